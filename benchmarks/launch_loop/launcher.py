"""The launch loop of one link: what Python sets up before, starts, stops, and takes over after."""

import ctypes
import marshal
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from engines.signature import Shape, Signature, align
from server.link.messages import Failure, ModelKey
from server.link.ring import Descriptors, Link
from server.workers.cancellations import WITHDRAWN

from . import native
from .native import Copies, Entry, Latencies, Loop

_DISABLE_TIMING, _BLOCKING_SYNC = 2, 1
_PORTABLE = 1
_EXPIRED = Failure("expired", "Request timeout expired before it began")


class Recipe(NamedTuple):
    """How an executor runs inferences of one set of shapes: its graph, the ring of copy tables that the graph reads, and the
    addresses on the device of inputs and outputs. All are integers that the driver knows.
    """

    graph: int
    stream: int
    context: int
    tables: int
    length: int
    device: tuple[int, ...]
    outputs: tuple[Shape, ...]


class Options(NamedTuple):
    """How a loop waits. Times are in nanoseconds; `bundle` is as in server/workers/worker.py."""

    wait: int = native.SPIN
    signal: int = native.EVENT
    ahead: int = native.MOST_AHEAD
    spin: int = 50_000
    idle_spin: int = 0
    bundle: int = 50_000
    margin: int = 40_000


class Counts(NamedTuple):
    """Since the loop was started: why it returned, the driver's error, launches, refused tickets, sleeps, queries."""

    why: int
    error: int
    launched: int
    refused: int
    sleeps: int
    queries: int


def ticket_body(model: ModelKey, shapes: tuple[Shape, ...]) -> bytes:
    """What a ticket for these shapes says, as the HTTP side writes it."""
    return marshal.dumps((model, shapes))


