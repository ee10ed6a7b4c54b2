"""The account of one server: what tenants were granted by the plans of partitions, and used as their processes report.

Pure: the caller says what time it is, in nanoseconds on a clock that does not go back.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from .traffic import NO_GUESSES, Traffic, divide
from .usage import NOTHING, NS, DeviceTotals, ModelTotals, Moved, Report, Row, TenantTotals, Totals, total_of

Counts = tuple[int, int, Mapping[str, int]]
"""Works, what they used, and what they borrowed, by lender."""


class Account:
    """Devices by name, and what each process that serves tenants of one has reported, by a number that stays when the process
    is replaced.
    """

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}
        self._sources: dict[int, _Source] = {}

    def hold(self, device: str, unit: str, units: int, shares: Mapping[str, int], now: int) -> None:
        """From now on these tenants have so many units of a device each, and no other tenant has any."""
        if device not in self._devices:
            self._devices[device] = _Device(unit, units, now)
        self._devices[device].hold(shares, now)

    def report(self, source: int, device: str, report: Report) -> None:
        """A process that serves tenants of this device has counted this much since it began.

        What a process that it has replaced had reported stays. Does nothing for a device that holds nothing yet, or for a
        report of a process that was replaced.
        """
        if there := self._devices.get(device):
            there.add(self._sources.setdefault(source, _Source()).advance(report))

    def measure(self, device: str, energy: int, now: int) -> None:
        """The device's energy meter shows so many microjoules: divide what it took since the last call by what was used."""
        if there := self._devices.get(device):
            there.measure(energy, now)

    def move(self, device: str, meter: Moved, now: int, guesses: Mapping[Row, Moved] = NO_GUESSES) -> None:
        """The device has moved so many bytes since its meter began: divide what it moved since the last call among the works
        that were reported since, as `Traffic.read` does.
        """
        if there := self._devices.get(device):
            there.move(meter, now, guesses)

    def count(self, device: str, meters: Mapping[str, int], now: int, guesses: Mapping[Row, Moved] = NO_GUESSES) -> None:
        """The cores of each of these tenants have moved so many bytes of memory since they are counted.

        What they moved since the last call is theirs, without what works of borrowers did, also once they hold nothing any
        more. It is divided as by `move`, among the works on these cores that were reported since.
        """
        if meters and (there := self._devices.get(device)):
            there.count(meters, now, guesses)

    def forget(self, device: str, row: Row) -> None:
        """A tenant's model on a device is another one from now on, with the same name."""
        if there := self._devices.get(device):
            there.forget(row)

    def traffic(self, device: str) -> Traffic | None:
        """What is known of what a device moves; None for one that has not said, or is counted tenant by tenant."""
        there = self._devices.get(device)
        return there.traffic if there else None

    def rates(self, device: str) -> dict[Row, tuple[Moved, Moved]]:
        """Bytes a second that each model moved when that was read last, and how much of that is only estimated."""
        there = self._devices.get(device)
        return there.rates() if there else {}

    def totals(self, now: int, wall: int) -> Totals:
        """Everything so far; `wall` is the same time in nanoseconds since 1970."""
        return Totals(now, wall, {name: device.totals(now) for name, device in self._devices.items()})


class _Source:
    """What one process, or those that it has replaced, has reported."""

    def __init__(self) -> None:
        self._epoch = 0
        self._last: dict[Row, Counts] = {}

    def advance(self, report: Report) -> dict[Row, Counts]:
        """What was added since the last report. Nothing is ever taken away."""
        if report.epoch < self._epoch:
            return {}
        if report.epoch > self._epoch:
            self._epoch, self._last = report.epoch, {}
        added: dict[Row, Counts] = {}
        for tenant, usages in report.tenants:
            for model, works, used, borrowed in usages:
                before: Counts = self._last.get((tenant, model), (0, 0, {}))
                lenders = {*before[2], *borrowed}
                by_lender = {lender: max(borrowed.get(lender, 0), before[2].get(lender, 0)) for lender in lenders}
                self._last[tenant, model] = now = max(works, before[0]), max(used, before[1]), by_lender
                gained = {lender: amount - before[2].get(lender, 0) for lender, amount in by_lender.items()}
                added[tenant, model] = now[0] - before[0], now[1] - before[1], gained
        return added


