"""What is published of one model, one after another, however long its functions take to be run."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import Signature, TensorSpec
from engines.datatypes import DATATYPES
from server.config.tenant import TenantConfig
from server.functions.definition import Functions
from server.tenants.catalog import ServedModel
from server.tenants.local_frontend import LocalFrontend, open_local

SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("",)),), (TensorSpec("y", DATATYPES["FP32"], ("",)),))


@pytest.fixture
async def frontend() -> "Iterator[LocalFrontend]":
    made = open_local(TenantConfig(name="acme", granules=1, models=("*",)))
    yield made
    made.close()


def model(load: int, source: str = "") -> ServedModel:
    functions = Functions("model.py", "m/model.py", source, SIGNATURE, True, False) if source else None
    return ServedModel("m", "1", f"m/1#{load}", SIGNATURE, "onnx", {}, functions=functions)


async def test_what_is_published_last_is_served_also_if_the_functions_before_take_longer(
    frontend: LocalFrontend, tmp_path: Path
) -> None:
    """As when a process is started again, and told what was served before, while a model is loaded."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    source = f"with open({str(gate)!r}) as gate:\n    gate.read()\ndef preprocess(inputs):\n    return inputs\n"
    first = asyncio.ensure_future(frontend.publish("m", [model(1, source)], []))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(frontend.publish("m", [model(2)], []))
    await asyncio.sleep(0)
    await asyncio.to_thread(gate.write_text, "go on")
    await asyncio.gather(first, second)
    assert [each.key for each in frontend.tenant.catalog.served()] == ["m/1#2"]
