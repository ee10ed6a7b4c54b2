"""The simulated GPU: SMs, splits, green contexts, memory, graphs, a log of every call, and faults on demand."""

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import monotonic_ns
from typing import Any, NamedTuple
from weakref import WeakSet

from .errors import CUDAError, Misuse
from .memory import FREED, Region, new_region
from .mps import FAULT, Client, connect
from .shared import Pages
from .streams import Capture, Graph, Operation, Stream

MIB = 1 << 20
TOTAL = 80 * 1024 * MIB
"""Bytes of memory."""
POOL_STEP = 32 * MIB
"""The memory pool takes the device's memory in pieces of this size."""
DRIVER_STEP = 2 * MIB
"""And so does the driver for what it keeps itself."""
INDEX = 1
"""The ordinal of the simulated GPU. The host's first GPU is another one, so that what assumes the first fails."""
DEFAULT_STREAMS = (0, 1, 2)
"""The names of the NULL, legacy and per-thread streams."""
RELAXED = 2
"""The mode of a thread that may call what is not safe while it captures."""
STICKY = {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ECC_UNCORRECTABLE"}


@dataclass
class Resource:
    """SMs from one split, groups of which are scheduled together; split 0 is the device itself."""

    sms: tuple[int, ...]
    split: int
    together: int = 0


class Capability(NamedTuple):
    """A compute capability."""

    major: int
    minor: int


class Properties(NamedTuple):
    """Some of a device's."""

    max_threads_per_multiprocessor: int = 2048
    l2_cache_size: int = MIB


@dataclass
class Context:
    """A green context, or one with all of a device."""

    sms: tuple[int, ...]
    handle: int
    streams: list[Stream] = field(default_factory=list)
    closed: bool = False
    green: bool = True
    device: int = INDEX
    queues: str = "device_ctx"
    """The context with which it shares its work queues."""


class Gpu:
    """One GPU. By default an H100: 132 SMs, which divide into 15 groups of 8 and 12 left, or 64 of 2 and 4 left.

    `cuda` is the version of driver and bindings. From 13.1 on they split into structured groups, refusing more groups than
    there are, where earlier ones give fewer; and they give contexts work queues.
    """

    name = "Simulated H100"
    index = INDEX
    uuid = "GPU-5ea1"
    """TensorRT takes kernels of this very GPU only, as it does of two H100s of one host."""
    arch = "90"

    def __init__(
        self,
        sms: int = 132,
        coarse: int = 120,
        smallest: int = 8,
        fine: int = 128,
        cuda: tuple[int, int] = (13, 0),
        index: int = INDEX,
    ) -> None:
        self.cuda = cuda
        self.index = index
        self.sms = sms
        self.smallest = smallest
        self.grouped = {smallest: coarse, 2: fine}
        self.rest_together = 0
        """How many SMs of a remainder are scheduled together, where that differs from the groups of its split."""
        self.takes_queues = True
        """Whether contexts are made that have work queues of their own."""
        self.priorities = 0, -5
        """The lowest of streams, and the highest."""
        self.splits = 0
        self.scattered: frozenset[int] = frozenset()
        """The SMs on which, without others, no clusters of thread blocks can be launched: what a split left over, or all of a
        fine one."""
        self.log: list[str] = []
        self.lost = ""
        self.free = TOTAL
        """What would be free if all took only what they use, and nothing were kept: see `reported_free`."""
        self.kernel_bytes, self.graph_bytes = 16 << 10, 4 << 10
        """What a kernel that is loaded and a graph that is instantiated take. By default so little that nothing shows: the
        driver takes whole steps."""
        self.driver_uses, self.driver_has = 0, DRIVER_STEP
        """What kernels and graphs use, and what the driver has taken for them, which it keeps for the next ones."""
        self.pool_uses, self.pool_has = 0, 0
        """What was allocated in the order of streams, and what the pool has taken for that, which it keeps."""
        self.library_has = 0
        """What TensorRT has allocated without the pool: weights, and the memory of contexts."""
        self.allocations_use = 0
        """What was allocated otherwise; the driver takes whole steps for it, and gives them back."""
        self.others_have = 0
        """What other processes have."""
        self.millijoules: int | None = None
        """What the GPU has taken of energy; None where it has no meter."""
        self.moved: tuple[float, float, float] | None = (0.0, 0.0, 0.0)
        """Bytes so far of its memory, over PCIe in, and out, as NVML's GPM sees them; None where it does not see them."""
        self.launched: deque[tuple[str, int, int]] = deque(maxlen=1000)
        """The last kernels of our own: the name, the SMs of the stream's context, and the blocks."""
        self.seconds = 0.0
        """The time of these."""
        self.has_nvml = True
        """Whether there is the driver's library for managing GPUs."""
        self.listed: Callable[[dict[int, int]], dict[int, int]] | None = None
        """What NVML lists instead of the memory of each process by its number: in a container with numbers of its own other
        numbers, nothing of other containers, or 0 bytes (driver 560: NVIDIA/open-gpu-kernel-modules#614)."""
        self.has_pool = True
        self.contexts: list[Context] = []
        """Green ones that were not destroyed."""
        self.primary = Context(tuple(range(sms)), 0x100, green=False, device=index)
        self.primary.streams = [Stream(self.primary, handle) for handle in DEFAULT_STREAMS]
        self.ordinary = [self.primary]
        """Contexts that are not green, also those of other devices."""
        self.pinned: dict[int, int] = {}
        self.allocated: dict[int, Region] = {}
        self.pages = Pages(self.allocated)
        """Memory that is shared with other processes."""
        self.freed: list[Region] = []
        self.graphs: list[Graph] = []
        """Those not destroyed, executable ones included."""
        self.events: WeakSet[object] = WeakSet()
        """Those not closed."""
        self.executions: WeakSet[object] = WeakSet()
        """TensorRT's execution contexts."""
        self.plans: dict[bytes, bytes] = {}
        """The ONNX of plans that do not carry theirs."""
        self.capturable = True
        """Whether TensorRT's work can be captured."""
        self.unresolved: list[str] = []
        """Tensors of which TensorRT says that it lacks something to know their shape."""
        self.compiled: list[str] = []
        """Kernels that TensorRT compiled, as they were not in its cache."""
        self.wrong_for: Callable[[tuple[tuple[int, ...], ...]], bool] = lambda shapes: False
        """For which input shapes TensorRT answers wrongly: finite numbers of the right size, not reported. Asked at each
        run. So TensorRT-RTX 1.6.1 does on an H100 for some numbers of rows of a matrix product, each time, and for plans
        without auxiliary streams now and then (2026-11-26): see `every_third`."""
        self.takes_caches = True
        """Whether TensorRT takes a cache of kernels that it is given."""
        self.verdict = ("VALID", 0)
        """What TensorRT says of any plan before it loads it."""
        self.kinds: dict[str, Any] = {}
        """The classes of the TensorRT that is installed, by name; and under `green` whether it knows of green contexts."""
        self.building = 0
        """How many builds of TensorRT's are going on in this process."""
        self.nvrtc = True
        self.confines = True
        """Whether streams stay on their context's SMs; if not, blocks run anywhere."""
        self.short = 0
        """SMs that contexts lack of what they were made of."""
        self.timer: Callable[[], int] = monotonic_ns
        """%globaltimer, in nanoseconds."""
        self.captured_by_all: list[Capture] = []
        """Captures in the global mode that are under way."""
        self.limits: dict[int, int] = {}
        """Limits of the primary context that were set, by their CUlimit."""
        self.here = threading.local()
        self.mps: Client | None = None
        """The connection to an MPS server, if the environment names one when the GPU is first used."""
        self._is_connected = False
        self._connecting = threading.Lock()
        self._memory_lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        """How often each call was made."""
        self.faults: dict[tuple[str, int], str] = {}
        """Errors that are still to come, by call and its number."""
        self._meanwhile: dict[str, Callable[[], object]] = {}
        self._handles = count(0x1000, 0x10)

    def fail(self, call: str, nth: int = 1, error: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Make the n-th call of this name from now on fail; a sticky error loses the device."""
        self.faults[call, self.calls[call] + nth] = error

    def meanwhile(self, call: str, action: Callable[[], object]) -> None:
        """Call a function when the next call of this name begins."""
        self._meanwhile[call] = action

    def enter(self, call: str, current: bool = False, safe: bool = True) -> None:
        """Every simulated call begins with this: it logs the call, and raises an error that was injected or is due.

        `current`: it needs a context. Not `safe`: the driver calls it potentially unsafe, so it is refused to a thread that
        has begun a capture, and to all threads while one captures in the global mode, and invalidates that capture.
        """
        if not self._is_connected:
            self._connect()
        if self.mps:
            self.mps.wait()
        self.calls[call] += 1
        self.log.append(call)
        if action := self._meanwhile.pop(call, None):
            action()
        if fault := self.faults.pop((call, self.calls[call]), ""):
            if fault in STICKY:
                self.lose(fault)
            raise CUDAError(f"{fault}: as scripted")
        if self.lost:
            raise CUDAError(f"{self.lost}: and ever after")
        if current and not self.current():
            raise CUDAError("CUDA_ERROR_INVALID_CONTEXT: this thread has no context")
        own = [self.here.capture] if getattr(self.here, "capture", None) else []
        if not safe and getattr(self.here, "mode", 0) != RELAXED and (affected := [*own, *self.captured_by_all]):
            errors = [capture.spoil() for capture in affected]
            raise errors[0]

    def lose(self, error: str) -> CUDAError:
        """The effect of failed work on the device: an error now, and from every later call."""
        self.lost = error
        if self.mps:
            self.mps.fault()
        return CUDAError(f"{error}: on the device")

    def _connect(self) -> None:
        with self._connecting:
            if not self._is_connected:
                self.mps = connect(self._lose_contexts, self._on_neighbour_s_fault)
                self._is_connected = True

    def _lose_contexts(self, error: str) -> None:
        """By the end of the MPS server, or because it was asked to terminate this client."""
        self.lost = self.lost or error

    def _on_neighbour_s_fault(self) -> None:
        """A kernel of another process failed: what this one has in flight fails too; if it has nothing, it notices nothing."""
        if any(stream.pending for context in (*self.contexts, *self.ordinary) for stream in context.streams):
            self.lost = self.lost or FAULT

    def whole(self) -> Resource:
        return Resource(tuple(range(self.sms)), 0, self.smallest)

    @property
    def is_structured(self) -> bool:
        return self.cuda >= (13, 1)

    def split_structured(self, resource: Resource, sizes: Sequence[int], step: int) -> tuple[list[Resource], Resource]:
        """Groups of which each `step` SMs are scheduled together: all of them, or an error. Here they have one size."""
        (size,) = set(sizes)
        if size % step or len(sizes) * size > self.grouped[step]:
            raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: the topology does not give that")
        groups, rest = self.split(resource, len(sizes), size, fine=step == 2)
        rest.together = self.rest_together or step
        return groups, rest

    def split(self, resource: Resource, groups: int, size: int, fine: bool = False) -> tuple[list[Resource], Resource]:
        """Only the first split of the device begins at SM 0: a later one silently overlaps it."""
        if resource.split:
            raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: this came out of a split")
        step = 2 if fine else self.smallest
        size = -(-size // step) * step
        most = self.grouped[step] // size
        if most == 0:
            raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: the topology does not give that")
        self.splits += 1
        turn = 3 * (self.splits - 1) % self.sms
        sms = resource.sms[turn:] + resource.sms[:turn]
        given = min(groups, most)
        parts = [Resource(sms[at : at + size], self.splits, step) for at in range(0, given * size, size)]
        self.scattered = frozenset(sms[0 if fine else given * size :])
        return parts, Resource(sms[given * size :], self.splits, step)

    def merge(self, resources: Sequence[Resource]) -> tuple[int, ...]:
        if len({resource.split for resource in resources}) != 1:
            raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: not of one split")
        if self.is_structured and len({resource.together for resource in resources}) != 1:
            raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: not scheduled together alike")
        return tuple(sm for resource in resources for sm in resource.sms)

    def create_context(self, sms: tuple[int, ...], queues: Sequence[str] = ()) -> Context:
        if queues and not self.takes_queues:
            raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_TYPE: no work queues")
        self.free -= 5 * MIB
        context = Context(sms[self.short :], next(self._handles), device=self.index, queues=next(iter(queues), Context.queues))
        self.contexts.append(context)
        return context

    @property
    def has(self) -> int:
        """What this process has of the device's memory."""
        contexts = 5 * MIB * len(self.contexts)
        allocations = -(-self.allocations_use // DRIVER_STEP) * DRIVER_STEP
        return contexts + self.driver_has + self.pool_has + self.library_has + allocations

    @property
    def reported_free(self) -> int:
        """What cuMemGetInfo reports: of all that is free, whoever took the rest."""
        return TOTAL - self.has - self.others_have

    def use_for_driver(self, nbytes: int) -> None:
        """Kernels or graphs use so much more, or less."""
        with self._memory_lock:
            self.driver_uses += nbytes
            self.driver_has = max(self.driver_has, -(-self.driver_uses // DRIVER_STEP) * DRIVER_STEP)

    def use_for_library(self, nbytes: int) -> None:
        """TensorRT has allocated so much more, or less."""
        with self._memory_lock:
            self.library_has += nbytes

    def create_stream(self, context: Context, priority: int = 0) -> Stream:
        if context.closed:
            raise Misuse("a stream of a destroyed context")
        context.streams.append(Stream(context, next(self._handles), priority=priority))
        return context.streams[-1]

    def find_stream(self, handle: int) -> Stream:
        contexts = (*self.contexts, *self.ordinary)
        (stream,) = [stream for context in contexts for stream in context.streams if stream.handle == handle]
        return stream

    def current(self) -> int:
        """The handle of the calling thread's context; 0 for none."""
        pushed = getattr(self.here, "pushed", ())
        return pushed[-1] if pushed else self.primary.handle if getattr(self.here, "current", False) else 0

    def set_current(self, context: int) -> None:
        """Replace the top of the calling thread's stack of contexts; 0 removes it."""
        pushed = list(getattr(self.here, "pushed", ()))[:-1]
        if getattr(self.here, "pushed", ()):
            self.here.pushed = [*pushed, *([context] if context else [])]
        else:
            self.here.current = context == self.primary.handle
            self.here.pushed = [context] if context and not self.here.current else []

    def use_runtime(self) -> None:
        """As libraries that use the CUDA runtime: make the primary context current in the thread and leave it so."""
        self.set_current(self.primary.handle)

    def destroy_stream(self, stream: Stream) -> None:
        if stream.closed or stream.context.closed:
            raise Misuse("a stream was destroyed twice, or after its context")
        if stream.pending and not self.lost:
            raise Misuse("a stream was destroyed with work in flight")
        stream.closed = True

    def destroy_context(self, context: Context) -> None:
        if context.closed or any(not stream.closed for stream in context.streams):
            raise Misuse("a context was destroyed twice, or before its streams")
        if any(graph.context is context for graph in self.graphs) and not self.lost:
            raise Misuse("a context was destroyed before its graphs")
        context.closed = True
        self.contexts.remove(context)
        self.free += 5 * MIB

    def pin(self, address: int, nbytes: int) -> None:
        for start, size in self.pinned.items():
            if address < start + size and start < address + nbytes:
                raise CUDAError("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: in part")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        if address not in self.pinned:
            raise CUDAError("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: or not from its start")
        del self.pinned[address]

    def allocate(self, nbytes: int, device: int = -1, context: int = 0) -> int:
        """Memory of the host's, or of a device: in a context, or from the device's pool."""
        region = new_region(nbytes)
        region.device, region.context = device, context
        self.allocated[region.address] = region
        self.free -= nbytes
        self._use_memory(region, nbytes)
        return region.address

    def _use_memory(self, region: Region, nbytes: int) -> None:
        if region.device != self.index:
            return
        with self._memory_lock:
            if region.context:
                self.allocations_use += nbytes
            else:
                self.pool_uses += nbytes
                self.pool_has = max(self.pool_has, -(-self.pool_uses // POOL_STEP) * POOL_STEP)

    def release(self, address: int) -> None:
        region = self.allocated.pop(address)
        region.poison(FREED)
        self.freed.append(region)
        self.free += region.nbytes
        self._use_memory(region, -region.nbytes)

    def release_on(self, stream: Stream | None, address: int) -> None:
        """Free it once the work on the stream has run; at once without a stream, or when nothing runs any more."""
        if stream and stream.pending and not self.lost:
            stream.put(Operation(partial(self.release, address)))
        else:
            self.release(address)

    def is_reachable(self, address: int, nbytes: int = 1) -> bool:
        """Whether the device may use this memory: it was allocated, or is pinned, perhaps by several calls."""
        at = address
        for start, size in sorted(self.pinned.items()):
            at = start + size if start <= at < start + size else at
        return at >= address + nbytes or self.is_in_one(address, nbytes)

    def is_in_one(self, address: int, nbytes: int) -> bool:
        """Whether this memory was allocated, or pinned, by one call."""
        pinned = any(start <= address and address + nbytes <= start + size for start, size in self.pinned.items())
        return pinned or any(region.holds(address, nbytes) for region in list(self.allocated.values()))

    def region_of(self, address: int) -> Region | None:
        """The memory that was allocated here, if it was."""
        return next((region for region in list(self.allocated.values()) if region.holds(address, 1)), None)

    def reach(self, address: int, nbytes: int) -> int:
        """For work on the device: access this memory."""
        if any(region.holds(address, 1) for region in self.freed):
            raise Misuse("the device used memory that was freed")
        if not self.is_reachable(address, nbytes):
            raise self.lose("CUDA_ERROR_ILLEGAL_ADDRESS")
        return address

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """For work on the device."""
        if nbytes:
            ctypes.memmove(self.reach(target, nbytes), self.reach(source, nbytes), nbytes)

    def enqueue_copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """A copy by a copy engine. One from or to memory that is not pinned would be staged by the driver, and waited for."""
        if not (self.is_reachable(source, nbytes) and self.is_reachable(target, nbytes)):
            raise Misuse("a copy engine was given memory that is neither pinned nor the device's")
        if not (self.is_in_one(source, nbytes) and self.is_in_one(target, nbytes)):
            raise CUDAError("CUDA_ERROR_INVALID_VALUE: across two registrations of host memory")
        self.find_stream(stream).put(Operation(partial(self.copy, source, target, nbytes)))

    def enqueue_staged_copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """To the device, from memory that need not be pinned: the driver has copied that when the call returns."""
        data = ctypes.string_at(source, nbytes)
        self.find_stream(stream).put(Operation(lambda: self.write(target, data)))

    def copy_back(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """From the device, to memory that need not be pinned: the call returns when it is there."""
        found = self.find_stream(stream)
        found.put(Operation(lambda: ctypes.memmove(target, self.read(source, nbytes), nbytes)))
        found.run()

    def read(self, address: int, nbytes: int) -> bytes:
        """For work on the device."""
        return ctypes.string_at(self.reach(address, nbytes), nbytes)

    def write(self, address: int, data: bytes) -> None:
        """For work on the device."""
        ctypes.memmove(self.reach(address, len(data)), data, len(data))

    def begin_capture(self, stream: Stream, thread_local: bool) -> None:
        if stream.capture:
            raise CUDAError("CUDA_ERROR_ILLEGAL_STATE: captured already")
        stream.capture = self.here.capture = Capture(thread_local)
        if not thread_local:
            self.captured_by_all.append(stream.capture)

    def end_capture(self, stream: Stream) -> Graph:
        capture = stream.capture
        self.captured_by_all = [each for each in self.captured_by_all if each is not capture]
        if not capture or capture.thread != threading.get_ident():
            raise CUDAError("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: or none")
        if capture.spoilt:
            raise CUDAError("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: by an earlier call")
        return self.add_graph(Graph(stream.context, capture.operations, next(self._handles)))

    def instantiate(self, graph: Graph) -> Graph:
        if graph not in self.graphs:
            raise Misuse("a destroyed graph was instantiated")
        self.use_for_driver(self.graph_bytes)
        return self.add_graph(Graph(graph.context, graph.operations, next(self._handles), self.graph_bytes))

    def add_graph(self, graph: Graph) -> Graph:
        self.graphs.append(graph)
        return graph

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        if graph not in self.graphs:
            raise Misuse("a destroyed graph was launched")
        graph.launch(stream)

    def destroy_graph(self, graph: Graph) -> None:
        if graph not in self.graphs or (graph.in_flight and not self.lost):
            raise Misuse("a graph was destroyed twice, or in flight")
        self.graphs.remove(graph)
        self.use_for_driver(-graph.nbytes)

    def run_blocks(self, stream: Stream, blocks: int) -> list[int]:
        """The SM of each block when it runs: round robin over those of the stream's context."""
        sms = stream.context.sms if self.confines else tuple(range(self.sms))
        if self.mps:
            sms = tuple(range(len(sms)))
        return [sms[block % len(sms)] for block in range(blocks)]


def every_third(chosen: Callable[[tuple[tuple[int, ...], ...]], bool]) -> Callable[[tuple[tuple[int, ...], ...]], bool]:
    """For `Gpu.wrong_for`: every third run of the chosen shapes is answered wrongly."""
    runs: Counter[tuple[tuple[int, ...], ...]] = Counter()

    def wrong(shapes: tuple[tuple[int, ...], ...]) -> bool:
        runs[shapes] += 1
        return chosen(shapes) and runs[shapes] % 3 == 0

    return wrong
