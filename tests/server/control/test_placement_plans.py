"""Plans of placements, each carried out in the background and given up for the next one."""

import asyncio
import fcntl
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from partitions.base import Bandwidth
from partitions.plan import Granules
from partitions.resctrl import CoreGroups, CoreShare
from server.config.tenant import TenantConfig
from server.control.controlled_device import ControlledDevice
from server.control.descriptions import Beside, DeviceInfo, ReadyShare
from server.control.fence import Fence, FencedModel, FencedTenant, Narrowing
from server.control.placement_plans import PlacementPlans
from server.control.stretch import Wide
from server.errors import Unavailable
from tests.server.device.test_runtime import add_model, serving
from tests.simulation.resctrl import KernelPath, cpus, groups, lay_out, meters, schemata

from .test_several_devices import FakeRuntime

GLOBEX = TenantConfig(name="globex", granules=2, models=("*",))
ACME = TenantConfig(name="acme", granules=3, models=("*",), memory_bandwidth=0.5)


class Runtime(FakeRuntime):
    """The device process of one tenant, which does what is planned once `free` is set."""

    def __init__(self, name: str) -> None:
        super().__init__([], name)
        self.free = asyncio.Event()
        self.free.set()
        self.asked = asyncio.Event()
        self.held: Mapping[str, Sequence[Granules]] = {}
        self.name = name
        self.fenced: list[Mapping[str, Fence]] = []
        self.state = FencedTenant(10**12, (), 0, 0, 0, [], [], [])

    async def plan(self, wide: Mapping[str, Wide], fences: Mapping[str, Fence]) -> None:
        self.asked.set()
        await self.free.wait()
        if self.away:
            raise Unavailable("it is being started again")
        self.fenced.append(fences)

    async def hold(self, ready: Mapping[str, Sequence[Granules]]) -> dict[str, list[ReadyShare]]:
        self.asked.set()
        await self.free.wait()
        self.held = ready
        return {}

    async def states(self) -> dict[str, Beside]:
        if self.away:
            raise Unavailable("it is being started again")
        return {self.name: Beside(None, self.state, [ReadyShare(tuple(each), 1, 0) for each in self.held.get(self.name, ())])}


async def loaded() -> None:
    """All models are."""


async def test_a_plan_that_gives_up_the_one_before_comes_to_every_device_process() -> None:
    names = ("acme", "globex")
    sides = {name: Runtime(name) for name in names}
    runtimes: Any = sides
    device = ControlledDevice("0", runtimes, info=DeviceInfo("cpu", "", "core", (1,) * 4))
    device.hold({"acme": (0, 1), "globex": (2, 3)})
    tenants = {name: TenantConfig(name=name, granules=2, ladder=(1,), models=("*",)) for name in names}
    plans = PlacementPlans(tenants, [device], asyncio.Lock())
    plans.begin(loaded)
    await plans.carried_out()
    assert {name: len(side.held[name]) for name, side in sides.items()} == {"acme": 1, "globex": 1}
    assert list(await plans.states()) == ["acme", "globex"]
    sides["acme"].away = True
    assert list(await plans.states()) == ["globex"], "a process that has ended has no rung"
    sides["acme"].away = False
    device.hold({"acme": (0,), "globex": (3,)})
    sides["acme"].free.clear()
    sides["acme"].asked.clear()
    plans.remake()
    await sides["acme"].asked.wait()
    sides["acme"].free.set()
    plans.remake()
    await plans.carried_out()
    assert {name: side.held for name, side in sides.items()} == {"acme": {"acme": []}, "globex": {"globex": []}}


async def fenced(runtimes: Any) -> tuple[ControlledDevice, PlacementPlans]:
    """A device whose acme has three granules and draws no more than two of them can, and its plans, which are carried out."""
    moves = Bandwidth(memory=4 * 10**12, unit=10**12)
    device = ControlledDevice("0", runtimes, info=DeviceInfo("cuda", "", "SM", (1,) * 8, bandwidth=moves))
    device.hold({"acme": (0, 1, 2), "globex": (4, 5)})
    plans = PlacementPlans({"acme": ACME, "globex": GLOBEX}, [device], asyncio.Lock())
    plans.begin(loaded)
    await plans.carried_out()
    return device, plans


