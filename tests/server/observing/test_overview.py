"""What the overview measures of two tenants on a clock of the test's own."""

from collections.abc import Sequence
from typing import Any

import pytest

from server.config.tenant import TenantConfig
from server.control.controlled_device import ControlledDevice
from server.control.descriptions import DeviceInfo, Execution, PartitionInfo, TenantMemory
from server.control.placement_plans import PlacementPlans
from server.observing.accountant import Accountant
from server.observing.overview import FRESH, PERIOD, SLOW, WINDOW, Overview, TenantLook
from server.scheduling.lane_statistics import LaneStatistics, SlotStatistics
from server.tenants.frontend import ModelReport, Report
from server.tenants.statistics import ModelStatistics, Size

MS = 1_000_000


class FakeController:
    """acme and globex on a device of two cores; what they answer is counted by `answer`."""

    def __init__(self) -> None:
        tenants = [TenantConfig(name=name, cores=1, models=("*",)) for name in ("acme", "globex")]
        self.tenants = {each.name: each for each in tenants}
        self.device = ControlledDevice("0", {}, info=DeviceInfo("cpu", "", "core", (1, 1)))
        self.device.held = {"acme": PartitionInfo((0,), 1), "globex": PartitionInfo((1,), 1)}
        self.placements: Any = PlacementPlans(self.tenants, [self.device], None)  # type: ignore[arg-type]
        self.models = {name: ModelStatistics() for name in self.tenants}
        self.waiting, self.ran = dict.fromkeys(self.tenants, 0), dict.fromkeys(self.tenants, 0)
        self.rejected = self.limited = 0
        self.silent: set[str] = set()
        self.asked = self.detailed = 0

    def answer(self, tenant: str, count: int, ms: int) -> None:
        """The tenant answered so many requests that took so long, and ran its model all that time."""
        statistics = self.models[tenant]
        size = statistics.sizes.setdefault(1, Size())
        size.count += count
        size.total += count * ms * MS
        self.ran[tenant] += count * ms * MS
        statistics.buckets[next(i for i, bound in enumerate((0.1, 0.2, 0.5, 1, 2, 5, 10)) if ms <= bound)] += count

    def device_of(self, tenant: str) -> ControlledDevice | None:
        return self.device if tenant in self.tenants else None

    async def reports(self) -> list[tuple[TenantConfig, Report]]:
        self.asked += 1
        found = []
        for name, tenant in self.tenants.items():
            rejected, limited = (self.rejected, self.limited) if name == "acme" else (0, 0)
            lane = LaneStatistics(self.waiting[name], 0, 0, rejected, limited=(limited, 0, 0, 0), ran=self.ran[name])
            served = [ModelReport("m", "1", self.models[name], 0)]
            age = 5.0 if name in self.silent else 0.0
            found.append((tenant, Report(served, [], lane, SlotStatistics(0, 0, 0), age)))
        return found

    async def executions(self) -> list[Execution]:
        self.detailed += 1
        return []

    async def memory(self) -> list[TenantMemory]:
        return []


class Bench:
    """An overview of it, at seconds that the test says."""

    def __init__(self) -> None:
        self.controller = FakeController()
        self.now = 0.0
        self.overview = Overview(self.controller, Accountant([self.controller.device]), lambda: self.now)

    async def after(self, seconds: float) -> Sequence[TenantLook]:
        self.now += seconds
        return (await self.overview.look()).tenants


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_rates_and_latencies_are_of_the_last_seconds(bench: Bench) -> None:
    acme, _ = await bench.after(1)
    assert acme.need is None
    bench.controller.answer("acme", 1000, 5)
    await bench.after(PERIOD)
    for _ in range(3):
        bench.controller.answer("acme", 50, 1)
        acme, globex = await bench.after(PERIOD)
    assert acme.need
    assert acme.need.seconds == WINDOW
    assert acme.need.requests == 100
    assert acme.models["m", "1"].rate == pytest.approx(10)
    assert globex.need
    assert globex.need.requests == 0


