"""Wide partitions over fakes: made when models are loaded, remade when granules change hands, and left out where they fail."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engines import Engine, ModelRefused, RuntimeSettings
from partitions import DoesNotFit, PartitionError
from server.admin.metrics import ServerCollector
from server.config.tenant import TenantConfig
from server.errors import Conflict
from server.observing.observers import Observers
from server.observing.overview import Details
from server.scheduling.lender import Lender
from server.workers.wide import WidePlacement
from tests.fakes import FakePartition
from tests.server.device.test_runtime import Site, add_model, serving

STRETCHED = (
    TenantConfig(name="acme", granules=2, burst=5, models=("*",)),
    TenantConfig(name="globex", granules=2, lend=1.0, models=("b",)),
    TenantConfig(name="initech", granules=2, lend=0.5, models=("b",)),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        add_model(tmp_path, name)
    (tmp_path / "b" / "config.pbtxt").write_text("max_batch_size: 8")
    return tmp_path


@pytest.fixture
async def site(root: Path) -> AsyncIterator[Site]:
    async with serving(root, tenants=STRETCHED) as site:
        await site.settled()
        yield site


def placement(site: Site, name: str = "acme") -> WidePlacement:
    found = site.runtime.workers[name].wide
    assert found
    return found


def wide(site: Site) -> FakePartition:
    partition = placement(site).partition
    assert isinstance(partition, FakePartition)
    return partition


async def go_wide(site: Site, model: str = "b") -> None:
    """Run one inference that goes wide, whatever this machine does meanwhile."""
    await site.infer("acme", model)
    for times in placement(site).times.values():
        times.home = 10**8
    before = wide(site).stream.ran
    await site.infer("acme", model)
    assert wide(site).stream.ran == before + 1


async def test_a_tenant_with_a_burst_gets_a_wide_partition_with_all_its_models(site: Site) -> None:
    assert (wide(site).granules, wide(site).lent) == ((0, 1, 2, 3, 4), (2, 3, 4))
    assert placement(site).limit == 500_000_000
    assert placement(site).place == (2, (("globex", 2), ("initech", 1)))
    assert site.granules == {"acme": (0, 1), "globex": (2, 3), "initech": (4, 5)}
    await go_wide(site, "a")
    await go_wide(site)
    wides = {name: each.wide for name, each in (await site.controller.placements.states()).items() if each.wide}
    ((tenant, state),) = wides.items()
    assert (tenant, state.granules, state.launches, state.problems) == ("acme", (0, 1, 2, 3, 4), 2, [])
    assert site.runtime.workers["globex"].wide is None


async def test_a_lenders_request_keeps_the_borrower_at_home_from_its_head_on(site: Site) -> None:
    await go_wide(site)
    lender = site.tenant("globex").lane.admission.neighbour
    assert isinstance(lender, Lender)
    kind = site.tenant("globex").lane.admission.admit()
    before = wide(site).stream.ran
    await site.infer("acme")
    assert wide(site).stream.ran == before
    lender.end(kind)
    await site.infer("acme")
    assert wide(site).stream.ran == before + 1


async def test_models_that_are_loaded_later_follow_and_those_that_are_unloaded_leave(site: Site, root: Path) -> None:
    add_model(root, "c")
    await site.controller.load("acme", "c")
    await site.settled()
    await go_wide(site, "c")
    before = dict(placement(site).executors)
    await site.controller.load("acme", "b")
    await site.controller.unload("acme", "a")
    await site.settled()
    assert sorted(key.partition("/")[0] for key in placement(site).executors) == ["b", "c"]
    gone = [executor for key, executor in before.items() if key not in placement(site).executors]
    assert len(gone) == 2
    assert all(executor.closed for executor in gone)  # type: ignore[attr-defined]
    await go_wide(site)


async def test_a_model_that_follows_during_a_repartition_leaves_the_tenant_on_its_share(site: Site, root: Path) -> None:
    add_model(root, "c")
    await go_wide(site)
    worker, loop = site.runtime.workers["acme"], asyncio.get_running_loop()
    revoke, begun, narrowed = worker.revoke, asyncio.Event(), asyncio.Event()

    def revoke_late() -> None:
        worker.revoke = revoke  # type: ignore[method-assign]
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(narrowed.wait(), loop).result(30)
        revoke()

    worker.revoke = revoke_late  # type: ignore[method-assign]
    loading = asyncio.ensure_future(site.controller.load("acme", "c"))
    await begun.wait()
    await site.runtime.placements.narrow(["acme"])
    narrowed.set()
    await loading
    await site.settled()
    before = wide(site).stream.ran
    await site.infer("acme")
    assert wide(site).stream.ran == before, "the granules change hands"


async def test_a_repartition_remakes_what_changed_hands_and_its_borrowers_are_served_meanwhile(site: Site) -> None:
    await go_wide(site)
    before, worker = wide(site), site.runtime.workers["acme"]
    gate, moving = await site.begun("attach", site.controller.repartition({"initech": 1, "globex": 3}))
    await site.infer("acme")
    gate.open()
    await moving
    await site.settled()
    assert site.runtime.workers["acme"] is worker, "it did not move, so it did not pause"
    assert before.closed
    assert wide(site).lent == site.granules["globex"]
    assert len(wide(site).lent) == 3
    assert placement(site).limit == 1_000_000_000, "of globex alone, whose granules they are now"
    await go_wide(site)


async def test_a_repartition_that_waits_too_long_for_a_wide_work_is_refused_with_its_tenant(root: Path) -> None:
    async with serving(root, tenants=STRETCHED, max_pause=0.1) as site:
        await site.settled()
        await go_wide(site)
        gate, (asking,) = await site.held(1)
        with pytest.raises(Conflict, match=r"tenant acme: an inference on granules of others has been running for 0\.1 s"):
            await site.controller.repartition({"initech": 1, "globex": 3})
        gate.open()
        await asking
        await site.settled()
        await go_wide(site)


async def test_nothing_waits_for_a_wide_work_any_more_once_the_repartition_was_refused(root: Path) -> None:
    async with serving(root, tenants=STRETCHED, max_pause=0.1) as site:
        await site.settled()
        await go_wide(site)
        gate, (asking,) = await site.held(1)
        before = asyncio.all_tasks()
        with pytest.raises(Conflict):
            await site.controller.repartition({"initech": 1, "globex": 3})
        await site.settled()
        gate.open()
        await asking
        assert asyncio.all_tasks() <= before, "it would take the wide partition away later, when nothing asks for that any more"
        await go_wide(site)


async def test_a_wide_work_that_does_not_end_holds_up_no_later_change(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(root, tenants=STRETCHED, max_pause=0.1) as site:
        await site.settled()
        await go_wide(site)
        gate, (asking,) = await site.held(1)
        await site.runtime.placements.plan({}, {})
        await asyncio.wait_for(site.settled(), 30)
        why = "an inference on granules of others has been running for 0.1 s (server.max_pause)"
        assert f"tenant acme keeps its wide partition for now, and does not use it: {why}" in caplog.text
        state = (await site.runtime.placements.states())["acme"].wide
        assert state
        assert state.problems == [why]
        before = wide(site)
        gate.open()
        await asking
        await site.infer("acme")
        assert before.stream.ran == 2, "nothing more goes there"
        async with asyncio.timeout(30):
            while not before.closed:  # It is tried again without another plan.
                await asyncio.sleep(0.01)
        await site.settled()
        assert site.runtime.workers["acme"].wide is None


async def test_a_move_waits_for_a_wide_work_on_when_a_change_before_it_gives_that_up(root: Path) -> None:
    async with serving(root, tenants=STRETCHED, max_pause=0.1) as site:
        await site.settled()
        await go_wide(site)
        gate, (asking,) = await site.held(1)
        await site.runtime.placements.plan({}, {})
        while not placement(site).suspended:
            await asyncio.sleep(0)
        narrowing = asyncio.ensure_future(site.runtime.placements.of("acme").stretch.pause())
        await site.settled()
        gate.open()
        await asking
        assert await asyncio.wait_for(narrowing, 30)


async def test_what_is_to_be_ready_is_made_though_a_change_of_the_wide_partition_is_taken_back(site: Site) -> None:
    await go_wide(site)
    gate, (asking,) = await site.held(1)
    await site.runtime.placements.plan({}, {})
    while not placement(site).suspended:
        await asyncio.sleep(0)
    holding = asyncio.ensure_future(site.runtime.placements.hold({"acme": [(0, 1, 6)]}))
    await asyncio.sleep(0)
    await site.runtime.placements.plan(site.controller.devices[0].wide, {})
    assert [(state.granules, state.models) for state in (await holding)["acme"]] == [((0, 1, 6), 2)]
    gate.open()
    await asking
    await go_wide(site)


async def test_a_plan_that_comes_again_while_the_loop_forgets_the_wide_partition_leaves_it_in_use(site: Site) -> None:
    await go_wide(site)
    before, worker, loop = placement(site), site.runtime.workers["acme"], asyncio.get_running_loop()
    revoke, plans = worker.revoke, site.controller.devices[0].wide

    def revoke_late() -> None:
        worker.revoke = revoke  # type: ignore[method-assign]
        asyncio.run_coroutine_threadsafe(site.runtime.placements.plan(plans, {}), loop).result(30)
        revoke()

    worker.revoke = revoke_late  # type: ignore[method-assign]
    await site.runtime.placements.plan({}, {})
    await site.settled()
    assert placement(site) is before
    await go_wide(site)


async def test_more_than_the_burst_is_refused_with_the_numbers(site: Site) -> None:
    with pytest.raises(DoesNotFit, match=r"acme: 6 granules, but tenants.acme.burst allows 5 at most"):
        await site.controller.repartition({"acme": 6, "globex": 1, "initech": 1})


async def test_a_wide_partition_that_cannot_be_made_is_left_out_and_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(root, tenants=STRETCHED)
    carve = site.device.carve

    def refuse(granules: "list[int]", lent: "tuple[int, ...]" = ()) -> FakePartition:
        if lent:
            raise PartitionError("no more contexts")
        return carve(granules, lent)

    site.device.carve = refuse  # type: ignore[method-assign, assignment]
    await site.controller.start()
    await site.controller.loaded()
    with caplog.at_level(logging.WARNING):
        await site.settled()
    why = "granules [0, 1, 2, 3, 4]: no more contexts"
    assert f"tenant acme has no wide partition, and runs on its share only: {why}" in caplog.text
    state = (await site.controller.placements.states())["acme"].wide
    assert (state.granules, state.problems) == ((), [why])
    await site.infer("acme")
    await site.controller.close()


async def test_a_model_that_is_refused_there_runs_at_home_and_the_others_go_wide(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(root, tenants=STRETCHED)
    await site.controller.start()
    await site.runtime.loaded()
    site.script.fail("bind", error=ModelRefused("too wide"))
    await site.settled()
    state = (await site.controller.placements.states())["acme"].wide
    assert state.problems == ["a/1: too wide"]
    assert "model a/1 is not ready on granules 0, 1, 2, 3, 4, and runs on its share only: too wide" in caplog.text
    await site.infer("acme", "a")
    await go_wide(site)
    await site.controller.close()


async def test_what_a_wide_partition_takes_counts_and_does_not_exceed_the_tenants_budget(root: Path) -> None:
    class Counting(Site):
        def read(self, path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
            engine: Any = super().read(path, max_batch, settings)
            engine.memory, engine.executor_memory, engine.adds = {"weights": 6}, {"contexts": 4}, {"contexts": 3}
            return engine  # type: ignore[no-any-return]

    acme, *others = STRETCHED
    site = Counting(root, tenants=(acme.model_copy(update={"device_memory": 25}), *others))
    await site.controller.start()
    await site.runtime.loaded()
    await site.settled()
    memory = (await site.controller.memory())[0]
    assert [each.nbytes for each in memory.models] == [13, 10]
    state = (await site.controller.placements.states())["acme"].wide
    (problem,) = state.problems
    assert problem.startswith(
        "b/1: on its wide partition it needs 3 bytes of device memory (contexts 3 bytes), but acme has 23"
    )
    await site.infer("acme", "b")
    await go_wide(site, "a")
    await site.controller.close()


async def test_a_model_that_takes_too_long_is_named_and_logged_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    await site.infer("acme", "a")
    await go_wide(site, "b")
    (times,) = [times for (key, _), times in placement(site).times.items() if key.startswith("a/")]
    times.home = 19 * 10**9
    why = (
        "a/1 does not run on granules of others: the shortest inference seen takes 19000 ms on its share, so 7600 ms there "
        "at best, and they are lent for 500 ms. Have the lenders lend for more than 7600 ms (`lend`), or limit "
        "its batches (`max_batch`)"
    )
    for looks in range(1, 4):
        site.runtime.placements.look()
        assert caplog.text.count(f"tenant acme: model {why}") == (looks > 1), "once, and only if it still is when looked again"
        state = (await site.controller.placements.states())["acme"].wide
        assert state.too_long == [why]
    times.wide = 10**9
    site.runtime.placements.look()
    state = (await site.controller.placements.states())["acme"].wide
    assert "the shortest inference seen takes 1000 ms there, and they are lent for 500 ms" in state.too_long[0]
    assert "lend for more than 1000 ms" in state.too_long[0]
    times.wide = 10**8
    site.runtime.placements.look()
    state = (await site.controller.placements.states())["acme"].wide
    assert state.too_long == []


async def test_closing_waits_for_a_wide_work(site: Site) -> None:
    await go_wide(site)
    gate, (asking,) = await site.held(1)
    closing = asyncio.ensure_future(site.controller.close())
    gate.open()
    await asking
    await closing


async def test_metrics_of_tenants_that_lend_and_borrow(site: Site) -> None:
    await go_wide(site)
    lender = site.tenant("globex").lane.admission.neighbour
    assert isinstance(lender, Lender)
    lender.guard.stops = 3
    collector = ServerCollector(
        site.controller,
        Observers(site.controller),
        await site.controller.reports(),
        Details(beside=await site.controller.placements.states()),
    )
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in collector.collect()
        if family.name.startswith(("greenlane_lend", "greenlane_wide", "greenlane_home"))
        for sample in family.samples
        if sample.value or "home" not in family.name
    }
    assert found == {
        ("greenlane_lends", "globex"): 1,
        ("greenlane_lends", "initech"): 1,
        ("greenlane_lending_stops_total", "globex"): 3,
        ("greenlane_lending_stops_total", "initech"): 0,
        ("greenlane_home_launches_total", "acme", "not_measured"): 1,
        ("greenlane_wide_launches_total", "acme"): 1,
        ("greenlane_wide_returns_total", "acme"): 0,
    }


async def test_a_model_that_is_paged_out_leaves_the_wide_partition_and_comes_back_to_it(site: Site) -> None:
    key = site.tenant("acme").catalog.find("b").key
    await go_wide(site)
    before = placement(site).executors[key]
    pager = site.runtime.tenant_models.pager
    async with pager.locks["acme"]:
        assert await pager.page_out("acme", key, pager.source("acme", key))
    assert before.closed  # type: ignore[attr-defined]
    assert key not in placement(site).executors
    await site.infer("acme")
    async with pager.locks["acme"]:
        pass
    await site.settled()
    assert key in placement(site).executors
    await go_wide(site)
