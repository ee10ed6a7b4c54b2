"""Simulated streams: operations that run when a thread waits for them, events between them, captures and graphs of them.

Nothing runs before it is waited for, so code that reads or overwrites memory too early gets wrong results every time.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any

from .errors import CUDAError, Misuse


class Operation:
    """An operation on a stream or in a graph. The object it is `of` counts it in `in_flight` from when it is queued until it
    ran.
    """

    def __init__(self, body: Callable[[], None], of: Any = None) -> None:
        self._body = body
        self._of = of

    def queue(self, stream: "Stream") -> "Operation":
        if self._of is not None:
            self._of.in_flight += 1
            self._of._on(stream)
        return self

    def __call__(self) -> None:
        try:
            self._body()
        finally:
            if self._of is not None:
                self._of.in_flight -= 1


class Awaiting(Operation):
    """Lets the operations after it wait for a position in another stream, which is reached when `mark` is."""

    def __init__(self, source: "Stream", mark: list[bool]) -> None:
        super().__init__(self.reach)
        self.source = source
        self.mark = mark

    def reach(self) -> None:
        self.source.run(until=lambda: self.mark[0])


class Capture:
    """The operations that were submitted to a stream since its capture began, unless the capture was invalidated."""

    def __init__(self, thread_local: bool) -> None:
        self.thread_local = thread_local
        self.thread = get_ident()
        self.operations: list[Operation] = []
        self.spoilt = False

    def take(self, operation: Operation) -> None:
        if self.thread != get_ident():
            raise Misuse("what one thread submitted went into the graph that another one captured")
        if self.spoilt:
            raise CUDAError("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: by an earlier call")
        self.operations.append(operation)

    def spoil(self) -> CUDAError:
        self.spoilt = True
        return CUDAError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: not while a stream is captured")


@dataclass(eq=False)
class Stream:
    """A queue. Any thread that waits runs the operations at its head, one at a time."""

    context: Any
    handle: int
    priority: int = 0
    pending: deque[Operation] = field(default_factory=deque)
    closed: bool = False
    capture: Capture | None = None
    turn: Any = field(default_factory=RLock)
    submitted: int = 0
    follows: dict[int, int] = field(default_factory=dict)
    """How much of each other stream, by its id, has run before what is submitted now."""

    @property
    def clock(self) -> dict[int, int]:
        """How much of every stream has run once everything that was submitted here has."""
        return {**self.follows, id(self): self.submitted}

    def put(self, operation: Operation) -> None:
        self.submitted += 1
        if self.closed:
            raise Misuse("work for a destroyed stream")
        if self.capture:
            self.capture.take(operation)
        else:
            self.pending.append(operation.queue(self))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Streams may wait for each other: no thread keeps the turn of one while it runs another that is awaited there."""
        reached: Awaiting | None = None
        while awaiting := self._run(until, reached):
            awaiting.reach()
            reached = awaiting

    def _run(self, until: Callable[[], bool], reached: Awaiting | None) -> Awaiting | None:
        """Run operations up to one that awaits a position elsewhere, if it was not `reached` as far as it can be."""
        with self.turn:
            while self.pending and not until():
                head = self.pending[0]
                if isinstance(head, Awaiting) and head is not reached and not head.mark[0]:
                    return head
                self.pending.popleft()()
        return None

    def wait(self) -> None:
        if self.closed:
            raise Misuse("a destroyed stream was waited for")
        if self.capture:
            raise self.capture.spoil()
        self.run()


@dataclass(eq=False)
class Position:
    """The position in a stream of an object's last operation, and how many of its operations are in flight."""

    stream: Stream | None = None
    position: int = 0
    in_flight: int = 0

    def _on(self, stream: Stream) -> None:
        """It was submitted to this stream."""
        self.stream, self.position = stream, stream.submitted

    def precedes(self, stream: Stream) -> bool:
        """Whether work that is submitted to this stream now runs after that position."""
        return stream.clock.get(id(self.stream), 0) >= self.position


@dataclass(eq=False)
class Event:
    """The position in a stream where it was recorded last; one that was never recorded is done."""

    stream: Stream | None = None
    mark: list[bool] = field(default_factory=lambda: [True])
    clock: dict[int, int] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.mark[0]

    def record(self, stream: Stream) -> None:
        mark = [False]
        stream.put(Operation(lambda: mark.__setitem__(0, True)))
        self.stream, self.mark, self.clock = stream, mark, stream.clock

    def wait(self) -> None:
        mark = self.mark
        if self.stream and not mark[0]:
            self.stream.run(until=lambda: mark[0])

    def hold(self, stream: Stream) -> None:
        """Let work that is submitted to this stream from now on wait for the position recorded."""
        source, mark = self.stream, self.mark
        for each, position in self.clock.items():
            stream.follows[each] = max(position, stream.follows.get(each, 0))
        if source and not mark[0]:
            stream.put(Awaiting(source, mark))


class Graph:
    """Operations that were captured on a green context's stream; an executable graph counts its launches in flight, and takes
    memory of the device.
    """

    def __init__(self, context: Any, operations: Iterable[Operation], handle: int, nbytes: int = 0) -> None:
        self.context = context
        self.operations = list(operations)
        self.handle = handle
        self.nbytes = nbytes
        self.in_flight = 0

    def __int__(self) -> int:
        return self.handle

    def launch(self, stream: Stream) -> None:
        """A graph's kernels run on the context it was captured in, also if it is launched on another context's stream."""
        if stream.context is not self.context:
            raise Misuse("a graph was launched on a stream of another context than it was captured on")
        stream.put(Operation(self._run, of=self))
        for operation in self.operations:
            operation.queue(stream)

    def _on(self, stream: Stream) -> None:
        """It may be launched on several streams at once."""

    def _run(self) -> None:
        for operation in self.operations:
            operation()
