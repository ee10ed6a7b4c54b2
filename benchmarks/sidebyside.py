"""Two servers of the same models driven in turns, so that whatever else the machine does meets both alike.

A ratio is of two rounds side by side; the figures are medians over rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .cases import Case, check, request
from .client import drive
from .servers import Server

WARM_UP = 0.3
"""Seconds of load before the first round of each case."""
COLUMNS = f"{'req/s':>8} {'p50 us':>8} {'p99 us':>8} {'CPU us':>7}"
"""The heading of a `Figures`."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests a second, latency in microseconds, and microseconds of the server's CPU for each request."""

    rate: float
    p50: float
    p99: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.rate:8,.0f} {self.p50:8,.0f} {self.p99:8,.0f} {self.cpu:7,.0f}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case on both servers; `ratio` is the median over rounds of the first one's rate over the second's, between `least`
    and `most`.
    """

    case: Case
    first: Figures
    second: Figures
    ratio: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.case!s:19} {self.first}   {self.second}   {self.ratio:5.2f} ({self.least:.2f} to {self.most:.2f})"


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Both servers with their models in `root`, ready for load."""

    root: Path
    first: Server
    second: Server

    def compare(self, case: Case, rounds: int, seconds: float, report: Callable[[str], None] = lambda _: None) -> Comparison:
        """Check the answers of both, then drive them in turns. Blocks. Raises ValueError for a wrong answer, or LoadFailed."""
        both = (self.first, self.second)
        for server in both:
            check(case, *server.ask(request(case)), self.root)
            drive(server.port, request(case), case.connections, WARM_UP)
        pairs: list[tuple[Figures, Figures]] = []
        for turn in range(rounds):
            report(f"{case}: round {turn + 1} of {rounds}")
            found = {server.port: _round(server, case, seconds) for server in (both if turn % 2 else both[::-1])}
            pairs.append((found[self.first.port], found[self.second.port]))
        first, second = zip(*pairs, strict=True)
        ratios = [a.rate / b.rate for a, b in pairs]
        return Comparison(case, _medians(first), _medians(second), median(ratios), min(ratios), max(ratios))


def heading(first: str, second: str) -> str:
    """The heading of a table of comparisons."""
    return f"{'':19} {first:^34}   {second:^34}\n{'case-connections':19} {COLUMNS}   {COLUMNS}   ratio"


def _round(server: Server, case: Case, seconds: float) -> Figures:
    before = server.cpu_seconds()
    load = drive(server.port, request(case), case.connections, seconds)
    return Figures(load.rate, load.p50, load.p99, (server.cpu_seconds() - before) * 1e6 / load.requests)


def _medians(rounds: Sequence[Figures]) -> Figures:
    return Figures(*(median(getattr(figures, name) for figures in rounds) for name in Figures.__slots__))
