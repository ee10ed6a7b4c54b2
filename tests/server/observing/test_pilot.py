"""The pilot measures, moves, and keeps out of an operator's way: simulated queues on a virtual clock."""

import asyncio
import logging
import random
from collections.abc import Mapping

import pytest

from partitions import DoesNotFit, Move
from server.config.tenant import TenantConfig
from server.control.controlled_device import ControlledDevice
from server.control.descriptions import Beside, DeviceInfo, PartitionInfo
from server.control.fence import FencedTenant
from server.control.moves import By, MoveLog
from server.errors import Conflict
from server.observing.pilot import Mode, Pilot
from server.scheduling.lane_statistics import LaneStatistics, SlotStatistics
from server.tenants.frontend import ModelReport, Report
from server.tenants.statistics import ModelStatistics, Size

from .queues import Queue, between, constant


class FakeController:
    """One device of six cores: acme has two and globex four. acme needs more from second 100 to second 400."""

    def __init__(self, mode: Mode = "on") -> None:
        tenants = [
            TenantConfig(name="acme", cores=2, models=("*",), target_p99=0.05),
            TenantConfig(name="globex", cores=4, models=("*",), target_p99=0.05, min_granules=2),
            TenantConfig(name="other", cores=1, models=("*",)),
        ]
        self.tenants = {each.name: each for each in tenants}
        self.device = ControlledDevice("0", {}, info=DeviceInfo("cpu", "", "core", (1,) * 7))
        self.devices = [self.device]
        self.moves = MoveLog()
        self.moving = False
        self.state = "serving"
        self.silent: set[str] = set()
        self.refuses: Exception | None = None
        self.asked: list[tuple[Mapping[str, int], By, str]] = []
        self.placements = self
        self.fences: dict[str, FencedTenant] = {}
        self.late = 0.0
        """How long device sides take to answer."""
        self.now = 0.0
        self.queues = {
            "acme": Queue(between(100, 400, 160, 5), 0.010),
            "globex": Queue(constant(5), 0.010),
            "other": Queue(constant(0), 0.01),
        }
        self._chance = random.Random(1)
        self.give({"acme": 2, "globex": 4, "other": 1})
        self.pilot = Pilot(self, mode, clock=lambda: self.now)

    @property
    def counts(self) -> dict[str, int]:
        return {name: len(each.granules) for name, each in self.device.held.items()}

    def give(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            self.device.held[name] = PartitionInfo(tuple(range(count)), count)

    def device_state(self, device: ControlledDevice) -> str:
        return self.state

    async def reports(self) -> list[tuple[TenantConfig, Report]]:
        found = []
        for name, queue in self.queues.items():
            requests, waited, *buckets = queue.counts
            statistics = ModelStatistics({1: Size(requests, 0, waited)}, buckets=list(buckets))
            report = Report(
                [ModelReport("m", "1", statistics, 0)],
                [],
                LaneStatistics(0, 0, 0, 0, ran=queue.ran),
                SlotStatistics(0, 0, 0),
                2.0 if name in self.silent else 0.0,
            )
            found.append((self.tenants[name], report))
        return found

    async def states(self) -> dict[str, Beside]:
        self.pass_by(self.late)
        return {name: Beside(None, fence, []) for name, fence in self.fences.items()}

    async def repartition(self, counts: Mapping[str, int], by: By = "operator", reason: str = "") -> Move:
        self.asked.append((counts, by, reason))
        if self.refuses:
            raise self.refuses
        self.moves.begin(by, reason, self.counts, counts).outcome = "moved"
        self.give(counts)
        if by == "operator":
            self.moves.by_operator = self.now
            self.moves.given.update(counts)
        return Move({}, {})

    def pass_by(self, seconds: float) -> None:
        then = self.now + seconds
        for name, queue in self.queues.items():
            queue.run(self.now, then, self.counts[name], self._chance)
            if fence := self.fences.get(name):
                fence.waits = queue.counts[0]
        self.now = then

    async def run(self, until: float) -> None:
        while self.now < until:
            self.pass_by(self.pilot.pace.period)
            if self.pilot.mode != "off":
                await self.pilot.tick()


async def test_it_moves_what_is_needed_and_says_why() -> None:
    site = FakeController()
    await site.run(100)
    assert site.asked == []
    await site.run(300)
    counts, by, reason = site.asked[0]
    assert (dict(counts), by) == ({"acme": 4, "globex": 2}, "autopilot")
    assert reason.startswith("2 cores from globex (")
    assert site.counts == {"acme": 4, "globex": 2, "other": 1}
    assert site.pilot.own("acme") == 2
    await site.run(1200)
    assert site.counts == {"acme": 2, "globex": 4, "other": 1}


@pytest.mark.parametrize("pcie", [0.2, "auto"])
async def test_a_tenant_whose_works_wait_for_its_share_of_pcie_gets_granules_only_if_it_grows_with_them(
    pcie: float | str,
) -> None:
    site = FakeController()
    site.tenants["acme"] = site.tenants["acme"].model_copy(update={"pcie": pcie})
    site.fences["acme"] = FencedTenant(0, (), 0, 10**9, 0, [], [], [])
    await site.run(300)
    assert bool(site.asked) == (pcie == "auto")
    assert pcie == "auto" or "waited for its `pcie`" in site.pilot.notes[0]


async def test_what_came_while_device_sides_answered_late_is_not_taken_for_more_load() -> None:
    site = FakeController("dry-run")
    site.queues["acme"] = Queue(constant(100), 0.010)
    await site.run(60)
    site.late = 8.0
    await site.run(65)
    assert site.pilot.needs["acme"].rate == pytest.approx(100, rel=0.1)


async def test_a_dry_run_moves_nothing_and_says_the_same_thing_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    site = FakeController("dry-run")
    await site.run(300)
    assert site.asked == []
    (proposed,) = site.moves
    assert (proposed.outcome, proposed.by, proposed.before) == ("proposed", "autopilot", {"acme": 2, "globex": 4})
    assert caplog.messages == [f"dry run: the autopilot would move {proposed.reason}"]


async def test_an_operator_wins_and_has_some_minutes_without_it() -> None:
    site = FakeController()
    await site.run(150)
    assert len(site.asked) == 1
    await site.repartition({"acme": 2, "globex": 4})
    del site.asked[:]
    at = site.now
    await site.run(at + 295)
    assert site.asked == []
    assert 0 < site.pilot.paused_for <= 5


async def test_what_an_operator_gave_is_a_tenants_own_share() -> None:
    site = FakeController()
    await site.run(30)
    await site.repartition({"acme": 3, "globex": 3})
    await site.run(40)
    assert (site.pilot.own("acme"), site.pilot.own("globex")) == (3, 3)
    await site.run(1500)
    assert site.counts == {"acme": 3, "globex": 3, "other": 1}


async def test_what_an_operator_gave_between_two_looks_is_a_tenants_own_share_also_where_it_has_it_already() -> None:
    """By two changes, of which the second undoes the first, or by one that asks for what the autopilot has done."""
    for changes in ([{"acme": 3, "globex": 3}, {"acme": 4, "globex": 2}], [{"acme": 4, "globex": 2}]):
        site = FakeController()
        await site.run(150)
        assert (site.counts["acme"], site.pilot.own("acme"), site.pilot.own("globex")) == (4, 2, 4)
        for counts in changes:
            await site.repartition(counts)
        await site.run(155)
        assert (site.pilot.own("acme"), site.pilot.own("globex")) == (4, 2)
        await site.run(1500)
        assert site.counts == {"acme": 4, "globex": 2, "other": 1}


@pytest.mark.parametrize("begins", [True, False])
async def test_a_target_that_a_reload_gives_or_takes_away_counts_from_then_on(begins: bool) -> None:
    site = FakeController()
    targets = [0.05, None] if begins else [None, 0.05]
    site.tenants["acme"] = site.tenants["acme"].model_copy(update={"target_p99": targets[0]})
    await site.run(50)
    site.tenants["acme"] = site.tenants["acme"].model_copy(update={"target_p99": targets[1]})
    await site.run(300)
    assert [dict(counts) for counts, *_ in site.asked] == ([] if begins else [{"acme": 4, "globex": 2}])
    assert site.pilot.own("acme") == 2


@pytest.mark.parametrize("state", ["starting", "restarting", "draining"])
async def test_nothing_is_moved_on_a_device_that_does_not_serve(state: str) -> None:
    site = FakeController()
    site.state = state
    await site.run(300)
    assert site.asked == []
    site.state = "serving"
    await site.run(300 + site.pilot.pace.window - site.pilot.pace.period)
    assert site.asked == []
    await site.run(380)
    assert site.asked


async def test_nothing_is_taken_from_a_tenant_whose_process_does_not_answer() -> None:
    site = FakeController()
    site.silent.add("globex")
    await site.run(300)
    assert site.asked == []
    assert any(note.endswith("but globex is not measured") for note in site.pilot.notes)


@pytest.mark.parametrize("error", [Conflict("tenant globex: an inference has been running"), DoesNotFit("too many")])
async def test_a_refused_move_is_logged_and_not_repeated_at_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    site = FakeController()
    site.refuses = error
    await site.run(400)
    assert len(site.asked) == 1
    assert [line for line in caplog.messages if line.startswith("the autopilot could not move 2 cores") and f"{error}" in line]


async def test_it_is_switched_while_it_runs() -> None:
    site = FakeController("off")
    await site.run(150)
    site.pilot.set_mode("on")
    assert site.pilot.needs == {}
    await site.run(150 + site.pilot.pace.window - site.pilot.pace.period)
    assert site.asked == []
    await site.run(250)
    assert site.asked
    assert site.pilot.needs
    site.pilot.set_mode("off")
    assert (site.pilot.needs, site.pilot.notes, site.pilot.own("acme")) == ({}, [], 2)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "it looks no more"