class _Device:
    def __init__(self, unit: str, units: int, began: int) -> None:
        self._unit = unit
        self._units = units
        self._began = self._held_at = self._measured_at = began
        self._shares: Mapping[str, int] = {}
        self._granted: dict[str, int] = {}
        self._lent: dict[str, int] = {}
        self._models: dict[Row, ModelTotals] = {}
        self._unmeasured: dict[Row, int] = {}
        """What was used since the last time that the energy was measured."""
        self._meter: int | None = None
        self._energy = self._idle_energy = 0
        self._idle_power = IdlePower()
        self.traffic: Traffic | None = None
        """From the first reading of what it moved on."""
        self._moved: Moved | None = None
        self._background = self._estimated = NOTHING
        self._read_at = self._moved_in = 0
        self._cores: dict[str, Traffic] = {}
        """Of each tenant whose cores are counted, from the first time on."""
        self._by_cores: dict[str, Moved] = {}
        self._unsure: dict[str, Moved] = {}
        """How much of that is so only by an estimate, as borrowers moved some of what a tenant's cores did."""

    def hold(self, shares: Mapping[str, int], now: int) -> None:
        self._granted = self._granted_at(now)
        for tenant in self._cores.keys() & shares.keys() - self._shares.keys():  # What its cores moved until now was elsewhere.
            self._cores[tenant] = Traffic()
        self._held_at, self._shares = now, dict(shares)
        for tenant in shares:
            self._granted.setdefault(tenant, 0)

    def add(self, added: Mapping[Row, Counts]) -> None:
        for row, (works, used, borrowed) in added.items():
            before, amount = self._models.get(row, ModelTotals()), sum(borrowed.values())
            self._models[row] = replace(
                before, works=before.works + works, used=before.used + used, borrowed=before.borrowed + amount
            )
            self._unmeasured[row] = self._unmeasured.get(row, 0) + used + amount
            if self.traffic:
                self.traffic.ran(row, works, used + amount)
            for place, part in ((row[0], used), *borrowed.items()):
                if place in self._cores and (part or place == row[0]):
                    self._cores[place].ran(row, works, part)
            for lender, lent in borrowed.items():
                self._lent[lender] = self._lent.get(lender, 0) + lent

    def measure(self, meter: int, now: int) -> None:
        before, since = self._meter, now - self._measured_at
        self._meter, self._measured_at = meter, now
        weights, self._unmeasured = self._unmeasured, {}
        if before is None or meter < before:  # It begins to count now, as after the end of what counts.
            return
        energy, used = meter - before, sum(weights.values()) > 0
        idle = self._idle_power.part(energy, since, used)
        self._energy += energy
        self._idle_energy += idle
        if used:
            for row, part in divide(energy - idle, weights).items():
                self._models[row] = replace(self._models[row], energy=self._models[row].energy + part)

    def move(self, meter: Moved, now: int, guesses: Mapping[Row, Moved]) -> None:
        self.traffic = self.traffic or Traffic()
        parts, since = self.traffic.read(meter, now, guesses), now - self._read_at
        self._read_at = now
        self._moved = self._moved or NOTHING
        self._moved_in += since if parts else 0
        for row, (moved, estimated) in parts.items():
            self._moved = self._moved.plus(moved)
            if row is None:
                self._background = self._background.plus(moved)
                self._estimated = self._estimated.plus(estimated)
            else:
                self._move(row, moved, estimated)

    def count(self, meters: Mapping[str, int], now: int, guesses: Mapping[Row, Moved]) -> None:
        since, read = now - self._read_at, False
        self._read_at, self._moved = now, self._moved or NOTHING
        for tenant, meter in meters.items():
            self._by_cores.setdefault(tenant, NOTHING)
            for row, (moved, estimated) in self._cores.setdefault(tenant, Traffic()).read(Moved(meter), now, guesses).items():
                read, whose = True, row[0] if row else tenant
                self._moved = self._moved.plus(moved)
                self._by_cores[whose] = self._by_cores.get(whose, NOTHING).plus(moved)
                if row:
                    self._move(row, moved, estimated)
                for each in {tenant, whose} if whose != tenant else ():
                    self._unsure[each] = self._unsure.get(each, NOTHING).plus(estimated)
        self._moved_in += since if read else 0

    def forget(self, row: Row) -> None:
        for traffic in (*([self.traffic] if self.traffic else ()), *self._cores.values()):
            traffic.forget(row)

    def _move(self, row: Row, moved: Moved, estimated: Moved) -> None:
        before = self._models[row]
        self._models[row] = replace(before, moved=before.moved.plus(moved), estimated=before.estimated.plus(estimated))

    def rates(self) -> dict[Row, tuple[Moved, Moved]]:
        found: dict[Row, tuple[Moved, Moved]] = {}
        theirs = (each for tenant, each in self._cores.items() if tenant in self._shares)
        for traffic in (*([self.traffic] if self.traffic else ()), *theirs):
            for row, (moved, estimated) in traffic.rates.items():
                before = found.get(row, (NOTHING, NOTHING))
                found[row] = before[0].plus(moved), before[1].plus(estimated)
        return found

    def totals(self, now: int) -> DeviceTotals:
        granted, energy = self._granted_at(now), None if self._meter is None else self._energy
        models: dict[str, dict[str, ModelTotals]] = {name: {} for name in (*granted, *self._lent)}
        for (tenant, model), each in self._models.items():
            models.setdefault(tenant, {})[model] = each
        tenants = {
            name: TenantTotals(
                granted.get(name, 0), self._lent.get(name, 0), self._shares.get(name, 0), theirs, *self._moved_by(name, theirs)
            )
            for name, theirs in models.items()
        }
        elapsed, moved = now - self._began, (self._moved, self._background, self._estimated, self._moved_in)
        return DeviceTotals(self._unit, self._units, elapsed, tenants, energy, self._idle_energy, *moved)

    def _moved_by(self, tenant: str, models: Mapping[str, ModelTotals]) -> tuple[Moved | None, Moved]:
        if self.traffic:
            return total_of(each.moved for each in models.values()), total_of(each.estimated for each in models.values())
        return self._by_cores.get(tenant), self._unsure.get(tenant, NOTHING)

    def _granted_at(self, now: int) -> dict[str, int]:
        elapsed = now - self._held_at
        return {name: granted + self._shares.get(name, 0) * elapsed for name, granted in self._granted.items()}


