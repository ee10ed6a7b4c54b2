"""Ladders over fakes: models ready on other granules, moves that only switch, and what is left where something fails."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines import Engine, ModelRefused, RuntimeSettings
from partitions import PartitionError
from partitions.plan import Granules
from server.config.tenant import TenantConfig
from server.control.descriptions import ReadyShare
from server.control.moves import Move
from server.workers.placement import Placement
from tests.server.device.test_runtime import Site, add_model, serving

LADDERS = (
    TenantConfig(name="acme", granules=2, ladder=(2, 4), models=("*",)),
    TenantConfig(name="globex", granules=6, ladder=(4, 6), models=("b",)),
)
NARROW, WIDE = (0, 1), (0, 1, 6, 7)
WHERE = "granules 0, 1, 6, 7"


@pytest.fixture
async def site(root: Path) -> AsyncIterator[Site]:
    async with serving(root, tenants=LADDERS) as site:
        await site.settled()
        yield site


def ready(site: Site) -> dict[str, Mapping[Granules, Placement]]:
    return {name: site.runtime.placements.of(name).ladder.ready for name in site.granules}


def rungs(site: Site) -> dict[str, dict[Granules, int]]:
    """How many models are ready on each tenant's rungs."""
    return {name: {granules: len(rung.executors) for granules, rung in held.items()} for name, held in ready(site).items()}


async def move(site: Site, **counts: int) -> Move:
    await site.controller.repartition(counts)
    return next(iter(site.controller.moves))


async def answered(site: Site) -> None:
    await asyncio.gather(site.infer("acme"), site.infer("acme", "a"), site.infer("globex"))


async def test_models_are_ready_on_every_rung_after_they_are_served(site: Site) -> None:
    assert rungs(site) == {"acme": {WIDE: 2}, "globex": {(2, 3, 4, 5): 1}}
    await answered(site)