async def test_a_fence_comes_to_the_tenants_device_process_follows_its_granules_and_is_taken_back() -> None:
    sides = {name: Runtime(name) for name in ("acme", "globex")}
    device, plans = await fenced(sides)
    fence = Fence(("globex",), 2 * 10**12, (0, 1))
    assert [side.fenced for side in sides.values()] == [[{"acme": fence}], [{}]]
    assert device.fences == {"acme": fence}
    model = FencedModel("mob/1", 5, 1.0, 2.0, slows=9.0)
    sides["acme"].state = FencedTenant(10**12, (), 0, 0, 0, [], [], [model], "not at all", 10**15)
    states = await plans.states()
    assert [*states] == ["acme", "globex"]
    assert (state := states["acme"].fence)
    assert (state.cores, state.moved, state.models[0].slows) == ("", None, 0.0), "which its own process does not know"
    sides["acme"].away = True
    assert [*(await plans.states())] == ["globex"], "a process that has ended holds none"
    sides["acme"].away = False
    device.hold({"acme": (3, 6, 7)})
    plans.remake()
    await plans.carried_out()
    assert sides["acme"].fenced[-1] == {"acme": fence._replace(granules=(3, 6))}
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": None}), "globex": GLOBEX})
    await plans.carried_out()
    assert [side.fenced[-1] for side in sides.values()] == [{}, {}]
    assert await plans.states() == {}
    count = len(sides["acme"].fenced)
    plans.remake()
    await plans.carried_out()
    assert len(sides["acme"].fenced) == count, "without a fence nothing is said"


@pytest.mark.parametrize("before", [None, 0.5])
async def test_a_share_that_a_reload_gives_holds_once_models_are_loaded(before: float | None) -> None:
    """Also the first one."""
    side, free = Runtime("acme"), asyncio.Event()
    runtimes: Any = {"acme": side, "globex": side}
    moves = Bandwidth(memory=4 * 10**12, unit=10**12)
    device = ControlledDevice("0", runtimes, info=DeviceInfo("cuda", "", "SM", (1,) * 8, bandwidth=moves))
    device.hold({"acme": (0, 1, 2), "globex": (4, 5)})
    acme = ACME.model_copy(update={"memory_bandwidth": before})
    plans = PlacementPlans({"acme": acme, "globex": GLOBEX}, [device], asyncio.Lock())

    async def load() -> None:
        await free.wait()

    plans.begin(load)
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": 0.25}), "globex": GLOBEX})
    for _ in range(99 if before else 0):
        await asyncio.sleep(0)
    assert not side.fenced
    free.set()
    await plans.carried_out()
    assert side.fenced == [{"acme": Fence(("globex",), 10**12, (0,))}]


async def test_a_fence_that_could_not_be_taken_back_is_taken_back_with_the_next_plan() -> None:
    side = Runtime("acme")
    _, plans = await fenced({"acme": side, "globex": side})
    assert side.fenced[-1]
    side.free.clear()
    side.asked.clear()
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": None}), "globex": GLOBEX})
    await side.asked.wait()  # It has not come yet when there is another plan.
    side.free.set()
    plans.remake()
    await plans.carried_out()
    assert side.fenced[-1] == {}


@pytest.fixture
def root(tmp_path: Path) -> KernelPath:
    return KernelPath(tmp_path)


def on_cores(root: KernelPath, names: tuple[str, ...] = ("acme", "globex")) -> tuple[ControlledDevice, PlacementPlans, Runtime]:
    """A device of cores 2 to 5, of which acme has two and may draw half of what there is, and its plans."""
    runtime: Any = Runtime("acme")
    device = ControlledDevice("0", dict.fromkeys(names, runtime), info=DeviceInfo("cpu", "", "core", (1,) * 4, "2,3,4,5"))
    device.hold({name: granules for name, granules in {"acme": (0, 1), "globex": (2,)}.items() if name in names})
    plans = PlacementPlans({"acme": ACME, "globex": GLOBEX}, [device], asyncio.Lock())
    plans.cores = CoreGroups(root)
    return device, plans, runtime