class Launcher:
    """The loop of one link for one executor. `cuda` is libcuda or the fake; `attach` is called on threads that use it."""

    def __init__(self, cuda: Any, link: Link, descriptors: Descriptors, attach: Callable[[], None]) -> None:
        self._cuda = cuda
        self._library = native.open_loop_library()
        self._link = link
        self._attach = attach
        self._kept: list[Any] = []
        self._entries: list[Entry] = []
        self._copies = Copies()
        self._cancelled = np.zeros(descriptors.slots, np.uint64)
        self._loop = Loop(link=native.view_link(link.arena, descriptors), cuda=native.cuda_functions(cuda))
        self._thread: Thread | None = None
        self._why = 0
        attach()
        self._events = {flags: self._make_events(flags) for flags in (_DISABLE_TIMING, _DISABLE_TIMING | _BLOCKING_SYNC)}
        self._words = ctypes.c_void_p()
        _succeed(cuda.cuMemHostAlloc(ctypes.byref(self._words), ctypes.c_size_t(4096), _PORTABLE))
        self._refusals()

    def register(self, body: bytes, signature: Signature, shapes: Sequence[Shape], recipe: Recipe) -> int:
        """Launch tickets with this body as the recipe says; returns the bytes that a slot needs."""
        entry = Entry(body=body, length=len(body), graph=recipe.graph, inputs=len(shapes), rows=len(recipe.device))
        place, extents = 0, []
        sizes = [spec.nbytes(shape) for spec, shape in zip(signature.inputs, shapes, strict=True)]
        sizes += [spec.nbytes(shape) for spec, shape in zip(signature.outputs, recipe.outputs, strict=True)]
        for index, (size, device) in enumerate(zip(sizes, recipe.device, strict=True)):
            entry.offset[index], entry.device[index], entry.nbytes[index] = place, device, size
            if index >= len(shapes):
                extents.append((recipe.outputs[index - len(shapes)], place, size))
            entry.needed = place + size
            place = align(place + size)
        entry.done = done = marshal.dumps((tuple(extents), None))
        entry.done_length = len(done)
        self._copies.tables, self._copies.length, self._copies.rows = recipe.tables, recipe.length, len(recipe.device)
        entry.copies = ctypes.pointer(self._copies)
        self._entries.append(entry)
        self._loop.context, self._loop.stream = recipe.context, recipe.stream
        return place

    def start(self, counted: int, options: Options) -> None:
        """Serve the link, from where its ends in Python stopped. `counted` inferences have used the copy tables so far."""
        loop, tickets, completions = self._loop, self._link.tickets, self._link.completions
        self._configure(counted, options)
        loop.stop = 0
        loop.read, loop.unread = tickets._read_count, tickets._unread_count
        loop.put = completions._put_count
        self._thread = Thread(target=self._run, name="launch loop", daemon=True)
        self._thread.start()

    def cancel(self, slot: int, serial: int) -> None:
        """Have this ticket refused if it was not launched yet. Any thread."""
        self._cancelled[slot] = serial

    def stop(self) -> Counts:
        """Start nothing more, and wait for what is in flight. Blocks."""
        self._loop.stop = 1
        self._link.tickets.wake()
        return self.wait()

    def wait(self) -> Counts:
        """Wait until the loop returns, and hand the link back to its ends in Python. Blocks."""
        assert self._thread
        self._thread.join()
        loop, tickets, completions = self._loop, self._link.tickets, self._link.completions
        tickets._read_count, tickets._unread_count = loop.read, loop.unread
        completions._put_count = completions._rung_count = loop.put
        return Counts(self._why, loop.error, loop.launched, loop.refused, loop.sleeps, loop.queries)

    @property
    def counted(self) -> int:
        """How many inferences have used the copy tables."""
        return int(self._copies.counted)

    def bare(self, counted: int, options: Options, capacity: int, seconds: float) -> tuple[int, Latencies]:
        """The engine without a link, back to back: how many works ended in time, and percentiles in microseconds. Blocks."""
        self._configure(counted, options)
        latencies = np.zeros(2_000_000, np.int64)
        count = self._library.loop_bare(
            ctypes.byref(self._loop),
            ctypes.byref(self._loop.entries[0]),
            capacity,
            int(seconds * 1e9),
            native.address(latencies.data),
            latencies.size,
        )
        _succeed(self._loop.error)
        return count, native.percentiles(latencies[: min(count, latencies.size)])

    def close(self) -> None:
        """Free events and words; the loop must not run."""
        self._attach()
        for events in self._events.values():
            for event in events:
                _succeed(self._cuda.cuEventDestroy_v2(event))
        _succeed(self._cuda.cuMemFreeHost(self._words))

    def _configure(self, counted: int, options: Options) -> None:
        loop = self._loop
        entries = (Entry * len(self._entries))(*self._entries)
        self._kept = [entries]
        loop.entries, loop.entry_count = entries, len(entries)
        self._copies.counted = counted
        loop.ahead, loop.wait, loop.signal = options.ahead, options.wait, options.signal
        loop.spin, loop.idle_spin, loop.bundle, loop.margin = options.spin, options.idle_spin, options.bundle, options.margin
        flags = _DISABLE_TIMING | (_BLOCKING_SYNC if options.wait == native.BLOCK else 0)
        for index, event in enumerate(self._events[flags]):
            loop.events[index] = event.value
        loop.words = loop.device_words = self._words.value

    def _run(self) -> None:
        self._why = self._library.loop_run(ctypes.byref(self._loop))

    def _make_events(self, flags: int) -> list[ctypes.c_void_p]:
        events = [ctypes.c_void_p() for _ in range(native.MOST_AHEAD)]
        for event in events:
            _succeed(self._cuda.cuEventCreate(ctypes.byref(event), flags))
        return events

    def _refusals(self) -> None:
        expired, cancelled = (marshal.dumps(((), tuple(failure))) for failure in (_EXPIRED, WITHDRAWN))
        self._loop.expired, self._loop.expired_length = expired, len(expired)
        self._loop.cancelled, self._loop.cancelled_length = cancelled, len(cancelled)
        self._loop.cancelled_serials = native.address(self._cancelled.data)


def _succeed(result: int) -> None:
    if result:
        raise RuntimeError(f"the driver returned CUresult {result}")
