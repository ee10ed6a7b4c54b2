"""Narrow placements over fakes: made as planned, used while others are at work, and made again when granules change hands."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engines import ModelRefused
from partitions import DoesNotFit, PartitionError
from partitions.base import Bandwidth
from server.accounts.usage import NS, Moved
from server.admin.metrics import ServerCollector
from server.config.tenant import TenantConfig
from server.control.fence import FencedTenant
from server.launch_loop.structures import IN, MEMORY
from server.link import activity
from server.link.messages import label_of
from server.observing.accountant import Accountant
from server.observing.observers import Observers
from server.observing.overview import Details
from server.workers.narrow import NarrowPlacement
from tests.fakes import FakePartition
from tests.server.device.test_runtime import Site, add_model, serving

MOVES = Bandwidth(memory=4 * 10**12, unit=10**12, pcie=60 * 10**9)
ACME = TenantConfig(name="acme", granules=4, memory_bandwidth=0.5, pcie=0.25, models=("*",))
GLOBEX = TenantConfig(name="globex", granules=2, models=("b",))
FENCED = ACME, GLOBEX
MS = 10**6
ALL = 10**18
"""Bytes that no work moves in its time within its tenant's share."""


@pytest.fixture
async def site(root: Path) -> AsyncIterator[Site]:
    async with serving(root, tenants=FENCED, moves=MOVES) as site:
        await site.settled()
        yield site


def placement(site: Site) -> NarrowPlacement:
    found = site.runtime.workers["acme"].narrow
    assert found
    return found


def narrow(site: Site) -> FakePartition:
    partition = placement(site).partition
    assert isinstance(partition, FakePartition)
    return partition


async def fence(site: Site) -> FencedTenant:
    """What GET /admin/partitions says of it."""
    states = await site.controller.placements.states()
    ((name, found),) = ((name, each.fence) for name, each in states.items() if each.fence)
    assert name == "acme"
    return found


async def runs_narrow(site: Site, model: str = "b") -> bool:
    """Whether a work that draws too much runs on the narrow placement beside a request of another tenant."""
    await site.runtime.placements.moved({"acme": {f"{model}/1": ALL}})
    await site.infer("acme", model)  # What it takes at home has to be known.
    before = narrow(site).stream.ran
    admission = site.tenant("globex").lane.admission
    kind = admission.admit()
    await site.infer("acme", model)
    admission.leave(kind, "", 0)
    return narrow(site).stream.ran == before + 1


async def test_works_run_narrow_for_the_sake_of_a_tenant_that_comes_again_and_not_of_one_that_has_gone(site: Site) -> None:
    pages, pace = site.runtime.placements, site.runtime.workers["acme"].pace
    assert await runs_narrow(site)
    assert pace
    pages.set_page("initech", activity.create(1))
    assert site.runtime.workers["acme"].pace is pace, "that is not beside it"
    pages.set_page("globex", None)
    assert not await runs_narrow(site)
    page = activity.create(1)
    again = activity.attach(page)
    pages.set_page("globex", page)
    assert not await runs_narrow(site)
    again.begin()
    assert placement(site).applies()
    assert (new := site.runtime.workers["acme"].pace)
    assert new.applies()
    before = narrow(site).stream.ran
    await site.infer("acme", "b")
    assert narrow(site).stream.ran == before + 1


async def test_a_fenced_tenant_gets_a_narrow_placement_with_all_its_models(site: Site) -> None:
    assert (narrow(site).granules, narrow(site).lent, placement(site).rate) == ((0, 1), (), 2 * 10**12)
    assert site.granules == {"acme": (0, 1, 2, 3), "globex": (4, 5)}
    assert await runs_narrow(site, "a")
    assert await runs_narrow(site)
    found = await fence(site)
    assert found == FencedTenant(2 * 10**12, (0, 1), 2, 15 * 10**9, 0, [], [], found.models)
    assert site.runtime.workers["globex"].narrow is None


