"""The end of a tenant's processes while some of it fails."""

from typing import Any

import pytest

from partitions import PartitionError
from server.processes.supervision.tenant_processes import TenantProcesses, TenantSides


class Parts:
    """All that a tenant has: its processes, its runtime, and its frontend. Writes down what is to end; `fails` raises."""

    def __init__(self, fails: str) -> None:
        self.steps: list[str] = []
        self.devices = self.handover = self
        self._fails = fails

    def has(self, _: object) -> bool:
        return True

    async def end(self, _: str) -> None:
        self._do("end")

    def close_page(self, _: str) -> None:
        self._do("close_page")

    async def release(self, _: str) -> None:
        self._do("release")

    async def leave(self, _: object) -> None:
        self._do("leave")

    def close(self) -> None:
        self._do("close")

    def _do(self, step: str) -> None:
        self.steps.append(step)
        if step == self._fails:
            raise PartitionError("it broke")


@pytest.mark.parametrize("fails", ["end", "close_page", "release", "leave", "close"])
async def test_a_tenant_that_goes_leaves_nothing_whatever_of_its_end_fails(fails: str) -> None:
    parts: Any = Parts(fails)
    tenants = {"acme": TenantSides(parts, parts)}
    with pytest.raises(PartitionError, match="it broke"):
        await TenantProcesses(parts, tenants, parts, (), parts, parts, 1).end("acme")
    assert parts.steps == ["end", "close_page", "release", "leave", "close"]
    assert not tenants
