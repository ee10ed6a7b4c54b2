"""A thread that runs calls of one model, one at a time, and can stop one that takes too long.

The calls run code of the model repository or of libraries. They hold the interpreter of the tenant's own HTTP process, and
never that of another tenant's.
"""

import asyncio
import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from ..errors import BadRequest, DeadlineExceeded, Failed, QueueFull, RequestError, Unavailable

log = logging.getLogger("greenlane.functions")

GRACE = 5.0
"""Seconds after which a call that was stopped and goes on makes its model unavailable, until it ends."""

_TRIES, _PAUSE = 100, 0.001
"""How often a call is found in Python's logging before it is stopped there, and seconds between."""
_MOST_TEXT = 2000
"""Characters of a function's ValueError that a client is sent."""

OnEnd = Callable[[object], None]
"""Called with what a call returned, or with the error that it ended with."""


class _Stopped(BaseException):
    """Raised in the thread by `FunctionThread` to end a call."""


class Call:
    """One call. `what` names it in errors, such as "model 'm': preprocess", and `setting` the key of its limit, if any."""

    __slots__ = ("began", "cancelled", "limit", "on_end", "setting", "stopped", "what", "work")

    def __init__(self, what: str, work: Callable[[], object], on_end: OnEnd, limit: float, setting: str) -> None:
        self.what = what
        self.work = work
        self.on_end: OnEnd | None = on_end
        self.limit = limit
        self.setting = setting
        self.began = 0.0
        self.cancelled = self.stopped = False


