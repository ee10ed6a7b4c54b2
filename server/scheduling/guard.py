"""Whether a tenant goes on lending: judged by its own latencies, when a request met a borrower and when it did not. Pure.

Only requests that found no other one open are compared, as others wait for each other anyway; each model is compared with
itself. The median is compared and not p99: every request of the first kind met a borrower, so what lending costs is in the
middle of them and not in their tail, and the p99 of some dozens is their longest, which any other noise may be.
"""

from collections import deque

ENOUGH = 16
"""Requests of a model, of each kind, that are compared."""
_KEPT = 64
TOLERANCE = 0.15
"""How much longer the median may be that met a borrower, unless the longest work of a borrower is more."""
FIRST_PAUSE, LONGEST_PAUSE = 1_000_000_000, 300_000_000_000
"""Nanoseconds for which nothing is lent after the first miss, and at most: each further one doubles it."""
MEASURING = 2_000_000_000
"""Nanoseconds for which nothing is lent at most, to see requests that meet no borrower."""
STALE = 60_000_000_000
"""Nanoseconds after which requests that met no borrower say nothing any more."""
_MOST_MODELS = 256


class _Latencies:
    """Those of one model, in nanoseconds."""

    def __init__(self) -> None:
        self.met: deque[int] = deque(maxlen=_KEPT)
        self.alone: deque[int] = deque(maxlen=_KEPT)
        self.alone_at = 0


class Guard:
    """Decides whether a tenant lends. `limit` is what a work of a borrower may take; all times are nanoseconds on one clock.

    `reason` says, after it has stopped, why.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._models: dict[str, _Latencies] = {}
        self._pause = FIRST_PAUSE
        self._lent_since = 0
        self._measured: _Latencies | None = None
        self.until = 0
        """When it lends again; 0 while it lends."""
        self.stops = 0
        self.reason = ""

    def __repr__(self) -> str:
        return f"<Guard {'lends' if self.lends else 'does not lend'}, stopped {self.stops} times>"

    @property
    def lends(self) -> bool:
        """Whether the tenant lends now."""
        return not self.until

    def look(self, now: int) -> None:
        """Lend again, if it is time."""
        if self.until and now >= self.until:
            self._lend(now)

    def learn(self, model: str, latency: int, met: bool, now: int) -> None:
        """A request that found no other one open was answered; `met`: when it came, a borrower used the granules."""
        self.look(now)
        found = self._models.get(model)
        if found is None:
            if len(self._models) >= _MOST_MODELS:
                self._models.clear()
            found = self._models[model] = _Latencies()
        if not met:
            found.alone.append(latency)
            found.alone_at = now
            if found is self._measured and len(found.alone) >= ENOUGH:
                self._lend(now)
        elif self.lends:
            found.met.append(latency)
            if len(found.met) >= ENOUGH:
                self._judge(model, found, now)

    def _judge(self, model: str, found: _Latencies, now: int) -> None:
        if now - found.alone_at > STALE:
            found.alone.clear()
        if len(found.alone) < ENOUGH:
            self._measured, self.until = found, now + MEASURING
            return
        alone, met = _median(found.alone), _median(found.met)
        found.met.clear()
        if met - alone <= max(TOLERANCE * alone, self._limit):
            if now - self._lent_since > self._pause:
                self._pause = FIRST_PAUSE
            return
        self.stops += 1
        self.until = now + self._pause
        self.reason = (
            f"requests of {model.rpartition('#')[0] or model} that met a borrower took {met / 1e6:.2f} ms, and others "
            f"{alone / 1e6:.2f} ms (medians); nothing is lent for {self._pause / 1e9:g} s"
        )
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _lend(self, now: int) -> None:
        self.until, self._lent_since, self._measured = 0, now, None
        for each in self._models.values():
            each.met.clear()


def _median(latencies: "deque[int]") -> int:
    ordered = sorted(latencies)
    return ordered[len(ordered) // 2]
