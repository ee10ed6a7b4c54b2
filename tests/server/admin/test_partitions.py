"""What the admin API says of partitions while these change."""

import asyncio
import json
from pathlib import Path

from server.admin import partitions
from tests.server.device.test_runtime import add_model, serving


async def test_a_probe_shows_a_tenant_that_came_while_it_waited(tmp_path: Path) -> None:
    for name in ("a", "b"):
        add_model(tmp_path, name)
    async with serving(tmp_path) as site:
        (device,) = site.controller.devices
        globex = device.held.pop("globex")
        async with site.controller.granules_change:
            asking = asyncio.ensure_future(partitions.probe(site.controller))
            for _ in range(10):
                await asyncio.sleep(0)
            device.held["globex"] = globex
        found = json.loads((await asking).body)["partitions"]
    assert {name: each["located"] for name, each in found.items()} == {
        name: list(each.granules) for name, each in device.held.items()
    }
