"""Request bodies that are arriving for one tenant: limits their memory and refuses those that arrive too slowly.

A body counts against its tenant from when its length is known until the request was answered.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from ..errors import RequestError, TooSlow, Unavailable
from ..link.blocks import LARGE
from ..link.occupancy import ARRIVING, LARGE_BODIES, Occupancy

GRACE = 30.0
"""Seconds that any body may take to arrive; each `MIN_RATE` bytes that arrived give it one more."""
MIN_RATE = 16 * 1024
"""The minimum average rate in bytes a second; a slow mobile line has several times as many."""
CHECK_INTERVAL = 1.0
"""Seconds between two checks of the rates."""


class Upload(Protocol):
    """A body that is arriving: a connection, or a task that waits for it."""

    def received(self) -> int:
        """Bytes that have arrived so far."""

    def refuse(self, error: RequestError) -> None:
        """Answer with this error now, without the rest of the body."""


class Uploads:
    """The request bodies that are arriving for one tenant, or for none. Belongs to the event loop.

    `limit` is in bytes, for all of them together: announced lengths, or else received bytes, and what compressed bodies
    decompress to; with an `occupancy` also for those of the tenant's other processes. A single body may be larger. `full` makes
    the error for a body that does not fit beside the others. `counted` is the sum of all bodies so far.
    """

    def __init__(
        self,
        limit: int,
        full: Callable[[str], RequestError] = Unavailable,
        clock: Callable[[], float] = time.monotonic,
        occupancy: Occupancy | None = None,
    ) -> None:
        self._limit = limit
        self._full = full
        self._clock = clock
        self._waiting: dict[Upload, tuple[float, int]] = {}
        self._reserved = 0
        self._occupancy = occupancy
        self._large = 0
        self._most_large: int | None = None
        self._full_of_large: Callable[[str], RequestError] = full
        self.counted = 0
        self._checking = False

    def __repr__(self) -> str:
        return f"<Uploads {len(self._waiting)} on their way, {self._reserved} of {self._limit} bytes>"

    def reserve(self, nbytes: int, own: int = 0) -> None:
        """Reserve these bytes until all of the body's are passed to `release`; `own` bytes of it are reserved already.

        Raises what `full` makes.
        """
        others = self._reserved - own
        if self._occupancy is not None:
            others += self._occupancy.elsewhere(ARRIVING)
        if others and others + own + nbytes > self._limit:
            text = f"a body of {own + nbytes} bytes while {others} bytes of others are on their way"
            raise self._full(f"{text}; together they may have {self._limit}")
        if own <= LARGE < own + nbytes:
            self._add_large(own + nbytes)
        self._reserved += nbytes
        self.counted += nbytes
        if self._occupancy is not None:
            self._occupancy.set(ARRIVING, self._reserved)

    def limit_large(self, most: int | None, full: Callable[[str], RequestError]) -> None:
        """Set how many bodies above `LARGE` may be on their way at a time, None for any number; `full` makes the error."""
        self._most_large, self._full_of_large = most, full

    def _add_large(self, nbytes: int) -> None:
        """Count a body of so many bytes as large. Raises what `limit_large` says."""
        if self._most_large is not None:
            large = self._large + (self._occupancy.elsewhere(LARGE_BODIES) if self._occupancy is not None else 0)
            if large >= self._most_large:
                text = f"a body of {nbytes} bytes, but {large} of more than {LARGE} are on their way, and no more may be"
                raise self._full_of_large(f"{text}. Send it again when one has arrived, or send fewer at a time")
        self._set_large(self._large + 1)

    def _set_large(self, count: int) -> None:
        self._large = count
        if self._occupancy is not None:
            self._occupancy.set(LARGE_BODIES, count)

    def release(self, nbytes: int) -> None:
        """Free the bytes that were reserved for one body."""
        if nbytes > LARGE:
            self._set_large(self._large - 1)
        self._reserved -= nbytes
        if self._occupancy is not None:
            self._occupancy.set(ARRIVING, self._reserved)

    def add(self, upload: Upload, nbytes: int) -> None:
        """Add an upload with a body of so many bytes. Raises as `reserve` does."""
        self.reserve(nbytes)
        self._waiting[upload] = self._clock(), nbytes
        if not self._checking:
            self._checking = True
            asyncio.get_running_loop().call_later(CHECK_INTERVAL, self._check_rates)

    def discard(self, upload: Upload) -> None:
        """Remove an upload and release its bytes; does nothing if it was removed."""
        if found := self._waiting.pop(upload, None):
            self.release(found[1])

    def forget(self, upload: Upload) -> None:
        """Remove an upload, which releases its bytes itself."""
        self._waiting.pop(upload, None)

    def expect(self, nbytes: int, received: Callable[[], int] | None = None) -> "AwaitedBody":
        """A context manager for the calling task, from before it reads a body until it is done with it; raises as `add` does.

        `nbytes` is the announced length, or 0. `received` returns how many bytes arrived, if the task does not see each chunk.
        """
        return AwaitedBody(self, nbytes, received)

    def refuse(self, reason: str) -> None:
        """Refuse all bodies that are arriving, with 503."""
        for upload in list(self._waiting):
            upload.refuse(Unavailable(reason))

    def _check_rates(self) -> None:
        """Refuse uploads that are too slow. The oldest come first, so only few are checked."""
        now = self._clock()
        for upload, (begun, _) in list(self._waiting.items()):
            if now - begun <= GRACE:
                break
            if now - begun > GRACE + upload.received() / MIN_RATE:
                slow = f"{upload.received()} bytes of the body came in {now - begun:.0f} s; expected {MIN_RATE} a second"
                upload.refuse(TooSlow(f"{slow} after the first {GRACE:.0f} s"))
        self._checking = bool(self._waiting)
        if self._checking:
            asyncio.get_running_loop().call_later(CHECK_INTERVAL, self._check_rates)


class AwaitedBody:
    """A body that a task waits for; see `Uploads.expect`."""

    def __init__(self, uploads: Uploads, nbytes: int, received: Callable[[], int] | None) -> None:
        self._uploads = uploads
        self._announced = nbytes
        self._reserved_more = 0
        self._counted = 0
        self._received = received
        self._task: asyncio.Task[Any] | None = None
        self._error: RequestError | None = None

    def __repr__(self) -> str:
        return f"<AwaitedBody {self.received()} of {self._announced} bytes>"

    def __enter__(self) -> "AwaitedBody":
        self._uploads.add(self, self._announced)
        self._task = asyncio.current_task()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.complete()
        self._uploads.release(self._announced + self._reserved_more)
        task, self._task = self._task, None  # Breaks the cycle of the task, its error and this object.
        refused, self._error = self._error, None
        try:
            if refused and isinstance(error, asyncio.CancelledError) and task and not task.uncancel():
                raise refused from None
        finally:
            del refused, error, traceback  # Breaks their cycle with this frame, which only the garbage collector would free.

    def received(self) -> int:
        return self._received() if self._received else self._counted

    def refuse(self, error: RequestError) -> None:
        """Raise this error in the waiting task."""
        self.complete()
        if self._task:
            self._error = error
            self._task.cancel()

    def add_received(self, nbytes: int) -> None:
        """Count received bytes. Raises as `Uploads.reserve` does for bytes beyond the announced length."""
        self._counted += nbytes
        if self._counted > self._announced + self._reserved_more:
            self.reserve_more(self._counted - self._announced - self._reserved_more)

    def reserve_more(self, nbytes: int) -> None:
        """Reserve more memory for this body. Raises as `Uploads.reserve` does."""
        self._uploads.reserve(nbytes, self._announced + self._reserved_more)
        self._reserved_more += nbytes

    def complete(self) -> None:
        """The body is complete; its bytes stay reserved until the end of the `with`."""
        self._uploads.forget(self)
