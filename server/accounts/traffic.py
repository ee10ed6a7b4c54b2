"""Divides the bytes that a device moved among the models that ran, by what a work of each moves. Pure."""

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import TypeVar

from .traffic_fit import Ran, TrafficFit
from .usage import NS, Moved, Row

NO_GUESSES: Mapping[Row, Moved] = MappingProxyType({})


class Traffic:
    """What one device moved, window by window: each begins with one reading of its meter and ends with the next."""

    def __init__(self) -> None:
        self.fits: tuple[TrafficFit[Row], ...] = tuple(TrafficFit() for _ in Moved._fields)
        """In the order of `Moved`."""
        self.rates: Mapping[Row, tuple[Moved, Moved]] = {}
        """Bytes a second that each model moved in the last window, and how much of that is only estimated."""
        self._ran: dict[Row, tuple[int, int]] = {}
        self._last: tuple[Moved, int] | None = None

    def ran(self, row: Row, works: int, used: int) -> None:
        """These works of a model have ended."""
        before = self._ran.get(row, (0, 0))
        self._ran[row] = before[0] + works, before[1] + used

    def memory_of(self, row: Row, guess: int = 0) -> int:
        """Bytes of memory that a work of a model moves: as measured, otherwise the guess, or more if it certainly is more."""
        fit = self.fits[0]
        return round(fit.bytes_of(row) if fit.measured(row) else max(guess, fit.at_least(row)))

    def read(self, meter: Moved, now: int, guesses: Mapping[Row, Moved] = NO_GUESSES) -> dict[Row | None, tuple[Moved, Moved]]:
        """The meter shows so much: what each model moved since the last reading, and how much of that is only estimated.

        What no model moved is under None. Empty for the first reading, and after the meter has begun again. `guesses` are what
        a work may move, for models of which that is known.
        """
        last = self._last
        if last is not None and now <= last[1]:
            return {}
        ran, self._ran = self._ran, {}
        self._last = meter, now
        if last is None or any(each < before for each, before in zip(meter, last[0], strict=True)):
            self.rates = {}
            return {}
        added, ns = meter.less(last[0]), now - last[1]
        seconds, parts = ns / NS, dict[Row | None, tuple[list[int], list[int]]]()
        any_ran = any(works for works, _ in ran.values())  # Otherwise nothing is divided.
        for path, (fit, moved) in enumerate(zip(self.fits, added, strict=True)):
            works = {row: Ran(*each, guesses[row][path] if row in guesses else 0) for row, each in ran.items()}
            fit.add(moved, seconds, works)
            for row, part in divide(moved, _weights(fit.shares(moved, seconds, works))).items():
                theirs, estimated = parts.setdefault(row, ([0, 0, 0], [0, 0, 0]))
                theirs[path] = part
                estimated[path] = 0 if not any_ran or fit.measured(row) else part
        found = {row: (Moved(*theirs), Moved(*estimated)) for row, (theirs, estimated) in parts.items()}
        self.rates = {row: (_rate(both[0], ns), _rate(both[1], ns)) for row, both in found.items() if row is not None}
        return found


def _rate(moved: Moved, ns: int) -> Moved:
    return Moved(*(each * NS // ns for each in moved))


def _weights(shares: Mapping[Row | None, float]) -> dict[Row | None, int]:
    """In whole bytes, of which there is at least one."""
    weights = {row: round(each) for row, each in shares.items()}
    return weights if any(weights.values()) else {None: 1}


K = TypeVar("K", bound=Hashable)


def divide(amount: int, weights: Mapping[K, int]) -> dict[K, int]:
    """Integers in proportion to the weights, which have a sum above 0; together exactly `amount`. Largest remainders first."""
    total = sum(weights.values())
    parts = {key: amount * weight // total for key, weight in weights.items()}
    left = amount - sum(parts.values())
    for key in sorted(weights, key=lambda key: amount * weights[key] % total, reverse=True)[:left]:
        parts[key] += 1
    return parts