class Seconds:
    """Seconds in which both tenants work, as their workers count it; globex's works take three times as long while acme's `b`
    runs at home.
    """

    def __init__(self, site: Site, moved: int = 0) -> None:
        self._site = site
        self._now = self._said = self._begin = 0
        self._moved = moved
        """Bytes of a work of acme's."""
        remake = site.controller.placements.remake
        self.accountant = Accountant(site.controller.devices, None, lambda: self._now, lambda: self._now, remake)
        self.accountant.follow(site.controller.devices[0])

    async def pass_by(self, most: int, until: Callable[[], bool]) -> None:
        """So many seconds at most."""
        self.accountant.start()
        while not until():
            assert self._now < most * NS
            (each,) = [each for each in (await fence(self._site)).models if each.model == "b/1"]
            held = each.anyway or each.moved * 1e3 > 2 * 10**12 * each.home_ms
            works = 40 + self._now // NS % 7 * 10 * bool(self._moved)
            self._work("acme", 20 * MS, works)
            self._work("globex", MS if held else 3 * MS)
            self._now += NS
            device = self._site.controller.devices[0]
            self._said += NS + works * self._moved
            self._begin = self._begin or self._said  # The first one is the begin.
            self.accountant.moved(device.name, Moved(self._said))
            async with asyncio.timeout(20):
                while self.accountant.totals().devices[device.name].moved != Moved(self._said - self._begin):
                    await asyncio.sleep(0)
            await self._site.settled()
        await self.accountant.close()

    def _work(self, tenant: str, took: int, works: int = 40) -> None:
        worker = self._site.runtime.workers[tenant]
        (key,) = [key for key in worker.executors if label_of(key) == "b/1"]
        counter = worker.metering.counter(worker.executors[key], key)
        assert counter
        for _ in range(works):
            counter.add(took)


async def test_a_model_beside_which_works_of_others_take_longer_runs_on_one_granule_though_it_moves_little(site: Site) -> None:
    for _ in range(9):
        await site.infer("acme")  # What it takes at home has to be known.
    seconds, device = Seconds(site), site.controller.devices[0]
    await seconds.pass_by(150, lambda: bool(device.slows))
    assert device.slows == {("acme", "b/1"): 3.0}
    assert narrow(site).granules == (0,)
    (known,) = [each for each in (await fence(site)).models if each.model == "b/1"]
    assert (known.slows, known.anyway) == (3.0, True)
    before, admission = narrow(site).stream.ran, site.tenant("globex").lane.admission
    kind = admission.admit()
    await site.infer("acme")
    admission.leave(kind, "", 0)
    assert narrow(site).stream.ran == before + 1


async def test_what_was_seen_of_models_is_forgotten_once_nothing_is_fenced(site: Site) -> None:
    for _ in range(9):
        await site.infer("acme")
    seconds, device = Seconds(site), site.controller.devices[0]
    await seconds.pass_by(150, lambda: bool(device.slows))
    fences, device.fences = device.fences, {}
    await seconds.pass_by(200, lambda: not device.slows)
    device.fences = fences
    assert device.narrowing == {}
    more = iter(range(5))
    await seconds.pass_by(300, lambda: next(more, None) is None)
    assert device.slows == {}, "it is tried again first"


async def test_a_placement_grows_while_its_models_do_not_fill_their_share_there(site: Site) -> None:
    """A work moves a gigabyte, in 0.1 ms at home, and at 0.4 TB/s on each granule where it is held; 2 TB/s are the share."""
    for _ in range(3):
        await site.infer("acme")
    (key,) = [key for key in placement(site).executors if label_of(key) == "b/1"]

    def grown() -> bool:
        demand, count = placement(site).demand(key), len(narrow(site).granules)
        demand.home, demand.narrow = MS // 10, round(10**9 / (0.4e12 * count) * NS)
        return count > 2

    pace = site.runtime.workers["acme"].pace
    assert pace
    assert pace.rate(MEMORY) == 0, "two granules cannot draw more than the share"
    await Seconds(site, moved=10**9).pass_by(60, grown)
    assert narrow(site).granules == (0, 1, 2), "the fourth is all that it has"
    assert (pace.rate(MEMORY), (await fence(site)).paced) == (2 * 10**12, True)
    assert await runs_narrow(site)
    assert pace.shared.free_at[MEMORY] > 0


async def test_a_tenant_without_a_share_of_pcie_is_paced_while_its_placement_could_draw_more(root: Path) -> None:
    tenants = ACME.model_copy(update={"pcie": None}), GLOBEX
    async with serving(root, tenants=tenants, moves=MOVES) as site:
        await site.settled()
        worker, plan = site.runtime.workers["acme"], site.controller.devices[0].fences["acme"]
        assert worker.pace is None
        await site.runtime.placements.plan({}, {"acme": plan._replace(paced=10**12)})
        await site.settled()
        assert (pace := worker.pace)
        assert (pace.rate(IN), pace.rate(MEMORY)) == (0, 10**12)
        assert await runs_narrow(site)
        assert pace.shared.free_at[MEMORY] > 0
        await site.runtime.placements.plan({}, {"acme": plan})
        assert worker.pace is None


