"""How many bytes a work of each model moves, from what the device moved and which works ended meanwhile; and whose they were.
Pure.

In each window the device moved a background (`None`) for each second, and for each work what a work of its model moves. That
is a Kalman filter: the estimates are normal, their covariance grows as they age, and each window narrows it. Models whose works
never vary against each other cannot be distinguished: what they moved together is then shared by a prior, as at first.
"""

import math
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from .usage import NS, Moved, Row

K = TypeVar("K", bound=Hashable)

MEMORY = 100
"""Windows in which the weight of what was seen falls to a third, for models that run."""
NOISE = 0.02
"""What NVML's figures are off by, as a part (H100: 2 % over a quarter of a second)."""
LATE = 0.1
"""Seconds by which the bytes and the works of a window may be apart, as NVML renews its values so often."""
FITS = 0.15
"""The largest residual with which figures are called measured; larger ones say that something else moves bytes."""
CERTAIN = 0.05, 0.005
"""A figure is measured whose standard error is at most this part of it, or this part of all that the device moves."""
MOST = 64
"""Models. The one that ran the longest time ago is forgotten first; of more in one window the least used are left out."""


class Ran(NamedTuple):
    """Works of a model that ended in a window, what they used (any unit), and a guess of the bytes that one moves; 0: none."""

    works: int
    used: int
    guess: int = 0


