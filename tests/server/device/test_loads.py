"""Which loads may take their time: those while tenants are served, until something waits for one, or the server ends."""

import logging
from pathlib import Path

import pytest

from server.errors import Conflict
from tests.server.device.test_runtime import Site, serving

START = ["open", "hurrying", "hurrying", "hurrying", "hurrying"]
"""Tenants get their first partitions like all others; each has two locks."""


async def test_models_are_loaded_at_once_at_the_start_and_in_the_background_while_tenants_are_served(root: Path) -> None:
    async with serving(root) as site:
        asked = site.device.loads.asked
        assert asked == START
        await site.controller.load("acme", "a")
        assert asked == [*START, "background", "loaded"]
    assert asked[-1] == "hurry"


async def test_the_end_of_the_server_ends_the_pauses_of_a_load(root: Path) -> None:
    async with serving(root) as site:
        site.runtime.stop_loading()
        assert site.device.loads.asked == [*START, "hurry"]


async def test_a_repartition_ends_the_pauses_of_the_load_that_it_waits_for(root: Path) -> None:
    async with serving(root, max_pause=0.05) as site:
        gate, loading = await site.begun("bind", site.controller.load("acme", "a"))
        with pytest.raises(Conflict, match="one of its models is being loaded"):
            await site.controller.repartition({"acme": 3})
        assert site.device.loads.asked == [*START, "background", "hurrying"]
        gate.open()
        await loading


async def test_a_load_that_has_left_pauses_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "greenlane.models")
    async with serving(root) as site:
        gate, loading = await site.begun("bind", site.controller.load("acme", "a"))
        site.device.loads.seconds += 30.0
        gate.open()
        await loading
    assert "model a: 0 s to have its kernels loaded, with pauses for what is served (models.paced_loads)" in caplog.messages


async def test_a_device_that_cannot_pace_loads_serves_all_the_same_and_says_why(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(root)
    site.device.loads.unavailable = "there is no libcupti.so.13"
    await site.controller.start()
    await site.controller.loaded()
    assert site.controller.ready
    await site.controller.close()
    text = "while a network is loaded for the first time, all tenants' inferences are slower: there is no libcupti.so.13"
    assert text in caplog.messages


async def test_loads_are_not_paced_where_the_configuration_says_so(root: Path) -> None:
    site = Site(root, models={"paced_loads": False})
    await site.controller.start()
    await site.controller.loaded()
    assert "open" not in site.device.loads.asked
    await site.controller.close()
