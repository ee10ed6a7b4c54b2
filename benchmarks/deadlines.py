"""`python -m benchmarks.deadlines`: how late is a 504, where a queue is always full of work that outlasts the deadline?

Requests with a deadline (`parameters.timeout`) are sent when they are due, whatever came of those before. How late an answer is
counts at the client, from when its request was due, so that whatever delays either of them is in the figures.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isnan, nan
from statistics import median

from . import needs  # noqa: F401

# isort: split
from greenlane.load.figures import Samples, percentile
from greenlane.load.jobs import ClosedLoop, OpenLoop
from greenlane.load.processes import run, together
from greenlane.load.schedule import poisson
from greenlane.options import count, positive

from . import subjects
from .arrangement import AGGRESSOR, SPLIT, VICTIM, Cores, Impossible, deployments
from .asks import binary
from .clients import Clients, apart, place
from .deployment import NotServed, granules
from .findings import milliseconds
from .kinds import KINDS
from .overhttp import running

TARGET = 5e3
"""Microseconds after its deadline by which 99 of 100 answers are to have come, under every load."""
EARLY = 1e3
"""Microseconds before its deadline that an answer may come: event loops count in whole milliseconds."""
FULL = replace(KINDS["compute"], connections=32)
"""The load that fills the queue: batches that a partition needs many deadlines for."""
NEIGHBOURS = ("compute", "transfer", "small", "json", "churn", "invalid")
OWN = ("small", "json", "churn", "invalid")
LOADS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a full queue": ((), ()),
    "and noisy neighbours": ((), NEIGHBOURS),
    "and its own tenant's noise": (OWN, ()),
    "and both": (OWN, NEIGHBOURS),
}
"""Further requests for the tenant itself, and for its neighbour."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Of one load, in one round or over rounds: requests due; answered with 200, 504, 504 EARLY, otherwise or never.

    Microseconds after the deadline of those with 504, and by which the client was late to send (p99).
    """

    load: str
    due: int
    served: int
    expired: int
    early: int
    other: int
    p50: float
    p99: float
    worst: float
    client: float

    @property
    def word(self) -> str:
        """PASS if enough came in time, none too early, and no answer of another kind."""
        return "PASS" if self.p99 <= TARGET and not self.early and not self.other else "missed"

    def __str__(self) -> str:
        counts = f"{self.due:7,} {self.served:7,} {self.expired:7,} {self.early:7,} {self.other:7,}"
        late = " ".join(f"{milliseconds(value):>8}" for value in (self.p50, self.p99, self.worst, self.client))
        return f"{self.load:27} {counts}   {late}  {self.word}"


HEADING = f"""\
{"":27} {"requests and their answers":^39}   {"504 late by, ms":^26} {"client":>8}
{"load":27} {"due":>7} {"200":>7} {"504":>7} {"early":>7} {"other":>7}   {"p50":>8} {"p99":>8} {"max":>8} {"p99":>8}"""


def lateness(load: str, samples: Samples, timeout: float, client: float = nan) -> Lateness:
    """From what a client saw of requests with a deadline, `timeout` microseconds after each was due."""
    rows = list(zip(samples.latency, samples.status, strict=True))
    late = sorted(latency - timeout for latency, status in rows if status == 504)
    served, early = samples.status.count(200), sum(value < -EARLY for value in late)
    p50, p99, worst = (percentile(late, quantile) for quantile in (0.5, 0.99, 1))
    return Lateness(load, len(rows), served, len(late), early, len(rows) - served - len(late), p50, p99, worst, client)


def over(rounds: Sequence[Lateness]) -> Lateness:
    """Counts summed, latencies as medians over the rounds; `worst` is the worst of all."""
    counts = {name: sum(getattr(one, name) for one in rounds) for name in ("due", "served", "expired", "early", "other")}
    points = {name: median(getattr(one, name) for one in rounds) for name in ("p50", "p99", "client")}
    return Lateness(rounds[0].load, **counts, **points, worst=max(one.worst for one in rounds))


def worst(found: Sequence[Lateness]) -> Lateness:
    """The load that missed the target by most, or came nearest to that; no 504 at all is the worst."""
    return max(found, key=lambda one: (one.word != "PASS", inf if isnan(one.p99) else one.p99))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0 if the target is met, 1 if not, 2 if it could not be tried."""
    options = _parser().parse_args(arguments)
    try:
        found = _measure(options)
    except (Impossible, NotServed) as error:
        print(f"deadlines: {error}", file=sys.stderr)
        return 2
    print("\n".join([HEADING, *map(str, found)]))
    last = worst(found)
    print(f"{last.word}: at worst {milliseconds(last.p99)} ms late (p99), of {last.load!r}; target: {TARGET / 1e3:g} ms")
    return int(last.word != "PASS")


def _measure(options: argparse.Namespace) -> list[Lateness]:
    every = sorted(os.sched_getaffinity(0))
    own = apart(every, None)
    left = tuple(core for core in every if core not in own)
    count = granules(options.device, left)
    models = sorted({KINDS[name].model for name in NEIGHBOURS})
    servers = deployments(options.device, count, models, NEIGHBOURS, Cores(left, left))
    clients = place(options.device, left, count, own, None)
    with running({SPLIT: servers[SPLIT]}, options.device == "cuda") as (server,):
        rounds = [[_one(load, server.port, clients, options) for load in LOADS] for _ in range(options.rounds)]
    return [over(of_one_load) for of_one_load in zip(*rounds, strict=True)]


def _one(load: str, port: int, clients: Clients, options: argparse.Namespace) -> Lateness:
    _, results = run([_asking(port, clients, options), *_noise(load, port, clients, options)])
    samples, _, late, _, _ = together(results)
    return lateness(load, samples, options.timeout * 1e3, late)


def _asking(port: int, clients: Clients, options: argparse.Namespace) -> OpenLoop:
    return OpenLoop(
        port=port,
        ask=binary("identity", VICTIM, timeout=round(options.timeout * 1e3)),
        first=binary("identity", VICTIM),
        arrivals=poisson(options.rate, options.seconds, seed=1),
        connections=16,
        most=256,
        spin=bool(clients.apart),
        cores=clients.victim or None,
    )


def _noise(load: str, port: int, clients: Clients, options: argparse.Namespace) -> list[ClosedLoop]:
    """The tenant's own clients run where its first one does, unless there are cores for clients alone."""
    own, others = LOADS[load]
    rows = subjects.ROWS if options.device == "cuda" else 8
    mine = clients.others if clients.apart else clients.victim
    jobs = [(kind, VICTIM, mine) for kind in (FULL, *(KINDS[name] for name in own))]
    jobs += [(KINDS[name], AGGRESSOR, clients.others) for name in others]
    made = (kind.jobs(port, tenant, options.seconds, rows, 1, cores or None) for kind, tenant, cores in jobs)
    return [job for some in made for job in some]


def _parser() -> argparse.ArgumentParser:
    about = "How late is a 504? Four loads in turns; some 50 seconds."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deadlines", description=about)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--timeout", type=positive, default=20.0, help="milliseconds from request to deadline; default: 20")
    parser.add_argument("--rate", type=positive, default=200.0, help="requests with a deadline a second; default: 200")
    parser.add_argument("--seconds", type=positive, default=3.0, help="length of a phase; default: 3")
    parser.add_argument("--rounds", type=count, default=3, help="rounds of the four loads; default: 3")
    return parser


if __name__ == "__main__":
    sys.exit(main())
