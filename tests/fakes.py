"""A device, partitions and engines without hardware: they keep the promises of partitions.base and engines.base to the
letter, treat what the seam calls a bug as one, and go wrong when their script says so.

Nothing here sleeps or starts a thread, but for `FakePartition.run`, which promises a fresh one. Work runs where it is
waited for, in the stream's order. To stop anything at a point of your choice:

    script = Script()
    engine = FakeEngine(signature, script)
    gate = script.hold("run")                # works do not end ...
    ...
    gate.wait_for_arrival()                  # ... and one has been begun,
    gate.open()                              # until now
    script.fail("carve", nth=2)              # the second call from now raises PartitionError
    prepared = engine.prepares((3,))         # executors compile for inputs of this shape, until prepared.set_result(None)

Points: carve, attach, locate, strain, pin (FakeDevice's script); bind, enqueue, proceed, run (FakeEngine's; what `run` raises
comes out of `wait`).
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from threading import Condition, Lock, Thread, current_thread
from typing import Any, TypeVar
from weakref import WeakSet, ref

import numpy as np

from engines import Cancelled, ExecutionFailed, ModelRefused, Room, RuntimeSettings, Signature, Tensor
from engines.base import NO_ROOM, check_tensors
from engines.memory import view
from engines.settings import overridden
from engines.signature import align
from partitions import DeviceUnavailable, Partition, PartitionError
from partitions.base import Bandwidth, Held
from partitions.deposit import Deposit
from partitions.strain import Before, Strain, Strained, check, unheld

T = TypeVar("T")
Compute = Callable[[Sequence[bytes]], Sequence[bytes]]
ComputeParts = Callable[[Sequence[bytes]], Iterator[Sequence[bytes]]]

PATIENCE = 30.0
"""Seconds after which a gate that was never opened fails the test instead of hanging it."""

ERRORS: dict[str, type[Exception]] = {
    "carve": PartitionError,
    "attach": PartitionError,
    "locate": PartitionError,
    "strain": PartitionError,
    "pin": PartitionError,
    "bind": ModelRefused,
    "enqueue": ExecutionFailed,
    "proceed": ExecutionFailed,
    "run": ExecutionFailed,
}


class Gate:
    """Holds the calls that reach it until it is opened."""

    def __init__(self, changed: Condition) -> None:
        self.arrived = 0
        self._changed = changed
        self._opened = False

    def __repr__(self) -> str:
        return f"<Gate {'open' if self._opened else 'shut'}, {self.arrived} arrived>"

    def open(self) -> None:
        """Let all calls through, now and later."""
        with self._changed:
            self._opened = True
            self._changed.notify_all()

    def wait_for_arrival(self, count: int = 1) -> None:
        """Block until this many calls have reached the gate."""
        self._wait(lambda: self.arrived >= count, f"{count} arrivals")

    def hold(self, given_up: Callable[[], bool]) -> None:
        """Block until the gate is opened or the caller gives up."""
        with self._changed:
            self.arrived += 1
            self._changed.notify_all()
        self._wait(lambda: self._opened or given_up(), "a call of open()")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, PATIENCE):
                raise TimeoutError(f"{self!r} waited {PATIENCE:g} s for {what}")


class Script:
    """Scripted failures and gates, by point; and how often each point was reached."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self._changed = Condition()
        self._gates: dict[str, Gate] = {}
        self._failures: dict[tuple[str, int], Exception] = {}

    def __repr__(self) -> str:
        return f"<Script {dict(self.reached)}>"

    def fail(self, point: str, nth: int = 1, error: Exception | None = None) -> None:
        """Make the n-th call from now that reaches this point raise `error`, by default one that such a call may raise."""
        self._failures[point, self.reached[point] + nth] = error or ERRORS[point](f"scripted to fail at {point}")

    def mend(self) -> None:
        """Let nothing fail any more that has not failed yet."""
        self._failures.clear()

    def hold(self, point: str) -> Gate:
        """Stop every later call at this point until the gate that is returned is opened."""
        if point == "enqueue":
            raise ValueError("enqueue never waits; hold its work at 'run'")
        self._gates[point] = Gate(self._changed)
        return self._gates[point]

    def wait_for(self, point: str, count: int) -> None:
        """Block until this point was reached so many times, by calls that were not stopped there."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.reached[point] >= count, PATIENCE):
                raise TimeoutError(f"{point} was reached {self.reached[point]} times in {PATIENCE:g} s; expected {count}")

    def reach(self, point: str, given_up: Callable[[], bool] = lambda: False) -> None:
        """For the fakes: count a call at this point, wait at its gate, and raise its scripted failure."""
        with self._changed:
            self.reached[point] += 1
            failure = self._failures.pop((point, self.reached[point]), None)
            self._changed.notify_all()
        if gate := self._gates.get(point):
            gate.hold(given_up)
        if failure:
            raise failure

    def look_up(self) -> None:
        """For the fakes: have the calls at gates check again whether to give up."""
        with self._changed:
            self._changed.notify_all()


class FakeStream:
    """Works that end in order, each run by the first thread that waits for it or for a later one; `ran` counts them."""

    def __init__(self) -> None:
        self.works: deque[FakeWork] = deque()
        self.ran = 0
        self._turn = Lock()

    def __repr__(self) -> str:
        return f"<FakeStream {len(self.works)} in flight>"

    def run_until(self, last: "FakeWork") -> None:
        """Block until this work has ended."""
        with self._turn:
            while not last.ended:
                self.ran += 1
                self.works[0].run()
                self.works.popleft()


class FakePartition:
    """Granules that exist only here; see `partitions.base.Partition`. Remembers the threads that were attached to it."""

    def __init__(self, device: "FakeDevice", granules: Sequence[int], lent: Sequence[int] = ()) -> None:
        self.device = device
        self.granules = tuple(granules)
        self.lent = tuple(lent)
        self.stream = FakeStream()
        self.threads: list[Thread] = []
        self.executors: WeakSet[FakeExecutor] = WeakSet()
        """Those bound here: one that is collected counts as closed."""
        self.closed = False

    def __repr__(self) -> str:
        lent = f", {list(self.lent)} lent" if self.lent else ""
        return f"<FakePartition {list(self.granules)}{lent}{', closed' if self.closed else ''}>"

    @property
    def size(self) -> int:
        return sum(self.device.granules[granule] for granule in self.granules)

    @property
    def host_cores(self) -> frozenset[int] | None:
        return self._units(set(self.granules) - set(self.lent)) if self.device.on_host_cores else None

    @property
    def units(self) -> frozenset[int]:
        """The units that the granules hold."""
        return self._units(self.granules)

    def _units(self, granules: Iterable[int]) -> frozenset[int]:
        ends = [0, *accumulate(self.device.granules)]
        return frozenset(unit for granule in granules for unit in range(ends[granule], ends[granule + 1]))

    @property
    def idle(self) -> bool:
        return not self.stream.works

    def attach(self) -> None:
        if self.closed:
            raise PartitionError(f"{self!r} cannot take another thread")
        self.device.script.reach("attach")
        self.threads.append(current_thread())

    def run(self, function: Callable[[], T]) -> T:
        result: Future[T] = Future()

        def body() -> None:
            try:
                self.attach()
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        thread = Thread(target=body, name=repr(self))
        thread.start()
        thread.join()
        return result.result()

    def locate(self) -> frozenset[int]:
        self.device.script.reach("locate")
        return self.run(lambda: self.device.lie(self) if self.device.lie else self.units)

    def hold(self, seconds: float) -> Held:
        self.device.script.reach("hold")
        return self.run(lambda: Held(self.size, 0, round(seconds * 1e9)))

    def strain(self, kind: Strain, seconds: float, before: Before = unheld) -> Strained:
        """A gigabyte a second by each unit, in two passes; none takes time."""
        check(kind, seconds)
        self.device.script.reach("strain")

        def passes() -> float:
            return sum((before(round(self.size * seconds * 5e8)) or self).size / 2 for _ in range(2))

        return self.run(lambda: Strained(round(passes() * seconds * 1e9), seconds))

    def close(self) -> None:
        """Raises RuntimeError with work in flight or before its executors: the interface calls both a bug."""
        if self.stream.works:
            raise RuntimeError(f"{self!r} was closed with work in flight: {list(self.stream.works)}")
        if left := [executor for executor in self.executors if not executor.closed]:
            raise RuntimeError(f"{self!r} was closed before {left}")
        self.closed = True


class FakePin:
    """Host memory that was pinned."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.closed = False

    def __repr__(self) -> str:
        return f"<FakePin {self.nbytes} bytes{', closed' if self.closed else ''}>"

    def close(self) -> None:
        self.closed = True


