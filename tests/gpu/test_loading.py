"""Processes that load a model at the same time, beside one that takes and frees memory: each measures what the model takes."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from partitions.mps import COMMAND, MpsDaemon
from tests.partitions.test_mps import Client

from .networks import add, mlp, plan

pytestmark = pytest.mark.gpu

STEP = 2 << 20
"""Bytes: the least that the driver takes. What one process finds room for in the rest of a step may be a step in another."""
LIMIT = 100


@pytest.fixture(params=[False, True], ids=["each for itself", "under MPS"])
async def environment(request: pytest.FixtureRequest, gpu: None) -> AsyncIterator[dict[str, str]]:
    """CUDA's variables for the processes."""
    if not request.param:
        yield {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
        return
    if not shutil.which(COMMAND):
        pytest.skip(f"needs {COMMAND}")
    from cuda.core import Device

    daemon = MpsDaemon(Device(0).uuid)
    await daemon.start()
    yield daemon.environment
    await daemon.close()


async def test_processes_that_load_at_the_same_time_each_measure_their_own(environment: dict[str, str], tmp_path: Path) -> None:
    path, loaded = plan(add(tmp_path, "model"), mlp()), asyncio.Event()
    with ExitStack() as made:

        async def start(module: str, *arguments: str) -> Client:
            client = Client(module, environment, *arguments)
            made.callback(client.kill)
            said = await client.next()
            assert "whole GPU" not in str(said), said
            assert ("MPS" in said.get("device", "")) == ("CUDA_MPS_PIPE_DIRECTORY" in environment) or "client" in said, said
            return client

        async def load(client: Client) -> dict[str, Any]:
            said = await client.do("load")
            print(said)
            return said

        async def take_and_give(client: Client) -> int:
            """How often it did."""
            turns = 0
            while not loaded.is_set():
                for what in ("take", "give"):
                    assert await client.do(what) == {"done": what}
                turns += 1
            return turns

        async with asyncio.timeout(LIMIT):
            first, *others, neighbour = await asyncio.gather(
                *(start("tests.gpu.loading", str(path)) for _ in range(3)), start("tests.gpu.mps_client")
            )
            alone = await load(first)
            taking = asyncio.create_task(take_and_give(neighbour))
            together = await asyncio.gather(*map(load, others))
            loaded.set()
            assert await taking
    assert alone["parts"]["kernels"], "there is something to measure"
    for each in (alone, *together):
        assert each["unmeasured"] == 0
        assert set(each["parts"]) | {"graphs"} == set(alone["parts"]) | {"graphs"}
        for kind, nbytes in alone["parts"].items():
            assert abs(each["parts"].get(kind, 0) - nbytes) <= STEP, kind