async def test_what_is_ready_is_logged_and_reported_for_the_admin_api(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(root, tenants=LADDERS) as site:
        await site.settled()
        ready = {name: each.ready for name, each in (await site.controller.placements.states()).items()}
        assert ready == {"acme": [ReadyShare(WIDE, 2, 0)], "globex": [ReadyShare((2, 3, 4, 5), 1, 0)]}
    assert f"acme can switch to {WHERE}: 2 models ready, 0.0 MiB more" in caplog.messages


async def test_a_move_between_rungs_binds_carves_and_probes_nothing_and_comes_back_the_same_way(site: Site) -> None:
    before = dict(site.script.reached)
    partitions = list(site.device.partitions)
    moved = await move(site, acme=4, globex=4)
    assert {name: pause.ladder for name, pause in moved.paused.items()} == {"acme": True, "globex": True}
    assert site.granules == {"acme": WIDE, "globex": (2, 3, 4, 5)}
    await site.settled()
    assert rungs(site) == {"acme": {NARROW: 2}, "globex": {(2, 3, 4, 5, 6, 7): 1}}
    await answered(site)
    moved = await move(site, acme=2, globex=6)
    assert [pause.ladder for pause in moved.paused.values()] == [True, True]
    await site.settled()
    await answered(site)
    for point in ("carve", "locate", "bind"):
        assert site.script.reached[point] == before[point]
    assert site.device.partitions == partitions
    assert site.granules == {"acme": NARROW, "globex": (2, 3, 4, 5, 6, 7)}


async def test_another_share_moves_as_without_a_ladder_and_the_rungs_follow(site: Site) -> None:
    moved = await move(site, acme=3, globex=5)
    assert {name: pause.ladder for name, pause in moved.paused.items()} == {"acme": False, "globex": False}
    await site.settled()
    assert rungs(site) == {"acme": {NARROW: 2, WIDE: 2}, "globex": {(2, 3, 4, 5): 1, (2, 3, 4, 5, 6, 7): 1}}
    moved = await move(site, acme=4, globex=4)
    assert {name: pause.ladder for name, pause in moved.paused.items()} == {"acme": True, "globex": True}
    await answered(site)


async def test_a_share_that_is_not_on_the_ladder_is_no_rung_once_it_was_left(root: Path) -> None:
    acme = TenantConfig(name="acme", granules=2, ladder=(4,), models=("*",))
    async with serving(root, tenants=(acme, TenantConfig(name="globex", granules=2, models=("b",)))) as site:
        await site.settled()
        (rung,) = rungs(site)["acme"]
        assert len(rung) == 4
        assert (await move(site, acme=4)).paused["acme"].ladder
        await site.settled()
        assert rungs(site)["acme"] == {}
        assert [each.ready for each in (await site.controller.placements.states()).values()] == [[], []]
        await move(site, acme=2)
        await site.settled()
        assert rungs(site)["acme"] == {rung: 2}


async def test_a_ladder_that_ends_while_a_rung_cannot_be_made_leaves_nothing(root: Path) -> None:
    async with serving(root, tenants=LADDERS) as site:
        carve, loop = site.device.carve, asyncio.get_running_loop()

        def refuse(granules: Any, lent: Any = ()) -> Any:
            if tuple(granules) == (2, 3, 4, 5):
                asyncio.run_coroutine_threadsafe(site.runtime.placements.hold({}), loop)
                raise PartitionError("no more contexts")
            return carve(granules, lent)

        site.device.carve = refuse  # type: ignore[method-assign]
        await site.settled()
        assert {name: held for name, held in rungs(site).items() if held} == {}


async def test_models_that_are_loaded_and_unloaded_follow(site: Site, root: Path) -> None:
    add_model(root, "c")
    await site.controller.load("acme", "c")
    await site.runtime.placements.settled()
    assert rungs(site)["acme"] == {WIDE: 3}
    await site.controller.unload("acme", "a")
    assert rungs(site)["acme"] == {WIDE: 2}
    await site.controller.load("acme", "b")
    await site.runtime.placements.settled()
    assert rungs(site)["acme"] == {WIDE: 2}
    moved = await move(site, acme=4, globex=4)
    assert moved.paused["acme"].ladder
    await asyncio.gather(site.infer("acme", "c"), site.infer("acme"))


async def test_after_a_refused_move_the_rungs_are_there_again(site: Site) -> None:
    ready(site)["acme"][WIDE].executors.popitem()[1].close()
    before = site.granules
    site.script.fail("carve", 1)
    with pytest.raises(PartitionError):
        await move(site, acme=4, globex=4)
    assert site.granules == before
    await site.settled()
    assert rungs(site) == {"acme": {WIDE: 2}, "globex": {(2, 3, 4, 5): 1}}
    assert (await move(site, acme=4, globex=4)).paused["acme"].ladder
    await answered(site)


async def test_a_refused_switch_leaves_no_threads(site: Site) -> None:
    before = {*threading.enumerate()}
    await site.runtime.moves.prepare({"acme": WIDE, "globex": (2, 3, 4, 5)})
    new = [each for each in {*threading.enumerate()} - before if each.name.startswith("worker")]
    assert len(new) == 4
    await site.runtime.moves.discard()
    assert not any(each.is_alive() for each in new)


async def test_a_rung_that_cannot_be_made_is_logged_and_left_out(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(root, tenants=LADDERS) as site:
        site.script.fail("carve", 1)
        site.script.fail("bind", 1, ModelRefused("no room"))
        await site.settled()
        await answered(site)
        assert len([rung for held in rungs(site).values() for rung in held]) == 1
    assert [line for line in caplog.messages if "cannot switch to granules" in line]


class Counting(Site):
    """Each model takes ten bytes, and three more on a rung."""

    def read(self, path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        engine: Any = super().read(path, max_batch, settings)
        engine.memory, engine.executor_memory, engine.adds = {"weights": 6}, {"contexts": 4}, {"contexts": 3}
        return engine  # type: ignore[no-any-return]


@asynccontextmanager
async def counting(root: Path, limit: int, paging: bool = False) -> AsyncIterator[Site]:
    acme, globex = LADDERS
    site = Counting(root, tenants=(acme.model_copy(update={"device_memory": limit, "paging": paging}), globex))
    await site.controller.start()
    await site.controller.loaded()
    await site.settled()
    yield site
    await site.controller.close()
    assert all(executor.closed for engine in site.engines for executor in engine.executors)


async def used(site: Site) -> int:
    return (await site.controller.memory())[0].used


async def test_a_rung_without_room_for_any_model_is_not_said_to_be_ready(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with counting(root, 21) as site:
        assert rungs(site)["acme"] == {WIDE: 0}
    assert f"acme has no model ready on {WHERE}: a move there takes as long as without a ladder" in caplog.messages
    assert "acme can switch to" not in caplog.text


async def test_rungs_count_within_the_budget_and_what_does_not_fit_is_not_made(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with counting(root, 25) as site:
        assert rungs(site)["acme"] == {WIDE: 1}
        assert await used(site) == 23
        assert f"b/1 is not ready on {WHERE}, so the tenant cannot just switch to them: it needs 3 bytes of" in caplog.text
        assert "acme has 23 bytes of 25 bytes in use" in caplog.text
        moved = await move(site, acme=4, globex=4)
        assert [pause.ladder for pause in moved.paused.values()] == [False, True], "not all models were ready there"
        await answered(site)
        await site.controller.unload("acme", "a")
        await site.runtime.placements.settled()
        assert rungs(site)["acme"] == {NARROW: 1}, "it was tried again once there was room"
        assert await used(site) == 13


async def test_rungs_give_way_to_a_model_that_is_loaded(root: Path) -> None:
    async with counting(root, 32) as site:
        assert await used(site) == 26
        add_model(root, "c")
        await site.controller.load("acme", "c")
        await site.runtime.placements.settled()
        assert rungs(site)["acme"] == {WIDE: 0}
        assert await used(site) == 30
        moved = await move(site, acme=4, globex=4)
        assert [pause.ladder for pause in moved.paused.values()] == [False, True]
        await answered(site)


async def test_a_model_that_is_paged_out_is_on_no_rung_and_comes_back_on_any(root: Path) -> None:
    async with counting(root, 40, paging=True) as site:
        key, other = (site.tenant("acme").catalog.find(name).key for name in "ab")
        models = site.runtime.tenant_models.pager
        async with models.locks["acme"]:
            assert await models.page_out("acme", key, models.source("acme", key))
        assert await used(site) == 13
        for count, granules in ((4, NARROW), (2, WIDE)):
            moved = await move(site, acme=count, globex=8 - count)
            assert [pause.ladder for pause in moved.paused.values()] == [True, True]
            await site.settled()
            assert ready(site)["acme"][granules].executors.keys() == {other}
            await site.infer("acme")
        await site.infer("acme", "a")
        await site.runtime.placements.settled()
        assert rungs(site)["acme"] == {WIDE: 2}
        assert await used(site) == 26
        moved = await move(site, acme=4, globex=4)
        assert [pause.ladder for pause in moved.paused.values()] == [True, True]
        await answered(site)