async def test_many_who_ask_at_once_are_one(bench: Bench) -> None:
    await bench.after(1)
    await bench.after(FRESH / 2)
    assert (bench.controller.asked, bench.controller.detailed) == (1, 1)
    await bench.after(FRESH)
    assert (bench.controller.asked, bench.controller.detailed) == (2, 1)
    await bench.after(SLOW)
    assert (bench.controller.asked, bench.controller.detailed) == (3, 2)


async def test_the_baseline_is_of_requests_whose_neighbours_rested(bench: Bench) -> None:
    await bench.after(PERIOD)
    for _ in range(4):  # The first interval has none before it, and does not count.
        bench.controller.answer("acme", 300, 1)
        acme, globex = await bench.after(PERIOD)
    assert (acme.isolation.ratio, acme.isolation.quiet_requests) == (pytest.approx(1.0), 900)
    assert globex.isolation.ratio is None
    for _ in range(3):
        bench.controller.answer("acme", 300, 5)
        bench.controller.answer("globex", 2000, 2)
        acme, _ = await bench.after(PERIOD)
    assert acme.isolation.quiet_requests == 900
    assert acme.isolation.slower
    assert acme.isolation.ratio == pytest.approx(5, rel=0.1)


async def test_a_neighbour_whose_request_runs_for_long_does_not_rest(bench: Bench) -> None:
    bench.controller.waiting["globex"] = 1
    for _ in range(5):
        bench.controller.answer("acme", 300, 1)
        acme, _ = await bench.after(PERIOD)
    assert acme.isolation.why.startswith("not known yet: 0 of 500")


async def test_a_neighbour_whose_requests_all_fail_does_not_rest(bench: Bench) -> None:
    for _ in range(5):
        bench.controller.answer("acme", 300, 1)
        bench.controller.ran["globex"] += 4000 * MS
        acme, globex = await bench.after(PERIOD)
    assert acme.isolation.why.startswith("not known yet: 0 of 500")
    assert globex.need
    assert (globex.need.requests, globex.need.busy) == (0, pytest.approx(0.8))


async def test_a_tenant_alone_has_no_neighbour_to_compare_with(bench: Bench) -> None:
    del bench.controller.device.held["globex"]
    await bench.after(PERIOD)
    acme, _ = await bench.after(PERIOD)
    assert acme.isolation.why == "it is alone on its device"


async def test_a_new_share_gets_a_new_baseline(bench: Bench) -> None:
    await bench.after(PERIOD)
    for _ in range(4):
        bench.controller.answer("acme", 300, 1)
        await bench.after(PERIOD)
    bench.controller.device.held["acme"] = PartitionInfo((0, 1), 2)
    acme, _ = await bench.after(PERIOD)
    assert (acme.need, acme.isolation.quiet_requests) == (None, 0)


async def test_a_process_that_does_not_answer_is_not_measured(bench: Bench) -> None:
    await bench.after(PERIOD)
    await bench.after(PERIOD)
    bench.controller.silent = {"acme"}
    acme, globex = await bench.after(PERIOD)
    assert (acme.need, acme.isolation.why) == (None, "not measured yet")
    assert globex.need


async def test_refusals_and_failures_are_problems_once_each(bench: Bench) -> None:
    bench.controller.rejected = 7  # From before the first look: when they came is not known.
    await bench.after(PERIOD)
    assert bench.overview.problems.newest() == []
    bench.controller.rejected += 3
    bench.controller.limited = 4
    bench.controller.models["globex"].failed(1, "BACKEND")
    await bench.after(PERIOD)
    await bench.after(PERIOD)
    found = {(each.tenant, each.text): each.count for each in bench.overview.problems.newest()}
    assert found == {
        ("acme", "requests refused (429): the queue or the memory is full"): 3,
        ("acme", "requests limited (429): over the tenant's requests_per_second"): 4,
        ("globex", "m 1: requests failed in the model (5xx)"): 1,
    }
    bench.controller.rejected = 2  # Its process was replaced, and counts from 0.
    await bench.after(PERIOD)
    assert bench.overview.problems.newest()[0].count == 5
