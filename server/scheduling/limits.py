"""A tenant's limits on its requests and the bytes of their bodies: token buckets. Pure, as callers pass the time."""

from typing import Final

from ..config.tables import dotted
from ..errors import LimitExceeded, RequestError, TooLarge
from ..link.occupancy import Occupancy

REQUESTS: Final = "requests_per_second"
BYTES: Final = "bytes_per_second"
CONNECTIONS: Final = "max_connections"
LARGE_BODIES: Final = "max_large_bodies"
LIMITS: Final = (REQUESTS, BYTES, CONNECTIONS, LARGE_BODIES)
"""The keys of a tenant's limits, in the order of `LaneStatistics.limited`."""

_MICROSECONDS: Final = 1_000_000
_LOT_TIME: Final = 10_000
"""A lot is at most what comes in so many microseconds ..."""
_LOTS: Final = 128
"""... and at most one part in so many of the burst."""
_LOT_USED: Final = 100_000
"""It is used for so many microseconds ..."""
_LOT_HELD: Final = 1_000_000
"""... and after so many another process may take it back. A process that was stopped for as long between reading the clock and
taking a token would grant one request too many."""


class TokenBucket:
    """`rate` tokens come in a second, and at most `burst` are there; at first as many are.

    Times are whole microseconds of a clock that never goes back, and `level` is in millionths of a token. So nothing is
    rounded, and in t seconds at most `burst` + `rate` * t tokens are taken.
    """

    __slots__ = ("at", "burst", "level", "rate")

    def __init__(self, rate: int, burst: int) -> None:
        self.rate = rate
        self.burst = burst
        self.level = burst * _MICROSECONDS
        self.at = 0

    def wait(self, count: int, now: int) -> int:
        """How long until `count` tokens are there, in microseconds, if none are taken until then; 0 if they are there now."""
        if now > self.at:
            level, full = self.level + (now - self.at) * self.rate, self.burst * _MICROSECONDS
            self.level = level if level < full else full
            self.at = now
        missing = count * _MICROSECONDS - self.level
        return -(-missing // self.rate) if missing > 0 else 0

    def take(self, count: int) -> None:
        """Take tokens for which `wait` has just returned 0."""
        self.level -= count * _MICROSECONDS


class RateLimits:
    """The buckets of one tenant, either of which may be absent: one token for a request, one for each byte of its body."""

    def __init__(self, tenant: str, requests: TokenBucket | None, nbytes: TokenBucket | None) -> None:
        self._tenant = tenant
        self.requests = requests
        self.nbytes = nbytes

    def charge(self, requests: int, nbytes: int, now: int) -> None:
        """Take the tokens of so many requests (1, or 0 for a body whose request was charged before) and bytes, or raise.

        Raises LimitExceeded, and TooLarge for more bytes than can ever be there at once; nothing is taken then.
        """
        of_requests, of_bytes = self.requests, self.nbytes
        if of_requests is not None and (wait := of_requests.wait(requests, now)):
            raise self._too_many(of_requests, wait)
        if of_bytes is not None:
            if wait := of_bytes.wait(nbytes, now):
                raise self._too_large(of_bytes, nbytes, wait)
            of_bytes.take(nbytes)
        if of_requests is not None:
            of_requests.take(requests)

    def check(self, now: int) -> None:
        """Raise LimitExceeded if no request would be admitted now; takes nothing."""
        if self.requests is not None and (wait := self.requests.wait(1, now)):
            raise self._too_many(self.requests, wait)

    def take_over(self, before: "RateLimits | None") -> None:
        """Go on with what is in the buckets of the limits that these replace."""
        if before is not None:
            _continue(self.requests, before.requests)
            _continue(self.nbytes, before.nbytes)

    def _too_many(self, bucket: TokenBucket, wait: int) -> LimitExceeded:
        key = dotted(("tenants", self._tenant, REQUESTS))
        rate = f"{bucket.rate} request{'s' * (bucket.rate != 1)} a second"
        allowed = f"{key} allows {rate}, and {bucket.burst} at once (burst_requests)"
        return _exceeded(REQUESTS, wait, f"{allowed}; there were more")

    def _too_large(self, bucket: TokenBucket, nbytes: int, wait: int) -> RequestError:
        key = dotted(("tenants", self._tenant, BYTES))
        allowed = f"{key} allows {bucket.rate} bytes of request bodies a second, and {bucket.burst} at once (burst_bytes)"
        if nbytes > bucket.burst:
            return TooLarge(f"{allowed}; this body has {nbytes}, which it never admits: send smaller ones")
        return _exceeded(BYTES, wait, f"{allowed}; this body has {nbytes}, for which too few are left")


class SharedBucket(TokenBucket):
    """A bucket of a tenant with several HTTP processes: what is in it is on the page that they share, at the place `index`.

    A process uses the tokens that it holds, a lot taken in advance, without a lock. No more is granted than by one bucket
    without lots: what is held counts as if it were still in there, and what can come in is bounded by what was held at the last
    change of the page, so that what was used since then comes back too late rather than too early. For that reason, and as
    others hold tokens, a request may be refused where that one bucket would have up to twice the lots of all processes left.
    """

    __slots__ = ("_full", "_index", "_lot", "_occupancy", "held")

    def __init__(self, rate: int, burst: int, occupancy: Occupancy, index: int) -> None:
        super().__init__(rate, burst)
        self._full = burst * _MICROSECONDS
        self._index = index
        self._occupancy = occupancy
        self.held = occupancy.held_tokens(index)
        lot = min(rate * _LOT_TIME, self._full // _LOTS)
        self._lot = lot if lot >= _MICROSECONDS else 0

    def load(self, now: int) -> None:
        """Set the level to what this process may take now: what is in the bucket, and what it holds itself."""
        level, since, held = self._occupancy.bucket(self._index)
        if now > since:
            level = max(0, min(level + (now - since) * self.rate, self._full - held))
            since = now
        self.level, self.at = level + self.held[0], since

    def store(self) -> None:
        """Put back what is left; of a bucket that is at least half full except a lot. With the lock held."""
        lot = self._lot if 2 * self.level >= self._full else 0
        self.held[0] = lot
        self._occupancy.set_bucket(self._index, self.level - lot, self.at)

    def take_back(self) -> None:
        """After `load`, with the lock held: also what processes hold that have not taken anything for long."""
        self.level += self._occupancy.take_back_tokens(self._index, self.at - _LOT_HELD)

    def give_up(self) -> None:
        """Forget what this process holds. With the lock held."""
        self.held[0] = 0
        level, since, _ = self._occupancy.bucket(self._index)
        self._occupancy.set_bucket(self._index, level, since)


class SharedRateLimits(RateLimits):
    """As `RateLimits`, of shared buckets. While a bucket is at least half full, a process takes a lot of tokens more than it
    needs (`_LOT_TIME`, `_LOTS`), so that the requests after that cost it no lock."""

    def __init__(self, tenant: str, requests: TokenBucket | None, nbytes: TokenBucket | None, occupancy: Occupancy) -> None:
        """Of buckets like these."""
        of_requests = None if requests is None else SharedBucket(requests.rate, requests.burst, occupancy, 0)
        of_bytes = None if nbytes is None else SharedBucket(nbytes.rate, nbytes.burst, occupancy, 1)
        super().__init__(tenant, of_requests, of_bytes)
        self._occupancy = occupancy
        self._shared = [bucket for bucket in (of_requests, of_bytes) if bucket is not None]
        self._held_requests, self._held_bytes = occupancy.held_tokens(0), occupancy.held_tokens(1)
        self._for_request = 0 if requests is None else _MICROSECONDS
        self._for_byte = 0 if nbytes is None else _MICROSECONDS
        self._until = 0

    def charge(self, requests: int, nbytes: int, now: int) -> None:
        if now < self._until:
            of_requests, of_bytes = self._held_requests, self._held_bytes
            requests_left = of_requests[0] - requests * self._for_request
            bytes_left = of_bytes[0] - nbytes * self._for_byte
            if requests_left >= 0 and bytes_left >= 0:
                of_requests[0] = requests_left
                of_bytes[0] = bytes_left
                return
        self._charge_locked(requests, nbytes, now)

    def check(self, now: int) -> None:
        for bucket in self._shared:
            bucket.load(now)
        super().check(now)

    def take_over(self, before: RateLimits | None) -> None:
        """What is in the buckets stays on the page. What this process holds was of another rate, and is lost."""
        locked = self._occupancy.lock()
        try:
            for bucket in self._shared:
                bucket.give_up()
        finally:
            if locked:
                self._occupancy.unlock()

    def _charge_locked(self, requests: int, nbytes: int, now: int) -> None:
        """Charge the page, and take a lot."""
        locked = self._occupancy.lock()  # If not, another process was stopped while it had the lock; a token may get lost.
        try:
            for bucket in self._shared:
                bucket.load(now)
            try:
                super().charge(requests, nbytes, now)
            except LimitExceeded:
                for bucket in self._shared:
                    bucket.take_back()
                super().charge(requests, nbytes, now)
            finally:
                for bucket in self._shared:
                    bucket.store()
                self._until = now + _LOT_USED
                self._occupancy.set_lot_since(now)
        finally:
            if locked:
                self._occupancy.unlock()


def _continue(bucket: TokenBucket | None, before: TokenBucket | None) -> None:
    if bucket is not None and before is not None:
        bucket.level, bucket.at = min(before.level, bucket.level), before.at


def _exceeded(limit: str, wait: int, text: str) -> LimitExceeded:
    seconds = wait / _MICROSECONDS
    return LimitExceeded(f"{text}. Send it again in {seconds:.3g} s, or send fewer", limit, seconds)
