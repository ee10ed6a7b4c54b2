"""To how many rows a borrower's batches are cut, to run on its wide partition although whole ones take too long. Pure.

A batch that takes longer on the wide partition than the lenders allow stays at home. Where one of fewer rows would not, and
rows get done faster in such pieces, the HTTP side joins no more than that (`link.cuts`). Whether they do is computed from what
works of each size took at home and wide, and from how often the lenders rested of late when a work was to be launched; so
nothing is cut while they do not rest, nor where rows take as long in a piece at home as wide. Sizes that were not measured are
tried, as a queue that is never empty has whole batches only: one at a time and for a short time, the largest first that may be
short enough, and later and later again. All times are nanoseconds.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from ..link.cuts import BatchKey
from .stretching import LONGEST_RETRY, RETRY, SETTLED, Measured

HANDLING: Final = 100_000
"""What a work costs beside the time that it runs: its requests are joined, its ticket is read, its answers are split."""
WORTH: Final = 0.9
"""Rows have to get done in this part of the time, or less."""
LOOK: Final = 50_000_000
"""Until the next look while a size is tried, which ends as soon as it is seen to be too long."""
_MOST_KEYS: Final = 512


class Known(NamedTuple):
    """What works of one size take at home and wide; 0 if that is not known, or `wide` no longer."""

    home: int
    wide: int


Sizes = Mapping[int, Known]
"""By rows, of one batch key."""
_UNKNOWN: Final = Known(0, 0)


def by_key(measured: Iterable[Measured], now: int) -> dict[BatchKey, dict[int, Known]]:
    """What is known of each batch key now. Of two that were measured of the same works, the first counts.

    Works without a row are left out: a tenant's HTTP process may ask for such, and what a row took is not defined for them.
    """
    found: dict[BatchKey, dict[int, Known]] = {}
    for each in measured:
        if each.shapes and each.shapes[0] and each.shapes[0][0] > 0:
            sizes = found.setdefault((each.model, tuple([shape[1:] for shape in each.shapes])), {})
            before = sizes.get(each.shapes[0][0], _UNKNOWN)
            sizes[each.shapes[0][0]] = Known(before.home or each.home, before.wide or each.known(now))
    return found


def cut(sizes: Sizes, limit: int, rests: float) -> int:
    """To how many rows batches are cut; 0: they are not. `limit` is the longest that the lenders allow, and `rests` how likely
    it is that they rest when a work is to be launched, from 0 to 1.
    """
    if _fits(sizes.get(max(sizes, default=0), _UNKNOWN), limit):
        return 0
    short = [rows for rows, known in sizes.items() if _fits(known, limit)]
    best = min(short, key=lambda rows: _of_a_row(rows, sizes[rows], rests), default=0)
    return best if best and _of_a_row(best, sizes[best], rests) <= WORTH * _at_home(sizes) else 0


def untried(sizes: Sizes, limit: int, home: int, wide: int, rests: float) -> list[int]:
    """Sizes that may be short enough wide and pay, and were not measured there: the largest and its halves, down to one that
    was and is. `home` and `wide` are the units of both partitions; what is not known is computed as if all of them helped.
    """
    found: list[int] = []
    at_home = [rows for rows, known in sizes.items() if known.home]
    if not at_home:
        return found
    before = largest = rows = max(at_home)
    while rows:
        if any(_fits(known, limit) for each, known in sizes.items() if rows <= each < before or each == rows):
            break
        known = sizes.get(rows, _UNKNOWN)
        if not known.wide:
            took = known.home or sizes[largest].home * rows // largest
            best = Known(took, took * home // wide)
            if best.wide <= limit and _of_a_row(rows, best, rests) <= WORTH * _at_home(sizes):
                found.append(rows)
        before, rows = rows, rows // 2
    return found


class _Trial:
    """Of one batch key: the size that is tried `until` then, 0 for none, or was tried last; and when the next may begin."""

    __slots__ = ("after", "largest", "rows", "until", "wait")

    def __init__(self) -> None:
        self.largest = self.rows = self.until = self.after = 0
        self.wait: int = RETRY


class Cutting:
    """Of one borrower with one wide partition: what its HTTP side joins. `limit`, `home` and `wide` as for `untried`."""

    def __init__(self, limit: int, home: int, wide: int) -> None:
        self.rests = 0.0
        """How likely it is that the lenders rest when a work is to be launched."""
        self.settled: dict[BatchKey, int] = {}
        """To how many rows batches are cut when nothing is tried."""
        self.trying = False
        """Whether to look again after LOOK."""
        self._limit = limit
        self._units = home, wide
        self._counted = 0, 0
        self._trials: dict[BatchKey, _Trial] = {}

    def __repr__(self) -> str:
        return f"<Cutting to {self.settled}, the lenders rest at {self.rests:.0%} of the launches>"

    def look(self, now: int, measured: Iterable[Measured], rested: int, not_rested: int) -> dict[BatchKey, int]:
        """To how many rows batches of which keys are cut from now on; those of which a size is only tried come last. The counts
        are of works that were to be launched so far while the lenders rested, and while they did not.
        """
        self._count(rested, not_rested)
        self.settled, tried = {}, {}
        if len(self._trials) > _MOST_KEYS:
            self._trials.clear()
        for key, sizes in by_key(measured, now).items():
            if rows := cut(sizes, self._limit, self.rests):
                self.settled[key] = rows
            if rows := self._try(self._trials.setdefault(key, _Trial()), sizes, now):
                tried[key] = rows
        self.trying = bool(tried)
        return {**self.settled, **tried}

    def _count(self, rested: int, not_rested: int) -> None:
        more, others = rested - self._counted[0], not_rested - self._counted[1]
        self._counted = rested, not_rested
        if more + others > 0:
            share = more / (more + others)
            self.rests = (self.rests + share) / 2 if self.rests and share else share

    def _try(self, trial: _Trial, sizes: Sizes, now: int) -> int:
        """The size to try now; 0 for none."""
        largest = max(sizes)
        if trial.until:
            if now < trial.until and sizes.get(trial.rows, _UNKNOWN).wide <= self._limit and self.rests:
                return trial.rows
            trial.until, trial.after = 0, now + trial.wait
            trial.wait = min(2 * trial.wait, LONGEST_RETRY)
        if largest != trial.largest:
            trial.largest, trial.rows, trial.after, trial.wait = largest, 0, 0, RETRY
        if now < trial.after or not (found := untried(sizes, self._limit, *self._units, self.rests)):
            return 0
        trial.rows = next((rows for rows in found if rows < trial.rows), found[0])
        trial.until = now + 2 * SETTLED + 4 * sizes[largest].home + 16 * self._limit
        return trial.rows


def _fits(known: Known, limit: int) -> bool:
    """Whether works of this size go wide while the lenders rest."""
    return 0 < known.wide <= limit and known.wide < known.home


def _of_a_row(rows: int, known: Known, rests: float) -> float:
    """What a row takes where works of this size go wide if the lenders rest."""
    return (HANDLING + rests * known.wide + (1 - rests) * known.home) / rows


def _at_home(sizes: Sizes) -> float:
    """What a row takes at home at least."""
    return min([(HANDLING + known.home) / rows for rows, known in sizes.items() if known.home])
