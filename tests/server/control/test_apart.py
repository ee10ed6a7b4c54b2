"""A shared GPU on which blocks wait for units that others have: wrong placements are refused, and what a move costs."""

import asyncio
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from partitions import Misplaced
from partitions.base import Held
from partitions.plan import Granules
from partitions.probe import Placement
from server.config.schema import Config
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.control.descriptions import DeviceInfo, Paused
from server.control.reconfiguration import reconfigure
from server.errors import Conflict

from .test_several_devices import Reporting, two_devices

MILLISECOND = 1_000_000
BRIEFLY = 0.0005
"""Seconds for which a tenant is held whose granules stay."""


class Gpu:
    """Has a unit for each granule. Those that hold theirs in a round begin at the same time, or later by `delays`."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.placed: dict[str, frozenset[int]] = {}
        """The units of each tenant, of one that moves the new ones."""
        self.misplaced: dict[str, frozenset[int]] = {}
        """By tenant, units that its next partition gets in place of those of its granules, as far as it has so many."""
        self.refused: list[bool] = []
        """Whether it was `apart`, each time that a move was discarded by one of its processes."""
        self.delays: dict[str, list[int]] = {}
        self._round: list[tuple[int, str, frozenset[int], int]] = []
        self._over = False

    @property
    def apart(self) -> bool:
        """Whether no unit is two tenants'."""
        return sum(map(len, self.placed.values())) == len(frozenset[int]().union(*self.placed.values()))

    def place(self, tenant: str, granules: Granules) -> None:
        wrong = self.misplaced.pop(tenant, frozenset())
        units = [*sorted(wrong), *(each for each in granules if each not in wrong)]
        self.placed[tenant] = frozenset(units[: len(granules)])

    def begin(self, tenant: str, seconds: float) -> None:
        if self._over:
            self._round, self._over = [], False
        delay = self.delays[tenant].pop(0) if self.delays.get(tenant) else 0
        self._round.append((delay, tenant, self.placed[tenant], round(seconds * 1e9)))

    def end(self, tenant: str) -> Held:
        """When this tenant had all of its units: each goes from one to the next in the order in which they began."""
        self._over, free, found = True, dict.fromkeys(range(self.units), 0), dict[str, Held]()
        for began, name, units, length in sorted(self._round, key=lambda each: each[:2]):
            starts = [max(began, free[unit]) for unit in units]
            free |= {unit: start + length for unit, start in zip(units, starts, strict=True)}
            found[name] = Held(len(units), max(starts), min(starts) + length)
        return found[tenant]


class Process:
    """The runtime of one tenant."""

    def __init__(self, tenant: str, gpu: Gpu) -> None:
        self.tenant, self._gpu = tenant, gpu
        self.away = False
        self.busy = False
        """Whether a work does not end."""
        self.processes = 1
        self.held = 0.0
        """Seconds for which its units were held."""
        self.granules: Granules = ()
        self.before: tuple[Granules, frozenset[int]] | None = None
        """What it has while a move is prepared."""
        self.moves: Any = self

    async def open(self) -> DeviceInfo:
        return DeviceInfo("fake", "a shared device", "core", (1,) * self._gpu.units, shared=True)

    async def start(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int] | None]:
        self.granules = granules[self.tenant]
        self._gpu.place(self.tenant, self.granules)
        return {self.tenant: None}

    def start_again(self) -> None:
        """Another process has its granules."""
        self.processes += 1
        self._gpu.place(self.tenant, self.granules)

    async def probe(self, seconds: float) -> dict[str, Placement]:
        self.held += seconds
        self._gpu.begin(self.tenant, seconds)
        await asyncio.sleep(0)  # The others begin.
        return {self.tenant: self._gpu.end(self.tenant)}

    async def prepare(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int]]:
        self.before, self.granules = (self.granules, self._gpu.placed[self.tenant]), granules[self.tenant]
        self._gpu.place(self.tenant, self.granules)
        return {self.tenant: frozenset()}

    async def settle(self) -> None:
        if self.busy:
            raise Conflict(f"tenant {self.tenant}: an inference")

    async def halt(self) -> bool:
        return True

    async def commit(self) -> dict[str, Paused]:
        self.before = None
        return {}

    async def switch(self) -> dict[str, Paused]:
        await self.settle()
        return await self.commit()

    async def discard(self) -> None:
        self._gpu.refused.append(self._gpu.apart)
        if self.before:
            (self.granules, self._gpu.placed[self.tenant]), self.before = self.before, None

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not called here")


class Site:
    """So many tenants of two granules on a GPU that has one more."""

    def __init__(self, count: int) -> None:
        self.gpu = Gpu(2 * count + 1)
        self.names = [chr(ord("a") + number) for number in range(count)]
        config = self.config({})
        frontends: Any = dict.fromkeys(self.names, Reporting())
        self.controller = Controller(config, frontends, lambda _: None)
        self.processes: dict[str, Any] = {name: Process(name, self.gpu) for name in self.names}
        self.controller.add(self.processes)

    def config(self, counts: Mapping[str, int]) -> Config:
        """With these counts of granules, and two for the others."""
        return two_devices(
            *(TenantConfig(name=name, device="0", granules=counts.get(name, 2), models=("*",)) for name in self.names)
        )

    async def start(self) -> "Site":
        await self.controller.start()
        self.forget()
        return self

    def forget(self) -> None:
        """What was held so far."""
        for each in self.processes.values():
            each.held = 0.0

    @property
    def held(self) -> dict[str, float]:
        return {name: process.held for name, process in self.processes.items()}


