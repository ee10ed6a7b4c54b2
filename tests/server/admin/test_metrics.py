"""Metrics of models, as the processes that have them describe them."""

from pathlib import Path
from typing import Any

import pytest

from server.accounts.usage import Report, TenantUsages, Usage
from server.admin.exposition import text
from server.admin.metrics import ServerCollector, fences
from server.config.tenant import TenantConfig
from server.control.descriptions import Execution
from server.control.fence import FencedTenant
from server.observing.observers import Observers
from server.observing.overview import Details
from tests.server.device.test_runtime import add_model, serving

DESCRIBED: dict[str, Any] = {"graphs": "off", "counts": {"padded": 3}}


@pytest.mark.parametrize(
    "description",
    [
        {},
        {**DESCRIBED, "counts": {"padded": "many"}},
        {**DESCRIBED, "kernels": {}},
        {**DESCRIBED, "kernels": {"found": 1, "saved": None, "refused": False}},
        {**DESCRIBED, "driver_memory": {"unmeasured": [1]}},
        {**DESCRIBED, "verified": {"right": 1, "others": [2]}},
        {**DESCRIBED, "verified": {"right": "1", "others": []}},
    ],
)
async def test_a_process_that_describes_its_models_badly_breaks_no_other_tenants_metrics(
    tmp_path: Path, description: dict[str, Any]
) -> None:
    for name in ("a", "b"):
        add_model(tmp_path, name)
    async with serving(tmp_path) as site:
        found = [Execution("acme", "a", "1", description), Execution("globex", "b", "1", DESCRIBED)]
        written = text(ServerCollector(site.controller, Observers(site.controller), [], Details(found)).collect())
    assert 'greenlane_padded_inferences_total{model="b",tenant="globex",version="1"} 3.0\n' in written


def test_what_cores_move_is_counted_where_the_kernel_counts_it() -> None:
    states = {name: FencedTenant(0, (), 0, 0, 0, [], [], [], "cores 0-1", moved) for name, moved in (("a", 7), ("b", None))}
    written = text(fences(states))
    assert [line for line in written.splitlines() if line.startswith("greenlane_fence_moved")] == [
        'greenlane_fence_moved_bytes_total{tenant="a"} 7.0'
    ]


class Untrue:
    """A device side that a client has taken over: it reports use of models with these names."""

    def __init__(self, *models: str) -> None:
        self._models = models

    async def usage(self) -> Report:
        return Report(1, [TenantUsages("acme", [Usage(model, 1, 0, {}) for model in self._models])])


async def test_what_a_process_calls_its_models_is_in_no_other_label(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    async with serving(tmp_path) as site:
        [device] = site.controller.devices
        side: Any = Untrue("without a version", "a/b/1", "")
        observers = Observers(site.controller)
        observers.accountant.follow(device)
        honest, device.runtimes = device.runtimes, {"acme": side}
        await observers.accountant.collect()
        device.runtimes = honest
        written = text(ServerCollector(site.controller, observers, [], Details()).collect())
    works = [line for line in written.splitlines() if line.startswith("greenlane_works_total")]
    assert len(works) == 3
    assert all(f',tenant="acme",unit="{device.info.unit}",version="' in line for line in works)


async def test_a_tenant_that_has_gone_since_it_reported_breaks_no_metrics(tmp_path: Path) -> None:
    for name in ("a", "b"):
        add_model(tmp_path, name)
    async with serving(tmp_path) as site:
        (_, report), *_ = reports = await site.controller.reports()
        reports.append((TenantConfig(name="gone", models=("*",)), report))
        written = text(ServerCollector(site.controller, Observers(site.controller), reports, Details()).collect())
    assert 'greenlane_waiting_requests{tenant="gone"} 0.0\n' in written