async def test_models_that_slow_others_are_shown_with_how_much(site: Site) -> None:
    site.controller.devices[0].slows = {("acme", "b/1"): 2.345, ("acme", "gone/1"): 3.0}
    assert [(each.model, each.slows) for each in (await fence(site)).models] == [("a/1", 0.0), ("b/1", 2.35)]


async def test_models_that_are_loaded_later_follow_and_those_that_are_unloaded_leave(site: Site, root: Path) -> None:
    add_model(root, "c")
    await site.controller.load("acme", "c")
    await site.settled()
    assert await runs_narrow(site, "c")
    before = dict(placement(site).executors)
    await site.controller.load("acme", "b")
    await site.controller.unload("acme", "a")
    await site.settled()
    assert sorted(key.partition("/")[0] for key in placement(site).executors) == ["b", "c"]
    gone = [executor for key, executor in before.items() if key not in placement(site).executors]
    assert len(gone) == 2
    assert all(executor.closed for executor in gone)  # type: ignore[attr-defined]
    assert await runs_narrow(site)


async def test_a_tenant_that_moves_is_fenced_on_its_new_granules(site: Site) -> None:
    before = narrow(site)
    await site.controller.repartition({"acme": 6})
    assert narrow(site) is before, "it is a part of what the tenant has now, which is fenced all the time"
    assert await runs_narrow(site)
    await site.settled()
    assert set(narrow(site).granules) < set(site.granules["acme"])
    assert len(narrow(site).granules) == 2
    assert await runs_narrow(site)
    before = narrow(site)
    await site.controller.repartition({"acme": 2})
    await site.settled()
    assert before.closed


async def test_a_move_after_which_shares_of_bandwidth_are_too_much_is_refused(root: Path) -> None:
    tenants = ACME.model_copy(update={"memory_bandwidth": "auto"}), GLOBEX.model_copy(update={"memory_bandwidth": 0.4})
    async with serving(root, tenants=tenants, moves=MOVES) as site:
        await site.settled()
        await site.controller.repartition({"acme": 3})
        why = (
            r"tenants.acme.memory_bandwidth auto \(0.75\) \+ tenants.globex.memory_bandwidth 0.4 = 1.15 of the device's memory"
        )
        with pytest.raises(DoesNotFit, match=why):
            await site.controller.repartition({"acme": 6})
        await site.controller.repartition({"acme": 4})


async def test_a_placement_of_a_tenant_whose_move_is_refused_stays(site: Site) -> None:
    before = narrow(site)
    site.script.fail("bind")
    with pytest.raises(ModelRefused):
        await site.controller.repartition({"acme": 6})
    await site.settled()
    assert narrow(site) is before
    assert await runs_narrow(site)


async def test_another_share_makes_another_placement_and_none_takes_it_away(site: Site) -> None:
    before, plans = narrow(site), site.controller.placements
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": 0.75}), "globex": GLOBEX})
    await site.settled()
    assert before.closed
    assert (narrow(site).granules, placement(site).rate) == ((0, 1, 2), 3 * 10**12)
    assert await runs_narrow(site)
    before = narrow(site)
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": None, "pcie": None}), "globex": GLOBEX})
    await site.settled()
    assert before.closed
    assert site.runtime.workers["acme"].narrow is None
    assert await plans.states() == {}
    await site.infer("acme")


async def test_another_rate_for_the_same_granules_leaves_the_placement_as_it_is(site: Site) -> None:
    before, plans = narrow(site), site.controller.placements
    assert await runs_narrow(site)
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": 0.6}), "globex": GLOBEX})
    await site.settled()
    assert narrow(site) is before
    assert placement(site).rate == round(2.4 * 10**12)
    assert (await fence(site)).memory_bandwidth == round(2.4 * 10**12)
    assert await runs_narrow(site)


async def test_what_drew_too_much_is_held_on_another_placement_from_its_first_work_on(site: Site) -> None:
    assert await runs_narrow(site)
    before, admission = narrow(site), site.tenant("globex").lane.admission
    kind = admission.admit()
    site.controller.placements.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": 0.75}), "globex": GLOBEX})
    await site.settled()
    await site.infer("acme")
    assert narrow(site) is not before
    assert narrow(site).stream.ran == 1
    admission.leave(kind, "", 0)


