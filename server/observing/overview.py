"""What the status page shows: everything about the server now, and how that was in the last seconds."""

import asyncio
import logging
import math
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ..accounts.usage import NS, DeviceTotals
from ..config.tenant import TenantConfig
from ..control.controller import Controller
from ..control.descriptions import Beside, Execution, TenantMemory
from ..facts import Fact, milliseconds
from ..scheduling.limits import LIMITS
from ..tenants.frontend import Report
from ..tenants.statistics import BOUNDS
from .accountant import Accountant
from .need import Counted, History, Need, by_model, counted, need, quantile

log = logging.getLogger("greenlane.control")


MOST = 64
"""Problems that are kept."""
_MOST_TEXT = 2000
"""Characters of one."""
_TOGETHER = 60.0
"""Seconds: one that comes again within that is the same one, once more."""


class Problem(Fact):
    """A warning or an error of the log, or requests that were refused or failed."""

    tenant: Annotated[str, "Empty for one that concerns the server."]
    text: str
    first: Annotated[float, "Seconds since 1970."]
    last: float
    count: int


class Problems(logging.Handler):
    """Keeps the last of them. Any thread. As a handler of a logger it keeps that logger's warnings and errors.

    `wall` is in seconds since 1970.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        super().__init__(logging.WARNING)
        self._wall = wall
        self._kept: OrderedDict[tuple[str, str], Problem] = OrderedDict()
        self._changing = threading.Lock()

    def newest(self) -> list[Problem]:
        """All that are kept, the newest first."""
        with self._changing:
            return list(reversed(self._kept.values()))

    def add(self, text: str, tenant: str = "", count: int = 1) -> None:
        """Something went wrong so many times."""
        now, text = round(self._wall(), 3), text[:_MOST_TEXT]
        with self._changing:
            found = self._kept.pop((tenant, text), None)
            if found is None or now - found.last > _TOGETHER:
                found = Problem(tenant, text, now, now, 0)
            self._kept[tenant, text] = found
            found.last, found.count = now, found.count + count
            if len(self._kept) > MOST:
                self._kept.pop(self._least_missed())

    def _least_missed(self) -> tuple[str, str]:
        """The oldest of the tenant with the most, so that one tenant's do not take the place of others'."""
        counts = Counter(tenant for tenant, _ in self._kept)
        most = max(counts.values())
        return next(key for key in self._kept if counts[key[0]] == most)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's lines as one: what follows the first are reasons, as of a refused reload. Never raises."""
        try:
            first, *reasons = record.getMessage().splitlines() or [""]
        except Exception:
            self.handleError(record)
        else:
            text = f"{first} {'; '.join(map(str.strip, reasons))}".rstrip()
            self.add(text, str(getattr(record, "tenant", "")))


ENOUGH = 500
"""Requests from which there is a baseline: five of them are slower than its p99."""
ENOUGH_NOW = 100
"""Requests of now that are compared with it."""
SLOWER = 1.1
"""How many times the baseline the p99 has to be before it counts as slower; it is interpolated in a histogram."""
_MOST = 100_000
"""Requests of one range of rates that count; beyond that all count half, so that old ones are forgotten."""
_STEPS = 2
"""Ranges of rates for each doubling. Ranges at most so many away from each other are compared: from half to twice the rate."""


class Isolation(Fact):
    """The p99 of now, compared with that of requests at about the same rate that were answered while its neighbours rested."""

    ratio: Annotated[float | None, "How many times as high; null where that is not known, see `why`."]
    slower: Annotated[bool, "More requests are slower than the quiet p99 than chance explains."]
    quiet_p99_ms: float | None
    quiet_requests: Annotated[int, "Requests that it is made of."]
    why: Annotated[str, "Why it is not known; empty if it is."]


