"""Memory that is not used any more is freed, whatever comes, goes or fails meanwhile."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from engines import ExecutionFailed
from server.device import runtime
from tests.server.device.test_runtime import Site, add_model


async def wait_until_trimmed(site: Site, name: str) -> None:
    """Wait until the executors of this tenant were trimmed once more."""
    trimmed = asyncio.Event()
    loop, worker = asyncio.get_running_loop(), site.runtime.workers[name]

    def trim(after: float) -> None:
        loop.call_soon_threadsafe(trimmed.set)

    worker.trim = trim  # type: ignore[method-assign]
    await asyncio.wait_for(trimmed.wait(), 30)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runtime, "CHECK_INTERVAL", 0)
    add_model(tmp_path, "b")
    return tmp_path


async def test_a_tenant_that_goes_while_another_is_trimmed_does_not_end_it(site: Site) -> None:
    loop, begun, gone = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def trim(after: float) -> None:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(gone.wait(), loop).result(30)

    site.runtime.workers["acme"].trim = trim  # type: ignore[method-assign]
    await asyncio.wait_for(begun.wait(), 30)
    await site.runtime.release("globex")
    site.frontends.pop("globex")
    gone.set()
    await wait_until_trimmed(site, "acme")


async def test_an_executor_that_cannot_be_trimmed_does_not_end_it(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def trim(after: float) -> Any:
        loop.call_soon_threadsafe(failed.set)
        raise ExecutionFailed("no memory")

    site.runtime.workers["acme"].trim = trim  # type: ignore[method-assign]
    await asyncio.wait_for(failed.wait(), 30)
    await wait_until_trimmed(site, "globex")
    assert ("greenlane.models", logging.WARNING, "unused memory of acme was not freed: no memory") in caplog.record_tuples
