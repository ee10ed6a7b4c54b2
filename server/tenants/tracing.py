"""Which requests are traced, and when their steps were: integers that are kept anyway. Spans are made of them elsewhere.

`server.tenants.spans` makes them on a thread of OpenTelemetry's, after the answers. Without tracing a request is asked twice
whether there is a sampler, and nothing else.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import getrandbits
from types import SimpleNamespace

from ..scheduling.limits import TokenBucket

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
"""The flag of a traceparent whose sender keeps its spans of this trace."""
_BITS = 64
"""The bits of a trace's number that decide, its lowest: as OpenTelemetry's own sampler does, so that servers agree."""
FORCED = 100
"""Requests a second that the callers of one tenant may have traced; beyond that the ratio decides for theirs too."""


class Trace:
    """A request whose spans are kept. The times are nanoseconds on the clock of `time.monotonic_ns`, 0 for what never came.

    `parent` is the caller's span, 0 without one. `begun` is when the request's head was there, `arrived` its body, `decoded`
    its inputs; it ran from `began` to `ended`, and at `done` its answer was encoded, or it failed. `error` is the text of an
    answer with `status`, "" after a success.
    """

    __slots__ = ("_keep", "arrived", "batch", "began", "begun", "decoded", "done", "ended", "error", "model", "parent", "rows",
                 "span", "status", "tenant", "trace", "version")  # fmt: skip

    context = SimpleNamespace(trace_flags=SimpleNamespace(sampled=True))
    """What the batch processor asks of a span."""

    def __init__(self, keep: Callable[["Trace"], None], trace: int, parent: int, begun: int) -> None:
        self._keep = keep
        self.trace = trace
        self.parent = parent
        self.span = getrandbits(64) or 1
        self.begun = self.arrived = begun
        self.decoded = self.began = self.ended = self.done = self.rows = self.batch = 0
        self.status = 200
        self.error = self.tenant = self.model = self.version = ""

    def about(self, tenant: str, model: str, version: str, arrived: int, done: int) -> None:
        """Whose request it was, when its body was there, and when it was over."""
        self.tenant, self.model, self.version, self.arrived, self.done = tenant, model, version, arrived, done

    def keep(self) -> None:
        """It has ended, and all of it is known."""
        self._keep(self)


class Sampler:
    """Decides for each request of a tenant: as its caller has, within `FORCED`, or `ratio` of those whose caller says nothing.

    `keep` takes traces.
    """

    def __init__(self, ratio: float, keep: Callable[[Trace], None]) -> None:
        self._keep = keep
        self._bound = round(ratio * 2**_BITS)
        self._forced = TokenBucket(FORCED, FORCED)

    def start(self, traceparent: bytes | str | None, begun: int) -> Trace | None:
        """The trace of a request with this header that began at `begun`, if it is kept. A wrong header counts as none."""
        if traceparent:
            text = traceparent if isinstance(traceparent, str) else traceparent.decode("latin-1")
            found = _TRACEPARENT.fullmatch(text.strip())
            # A later version may have more fields; 00 has four, and ff is none.
            if found and found[1] != "ff" and not (found[1] == "00" and found[5]) and int(found[2], 16) and int(found[3], 16):
                if not int(found[4], 16) & _SAMPLED:
                    return None
                trace, parent = int(found[2], 16), int(found[3], 16)
                if not self._forced.wait(1, begun // 1000):
                    self._forced.take(1)
                elif trace & (2**_BITS - 1) >= self._bound:
                    return None
                return Trace(self._keep, trace, parent, begun)
        trace = getrandbits(128) or 1
        return Trace(self._keep, trace, 0, begun) if trace & (2**_BITS - 1) < self._bound else None


@dataclass(slots=True)
class Tracing:
    """A tenant's tracing: None while its requests are not traced."""

    sampler: Sampler | None = None
