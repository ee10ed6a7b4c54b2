"""What a soak found: counts, latencies by what was going on, memory and descriptors over time, the account."""

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from greenlane.load.figures import percentile

from .soak_clients import HOGS, Client, Outcome
from .soak_events import Event, Late, Sample

GOOD = frozenset({"right", "refused", "left"})
MEMORY, DESCRIPTORS = 4096, 16
"""KiB and descriptors by which the last third of a process's life may be above its second third."""
STEP = 1024
"""KiB by which the memory of a process that grows has to rise from one sample to the next to be listed."""
EVERY_SAMPLE = 10
"""Of so many samples of a process one is written to the file."""
LEAST = 30
"""Samples, one a second, of a process that are enough to look at."""
OLD = 300
"""Samples after which its memory has to be flat. The heap of a younger one still grows with its first changes of partitions
and models, of which the next ones use what was freed (docs/lab/2026-11-23-soak.md has the curve).
"""
ENDING = 0.25
"""Seconds that a killed process may need until the kernel has closed its sockets; they are looked at separately."""
AFTER = {"kill": 2.0, "kill of dev": 5.0}
"""Seconds after a kill, of an HTTP process or a device process, for which answers are said to be beside it."""
SLOWEST = 10
"""Slowest answers that are listed with what was done before."""
SUMS = 0.02
"""By which the account's sums may differ from the time that passed."""


