"""Requests of a client that ran through several phases, by phase. Pure."""

from collections.abc import Sequence
from typing import Protocol

from greenlane.load.figures import Samples, merged


class Span(Protocol):
    """From when to when a phase is, in seconds from the start."""

    @property
    def begin(self) -> float: ...

    @property
    def end(self) -> float: ...


def by_phase(spans: Sequence[Span], samples: Samples) -> list[Samples]:
    """The requests that were due in each of these phases, which are in order and do not overlap.

    A phase in which the server had too much to do, such as a control, leaves requests waiting. What was due in the next phase
    before the last of them was answered is left out: it waited for them, and for nothing that its own phase is about.
    """
    every = merged([samples])
    rows = list(zip(every.due, every.latency, every.status, strict=True))
    found, clear = [], 0.0
    for span in spans:
        mine = [row for row in rows if span.begin <= row[0] < span.end]
        kept = Samples()
        for row in mine:
            if row[0] >= clear:
                kept.add(*row)
        found.append(kept)
        clear = max((due + latency / 1e6 for due, latency, _ in mine), default=0.0)
    return found
