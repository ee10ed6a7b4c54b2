"""Metrics of models, as the processes that have them describe them."""

from pathlib import Path
from typing import Any

import pytest

from server.admin.exposition import text
from server.admin.metrics import ServerCollector
from server.config.tenant import TenantConfig
from server.control.descriptions import Execution
from server.observing.observers import Observers
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
        written = text(ServerCollector(site.controller, Observers(site.controller), [], found).collect())
    assert 'greenlane_padded_inferences_total{model="b",tenant="globex",version="1"} 3.0\n' in written


async def test_a_tenant_that_has_gone_since_it_reported_breaks_no_metrics(tmp_path: Path) -> None:
    for name in ("a", "b"):
        add_model(tmp_path, name)
    async with serving(tmp_path) as site:
        (_, report), *_ = reports = await site.controller.reports()
        reports.append((TenantConfig(name="gone", models=("*",)), report))
        written = text(ServerCollector(site.controller, Observers(site.controller), reports, []).collect())
    assert 'greenlane_waiting_requests{tenant="gone"} 0.0\n' in written