class IdlePower:
    """The power of a device on which nothing runs: the least that was seen. Pure."""

    def __init__(self) -> None:
        self._microwatts: int | None = None

    def part(self, energy: int, ns: int, used: bool) -> int:
        """How much of the microjoules of the last `ns` nanoseconds was idle power; `used`: whether anything ran meanwhile.

        All of it if nothing ran. Without any idle phase so far nothing is known, and none of it.
        """
        if not used:
            if ns > 0:
                power = energy * 10**9 // ns
                self._microwatts = power if self._microwatts is None else min(power, self._microwatts)
            return energy
        return min(energy, (self._microwatts or 0) * ns // 10**9)


class History:
    """Totals of the past: each that is added for `fine` nanoseconds, and then one in `step` for `coarse` nanoseconds. Pure."""

    def __init__(self, fine: int = 120 * NS, step: int = 60 * NS, coarse: int = 48 * 3600 * NS) -> None:
        self._fine_span, self._step, self._coarse_span = fine, step, coarse
        self._fine: deque[Totals] = deque()
        self._coarse: deque[Totals] = deque()

    def add(self, totals: Totals) -> None:
        """Remember the totals of now."""
        self._fine.append(totals)
        if not self._coarse or totals.at - self._coarse[-1].at >= self._step:
            self._coarse.append(totals)
        while totals.at - self._fine[0].at > self._fine_span:
            self._fine.popleft()
        while totals.at - self._coarse[0].at > self._coarse_span:
            self._coarse.popleft()

    def before(self, wall: int) -> Totals | None:
        """The last totals at or before a time in nanoseconds since 1970, or the oldest; None if there are none at all.

        The clock of the day may have been set back meanwhile.
        """
        every = sorted({each.at: each for each in (*self._coarse, *self._fine)}.values(), key=lambda each: -each.at)
        return next((each for each in every if each.wall <= wall), every[-1] if every else None)