class FunctionThread:
    """Belongs to the event loop that makes it, except what `_run` calls. `name` is the model's.

    At most `most` calls wait, for `setting`, a configuration key. One that runs for longer than `limit` seconds, for
    `limit_key`, ends with DeadlineExceeded; 0: no limit. If it does not end then, as code in C may not, others are refused
    with Unavailable from `GRACE` seconds later on, until it has ended.
    """

    def __init__(self, name: str, most: int, setting: str, limit: float, limit_key: str) -> None:
        self._name = name
        self._most = most
        self._setting = setting
        self._limit = limit
        self._limit_key = limit_key
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._open: set[Call] = set()
        self._lock = threading.Lock()
        self._running: Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stuck = ""
        self._thread = threading.Thread(target=self._run, name=f"model {name}"[:15], daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<FunctionThread {self._name}, {len(self._open)} calls{', stuck' if self._stuck else ''}>"

    def call(self, what: str, work: Callable[[], object], on_end: OnEnd, limit: float | None = None) -> Call:
        """Run `work` on the thread; `on_end` is called later, once, unless it is cancelled before.

        `limit` replaces that of all calls. Raises Unavailable if the thread is stuck.
        """
        if self._stuck:
            raise Unavailable(self._stuck)
        setting = f" ({self._limit_key})" if limit is None else ""
        call = Call(what, work, on_end, self._limit if limit is None else limit, setting)
        self._open.add(call)
        self._calls.put(call)
        if self._timer is None and call.limit:
            self._timer = self._loop.call_later(call.limit, self._check)
        return call

    async def result_of(self, what: str, work: Callable[[], object], limit: float | None = None) -> Any:
        """What `work` returns, as for `call`. Raises the error that it ended with, or that it returned."""
        ended: asyncio.Future[object] = self._loop.create_future()

        def on_end(end: object) -> None:
            if not ended.done():
                ended.set_result(end)

        call = self.call(what, work, on_end, limit)
        try:
            end = await ended
        except asyncio.CancelledError:
            self.cancel(call)
            raise
        if isinstance(end, Exception):
            raise end
        return end

    def check_room(self) -> None:
        """Raise QueueFull if as many calls wait as may."""
        if len(self._open) > self._most:
            most = f"{self._most} requests may wait for its functions, and as many do ({self._setting})"
            raise QueueFull(f"Exceeds maximum queue size: model {self._name!r}: {most}")

    def cancel(self, call: Call) -> None:
        """Do not report the end of this call. One that waits is not run; one that runs goes on."""
        call.on_end = None
        with self._lock:
            if self._running is not call:
                self._open.discard(call)
            self._drop(call)

    def close(self) -> None:
        """End the thread once what was asked for has run; one that was cancelled is stopped in time, too."""
        self._calls.put(None)
        if self._timer and not self._open:
            self._timer.cancel()

    def _drop(self, call: Call) -> None:
        """Do not run this call, and free what it works on at once: the queue keeps it until its turn. With `_lock` held."""
        call.cancelled = True
        if self._running is not call:
            call.work = _nothing

    def _check(self) -> None:
        """Stop a call that has run for as long as it may."""
        self._timer = None
        left = self._limit
        with self._lock:
            if (call := self._running) is not None and call.limit:
                left = call.began + call.limit - time.monotonic()
                if left <= 0:
                    call.stopped = True
        if call is None or not call.stopped:
            self._timer = self._loop.call_later(max(left, 0.001), self._check) if self._open else None
            return
        self._stop(call, _TRIES)
        text = f"{call.what} ran for {call.limit:g} s and was stopped{call.setting}"
        log.error("%s", text)
        self._timer = self._loop.call_later(GRACE, self._check_stopped, call)
        self._end(call, DeadlineExceeded(text))

    def _stop(self, call: Call, tries: int) -> None:
        """Raise `_Stopped` in the thread if this call still runs. A while later if it logs something just then: an exception in
        the wrong place there would leave a handler locked, and the whole process would wait for that with its next line.
        """
        with self._lock:
            if self._running is not call:
                return
            if not tries or not _logs(self._thread):
                _raise_in(self._thread, _Stopped)
                return
        self._loop.call_later(_PAUSE, self._stop, call, tries - 1)

    def _check_stopped(self, call: Call) -> None:
        """Refuse requests while a call that was stopped goes on all the same."""
        if self._running is not call:
            self._check()
            return
        self._timer = None
        self._stuck = f"{call.what} has been running for more than {call.limit:g} s and cannot be stopped{call.setting}"
        log.error("%s; requests for the model are refused until it ends", self._stuck)
        for each in list(self._open):
            with self._lock:
                self._drop(each)
            self._end(each, Unavailable(self._stuck))

    def _end(self, call: Call, outcome: object) -> None:
        self._open.discard(call)
        on_end, call.on_end = call.on_end, None
        if on_end:
            on_end(outcome)

    def _on_ended(self, call: Call, outcome: object) -> None:
        """The thread has ended this call."""
        if self._stuck and call.stopped:
            self._stuck = ""
            log.warning("%s has ended; requests for the model are taken again", call.what)
        self._end(call, outcome)
        if self._timer and (call.stopped or not self._open):
            self._timer.cancel()
            self._timer = None
        if call.stopped and self._open:
            self._check()

    def _run(self) -> None:
        """The thread's loop."""
        while (call := self._calls.get()) is not None:
            with self._lock:
                if call.cancelled:
                    continue
                call.began = time.monotonic()
                self._running = call
            outcome = self._outcome(call)
            with suppress(RuntimeError):  # The event loop is closed.
                self._loop.call_soon_threadsafe(self._on_ended, call, outcome)
            del call, outcome

    def _outcome(self, call: Call) -> object:
        """What the call returned, or an error; `_Stopped` may be raised anywhere in here until `_running` is None."""
        try:
            outcome = _result(call)
            with self._lock:
                self._running = None
            for _ in range(8 if call.stopped else 0):
                time.sleep(0)  # What `_check` raised comes here at the latest.
        except _Stopped:
            self._running = None
            outcome = None
        return outcome


def _nothing() -> None:
    """The work of a call that is not run."""


def _result(call: Call) -> object:
    try:
        return call.work()
    except _Stopped:
        raise
    except RequestError as error:
        return error
    except ValueError as error:
        return BadRequest(text_of(error) or f"{call.what} raised {type(error).__name__}")
    except BaseException as error:
        log.error("%s raised %s", call.what, type(error).__name__, exc_info=error)
        return Failed(f"{call.what} raised {type(error).__name__}")


def text_of(error: BaseException) -> str:
    """What an error says, as a text that can be sent: of any class, with any characters, of any length."""
    try:
        text = str(error)
    except Exception:
        return ""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _logs(thread: threading.Thread) -> bool:
    """Whether the call that this thread runs is in Python's logging."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame and (module := frame.f_globals.get("__name__")) != __name__:
        if module == logging.__name__:
            return True
        frame = frame.f_back
    return False


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Raise an exception in a thread, at its next step in Python."""
    raise_in: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))