async def test_a_placement_is_taken_away_once_nothing_runs_there(site: Site) -> None:
    assert await runs_narrow(site)
    admission, plans = site.tenant("globex").lane.admission, site.controller.placements
    kind, before = admission.admit(), placement(site)
    gate, (asking,) = await site.held(1)
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": None}), "globex": GLOBEX})
    await plans.carried_out()
    while not before.suspended:
        await asyncio.sleep(0)
    assert site.runtime.workers["acme"].narrow is before
    gate.open()
    await asking
    await site.settled()
    assert site.runtime.workers["acme"].narrow is None
    admission.leave(kind, "", 0)


async def test_a_plan_that_comes_again_while_its_placement_is_being_taken_away_leaves_it_in_use(site: Site) -> None:
    assert await runs_narrow(site)
    admission, plans, before = site.tenant("globex").lane.admission, site.controller.devices[0].fences, placement(site)
    kind = admission.admit()
    gate, (asking,) = await site.held(1)
    await site.runtime.placements.plan({}, {})
    while not before.suspended:
        await asyncio.sleep(0)
    await site.runtime.placements.plan({}, plans)
    gate.open()
    await asking
    await site.settled()
    assert placement(site) is before
    admission.leave(kind, "", 0)
    assert await runs_narrow(site)


async def test_a_neighbour_that_comes_again_while_models_are_made_ready_counts_there(site: Site) -> None:
    plan, gate, page = site.controller.devices[0].fences["acme"], site.script.hold("bind"), activity.create(1)
    again = activity.attach(page)
    await site.runtime.placements.plan({}, {"acme": plan._replace(granules=(0,))})
    await asyncio.to_thread(gate.wait_for_arrival)
    site.runtime.placements.set_page("globex", page)
    gate.open()
    await site.settled()
    again.begin()
    assert (narrow(site).granules, placement(site).applies()) == ((0,), True)


