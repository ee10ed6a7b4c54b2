"""A replica without Ray: its child process, a real server, and what the coordinator hears of it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from greenlane.load.server_process import family_of, free_port
from greenlane.ray import server as module
from greenlane.ray.coordinator import Coordinator, Listed, Shares
from greenlane.ray.server import Server, ServerEnded, ServerProcess
from tests.end_to_end import repository

from .load import TOML

ALWAYS_READY = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", json.load(sys.stdin)["port"]), Handler).serve_forever()
"""
OTHER = Listed("other", 1, "http://127.0.0.1:1", "key")
CHILD = ("-m", "tests.greenlane.ray.virtual_child")


@pytest.fixture
async def coordinator() -> Coordinator:
    return Coordinator("v", lambda: 0.0)


@pytest.fixture
async def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServerProcess]:
    monkeypatch.setattr(module, "UNLISTED", 0.0)
    repository.write(tmp_path, "identity", repository.IDENTITY)
    toml = TOML.replace("REPOSITORY", str(tmp_path)).replace("[models]", 'drain_grace = "0s"\n[models]')
    found = ServerProcess(toml, "127.0.0.1", free_port(), [min(os.sched_getaffinity(0))], CHILD)
    yield found
    found.end()


async def until_listed(coordinator: Coordinator, listed: bool = True) -> None:
    """Wait until the server is on the list, or is not."""
    async with asyncio.timeout(60):
        while listed is not any(each.id == "id" for each in (await coordinator.servers()).servers):
            await asyncio.sleep(0.01)


def children() -> set[int]:
    """The processes that this one has started and that have not ended."""
    return {each.pid for each in family_of(os.getpid()) if each.parent == os.getpid()}


async def test_a_server_serves_with_the_shares_in_force_and_takes_over_later_ones(
    process: ServerProcess, coordinator: Coordinator
) -> None:
    await coordinator.report(OTHER, Shares("v", 1, {"acme": 2, "globex": 2}))
    server = Server("id", 0, process, coordinator, "v")
    await server.start()
    assert await process.repartition({"acme": 3}) is not None, "acme and globex have all granules: 2 and 2"
    await server.check_health()
    await until_listed(coordinator)

    await coordinator.report(OTHER, Shares("v", 2, {"acme": 1, "globex": 1}))
    async with asyncio.timeout(60):
        while await process.repartition({"acme": 3}) is not None:  # Until globex has 1.
            await asyncio.sleep(0.01)

    await server.stop()
    await until_listed(coordinator, False)
    with pytest.raises(ServerEnded, match="ended with status 0; its log is the replica's"):
        await server.check_health()


async def test_a_server_that_ends_is_taken_off_the_list_and_unhealthy(coordinator: Coordinator) -> None:
    process, before = ServerProcess("", "127.0.0.1", free_port(), [], ("-c", ALWAYS_READY)), children()
    server = Server("id", 0, process, coordinator, "v")
    await server.start()
    await until_listed(coordinator)
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    await until_listed(coordinator, False)
    with pytest.raises(ServerEnded, match="ended with status -9"):
        await server.check_health()
    process.end()


async def test_a_server_that_cannot_start_is_reported(coordinator: Coordinator) -> None:
    broken = ServerProcess("[models]", "127.0.0.1", free_port(), [], ("-P", "-m", "greenlane.ray.child"))
    with pytest.raises(ServerEnded, match="ended with status 2"):
        await Server("id", 0, broken, coordinator, "v").start()
    assert await broken.repartition({}) is not None
    broken.end()


async def test_the_child_ends_without_the_replica(tmp_path: Path) -> None:
    """It was started by a process that has ended since."""
    words = [sys.executable, "-P", "-m", "greenlane.ray.child"]
    child = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.PIPE)
    await child.communicate(b'{"parent": 1}')
    assert child.returncode == 1
