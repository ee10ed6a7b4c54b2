"""The bodies that are on their way to one tenant: what memory they may take, and how long they may.

A body counts against its tenant from the moment its length is known until the request was answered. One that comes too
slowly is refused.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from ..errors import RequestError, TooSlow, Unavailable

GRACE = 30.0
"""Seconds that any body may take to come; each `LEAST` bytes of it that came give it another."""
LEAST = 16 * 1024
"""Bytes a second at which a body has to come in the long run: a slow mobile line brings several times as many."""
LOOK = 1.0
"""Seconds between two looks at whether bodies come as fast as that."""


class Upload(Protocol):
    """A body on its way: a connection that it comes on, or a task that waits for it."""

    def received(self) -> int:
        """How many bytes of it came so far."""

    def refuse(self, error: RequestError) -> None:
        """Answer this now, without the rest."""


class Uploads:
    """The bodies that are on their way to one tenant, or to none: what memory they may take, and how long they may.

    `most` is in bytes, of all of them together: those that are told beforehand, or else those that came, and what packed
    ones unpack to. One alone may be larger. `full` makes the error for what does not fit beside the others.
    `counted` are the bytes of all that ever were. Belongs to the event loop.
    """

    def __init__(
        self, most: int, full: Callable[[str], RequestError] = Unavailable, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._full = full
        self._clock = clock
        self._waiting: dict[Upload, tuple[float, int]] = {}
        self._taken = 0
        self.counted = 0
        self._looking = False

    def __repr__(self) -> str:
        return f"<Uploads {len(self._waiting)} on their way, {self._taken} of {self._most} bytes>"

    def reserve(self, nbytes: int, own: int = 0) -> None:
        """Count these bytes until `give` is called with as many; `own` of those that are counted are of the same body.

        Raises what `full` makes.
        """
        others = self._taken - own
        if others and self._taken + nbytes > self._most:
            text = f"a body of {own + nbytes} bytes while {others} bytes of others are on their way"
            raise self._full(f"{text}; together they may have {self._most}")
        self._taken += nbytes
        self.counted += nbytes

    def release(self, nbytes: int) -> None:
        """These bytes are free again."""
        self._taken -= nbytes

    def add(self, upload: Upload, nbytes: int) -> None:
        """This waits for a body of so many bytes. Raises as `take` does."""
        self.reserve(nbytes)
        self._waiting[upload] = self._clock(), nbytes
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(LOOK, self._look)

    def discard(self, upload: Upload) -> None:
        """It waits no more, if it did."""
        if found := self._waiting.pop(upload, None):
            self.release(found[1])

    def forget(self, upload: Upload) -> None:
        """It waits no more, and gives what it took itself."""
        self._waiting.pop(upload, None)

    def expect(self, nbytes: int, received: Callable[[], int] | None = None) -> "AwaitedBody":
        """For a `with` around what the calling task does until it has a body and is done with it; raises as `add` does.

        `nbytes` is what is told of its length, or 0; `received` says how many came, where the task is not told of each part.
        """
        return AwaitedBody(self, nbytes, received)

    def refuse(self, reason: str) -> None:
        """Tell everyone so whose body is on its way."""
        for upload in list(self._waiting):
            upload.refuse(Unavailable(reason))

    def _look(self) -> None:
        """Refuse what takes too long. Those that came first are first, so that few are looked at."""
        now = self._clock()
        for upload, (begun, _) in list(self._waiting.items()):
            if now - begun <= GRACE:
                break
            if now - begun > GRACE + upload.received() / LEAST:
                slow = f"{upload.received()} bytes of the body came in {now - begun:.0f} s; expected {LEAST} a second"
                upload.refuse(TooSlow(f"{slow} after the first {GRACE:.0f} s"))
        self._looking = bool(self._waiting)
        if self._looking:
            asyncio.get_running_loop().call_later(LOOK, self._look)


class AwaitedBody:
    """A body that one task waits for; see `Uploads.expect`."""

    def __init__(self, uploads: Uploads, nbytes: int, received: Callable[[], int] | None) -> None:
        self._uploads = uploads
        self._told = nbytes
        self._more = 0
        self._parts = 0
        self._received = received
        self._task: asyncio.Task[Any] | None = None
        self._error: RequestError | None = None

    def __repr__(self) -> str:
        return f"<AwaitedBody {self.received()} of {self._told} bytes>"

    def __enter__(self) -> "AwaitedBody":
        self._uploads.add(self, self._told)
        self._task = asyncio.current_task()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.complete()
        self._uploads.release(self._told + self._more)
        task, self._task = self._task, None  # The task's error knows the frames that know this, and would not be freed.
        refused, self._error = self._error, None
        try:
            if refused and isinstance(error, asyncio.CancelledError) and task and not task.uncancel():
                raise refused from None
        finally:
            del refused, error, traceback  # They would know this frame, and be left to the garbage collector.

    def received(self) -> int:
        return self._received() if self._received else self._parts

    def refuse(self, error: RequestError) -> None:
        """Raise this where the task waits."""
        self.complete()
        if self._task:
            self._error = error
            self._task.cancel()

    def add_received(self, nbytes: int) -> None:
        """So much more of it came. Raises as `Uploads.take` does, if more came than was told."""
        self._parts += nbytes
        if self._parts > self._told + self._more:
            self.reserve_more(self._parts - self._told - self._more)

    def reserve_more(self, nbytes: int) -> None:
        """It takes so much more memory. Raises as `Uploads.take` does."""
        self._uploads.reserve(nbytes, self._told + self._more)
        self._more += nbytes

    def complete(self) -> None:
        """Nothing more of it comes; what it takes is counted until the end of the `with`."""
        self._uploads.forget(self)