async def test_a_work_that_does_not_end_leaves_the_placement_in_use(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(root, tenants=FENCED, moves=MOVES, max_pause=0.1) as site:
        await site.settled()
        assert await runs_narrow(site)
        admission = site.tenant("globex").lane.admission
        kind = admission.admit()
        gate, (asking,) = await site.held(1)
        plan = site.controller.devices[0].fences["acme"]
        await site.runtime.placements.plan({}, {"acme": plan._replace(granules=(0,))})
        await asyncio.wait_for(site.settled(), 30)
        why = "an inference there has been running for 0.1 s (server.max_pause)"
        assert f"tenant acme keeps its narrow placement for now: {why}" in caplog.text
        before = placement(site)
        assert ((await fence(site)).granules, (await fence(site)).problems) == ((0, 1), [why])
        gate.open()
        await asking
        admission.leave(kind, "", 0)
        async with asyncio.timeout(30):
            while before.executors:  # It is tried again without another plan.
                await asyncio.sleep(0.01)
        await site.settled()
        assert ((await fence(site)).granules, (await fence(site)).problems) == ((0,), [])


async def test_a_placement_that_cannot_be_made_is_said_and_tried_again(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(root, tenants=FENCED, moves=MOVES) as site:
        await site.settled()
        site.script.fail("carve", error=PartitionError("no room"))
        plan = site.controller.devices[0].fences["acme"]
        await site.runtime.placements.plan({}, {"acme": plan._replace(granules=(0,))})
        await site.settled()
        assert (await fence(site)).problems == ["granules [0]: no room"]
        assert "tenant acme has no narrow placement, so nothing holds its memory bandwidth" in caplog.text
        await site.infer("acme")
        await site.runtime.placements.plan({}, {"acme": plan._replace(granules=(0,))})
        await site.settled()
        assert (narrow(site).granules, (await fence(site)).problems) == ((0,), [])


async def test_a_plan_for_granules_that_the_tenant_no_longer_has_is_not_carried_out(site: Site) -> None:
    plan = site.controller.devices[0].fences["acme"]
    await site.runtime.placements.plan({}, {"acme": plan._replace(granules=(0, 5))})
    await site.settled()
    assert site.runtime.workers["acme"].narrow is None
    assert (await fence(site)).problems[0].startswith("granules [0, 5]: the tenant has others now")
    site.controller.placements.remake()
    await site.settled()
    assert await runs_narrow(site)


async def test_a_model_that_cannot_be_made_ready_there_is_not_held_and_said(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(root, tenants=FENCED, moves=MOVES) as site:
        await site.settled()
        site.script.fail("bind", error=ModelRefused("no such kernels"))
        await site.runtime.placements.plan({}, {})
        await site.settled()
        await site.runtime.placements.plan({}, site.controller.devices[0].fences)
        await site.settled()
        (problem,) = (await fence(site)).problems
        assert problem == "a/1: no such kernels"
    assert "model a/1 is not ready on granules 0, 1, so nothing holds its memory bandwidth: no such kernels" in caplog.text


async def test_a_tenant_keeps_its_pace_over_pcie_through_moves_and_other_rates(site: Site) -> None:
    pace = site.runtime.workers["acme"].pace
    assert pace
    assert (pace.rate(IN), site.runtime.workers["globex"].pace) == (15 * 10**9, None)
    assert not pace.applies()
    admission, plans = site.tenant("globex").lane.admission, site.controller.placements
    kind = admission.admit()
    assert pace.applies()
    pace.charge(IN, 10**9, time.monotonic_ns())
    pace.count_wait(time.monotonic_ns())
    await site.controller.repartition({"acme": 6})
    assert site.runtime.workers["acme"].pace is pace, "before it is planned again, too"
    await site.settled()
    plans.reconfigure({"acme": ACME.model_copy(update={"pcie": 10**9}), "globex": GLOBEX})
    await site.settled()
    assert (pace.rate(IN), site.runtime.workers["acme"].pace, (await fence(site)).waits) == (10**9, pace, 1)
    plans.reconfigure({"acme": ACME.model_copy(update={"pcie": None}), "globex": GLOBEX})
    await site.settled()
    assert site.runtime.workers["acme"].pace is None
    assert ((await fence(site)).pcie, (await fence(site)).waits) == (0, 1)
    await site.infer("acme")
    admission.leave(kind, "", 0)


async def test_the_launch_loop_charges_where_it_did_when_the_same_is_planned_again(site: Site) -> None:
    pace = site.runtime.workers["acme"].pace
    assert pace
    charged = pace.shared
    site.controller.placements.remake()
    await site.settled()
    assert pace.shared is charged


async def test_requests_that_wait_for_pcie_hold_up_no_repartition_and_are_answered_after_it(site: Site) -> None:
    pace = site.runtime.workers["acme"].pace
    assert pace
    admission = site.tenant("globex").lane.admission
    kind = admission.admit()
    pace.charge(IN, 3600 * pace.rate(IN), time.monotonic_ns())
    asking = await site.asked(3)
    while not pace.waits:
        await asyncio.sleep(0)
    await site.controller.repartition({"acme": 6})
    assert (len(site.granules["acme"]), [each.done() for each in asking]) == (6, [False] * 3)
    admission.leave(kind, "", 0)
    assert [done.failure for done in await asyncio.gather(*asking)] == [None] * 3


async def test_a_tenant_is_fenced_beside_its_ladder_and_what_it_borrows(root: Path) -> None:
    acme = ACME.model_copy(update={"ladder": (2, 4, 6), "burst": 8})
    async with serving(root, tenants=(acme, GLOBEX.model_copy(update={"lend": 1.0})), moves=MOVES) as site:
        await site.settled()
        worker = site.runtime.workers["acme"]
        assert worker.wide
        assert worker.wide.partition.granules == (0, 1, 2, 3, 4, 5)
        assert await runs_narrow(site)
        for count in (6, 4, 2, 6):
            await site.controller.repartition({"acme": count})
            assert [*site.controller.moves][-1].paused["acme"].ladder, count
            await site.settled()
            assert (await fence(site)).granules == (0, 1), count
            assert await runs_narrow(site), count
            assert len(placement(site).executors) == 2
            await site.infer("acme")


async def test_a_home_that_cannot_draw_too_much_is_not_left_for_granules_of_others_beside_a_neighbour(root: Path) -> None:
    acme = ACME.model_copy(update={"granules": 2, "burst": 6})
    lender = TenantConfig(name="lender", granules=2, lend=1.0, models=("b",))
    async with serving(root, tenants=(acme, GLOBEX, lender), moves=MOVES) as site:
        await site.settled()
        wide = site.runtime.workers["acme"].wide
        assert wide
        assert (await fence(site)).granules == (0, 1)
        await site.infer("acme")
        for times in wide.times.values():
            times.home = 10**8
        await site.runtime.placements.moved({"acme": {"b/1": 16 * 10**11}})
        for demand in placement(site).statistics.demands.values():
            demand.home = 10**9  # 1.6 TB/s at home, of 2.
        before = wide.statistics.launches
        await site.infer("acme")
        assert wide.statistics.launches == before + 1
        admission = site.tenant("globex").lane.admission
        kind = admission.admit()
        await site.infer("acme")
        admission.leave(kind, "", 0)
        assert (wide.statistics.launches, wide.statistics.why_home()["fenced"]) == (before + 1, 1)
        assert placement(site).statistics.launches == 0


@pytest.mark.parametrize("why", ["the server stops", "the tenant leaves", "the share is taken away"])
async def test_a_load_that_waits_for_pcie_hurries_once_nothing_is_to_be_held(site: Site, root: Path, why: str) -> None:
    add_model(root, "c")
    (root / "c" / "1" / "model.onnx").write_bytes(bytes(20_000))
    pace = site.runtime.workers["acme"].pace
    assert pace
    pace.set_rate(IN, 1)  # A byte a second.
    admission = site.tenant("globex").lane.admission
    kind = admission.admit()
    loading = asyncio.ensure_future(site.controller.load("acme", "c"))
    while not pace.shared.free_at[IN]:
        await asyncio.sleep(0)
    plan = site.controller.devices[0].fences["acme"]
    await site.runtime.placements.plan({}, {"acme": plan._replace(neighbours=("globex", "initech"), pcie=1)})
    assert site.runtime.workers["acme"].pace is pace, "it goes on when a neighbour comes, with what pays to it"
    assert not loading.done()
    if why == "the server stops":
        site.runtime.stop_loading()
    elif why == "the tenant leaves":
        await asyncio.wait_for(site.runtime.release("acme"), 30)
        site.frontends.pop("acme")
    else:
        await site.runtime.placements.plan({}, {})
    await asyncio.wait_for(loading, 30)
    admission.leave(kind, "", 0)


@pytest.mark.parametrize(
    ("moves", "keys", "note", "level"),
    [
        (None, {}, "its memory_bandwidth holds nothing back: what this device moves is not known", "WARNING"),
        (MOVES, {"granules": 1}, "it has one granule, which cannot be narrowed", "WARNING"),
        (MOVES, {"memory_bandwidth": 1.0}, "it needs no narrower placement", "INFO"),
    ],
)
async def test_what_needs_none_or_can_have_none_is_said_and_a_share_that_holds_nothing_is_a_warning(
    root: Path, moves: Bandwidth | None, keys: dict[str, object], note: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    acme = ACME.model_copy(update={"memory_bandwidth": 0.1, **keys})
    async with serving(root, tenants=(acme, GLOBEX), moves=moves) as site:
        await site.settled()
        assert site.runtime.workers["acme"].narrow is None
        state = await fence(site)
        assert state.granules == ()
        assert [each for each in state.notes if note in each]
        said = [each.levelname for each in caplog.records if each.getMessage().startswith(f"tenant acme: {note}")]
        assert said == [level]
        await site.infer("acme")


async def test_metrics_say_what_a_tenant_is_held_to_and_how_often(site: Site) -> None:
    assert await runs_narrow(site)
    details = Details(beside=await site.controller.placements.states())
    collector = ServerCollector(site.controller, Observers(site.controller), (), details)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in collector.collect()
        if family.name.startswith(("greenlane_fence", "greenlane_narrow", "greenlane_pcie"))
        for sample in family.samples
    }
    assert found == {
        ("greenlane_fence_bytes_per_second", "acme", "memory"): 2e12,
        ("greenlane_fence_bytes_per_second", "acme", "pcie"): 15e9,
        ("greenlane_narrow_launches_total", "acme"): 1,
        ("greenlane_pcie_waits_total", "acme"): 0,
    }


async def test_what_is_known_of_its_models_is_shown(site: Site) -> None:
    assert await runs_narrow(site)
    models = {each.model: each for each in (await fence(site)).models}
    assert models["b/1"].moved == ALL
    assert models["b/1"].home_ms > 0
    assert models["b/1"].narrow_ms > 0
    assert set(models) == {"a/1", "b/1"}