async def test_cores_are_held_from_the_first_plan_follow_moves_and_are_free_at_the_end(
    root: KernelPath, caplog: pytest.LogCaptureFixture
) -> None:
    base, how = lay_out(root, 8), "cores {}: MB:0=50, % of each L3 cache's memory bandwidth, by resctrl"
    caplog.set_level(logging.INFO)
    device, plans, runtime = on_cores(root)
    plans.begin(loaded)
    await plans.carried_out()
    assert runtime.fenced[-1] == {"acme": Fence(("globex",), cores=how.format("2-3"))}
    assert f"tenant acme is held to its memory_bandwidth at any time: {how.format('2-3')}" in caplog.text
    (group,) = groups(base)
    assert (cpus(group), schemata(group)) == ({2, 3}, {0: 50})
    (group / "mon_data/mon_L3_00/mbm_total_bytes").write_text("12345\n")
    runtime.state = FencedTenant(0, (), 0, 0, 0, [], [], [], "not at all", 10**15)
    fence = (await plans.states())["acme"].fence
    assert fence
    assert (fence.cores, fence.moved) == (how.format("2-3"), 12345)
    device.hold({"acme": (0,), "globex": (1, 2)})
    plans.remake()
    await plans.carried_out()
    assert cpus(group) == {2}
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": "auto"}), "globex": GLOBEX})
    await plans.carried_out()
    assert schemata(group) == {0: 20}, "a quarter of the cores"
    plans.close()
    await plans.free_cores()
    assert not groups(base)
    assert cpus(base) == set(range(8))


async def test_of_two_shares_a_warning_is_only_about_the_one_that_holds_nothing(
    root: KernelPath, caplog: pytest.LogCaptureFixture
) -> None:
    lay_out(root, 8)
    caplog.set_level(logging.INFO)
    _, plans, runtime = on_cores(root)
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": 0.05, "pcie": 0.1}), "globex": GLOBEX})
    plans.begin(loaded)
    await plans.carried_out()
    pcie, held = runtime.fenced[-1]["acme"].notes
    assert pcie == "its pcie holds nothing back: only a GPU's is held, and it has cores"
    assert held == "its memory_bandwidth is 0.05, and this processor holds cores to 10 % at least"
    said = {text: level for name, level, text in caplog.record_tuples if name == "greenlane.fence"}
    assert (said[f"tenant acme: {pcie}"], said[f"tenant acme: {held}"]) == (logging.WARNING, logging.INFO)


async def test_a_tenant_that_is_not_fenced_any_more_has_no_group(root: KernelPath) -> None:
    base = lay_out(root, 8)
    _, plans, _ = on_cores(root)
    plans.begin(loaded)
    await plans.carried_out()
    assert groups(base)
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": None}), "globex": GLOBEX})
    await plans.carried_out()
    assert not groups(base)


async def test_who_is_alone_on_a_device_of_cores_is_not_held(root: KernelPath, caplog: pytest.LogCaptureFixture) -> None:
    base = lay_out(root, 8)
    caplog.set_level(logging.INFO)
    _, plans, runtime = on_cores(root, ("acme",))
    plans.begin(loaded)
    await plans.carried_out()
    assert not groups(base)
    (note,) = runtime.fenced[-1]["acme"].notes
    assert note == "no other tenant is on its device, so nothing holds it"
    assert ("greenlane.fence", logging.INFO, f"tenant acme: {note}") in caplog.record_tuples