class FakeLoads:
    """Notes what it is asked for, and refuses to open with the reason `unavailable`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.unavailable = ""
        self.seconds = 0.0

    def open(self) -> None:
        self.asked.append("open")
        if self.unavailable:
            raise DeviceUnavailable(self.unavailable)

    @contextmanager
    def background(self) -> Iterator[None]:
        self.asked.append("background")
        yield
        self.asked.append("loaded")

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        self.asked.append("hurrying")
        yield

    def hurry(self) -> None:
        self.asked.append("hurry")

    def waited(self) -> float:
        return self.seconds


class FakeDevice:
    """Granules of these sizes; see `partitions.base.Device`. `lie`, where set, is what `locate` returns in place of the units.

    `on_host_cores` is whether its units are cores of the host; no thread's affinity is set.
    """

    kind = "fake"
    unit = "unit"

    def __init__(self, granules: Sequence[int] = (1, 1, 1, 1), script: Script | None = None) -> None:
        self.granules = tuple(granules)
        self.script = script or Script()
        self.on_host_cores = False
        self.moves: Bandwidth | None = None
        self.loads = FakeLoads()
        self.lie: Callable[[FakePartition], frozenset[int]] | None = None
        self.partitions: list[FakePartition] = []
        self.pins: list[FakePin] = []
        self.deposit: Deposit | None = None
        self.closed = False

    def __repr__(self) -> str:
        return f"<FakeDevice {len(self.granules)} granules, {len(self.open)} partitions{', closed' if self.closed else ''}>"

    @property
    def open(self) -> list[FakePartition]:
        """The partitions that were carved and not closed yet, in that order."""
        return [partition for partition in self.partitions if not partition.closed]

    def describe(self) -> str:
        return f"a fake, {len(self.granules)} granules"

    def carve(self, granules: Sequence[int], lent: Sequence[int] = ()) -> FakePartition:
        self.script.reach("carve")
        known = all(0 <= granule < len(self.granules) for granule in granules)
        if self.closed or not granules or not known or len(set(granules)) != len(granules):
            raise PartitionError(f"cannot carve granules {list(granules)} from {self!r}")
        if not set(lent) < set(granules) or len(set(lent)) != len(lent):
            raise PartitionError(f"cannot carve granules {list(granules)} from {self!r} with {list(lent)} lent")
        self.partitions.append(FakePartition(self, sorted(granules), sorted(lent)))
        return self.partitions[-1]

    address = ""
    uuid = ""
    shared = False

    def memory(self) -> int | None:
        return None

    def bandwidth(self) -> Bandwidth | None:
        return self.moves

    def energy(self) -> int | None:
        return None

    def share(self, deposit: Deposit) -> None:
        self.deposit = deposit

    def pin(self, address: int, nbytes: int) -> "FakePin":
        self.script.reach("pin")
        self.pins.append(FakePin(address, nbytes))
        return self.pins[-1]

    def close(self) -> None:
        """Raises RuntimeError while partitions are open: the interface calls that a bug."""
        if self.open:
            raise RuntimeError(f"{self!r} was closed before {self.open}")
        self.closed = True


class FakeWork:
    """One computation; see `engines.base.Work`. It ends when it is waited for, its gate is open and earlier works ended.

    `parts` are the parts of its answer that follow, if it has parts and is not the first.
    """

    def __init__(
        self, executor: "FakeExecutor", inputs: Sequence[Tensor], room: Room, parts: Iterator[Sequence[bytes]] | None = None
    ) -> None:
        self.executor = executor
        self.parts = parts
        self.ended = False
        self.cancelled = False
        self._call = (inputs, room)
        self._outputs: tuple[Tensor, ...] = ()
        self._error: Exception | None = None

    def __repr__(self) -> str:
        return f"<FakeWork {'failed' if self._error else 'done' if self.ended else 'waiting'}>"

    def wait(self) -> tuple[Tensor, ...]:
        self.executor.partition.stream.run_until(self)
        if self._error:
            raise self._error
        return self._outputs

    def cancel(self) -> None:
        self.cancelled = True
        self.executor.engine.script.look_up()

    def run(self) -> None:
        """For the stream: do the work and keep what comes of it."""
        try:
            self.executor.engine.script.reach("run", lambda: self.cancelled)
            if self.cancelled:
                raise Cancelled("cancelled")
            self._outputs = self._compute()
        except Exception as error:
            self._error, self.parts = error, None
        self.ended = True

    def _compute(self) -> tuple[Tensor, ...]:
        engine = self.executor.engine
        if not engine.signature.in_parts:
            return engine.answer(*self._call)
        self.parts = self.parts or engine.begin(self._call[0])
        return engine.next_part(self.parts, *self._call)

    def take_parts(self) -> Iterator[Sequence[bytes]]:
        """For `proceed`: the parts that follow. Raises ExecutionFailed if the answer has ended, or gone on already."""
        parts, self.parts = self.parts, None
        if parts is None or not self._outputs:
            raise ExecutionFailed(f"{self!r} has nothing after it")
        return parts


class FakeExecutor:
    """An engine on a partition; see `engines.base.Executor`. Works in flight hold it; collected, it counts as closed.

    It raises RuntimeError for an inference while another executor that it takes turns with has one in flight.
    """

    def __init__(self, engine: "FakeEngine", partition: FakePartition) -> None:
        self.engine = engine
        self.partition = partition
        self.closed = False
        self.alternates: WeakSet[FakeExecutor] = WeakSet([self])
        """Those that take turns, itself included."""
        self._is_alternate = False

    def __repr__(self) -> str:
        return f"<FakeExecutor of {self.engine!r} on {self.partition!r}{', closed' if self.closed else ''}>"

    def preparing(self, shapes: Sequence[tuple[int, ...]]) -> "Future[None] | None":
        """As `engines.Preparing`; the test prepares, by what `FakeEngine.prepares` gave it."""
        prepared = self.engine.compiling.get(tuple(shapes))
        return None if prepared is None or _succeeded(prepared) else prepared

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> FakeWork:
        if self.closed or self.partition.closed:
            raise RuntimeError(f"{self!r} was asked to work")
        self.engine.script.reach("enqueue")
        check_tensors(self.engine.signature, inputs)
        self.engine.signature.check([tensor.shape for tensor in inputs])
        prepared = self.engine.compiling.get(tuple([tensor.shape for tensor in inputs]))
        if prepared and not prepared.done():
            raise AssertionError(f"{self!r} would have to compile for {[tensor.shape for tensor in inputs]}")
        return self._put(FakeWork(self, tuple(inputs), room))

    def proceed(self, part: FakeWork, room: Room = NO_ROOM) -> FakeWork:
        """As `engines.base.Streaming`, for an engine that has parts."""
        if self.closed or self.partition.closed:
            raise RuntimeError(f"{self!r} was asked to work")
        self.engine.script.reach("proceed")
        return self._put(FakeWork(self, (), room, part.take_parts()))

    @property
    def works(self) -> list[FakeWork]:
        """Those in flight."""
        return [work for work in self.partition.stream.works if work.executor is self]

    def _put(self, work: FakeWork) -> FakeWork:
        if busy := [each for each in self.alternates if each is not self and each.works]:
            raise RuntimeError(f"{self!r} was asked to work out of its turn, while {busy} had work in flight")
        self.partition.stream.works.append(work)
        return work

    def rebind(self, partition: Partition) -> "FakeExecutor":
        executor = self.engine.bind(partition)
        return self._take_turns(executor) if len(self.alternates) > 1 else executor

    def alternate(self, partition: Partition) -> "FakeExecutor":
        executor = self._take_turns(self.engine.bind(partition))
        executor._is_alternate = True
        return executor

    def _take_turns(self, other: "FakeExecutor") -> "FakeExecutor":
        self.alternates.add(other)
        other.alternates = self.alternates
        return other

    def overriding(self, **changes: Any) -> AbstractContextManager[None]:
        """Nothing depends on settings."""
        if overridden(RuntimeSettings(), changes).graphs == "required":
            raise ModelRefused("graphs are required, but this is a fake")
        return nullcontext()

    def describe(self) -> Mapping[str, object]:
        """`FakeEngine.description`."""
        return {**self.engine.description, **({"adds": self.engine.adds} if self._is_alternate else {})}

    @property
    def memory(self) -> Mapping[str, int]:
        """`FakeEngine.executor_memory`."""
        return {} if self.closed else self.engine.executor_memory

    def close(self) -> None:
        """Raises RuntimeError with work in flight: the interface calls that a bug."""
        if self.works:
            raise RuntimeError(f"{self!r} was closed with work in flight")
        self.closed = True
        self.engine.keep(self)


class FakeEngine:
    """A model that gives what it takes: output n is input n, and those beyond the last input begin again at the first.

    `compute`, where given, makes other bytes of the inputs' bytes, one item an output; it may raise. `compute_parts`, where
    given, does so for each part of an answer, whose outputs must have known shapes. Remembers the inputs of
    every work that ran in `computed`, and its executors in `executors`: those that are referred to or closed, while one
    that was collected before it was closed is only counted, in `forgotten`. See `engines.base.Engine`.
    """

    platform = "fake_fake"
    by_shape = False

    def __init__(
        self,
        signature: Signature,
        script: Script | None = None,
        compute: Compute | None = None,
        compute_parts: ComputeParts | None = None,
    ) -> None:
        self.signature = replace(signature, in_parts=compute_parts is not None)
        self.script = script or Script()
        self.computed: list[tuple[bytes, ...]] = []
        self._bound: list[ref[FakeExecutor]] = []
        self._kept: set[FakeExecutor] = set()
        self.compiling: dict[tuple[tuple[int, ...], ...], Future[None]] = {}
        self.description: Mapping[str, object] = {"graphs": "none"}
        """What every executor says of itself."""
        self.memory: Mapping[str, int] = {"weights": 0}
        self.executor_memory: Mapping[str, int] = {"contexts": 0}
        """What every executor takes."""
        self.adds: Mapping[str, int] = {}
        """What an alternate takes that the executor does not share with it."""
        self.closed = False
        self.compute: Compute = compute or self._repeat
        self._compute_parts = compute_parts

    def __repr__(self) -> str:
        return f"<FakeEngine {self.signature!r}{', closed' if self.closed else ''}>"

    @property
    def executors(self) -> list[FakeExecutor]:
        """Those bound so far, in that order, without those forgotten."""
        return [executor for bound in self._bound if (executor := bound())]

    @property
    def forgotten(self) -> int:
        """How many executors were collected before they were closed."""
        return len(self._bound) - len(self.executors)

    def keep(self, executor: FakeExecutor) -> None:
        """For the executors: this one was closed, and stays in `executors`."""
        self._kept.add(executor)

    def bind(self, partition: Partition) -> FakeExecutor:
        self.script.reach("bind")
        if not isinstance(partition, FakePartition) or partition.closed or self.closed:
            raise ModelRefused(f"{self!r} cannot be bound to {partition!r}")
        executor = FakeExecutor(self, partition)
        self._bound.append(ref(executor))
        partition.executors.add(executor)
        return executor

    def close(self) -> None:
        """Raises RuntimeError while executors are open: the interface calls that a bug."""
        if left := [executor for executor in self.executors if not executor.closed]:
            raise RuntimeError(f"{self!r} was closed before {left}")
        self.closed = True

    def prepares(self, *shapes: tuple[int, ...]) -> "Future[None]":
        """From now on executors have to compile for inputs of these shapes, until the test ends the future that this returns.

        Where it ends with an error, each inference of the shapes fails with that, until this is called again.
        """
        self.compiling[shapes] = Future()
        return self.compiling[shapes]

    def answer(self, inputs: Sequence[Tensor], room: Room) -> tuple[Tensor, ...]:
        """For the works: compute, and put each output where the interface promises it."""
        given = tuple(bytes(view(tensor.address, tensor.nbytes)) for tensor in inputs)
        self.computed.append(given)
        try:
            results = self.compute(given)
        except Exception as error:
            raise ExecutionFailed(str(error)) from error
        return tuple(self._place(inputs, results, room))

    def begin(self, inputs: Sequence[Tensor]) -> Iterator[Sequence[bytes]]:
        """For the works: begin an answer in parts."""
        given = tuple(bytes(view(tensor.address, tensor.nbytes)) for tensor in inputs)
        self.computed.append(given)
        assert self._compute_parts
        return self._compute_parts(given)

    def next_part(self, parts: Iterator[Sequence[bytes]], inputs: Sequence[Tensor], room: Room) -> tuple[Tensor, ...]:
        """For the works: the next part, () at the end."""
        try:
            results = next(parts, ())
        except Exception as error:
            raise ExecutionFailed(str(error)) from error
        return tuple(self._place_known(results, room)) if results else ()

    def _place_known(self, results: Sequence[bytes], room: Room) -> Iterator[Tensor]:
        end = 0
        for shape, data in zip(self.signature.output_shapes({}), results, strict=True):
            assert shape
            fits = end + len(data) <= room.nbytes
            yield _written(shape, data, room.address + end if fits else None)
            end = align(end + len(data)) if fits else end

    def _repeat(self, inputs: Sequence[bytes]) -> list[bytes]:
        return [inputs[index % len(inputs)] for index in range(len(self.signature.outputs))]

    def _place(self, inputs: Sequence[Tensor], results: Sequence[bytes], room: Room) -> list[Tensor]:
        shapes = [tensor.shape for tensor in inputs]
        known = self.signature.output_shapes(self.signature.check(shapes))
        tensors, end = [], 0
        for index, (spec, shape, data) in enumerate(zip(self.signature.outputs, known, results, strict=True)):
            fits = shape is not None and spec.datatype.size > 0 and end + len(data) <= room.nbytes
            tensor = _written(shape or shapes[index % len(shapes)], data, room.address + end if fits else None)
            if spec.datatype.size and tensor.nbytes != math.prod(tensor.shape) * spec.datatype.size:
                raise AssertionError(f"{self!r} computed {tensor.nbytes} bytes for {spec.name!r} of shape {tensor.shape}")
            tensors.append(tensor)
            end = align(end + len(data)) if fits else end
        return tensors


def _succeeded(prepared: "Future[None]") -> bool:
    return prepared.done() and not prepared.cancelled() and prepared.exception() is None


def _written(shape: tuple[int, ...], data: bytes, address: int | None) -> Tensor:
    """The data at this address, or in memory of its own."""
    if address is None:
        own = np.frombuffer(bytearray(data), np.uint8)
        return Tensor(shape, own.ctypes.data, len(data), own)
    view(address, len(data))[:] = data
    return Tensor(shape, address, len(data))
