"""A model on a partition with memory to feed it from, and threads that drive it: what a tenant is when there is no HTTP."""

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from time import monotonic_ns, perf_counter, sleep
from typing import Any, TypeVar

import numpy as np

from engines import Engine, Executor, Room, Tensor, Work
from engines.signature import align
from greenlane.load.figures import Samples
from partitions import Device, Partition
from server.workers.gil_priority import GilPriorities, GilPriority
from server.workers.ticket_runner import BUNDLE

from .nets import Array

T = TypeVar("T")
AHEAD = 2
"""Works that an aggressor has on its stream at a time, so that it never runs empty."""


class Memory:
    """Host memory that the device reads and writes in place."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self.array = np.frombuffer(self._pages, np.uint8)
        self._pinned = device.pin(self.address, nbytes)

    def close(self) -> None:
        """Unpin it."""
        self._pinned.close()


class Seat:
    """An executor, `x` in its own memory AHEAD times, and room for the outputs. One thread at a time drives it."""

    def __init__(self, partition: Partition, executor: Executor, x: Array, memories: list[Memory]) -> None:
        self.partition = partition
        self.rows = x.shape[0]
        self.executor = executor
        self._memories = memories
        self._turn = 0
        self._asks = [_ask(memory, x) for memory in memories]

    def enqueue(self) -> Work:
        """Put one inference on the stream; not more than AHEAD may be unfinished."""
        self._turn = (self._turn + 1) % len(self._asks)
        return self.executor.enqueue(*self._asks[self._turn])

    def answer(self) -> Array:
        """Wait for the output; a new array. Blocks."""
        (tensor,) = self.on_thread(lambda: self.enqueue().wait())
        return np.array(tensor.array(self.executor.engine.signature.outputs[0].datatype), np.float32)

    def on_thread(self, function: Callable[[], T]) -> T:
        """Call it on a thread of the partition."""
        return self.partition.run(function)

    def close(self) -> None:
        """Nothing may be in flight."""
        self.executor.close()
        for memory in self._memories:
            memory.close()


def open_seat(device: Device, engine: Engine, partition: Partition, x: Array) -> Seat:
    """Bind the engine, make it memory, and run it, for kernels may be compiled for so many rows first.

    Blocks, on a GPU for seconds. Raises ModelRefused, PartitionError.
    """
    executor = engine.bind(partition)
    sizes = engine.signature.check([x.shape])
    room = engine.signature.output_bytes(sizes)
    seat = Seat(partition, executor, x, [Memory(device, align(x.nbytes) + room) for _ in range(AHEAD)])
    for _ in range(AHEAD):
        seat.answer()
    return seat


def at_rate(seat: Seat, rate: float, start: float, seconds: float, priorities: GilPriorities) -> Samples:
    """One inference after another, `rate` a second, the next one when it is due and the last has ended. Blocks.

    Latency is from the call to the outputs in host memory: copies, engine, copies. Towards the other threads it behaves as
    a worker of the server does.
    """
    samples, due, took = Samples(), 0.0, BUNDLE + 1
    with placed(priorities, lambda: perf_counter() >= start + due) as place:
        while due < seconds:
            place.end_enqueuing()
            place.start_waiting(False)
            sleep(max(0.0, start + due - perf_counter()))
            place.start_enqueuing(monotonic_ns())
            began = perf_counter()
            wait(seat.enqueue(), place, took)
            ended = perf_counter()
            took = int((ended - began) * 1e9)
            samples.add(began - start, took / 1e3, 200)
            due = max(due + 1 / rate, ended - start)
    return samples


def back_to_back(seat: Seat, start: float, until: float, priorities: GilPriorities) -> int:
    """As many inferences as there is time for, AHEAD of them at once. Blocks; returns how many ended before `until`."""
    sleep(max(0.0, start - perf_counter()))
    works: deque[Work] = deque(seat.enqueue() for _ in range(AHEAD))
    done, took = 0, BUNDLE + 1
    with placed(priorities, lambda: True) as place:
        while perf_counter() < until:
            place.yield_gil(began := monotonic_ns())
            wait(works.popleft(), place, took)
            place.start_enqueuing(ended := monotonic_ns())
            works.append(seat.enqueue())
            done, took = done + 1, ended - began
        for work in works:
            work.wait()
    return done


@contextmanager
def placed(priorities: GilPriorities, waiting: Callable[[], bool]) -> Iterator[GilPriority]:
    """A place among the threads, for as long as one of them works."""
    place = priorities.make(waiting)
    priorities.join(place)
    try:
        yield place
    finally:
        priorities.remove(place)


def wait(work: Work, place: GilPriority, took: int) -> None:
    """Wait for the outputs; if the last took so many nanoseconds that others may go first meanwhile, let them. Blocks."""
    if took > BUNDLE:
        place.end_enqueuing()
        place.start_waiting(True)  # The thread that waits is the only one.
    work.wait()
    place.start_completing()


def all_at_once(tasks: list[tuple[Seat, Callable[[Seat], T]]]) -> list[T]:
    """Each task on a thread of its seat's partition; their results in order. Blocks. Raises what one of them raised."""
    runs = [_Run(seat, task) for seat, task in tasks]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    if errors := [run.error for run in runs if run.error]:
        raise errors[0]
    return [run.result for run in runs]


class _Run(Thread):
    def __init__(self, seat: Seat, task: Callable[[Seat], Any]) -> None:
        super().__init__(name=f"load on {seat.partition!r}")
        self._seat = seat
        self._task = task
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._seat.partition.attach()
            self.result = self._task(self._seat)
        except BaseException as error:  # Raised again where the thread is joined.
            self.error = error


def _ask(memory: Memory, x: Array) -> tuple[list[Tensor], Room]:
    memory.array[: x.nbytes] = np.frombuffer(x.tobytes(), np.uint8)
    start = align(x.nbytes)
    return [Tensor(x.shape, memory.address, x.nbytes)], Room(memory.address + start, memory.array.nbytes - start)