async def test_why_cores_are_not_held_is_said_and_logged(root: KernelPath, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, plans, runtime = on_cores(root)
    plans.begin(loaded)
    await plans.carried_out()
    (note,) = runtime.fenced[-1]["acme"].notes
    assert note.startswith(
        "unfenced: its memory_bandwidth holds nothing back, as this processor, kernel or virtual machine has"
    )
    assert ("greenlane.fence", logging.WARNING, f"tenant acme: {note}") in caplog.record_tuples
    fence = (await plans.states())["acme"].fence
    assert fence
    assert fence.moved is None


async def test_a_server_without_a_fence_removes_what_a_killed_one_left(root: KernelPath) -> None:
    base = lay_out(root, 8)
    (base / "greenlane-acme-c0ffee").mkdir()
    (base / "greenlane-acme-c0ffee/cpus_list").write_text("2-3\n")
    device, plans, _ = on_cores(root)
    device.info = DeviceInfo("cuda", "", "SM", (1,) * 4)
    plans.reconfigure({name: GLOBEX.model_copy(update={"name": name}) for name in ("acme", "globex")})
    plans.begin(loaded)
    await plans.free_cores()
    assert not groups(base)


async def test_cores_are_counted_that_are_not_held_and_follow_moves(root: KernelPath) -> None:
    base = lay_out(root, 8)
    device, plans, runtime = on_cores(root)
    plans.reconfigure({"acme": GLOBEX.model_copy(update={"name": "acme"}), "globex": GLOBEX})
    plans.begin(loaded)
    await plans.carried_out()
    assert (groups(base), runtime.fenced) == ([], []), "nothing is planned but that"
    assert sorted(map(sorted, map(cpus, meters(base)))) == [[2, 3], [4]]
    device.hold({"acme": (0,), "globex": (1, 2)})
    plans.remake()
    await plans.carried_out()
    assert sorted(map(sorted, map(cpus, meters(base)))) == [[2], [3, 4]]
    assert await plans.moved() == {"acme": 0, "globex": 0}
    await plans.free_cores()
    assert not meters(base)


async def test_what_is_seen_of_models_plans_again_only_where_it_makes_other_placements(root: KernelPath) -> None:
    device, plans, runtime = on_cores(root)
    tenants = {"acme": ACME.model_copy(update={"memory_bandwidth": 2 * 10**9}), "globex": GLOBEX}
    device.info = DeviceInfo("cuda", "", "SM", (1,) * 5, bandwidth=Bandwidth(5 * 10**9, 10**9, 10**9))
    device.hold({"acme": (0, 1, 2, 3), "globex": (4,)})
    plans.reconfigure(tenants)
    plans.begin(loaded)
    await plans.carried_out()
    for unit, looks in ((9 * 10**8, 2), (6 * 10**8, 2), (62 * 10**7, 2), (0, 3)):
        device.narrowing = {"acme": Narrowing(unit)}
        plans.narrowed()
        await plans.carried_out()
        assert len(runtime.fenced) == looks
    assert [len(each["acme"].granules) for each in runtime.fenced] == [2, 3, 2]
    plans.close()
    await plans.free_cores()


async def test_works_are_paced_to_a_share_below_a_granule_once_it_was_seen_what_models_draw(root: KernelPath) -> None:
    """Where the granules stay the same."""
    device, plans, runtime = on_cores(root)
    device.info = DeviceInfo("cuda", "", "SM", (1,) * 5, bandwidth=Bandwidth(5 * 10**9, 10**9, 10**9))
    device.hold({"acme": (0, 1, 2, 3), "globex": (4,)})
    plans.reconfigure({"acme": ACME.model_copy(update={"memory_bandwidth": 8 * 10**8}), "globex": GLOBEX})
    plans.begin(loaded)
    await plans.carried_out()
    for seen in (Narrowing(9 * 10**8), Narrowing(9 * 10**8, True)):
        device.narrowing = {"acme": seen}
        plans.narrowed()
        await plans.carried_out()
    assert [(each["acme"].granules, each["acme"].paced) for each in runtime.fenced] == [((0,), 0), ((0,), 8 * 10**8), ((0,), 0)]
    plans.close()
    await plans.free_cores()


async def test_what_was_seen_of_a_tenants_models_goes_with_it() -> None:
    device = ControlledDevice("0", {}, info=DeviceInfo("cuda", "", "SM", (1,) * 2))
    device.hold({"acme": (0,), "globex": (1,)})
    device.narrowing = {"acme": Narrowing(5), "globex": Narrowing(6)}
    device.slows = {("acme", "mob/1"): 2.0, ("globex", "mob/1"): 3.0}
    device.remove("acme")
    assert (device.narrowing, device.slows) == ({"globex": Narrowing(6)}, {("globex", "mob/1"): 3.0})


async def test_cores_that_another_program_kept_from_being_held_are_held_once_it_does_not(
    root: KernelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.control.placement_plans.AGAIN", 0.01)
    base = lay_out(root, 8)
    _, plans, runtime = on_cores(root)
    lock = os.open(base, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    plans.begin(loaded)
    await plans.carried_out()
    assert "another program has" in runtime.fenced[-1]["acme"].notes[0]
    os.close(lock)
    async with asyncio.timeout(20):
        while not runtime.fenced[-1]["acme"].cores:
            await asyncio.sleep(0.01)
    assert len(groups(base)) == len(meters(base)) == 1
    plans.close()
    await plans.free_cores()
    assert not groups(base)


async def test_the_end_of_the_controller_frees_cores(root: KernelPath) -> None:
    base = lay_out(root, 8)
    add_model(root, "a")
    async with serving(root) as site:
        site.controller.placements.cores = cores = CoreGroups(root)
        cores.hold({"acme": CoreShare((0, 1), 0.4)})
        assert groups(base)
        await site.controller.close()
        assert not groups(base)
