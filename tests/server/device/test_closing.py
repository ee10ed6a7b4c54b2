"""What a change leaves is closed once the change is made: what fails then does not undo it, and keeps nothing else open."""

from pathlib import Path
from typing import Any

import pytest

from engines import ExecutionFailed
from tests.fakes import FakeExecutor
from tests.server.device.test_runtime import Site, serving


def executor_that_fails(site: Site, model: str) -> FakeExecutor:
    """The executor of acme's model, which reports an error when it is closed."""
    found: Any = site.runtime.workers["acme"].executors[site.tenant("acme").catalog.find(model).key]
    close = found.close

    def fail() -> None:
        close()
        raise ExecutionFailed("destroying an event: no")

    found.close = fail
    return found  # type: ignore[no-any-return]


async def test_a_repartition_is_made_although_what_it_leaves_cannot_be_closed(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    left = executor_that_fails(site, "a").partition
    await site.controller.repartition({"acme": 4})
    held = site.controller.partition("acme")
    assert held
    assert held.granules == site.granules["acme"], "the control plane and the device side agree"
    assert len(held.granules) == 4
    assert left.closed
    assert "destroying an event: no" in caplog.text
    await site.infer("acme", "a")


async def test_an_unload_is_made_although_the_executor_cannot_be_closed(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    executor_that_fails(site, "a")
    await site.controller.unload("acme", "a")
    assert [s.name for s in site.tenant("acme").catalog.served()] == ["b"]
    assert "destroying an event: no" in caplog.text
    await site.controller.load("acme", "a")
    await site.infer("acme", "a")


async def test_the_server_ends_although_an_executor_cannot_be_closed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(root) as site:
        executor_that_fails(site, "b")
    assert "destroying an event: no" in caplog.text
