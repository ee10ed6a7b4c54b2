"""How much a unit draws of a device's memory where a fenced tenant's models are held, so that these get what they may. Pure.

At first the plan assumes that a unit draws all that it can. Models draw less: on an H200 models that read, write or copy
memory drew a quarter to two fifths of it (docs/lab/2026-11-29-bandwidth.md). So a placement gets more granules, until its
models fill the tenant's share. What they draw is seen while they run there. The model that
draws the most counts for its tenant.
"""

from collections.abc import Collection, Mapping

from .usage import NS, Row

SETTLES = 5
"""Looks for which a model is seen on a placement until its figure counts, as that is an average."""
WEIGHT, MORE = 1 / 8, 1.6
"""The weight of a look in a model's average, as works vary; a look of `MORE` times that average replaces it at once."""
MARGIN = 1.1
"""As many times as seen is what a unit is taken to draw. It is taken to draw less once less than `LOWER` of that is seen."""
LOWER = 0.8
REST = 60 * NS
"""From a change to the next one that makes a tenant's placement wider, as nothing is held while it is made."""


class Drawn:
    """Of one device."""

    def __init__(self) -> None:
        self.units: dict[str, int] = {}
        """By tenant: bytes a second that a unit draws where its models are held, at most. Others may draw all they can."""
        self._seen: dict[Row, float] = {}
        self._looks: dict[Row, tuple[int, int]] = {}
        """By model the units on which it is held, and for how many looks it has been seen there."""
        self._at: dict[str, int] = {}
        """When a tenant's figure changed last, in nanoseconds."""

    def look(self, now: int, units: Mapping[str, int], held: Mapping[Row, float], known: Collection[Row]) -> None:
        """At this time in nanoseconds tenants have narrow placements of so many units. `held` are the models that are held
        there, and the bytes a second that each draws there at most, 0 where that is not known. Models not in `known` have gone.

        A model of which nothing was known yet does not count: it may never run there. Once it has, it counts as new until it is
        seen, also on another placement.
        """
        self._seen = {row: each for row, each in self._seen.items() if row in known}
        self._looks = {row: each for row, each in self._looks.items() if row in held}
        for row in [row for row, rate in held.items() if rate or row in self._looks]:
            there, rate = units[row[0]], held[row]
            before, looks = self._looks.get(row, (there, 0))
            looks = looks + 1 if before == there and rate else 0
            self._looks[row] = there, looks
            if looks >= SETTLES:
                drawn, average = rate / there, self._seen.get(row, 0.0)
                self._seen[row] = drawn if drawn > MORE * average else average + (drawn - average) * WEIGHT
        tenants = {tenant for tenant, _ in known}
        for kept in (self.units, self._at):
            for tenant in kept.keys() - tenants:
                del kept[tenant]
        counted = [row for row in held if row in self._looks or row in self._seen]
        for tenant in {tenant for tenant, _ in counted}:
            self._judge(tenant, [self._seen.get(row) for row in counted if row[0] == tenant], now)

    def _judge(self, tenant: str, seen: list[float | None], now: int) -> None:
        each, taken = max((one for one in seen if one is not None), default=0), self.units.get(tenant)
        if None in seen:
            self.units.pop(tenant, None)  # What is new may draw all it can.
        elif taken is None or each > taken or (each < LOWER * taken and now - self._at.get(tenant, now - REST) >= REST):
            self.units[tenant], self._at[tenant] = round(each * MARGIN), now