class TrafficFit(Generic[K]):
    """The fit for one kind of traffic of one device."""

    def __init__(self) -> None:
        self.residual = 1.0
        """Root mean square of what was not foreseen, as a part of that of all: 0 is a perfect fit."""
        self._index: dict[K | None, int] = {}
        self._mean = np.zeros(0)
        self._precision = np.zeros((0, 0))
        self._covariance = np.zeros((0, 0))
        """Its inverse."""
        self._most = np.zeros(0)
        """The variance of each that nothing is known of."""
        self._found = np.zeros(0)
        """The means, none below 0."""
        self._works = np.zeros(0)
        """Of a window in which it ran, on average; of the background its seconds."""
        self._ran = np.zeros(0)
        """The last window in which it ran."""
        self._off = np.zeros(0)
        """By which part windows in which it ran were not foreseen: the least of late, as it has no part in what begins."""
        self._windows = self._surprises = 0
        self._rate: float | None = None
        self._peak = self._squares = self._misses = 0.0

    def add(self, moved: float, seconds: float, ran: Mapping[K, Ran]) -> None:
        """A window of so many seconds is over in which the device moved so many bytes, and these works ended."""
        if seconds <= 0 or moved < 0:
            return
        active = {key: each for key, each in ran.items() if each.works > 0}
        if len(active) > MOST:
            active = dict(sorted(active.items(), key=lambda item: item[1].used, reverse=True)[:MOST])
        self._windows += 1
        self._peak = max(moved / seconds, self._peak * (1 - 0.1 / MEMORY))
        self._make_rows(moved, seconds, active)
        window = np.zeros(len(self._index))
        window[0] = seconds
        for key, each in active.items():
            window[self._index[key]] = each.works
        self._judge(moved, window)
        self._age(window > 0, 1 / MEMORY)
        self._update(moved, seconds, window)
        self._rate = moved / seconds
        self._found = _not_negative(self._mean, self._covariance)

    def bytes_of(self, key: K | None) -> float:
        """What a work moves, or for None what is moved each second without any; 0 for a model that never ran."""
        at = self._index.get(key)
        return 0.0 if at is None else float(self._found[at])

    def measured(self, key: K | None) -> bool:
        """Whether that is certain enough; otherwise it is shared out by a prior for a part that matters."""
        at = self._index.get(key)
        if at is None or self.residual > FITS:
            return False
        error = self._error(at, self.residual)
        whole = math.sqrt(self._squares / max(1e-9, self._weight))
        of_it, of_all = CERTAIN
        return error <= of_it * float(self._found[at]) or error * float(self._works[at]) <= of_all * whole

    def at_least(self, key: K) -> float:
        """What a work certainly moves, two standard errors less; 0 for a model that never ran.

        Known some windows after a model began to run, where `measured` takes many: what counts are windows in which it ran.
        """
        at = self._index.get(key)
        return 0.0 if at is None else max(0.0, float(self._found[at]) - 2 * self._error(at, float(self._off[at])))

    def at_most(self, key: K) -> float:
        """The same, two standard errors more."""
        at = self._index.get(key)
        return 0.0 if at is None else float(self._found[at]) + 2 * self._error(at, float(self._off[at]))

    def forget(self, key: K) -> None:
        """Nothing is known of this model any more, as it is another one now."""
        if at := self._index.get(key):
            self._remove(at)

    def shares(self, moved: float, seconds: float, ran: Mapping[K, Ran]) -> dict[K | None, float]:
        """The bytes of a window, shared by works and background in proportion to what each moves; together `moved`."""
        parts: dict[K | None, float] = {key: each.works * self.bytes_of(key) for key, each in ran.items() if each.works > 0}
        parts[None] = seconds * self.bytes_of(None)
        total = sum(parts.values())
        return {key: moved * each / total for key, each in parts.items()} if total > 0 else {None: moved}

    def _error(self, at: int, off: float) -> float:
        """The standard error of a figure, larger where windows are not foreseen by a larger part than NVML is off."""
        return math.sqrt(max(0.0, float(self._covariance[at, at]))) * max(1.0, off / NOISE / 2)

    @property
    def _weight(self) -> float:
        """Of all windows together, the last one having 1."""
        return (1 - (1 - 1 / MEMORY) ** self._windows) * MEMORY

    def _make_rows(self, moved: float, seconds: float, active: Mapping[K, Ran]) -> None:
        """Rows for what has not run before, and how far each may be off where nothing else is known."""
        if None not in self._index:
            self._insert(None, 0.0)
        self._most[0] = max(self._most[0], (0.2 * self._peak) ** 2, 1.0)
        self._note(0, seconds)
        self._ran[[self._index[key] for key in active if key in self._index]] = self._windows
        for key, part in prior(active).items():
            each = moved / active[key].works
            if key not in self._index:
                if len(self._index) > MOST:  # The model that ran the longest time ago.
                    self._remove(1 + int(np.argmin(self._ran[1:])))
                self._insert(key, part * each)
            at = self._index[key]
            # In proportion to `part`, so that what several together move more or less is shared by it as well.
            self._most[at] = max(self._most[at], max(part, 1e-6) * each * each, 1.0)
            self._note(at, active[key].works)
            self._ran[at] = self._windows
        fresh = np.flatnonzero(np.diag(self._precision) == 0)
        self._precision[fresh, fresh] = 1 / self._most[fresh]

    def _note(self, at: int, works: float) -> None:
        self._works[at] += (works - self._works[at]) * (0.1 if self._works[at] else 1.0)

    def _insert(self, key: K | None, mean: float) -> None:
        count = len(self._index)
        self._index[key] = count
        self._precision = np.pad(self._precision, (0, 1))
        self._mean = np.append(self._mean, mean)
        self._found = np.append(self._found, mean)
        self._most, self._works, self._ran = (np.append(each, 0.0) for each in (self._most, self._works, self._ran))
        self._off = np.append(self._off, 1.0)

    def _remove(self, gone: int) -> None:
        left = [at for at in range(len(self._index)) if at != gone]
        self._index = {key: left.index(at) for key, at in self._index.items() if at != gone}
        row = self._precision[gone]  # Marginalized (a Schur complement), so that no other model becomes more certain.
        self._precision = (self._precision - np.outer(row, row) / row[gone])[np.ix_(left, left)]
        self._covariance = np.delete(np.delete(self._covariance, gone, 0), gone, 1)
        self._mean, self._found, self._most = self._mean[left], self._found[left], self._most[left]
        self._works, self._ran, self._off = self._works[left], self._ran[left], self._off[left]

    def _judge(self, moved: float, window: Any) -> None:
        """How well this window was foreseen."""
        keeps = 1 - 1 / MEMORY
        self._squares = self._squares * keeps + moved * moved
        missed = abs(moved - float(window @ self._found))
        self._misses = self._misses * keeps + min(missed, moved) ** 2  # Or the first windows would count for hundreds.
        off, ran = missed / max(1.0, moved), window > 0
        self._off[ran] = np.minimum(off, self._off[ran] + (off - self._off[ran]) / 8)
        self.residual = math.sqrt(self._misses / self._squares) if self._squares else 0.0

    def _age(self, active: Any, part: float) -> None:
        """Forget a part of what is known of those that run, down to what is known at first: that they are not far from here."""
        keeps = np.where(active, math.sqrt(1 - part), 1.0)
        self._precision *= np.outer(keeps, keeps)
        at = np.flatnonzero(active)
        self._precision[at, at] += part / self._most[at]

    def _update(self, moved: float, seconds: float, window: Any) -> None:
        late = 0.0 if self._rate is None else LATE * (moved / seconds - self._rate) / 2
        noise = (NOISE * moved) ** 2 + late * late + (0.002 * self._peak * seconds) ** 2 + 1.0
        missed = moved - float(window @ self._mean)
        covariance = _inverse(self._precision)
        unlikely = missed * missed > 16 * (float(window @ covariance @ window) + noise)
        self._surprises = self._surprises + 1 if unlikely else 0
        if self._surprises > 1:  # Works have changed, as by another size of their batches.
            self._age(window > 0, 0.9)
        self._precision += np.outer(window, window) / noise
        self._covariance = _inverse(self._precision)
        self._mean = self._mean + self._covariance @ window * (missed / noise)