class Account(NamedTuple):
    """What is granted and free over what there was, and what was borrowed less what was lent, in seconds of a granule."""

    share: float
    borrowed: float
    lent: float

    @classmethod
    def of(cls, usage: dict[str, Any]) -> "Account":
        """From GET /admin/usage."""
        (device,) = usage["devices"]
        there = sum(device[key] for key in ("used", "idle", "lent", "free"))
        borrowed = sum(each.get("borrowed") or 0 for each in usage["tenants"])
        return cls(there / (device["units"] * usage["seconds"]), borrowed, device["lent"])


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run."""

    seconds: float
    clients: Sequence[Client]
    events: Sequence[Event]
    samples: dict[tuple[str, int], list[Sample]]
    account: Account
    answered: dict[str, int]
    log: Sequence[str]
    fence: dict[str, Any] | None = None
    """What /admin/partitions says of the tenant that is fenced; None where none is."""
    device: str = "cpu"
    late: Sequence[Late] = ()
    """When the clients' own process was late."""

    def failures(self) -> list[str]:
        """Why it did not hold."""
        counts = self.counts()
        found = [f"{count} {what}" for what, count in counts.items() if what in ("wrong", "unanswered")]
        found += [f"{row['name']}: memory or descriptors grow" for row in self.processes() if not row["flat"]]
        found += [f"{tenant} answers {count} of 20 at the end" for tenant, count in self.answered.items() if count < 20]
        if self.fence is not None:
            # A GPU does not copy the output that no client asks for, so nothing has to wait for its PCIe.
            needed = ("launches",) if self.device == "cuda" else ("launches", "waits")
            found += [f"the fence held nothing: 0 {what}" for what in needed if not self.fence.get(what)]
        if abs(self.account.share - 1) > SUMS:
            found.append(f"the account's sum is {self.account.share:.3f} of what there was")
        return found

    def counts(self) -> Counter[str]:
        """Requests by how they ended."""
        return Counter(what for client in self.clients for what, _ in self._judged(client))

    def causes(self) -> Counter[tuple[str, str, str]]:
        """Requests that did not end well, by the tenant, how and why."""
        found = Counter[tuple[str, str, str]]()
        for client in self.clients:
            found.update((client.tenant, what, each.cause) for what, each in self._judged(client) if what not in GOOD)
        return found

    def _judged(self, client: Client) -> Iterator[tuple[str, Outcome]]:
        """A connection that was there when its tenant was killed is lost by that; any other may not be lost.

        One that is made within ENDING of it may still be handed to the process that ends, and is lost with it.
        """
        kills = sorted((each.began, each.ended) for each in self.events if each.name == "kill" and each.tenant == client.tenant)
        for each in client.outcomes:
            what, cause = each.what, each.cause
            if what in ("lost", "late", "connection refused"):
                before = [ended for began, ended in kills if began <= each.ended]
                after = each.opened - before[-1] if before else math.inf
                what = "lost by a kill" if after <= 0 else "lost with a process that ended" if after < ENDING else "unanswered"
                cause += f", connected {after * 1e3:.0f} ms after a kill" if after > 0 else ""
            yield what, each._replace(cause=cause)

    def latencies(self) -> dict[tuple[str, str], list[float]]:
        """Seconds of right answers, ascending, by tenant and by what was going on; those of a tenant's hogs stand apart."""
        found: dict[tuple[str, str], list[float]] = {}
        spans = sorted(self.events, key=lambda each: each.began)
        begins = [each.began for each in spans]
        for client in self.clients:
            whose = f"{client.tenant}, {client.kind}" if client.kind in HOGS else client.tenant
            for each in client.outcomes:
                if each.what == "right" and client.kind != "slow":
                    now = _beside(spans, begins, client.tenant, each)
                    for what in (*sorted(now or {"nothing else"}), "all"):
                        found.setdefault((whose, what), []).append(each.ended - each.began)
        return {key: sorted(found[key]) for key in sorted(found)}

    def slowest(self) -> list[dict[str, Any]]:
        """The slowest right answers, one of each tenth of a second, the last thing that was done before each had ended, and
        the seconds by which the clients' own process was late meanwhile.
        """
        spans = sorted(self.events, key=lambda each: each.began)
        begins = [each.began for each in spans]
        start = min((each.began for client in self.clients for each in client.outcomes), default=0.0)
        answers = [(each, client) for client in self.clients for each in client.outcomes if each.what == "right"]
        answers = [(each, client) for each, client in answers if client.kind != "slow"]
        found: dict[float, dict[str, Any]] = {}
        for each, client in sorted(answers, key=lambda answer: answer[0].began - answer[0].ended):
            at = round(each.ended - start, 1)
            last = bisect_left(begins, each.ended) - 1
            done = f"{spans[last].name} {spans[last].tenant}".strip() if last >= 0 else ""
            row = {"tenant": client.tenant, "kind": client.kind, "at": at, "seconds": each.ended - each.began}
            own = max((late.seconds for late in self.late if each.began <= late.at <= each.ended + late.seconds), default=0.0)
            row |= {"after": done, "since": each.ended - begins[last] if done else None, "own": own}
            found.setdefault(at, row)
            if len(found) == SLOWEST:
                break
        return list(found.values())

    def processes(self) -> list[dict[str, Any]]:
        """Memory and descriptors of processes that lived long enough: medians of the second and the last third of the life."""
        rows = []
        for (name, pid), samples in sorted(self.samples.items()):
            if len(samples) >= LEAST:
                third = len(samples) // 3
                middle, last = samples[third : 2 * third], samples[2 * third :]
                anonymous = [round(median(each.anonymous for each in part)) for part in (middle, last)]
                descriptors = [round(median(each.descriptors for each in part)) for part in (middle, last)]
                same = anonymous[1] - anonymous[0] <= MEMORY or len(samples) < OLD
                flat = same and descriptors[1] - descriptors[0] <= DESCRIPTORS
                slope = _slope([(each.at, each.anonymous) for each in samples[third:]]) * 60 / 1024
                row = {"name": name, "pid": pid, "seconds": len(samples), "KiB": anonymous, "descriptors": descriptors}
                rows.append(row | {"MiB a minute": round(slope, 2), "flat": flat})
        return rows

    def steps(self) -> list[dict[str, Any]]:
        """Where the memory of a process that grows rose by STEP or more in a second: when, and what was done to the server."""
        rows = []
        for name, pid in [(row["name"], row["pid"]) for row in self.processes() if not row["flat"]]:
            for before, after in pairwise(self.samples[name, pid]):
                if after.anonymous - before.anonymous >= STEP:
                    during = [each.name for each in self.events if each.began <= after.at and each.ended >= before.at - 1]
                    row = {"name": name, "at": round(after.at - self._began), "KiB": after.anonymous - before.anonymous}
                    rows.append(row | {"threads": (before.threads, after.threads), "during": during})
        return rows

    def _missing(self) -> list[dict[str, Any]]:
        """Each request that did not end well, with the seconds from the first sample at which it began and ended."""
        return [
            {"tenant": client.tenant, "kind": each.kind, "how": what, "cause": each.cause}
            | {"began": round(each.began - self._began, 1), "ended": round(each.ended - self._began, 1)}
            for client in self.clients
            for what, each in self._judged(client)
            if what not in GOOD
        ]

    @property
    def _began(self) -> float:
        return min((samples[0].at for samples in self.samples.values()), default=0.0)

    def _thinned(self) -> list[dict[str, Any]]:
        """One sample of each process in EVERY_SAMPLE: seconds since the first of all, KiB and descriptors."""
        return [
            {"name": name, "pid": pid, "samples": [(round(one.at - self._began), *one[1:]) for one in samples[::EVERY_SAMPLE]]}
            for (name, pid), samples in sorted(self.samples.items())
        ]

    def lines(self) -> Iterator[str]:
        """For people."""
        yield "| requests that ended so | count |\n|---|---|"
        yield from (f"| {what} | {count:,} |" for what, count in self.counts().most_common())
        yield "\n| not answered rightly: tenant | how | cause | count |\n|---|---|---|---|"
        yield from (f"| {tenant} | {how} | {why} | {count:,} |" for (tenant, how, why), count in self.causes().most_common(30))
        yield "\n| done to the server | status | count | median | worst |\n|---|---|---|---|---|"
        for name, status in sorted({(each.name, each.status) for each in self.events}):
            took = [(e.ended - e.began) * 1e3 for e in self.events if (e.name, e.status) == (name, status)]
            shown = (
                "" if name in ("kill", "kill of dev", "reload (SIGHUP)") else f"{median(took):,.0f} ms | {max(took):,.0f} ms"
            )
            yield f"| {name} | {status or 'not answered'} | {len(took)} | {shown or ' | '} |"
        yield "\n| tenant | beside | right answers | p50 | p99 | worst |\n|---|---|---|---|---|---|"
        for (tenant, what), times in self.latencies().items():
            figures = [percentile(times, 0.5), percentile(times, 0.99), times[-1]]
            yield f"| {tenant} | {what} | {len(times):,} | " + " | ".join(f"{each * 1e3:,.1f} ms" for each in figures) + " |"
        yield "\n| slowest answers: tenant | kind | at | took | last done before its end | before | clients themselves late |"
        yield "|---|---|---|---|---|---|---|"
        for row in self.slowest():
            since = "" if row["since"] is None else f"{row['since'] * 1e3:,.0f} ms"
            when = f"{row['at']} s | {row['seconds'] * 1e3:,.1f} ms"
            yield f"| {row['tenant']} | {row['kind']} | {when} | {row['after']} | {since} | {row['own'] * 1e3:,.0f} ms |"
        yield "\n| process | lived for | memory of its own, second and last third | slope | descriptors | flat |"
        yield "|---|---|---|---|---|---|"
        for row in self.processes():
            (m, n), (d, e) = row["KiB"], row["descriptors"]
            memory = f"{m / 1024:.1f} MiB, {n / 1024:.1f} MiB | {row['MiB a minute']:+.2f} MiB a minute"
            yield f"| {row['name']} | {row['seconds']} s | {memory} | {d}, {e} | {'yes' if row['flat'] else 'NO'} |"
        if steps := self.steps():
            yield "\n| process | its memory rose after | by | threads | while this was done |\n|---|---|---|---|---|"
        for row in steps:
            before, after = row["threads"]
            during = ", ".join(row["during"])
            yield f"| {row['name']} | {row['at']} s | {row['KiB'] / 1024:.1f} MiB | {before}, {after} | {during} |"
        share, borrowed, lent = self.account
        yield f"\nAccount: {share:.4f} of the time that passed; borrowed {borrowed:.2f} s, lent {lent:.2f} s."
        if self.fence is not None:
            yield f"Fence at the end: {json.dumps(self.fence)}"
        yield f"Right answers of 20 at the end: {', '.join(f'{name} {count}' for name, count in self.answered.items())}."
        yield f"Errors in the log: {len(self.log)}."
        yield from self.log[:10]
        yield "\n" + ("It held." if not self.failures() else "It did NOT hold: " + "; ".join(self.failures()))

    def document(self) -> dict[str, Any]:
        """For programs."""
        latencies = [
            {"tenant": tenant, "beside": what, "count": len(times), "p50": percentile(times, 0.5)}
            | {"p99": percentile(times, 0.99), "worst": times[-1]}
            for (tenant, what), times in self.latencies().items()
        ]
        causes = [{"tenant": t, "how": how, "cause": why, "count": n} for (t, how, why), n in self.causes().items()]
        return {
            "seconds": self.seconds,
            "requests": self.counts(),
            "causes": causes,
            "latencies": latencies,
            "slowest": self.slowest(),
            "events": Counter(f"{each.name}: {each.status}" for each in self.events),
            "processes": self.processes(),
            "steps": self.steps(),
            "samples": self._thinned(),
            "missing": self._missing(),
            "account": self.account._asdict(),
            "answered": self.answered,
            "fence": self.fence,
            "failures": self.failures(),
        }


def _beside(spans: Sequence[Event], begins: Sequence[float], tenant: str, outcome: Outcome) -> set[str]:
    """What was done while this was answered. Events follow each other; only those of kills reach into the next ones."""
    found, at = set(), bisect_left(begins, outcome.ended)
    for each in spans[max(0, at - 16) : at]:
        if each.ended + AFTER.get(each.name, 0.0) >= outcome.began:
            name = each.name.partition(" (")[0]
            whose = "its " if each.tenant == tenant else "another's "
            found.add(whose + name if name in AFTER else name)
    return found


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through these with the least squares, in units a second."""
    x, y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    square = sum((at - x) ** 2 for at, _ in points)
    return sum((at - x) * (value - y) for at, value in points) / square if square else 0.0