class Baseline:
    """The requests of one tenant that were answered while its neighbours rested, by rate and time.

    By rate, as a tenant's own load makes its requests wait for each other: they are compared with those at about the same rate.
    But clients that wait for answers send fewer when a neighbour delays these. So where there are too few at that rate, those
    at higher rates count too: they can only have been slower, so that the ratio is too low then, and never too high.
    """

    def __init__(self) -> None:
        self._buckets: defaultdict[int, list[int]] = defaultdict(lambda: [0] * (len(BOUNDS) + 1))

    def learn(self, need: Need) -> None:
        """Its neighbours rested while these requests were answered."""
        if need.requests:
            kept = self._buckets[_range(need.rate)]
            kept[:] = [before + added for before, added in zip(kept, need.buckets, strict=True)]
            if sum(kept) > _MOST:
                kept[:] = [count // 2 for count in kept]

    def forget(self) -> None:
        """What was learned is of another share, or of other models."""
        self._buckets.clear()

    def compare(self, need: Need) -> Isolation:
        """The requests of now, compared with those at about the same rate."""
        if need.requests < ENOUGH_NOW:
            why = f"{need.requests} of the {ENOUGH_NOW} requests that this needs, in the last {need.seconds:.0f} s"
            return Isolation(None, False, None, 0, why)
        quiet = self._at(need.rate)
        p99, requests = quantile(quiet, 0.99), sum(quiet)
        if p99 is None or requests < ENOUGH:
            why = (
                f"not known yet: {requests} of {ENOUGH} requests at about this rate or a higher one while its neighbours rested"
            )
            return Isolation(None, False, None, requests, why)
        ratio = (need.p99 or 0.0) / p99
        return Isolation(round(ratio, 2), ratio > SLOWER and need.misses(p99), milliseconds(p99), requests, "")

    def _at(self, rate: float) -> Sequence[int]:
        """The requests at about this rate; if they are too few, also those at the next higher ones."""
        found, now = [0] * (len(BOUNDS) + 1), _range(rate)
        for each, kept in sorted(self._buckets.items()):
            if abs(each - now) <= _STEPS or (each > now and sum(found) < ENOUGH):
                found = [before + added for before, added in zip(found, kept, strict=True)]
        return found


def _range(rate: float) -> int:
    return math.floor(_STEPS * math.log2(rate))


PERIOD = 5.0
"""Seconds between two looks while the page is not open: baselines are made of them."""
FRESH = 0.5
"""Seconds for which a look is as good as a new one, however many ask."""
WINDOW = 10.0
"""Seconds that rates and latencies are of."""
LENT_WINDOW = 3
"""Seconds that what is lent is of."""
SLOW = 5.0
"""Seconds for which what changes seldom is good: how models run, their memory, and wide partitions."""
RESTS = 0.02
"""A tenant rests while its models run for at most this share of the time, and it has no request."""

_REFUSALS = (
    ("rejected", "requests refused (429): the queue or the memory is full"),
    ("expired", "requests answered 504: their timeout passed"),
    ("invalid", "wrong requests (4xx)"),
)
_FAILURES = {"BACKEND": "requests failed in the model (5xx)", "OTHER": "requests failed (5xx)"}


@dataclass(frozen=True, slots=True)
class Details:
    """What changes seldom: how models run, the memory that they take, and what tenants have beside their homes, by tenant."""

    executions: Sequence[Execution] = ()
    memory: Sequence[TenantMemory] = ()
    beside: Mapping[str, Beside] = field(default_factory=dict)


async def details(controller: Controller) -> Details:
    """The details now."""
    return Details(*await asyncio.gather(controller.executions(), controller.memory(), controller.placements.states()))


@dataclass(frozen=True, slots=True)
class TenantLook:
    """One tenant. `need` and `models` are of the last `WINDOW` seconds; None and empty where nothing is known of them."""

    config: TenantConfig
    report: Report
    need: Need | None
    models: Mapping[tuple[str, str], Need]
    isolation: Isolation


@dataclass(frozen=True, slots=True)
class Look:
    """The server at a moment; `used` is what was used and lent in the last `LENT_WINDOW` seconds, by device."""

    tenants: Sequence[TenantLook]
    used: Mapping[str, DeviceTotals]
    details: Details


class Overview:
    """Looks at the server every few seconds, and whenever it is asked. Belongs to the controller's event loop.

    Nothing is counted for it: it asks the tenants' processes for the reports that metrics are made of. `clock` is in seconds.
    """

    def __init__(self, controller: Controller, accountant: Accountant, clock: Callable[[], float] = time.monotonic) -> None:
        self.problems = Problems()
        self._controller = controller
        self._accountant = accountant
        self._clock = clock
        self._history = History(WINDOW)
        self._last: dict[str, Counted] = {}
        self._rested: dict[str, bool] = {}
        self._baselines: dict[str, Baseline] = {}
        self._shapes: dict[str, object] = {}
        self._failed: dict[tuple[str, str], int] = {}
        self._details = Details()
        self._detailed: float | None = None
        self._look: Look | None = None
        self._looked = 0.0
        self._looking = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look every few seconds, and keep what the log warns of, from now on."""
        logging.getLogger("greenlane").addHandler(self.problems)
        self._running = asyncio.create_task(self._run())

    def close(self) -> None:
        """Stop that. Idempotent."""
        logging.getLogger("greenlane").removeHandler(self.problems)
        if self._running:
            self._running.cancel()

    async def look(self) -> Look:
        """The server now, or as it was a moment ago. Takes up to a second or so if a process does not answer."""
        async with self._looking:
            if self._look is None or self._clock() - self._looked >= FRESH:
                self._look = await self._collect()
                self._looked = self._clock()
            return self._look

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            try:
                await self.look()
            except Exception:  # It goes on; those who ask see the error.
                log.exception("the overview for the status page failed; it goes on")

    async def _collect(self) -> Look:
        reports = await self._controller.reports()
        now = self._clock()
        answered = {tenant.name: report for tenant, report in reports if not report.age}
        grown = self._grown({name: counted(report, now) for name, report in answered.items()})
        self._follow_shapes()
        self._learn(grown, answered)
        for name, report in answered.items():
            self._note_failures(name, report)
        if self._detailed is None or now - self._detailed >= SLOW:
            self._details, self._detailed = await details(self._controller), now
        return Look([self._tenant(*each) for each in reports], self._used(), self._details)

    def _grown(self, latest: Mapping[str, Counted]) -> dict[str, Need]:
        """What each tenant that answers needed since the last look, if it answered then."""
        grown = {name: need(self._last[name], each) for name, each in latest.items() if name in self._last}
        for name in self._last.keys() - latest.keys():
            self._history.forget(name)
        for name, each in latest.items():
            self._history.add(name, each)
        self._last = dict(latest)
        return grown

    def _follow_shapes(self) -> None:
        """Forget what was measured of a tenant that has other granules or other models than before."""
        for name, each in self._last.items():
            device = self._controller.device_of(name)
            shape = device and device.held.get(name), frozenset(each.models)
            if self._shapes.get(name, shape) != shape:
                self._history.forget(name)
                self._history.add(name, each)
                self._baseline(name).forget()
            self._shapes[name] = shape

    def _learn(self, grown: Mapping[str, Need], answered: Mapping[str, Report]) -> None:
        """Add requests to the baselines of tenants whose neighbours rested, in the interval before as well: requests that
        were answered in this one may have begun in that one.
        """
        rests = {
            name: each.busy <= RESTS and not answered[name].lane.waiting and not answered[name].lane.in_flight
            for name, each in grown.items()
        }
        for name, each in grown.items():
            if all(rests.get(other) and self._rested.get(other) for other in self._neighbours(name)):
                self._baseline(name).learn(each)
        self._rested = rests

    def _note_failures(self, name: str, report: Report) -> None:
        counts = {text: getattr(report.lane, field) for field, text in _REFUSALS}
        for limit, count in zip(LIMITS, report.lane.limited, strict=True):
            counts[f"requests limited (429): over the tenant's {limit}"] = count
        for model in report.served:
            for reason, text in _FAILURES.items():
                counts[f"{model.name} {model.version}: {text}"] = model.statistics.failures.get(reason, 0)
        for text, count in counts.items():
            before = self._failed.get((name, text), count)
            if added := count - before if count >= before else count:
                self.problems.add(text, name, added)
            self._failed[name, text] = count

    def _tenant(self, config: TenantConfig, report: Report) -> TenantLook:
        name, ends = config.name, None if report.age else self._history.ends(config.name)
        if ends is None:
            return TenantLook(config, report, None, {}, Isolation(None, False, None, 0, "not measured yet"))
        found = need(*ends)
        alone = not self._neighbours(name)
        apart = Isolation(None, False, None, 0, "it is alone on its device") if alone else self._baseline(name).compare(found)
        return TenantLook(config, report, found, by_model(*ends), apart)

    def _used(self) -> Mapping[str, DeviceTotals]:
        totals = self._accountant.totals()
        begin = self._accountant.before(totals.wall - LENT_WINDOW * NS)
        return totals.less(begin).devices if begin else {}

    def _neighbours(self, name: str) -> set[str]:
        """The other tenants on its device."""
        device = self._controller.device_of(name)
        return device.held.keys() - {name} if device else set()

    def _baseline(self, name: str) -> Baseline:
        return self._baselines.setdefault(name, Baseline())