def prior(ran: Mapping[K, Ran]) -> dict[K, float]:
    """Each model's part of what its works moved together, by guesses where all have one, otherwise by what they used."""
    guessed = all(each.guess for each in ran.values())
    weights = {key: float(each.works * each.guess if guessed else each.used + 1) for key, each in ran.items()}
    total = sum(weights.values())
    return {key: weight / total for key, weight in weights.items()}


def _inverse(matrix: Any) -> Any:
    """Of a positive definite one, whose rows may be of very different sizes.

    Rows that are the same but for what a double cannot show would make it singular, so they are taken to differ a little more.
    """
    sizes = 1 / np.sqrt(np.diag(matrix))
    scale = np.outer(sizes, sizes)
    return np.linalg.inv(matrix * scale + 1e-12 * np.eye(len(matrix))) * scale


def _not_negative(mean: Any, covariance: Any) -> Any:
    """The most likely values of these normal ones of which none is below 0."""
    zero = mean < 0
    for _ in range(len(mean)):
        if not zero.any():
            return mean
        at = np.flatnonzero(zero)
        pull = np.linalg.lstsq(covariance[np.ix_(at, at)], mean[at], rcond=None)[0]
        found = np.where(zero, 0.0, mean - covariance[:, at] @ pull)
        wrong = found < 0
        if not wrong.any():
            return found
        zero = zero | wrong
    return np.maximum(mean, 0.0)


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

    def forget(self, row: Row) -> None:
        """This is another model now, whose works may move more or less."""
        for fit in self.fits:
            fit.forget(row)

    def memory_of(self, row: Row, guess: int = 0) -> int:
        """Bytes of memory that a work of a model moves: as measured, otherwise the guess, or what is certainly more or less."""
        fit = self.fits[0]
        if fit.measured(row):
            return round(fit.bytes_of(row))
        most = fit.at_most(row)
        return round(max(min(guess, most) if most else guess, fit.at_least(row)))

    def most_memory_of(self, row: Row) -> int:
        """Bytes of memory that a work of a model moves at most, as far as its meter is certain; 0 for one that never ran."""
        return round(self.fits[0].at_most(row))

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
            if moved or path or not any_ran:  # Works move some memory: otherwise the meter stands still.
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


def divide(amount: int, weights: Mapping[K, int]) -> dict[K, int]:
    """Integers in proportion to the weights, which have a sum above 0; together exactly `amount`. Largest remainders first."""
    total = sum(weights.values())
    parts = {key: amount * weight // total for key, weight in weights.items()}
    left = amount - sum(parts.values())
    for key in sorted(weights, key=lambda key: amount * weights[key] % total, reverse=True)[:left]:
        parts[key] += 1
    return parts
