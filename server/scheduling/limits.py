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

    def __repr__(self) -> str:
        return f"<TokenBucket {self.level / _MICROSECONDS:.6g} of {self.burst}, {self.rate} a second>"

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

    def __repr__(self) -> str:
        return f"<RateLimits of {self._tenant}: {self.requests!r}, {self.nbytes!r}>"

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
        allowed = f"{key} allows {bucket.rate} requests a second, and {bucket.burst} at once (burst_requests)"
        return _exceeded(REQUESTS, wait, f"{allowed}; there were more")

    def _too_large(self, bucket: TokenBucket, nbytes: int, wait: int) -> RequestError:
        key = dotted(("tenants", self._tenant, BYTES))
        allowed = f"{key} allows {bucket.rate} bytes of request bodies a second, and {bucket.burst} at once (burst_bytes)"
        if nbytes > bucket.burst:
            return TooLarge(f"{allowed}; this body has {nbytes}, which it never admits: send smaller ones")
        return _exceeded(BYTES, wait, f"{allowed}; this body has {nbytes}, for which too few are left")


class SharedRateLimits(RateLimits):
    """As `RateLimits`, for a tenant with several HTTP processes: what is in the buckets is on the page that they share."""

    def __init__(self, tenant: str, requests: TokenBucket | None, nbytes: TokenBucket | None, occupancy: Occupancy) -> None:
        super().__init__(tenant, requests, nbytes)
        self._occupancy = occupancy

    def charge(self, requests: int, nbytes: int, now: int) -> None:
        locked = self._occupancy.lock()  # If not, another process was stopped while it had the lock; a token may get lost.
        try:
            self._load()
            super().charge(requests, nbytes, now)
            self._store()
        finally:
            if locked:
                self._occupancy.unlock()

    def check(self, now: int) -> None:
        self._load()
        super().check(now)

    def take_over(self, before: RateLimits | None) -> None:
        """Nothing: it stays on the page."""

    def _load(self) -> None:
        for index, bucket in enumerate((self.requests, self.nbytes)):
            if bucket is not None:
                bucket.level, bucket.at = self._occupancy.bucket(index)

    def _store(self) -> None:
        for index, bucket in enumerate((self.requests, self.nbytes)):
            if bucket is not None:
                self._occupancy.set_bucket(index, bucket.level, bucket.at)


def _continue(bucket: TokenBucket | None, before: TokenBucket | None) -> None:
    if bucket is not None and before is not None:
        bucket.level, bucket.at = min(before.level, bucket.level), before.at


def _exceeded(limit: str, wait: int, text: str) -> LimitExceeded:
    seconds = wait / _MICROSECONDS
    return LimitExceeded(f"{text}. Send it again in {seconds:.3g} s, or send fewer", limit, seconds)