async def test_tenants_that_keep_their_granules_are_held_briefly_in_a_move_of_two_of_fourteen() -> None:
    """And once, unless they or one that moves began too late; where all were held as long as those that move it was 4 ms."""
    site = await Site(14).start()
    site.gpu.delays = {"c": [3 * MILLISECOND]}
    await site.controller.repartition({"a": 1, "b": 3})
    assert site.held == {**dict.fromkeys(site.names, BRIEFLY), "a": 0.004, "b": 0.004, "c": 2 * BRIEFLY}
    site.forget()
    site.gpu.delays = {"b": [3 * MILLISECOND]}
    await site.controller.repartition({"a": 2, "b": 2})
    assert site.held == {**dict.fromkeys(site.names, 2 * BRIEFLY), "a": 0.004, "b": 0.004}


async def test_a_reload_that_changes_shares_holds_each_tenant_once() -> None:
    site = await Site(3).start()
    site.controller.on_state(site.names, "serving")
    reloaded = list[Config]()

    async def everywhere(config: Config) -> None:
        reloaded.append(config)

    await reconfigure(site.controller, site.config({"a": 1, "b": 3}), everywhere)
    assert [len(each.granules) for each in site.processes.values()] == [1, 3, 2]
    assert (len(reloaded), site.held) == (1, {"a": 0.002, "b": 0.002, "c": BRIEFLY})


async def test_a_move_holds_a_process_as_long_as_those_that_move_if_it_was_started_since_the_last_one() -> None:
    site = await Site(4).start()
    for expected in (0.002, BRIEFLY):
        if expected == 0.002:
            site.processes["d"].start_again()
        await site.controller.repartition({"a": 1 if expected == 0.002 else 3})
        assert site.held == {"a": 0.002, "b": BRIEFLY, "c": BRIEFLY, "d": expected}
        site.forget()


async def test_a_move_compares_all_once_a_look_has_found_that_two_are_not_apart() -> None:
    site = await Site(4).start()
    site.gpu.placed["d"] = site.gpu.placed["c"]
    _, shared = await site.controller.probe(site.controller.devices[0])
    assert ("c", "d", frozenset()) in shared
    with pytest.raises(Misplaced, match="c and d did not have all their units at the same time"):
        await site.controller.repartition({"a": 1, "b": 3})


@pytest.mark.parametrize("over", ["b", "c"])
async def test_a_move_onto_the_units_of_another_that_moves_or_stays_is_refused(over: str) -> None:
    site = await Site(3).start()
    site.gpu.misplaced = {"a": site.gpu.placed[over]}
    with pytest.raises(Misplaced, match=f"^device 0: a and {over} did not have all their units at the same time"):
        await site.controller.repartition({"a": 1, "b": 3})
    assert [len(each.granules) for each in site.processes.values()] == [2, 2, 2]


Step = tuple[str, int, int, list[tuple[int, int]], int]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["move", "move of one that is busy", "start again", "look"]),
            st.integers(0, 3),
            st.integers(0, 3),
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=2),
            st.integers(0, 1000),
        ),
        max_size=8,
    ),
    st.booleans(),
)
@example([], True)
@example([("move", 0, 1, [(1, 2)], 0), ("move", 0, 1, [(0, 1)], 0)], False)
@example([("start again", 3, 0, [(3, 2)], 0), ("move", 0, 1, [], 0)], False)
@example([("move of one that is busy", 0, 1, [], 0), ("move", 0, 1, [(1, 2)], 0)], False)
def test_whatever_happened_before_a_move_is_made_if_all_placements_are_apart_and_refused_if_not(
    steps: list[Step], wrong: bool
) -> None:
    """Of all tenants, as if all were compared each time."""
    asyncio.run(follow(steps, wrong))


async def follow(steps: list[Step], wrong: bool) -> None:
    site = Site(4)
    if wrong:
        site.gpu.misplaced = {"b": frozenset({5})}
    try:
        await site.controller.start()
    except Misplaced:
        assert not site.gpu.apart
        return
    assert site.gpu.apart
    known = set(site.names)
    for what, one, other, misplaced, seed in steps:
        giver, taker = site.processes[site.names[one]], site.processes[site.names[other]]
        site.gpu.misplaced = {site.names[each]: site.gpu.placed[site.names[over]] for each, over in misplaced}
        if what == "start again":
            giver.start_again()
            known.discard(giver.tenant)
        elif what == "look":
            _, shared = await site.controller.probe(site.controller.devices[0])
            assert bool(shared) != site.gpu.apart
            known = known if site.gpu.apart else set()
        elif one != other and len(giver.granules) > 1:
            moving = {giver.tenant, taker.tenant}
            counts = {giver.tenant: len(giver.granules) - 1, taker.tenant: len(taker.granules) + 1}
            before = dict(site.gpu.placed)
            random = Random(seed)
            site.gpu.delays = {name: [random.randrange(3 * MILLISECOND) for _ in range(2)] for name in site.names}
            site.forget()
            giver.busy, taker.busy = what != "move", False
            try:
                await site.controller.repartition(counts)
            except (Misplaced, Conflict):
                assert giver.busy or not site.gpu.refused[0]
                assert site.gpu.placed == before
                site.gpu.refused.clear()
                known -= moving
            else:
                assert site.gpu.apart
                assert not giver.busy
                assert all(len(site.processes[name].granules) == count for name, count in counts.items())
                assert all(site.held[name] <= 3 * BRIEFLY for name in known - moving)
                known = set(site.names)
