"""Partitions of a GPU: a granule is the smallest group of SMs the driver can isolate, and a partition is a green context.

Threads have the primary context current; work is confined to a partition's SMs by its stream. So pass the stream to every
call, and run nothing on streams of the primary context, which use all SMs.

A caller of this library may have another context current, a green one for instance. Every call restores the context that was
current in its thread; `CudaPartition.attach` and the threads of `run` keep the primary one.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import chain
from threading import Lock
from typing import TypeVar

from cuda.bindings import driver
from cuda.core import Device, Stream

from ..base import Bandwidth, Held, stream_handle
from ..deposit import Deposit
from ..errors import DeviceUnavailable, Misplaced, PartitionError
from ..mps import is_mps_client
from ..plan import choose, choose_lent
from ..strain import Before, Strain, Strained, check, unheld
from .current_context import restored
from .driver import CUDAError, handle_return, translated
from .driver_memory import DriverMemory
from .green_contexts import NONBLOCKING, SM, Green, Split, split
from .kernel_loads import KERNEL_LOADS
from .kernels import Kernels
from .memory_level import Bytes, find_own, level
from .nvml import Nvml, open_nvml
from .pages import PIN_PIECE, pieces, populate
from .sm_probe import SmProbe, open_probe
from .strain import Place, strain

T = TypeVar("T")

STACK = 256
"""Bytes of a thread's stack in a process that has one tenant. The driver's own 1,024 take 198 MiB more of device memory in each
process (H100, driver 580.159, 2026-11-26); for a kernel that needs more it enlarges the stack (NVIDIA on cuCtxSetLimit)."""
DEFAULT_STREAMS = {0: "the NULL stream", 1: "the legacy default stream", 2: "the per-thread default stream"}
NOT_CAPTURED = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

NEEDED = "green contexts need a driver of CUDA 12.4 and a GPU of compute capability 6.0, or newer; or use backend = 'cpu'"
NO_CLIENT = "the MPS daemon that CUDA_MPS_PIPE_DIRECTORY names takes no clients now: it has too many, or there was a fault"
FULL = "other processes use all of its memory, or are too many: nvidia-smi shows them; end some, or use another GPU"


class CudaPartition:
    """SMs that one holder may use; see `partitions.base.Partition` for the contract.

    The streams of a home partition have the device's highest priority, those of a wide one its lowest: where both have blocks
    to start on an SM, those of the home partition start first. A block that runs is not stopped.

    Work may be submitted to `stream` from one thread at a time. Executors, graphs and events that use it must be closed before
    the partition.
    """

    def __init__(self, device: "CudaDevice", granules: Sequence[int], green: Green, lent: Sequence[int] = ()) -> None:
        self.device = device
        self.granules = tuple(granules)
        self.lent = tuple(lent)
        self.size = green.sms
        self.stream: Stream = green.stream
        self._green = green
        self._closed = False

    def __repr__(self) -> str:
        lent = f", {list(self.lent)} lent" if self.lent else ""
        return f"<CudaPartition granules {list(self.granules)}{lent}, {self.size} SMs{', closed' if self._closed else ''}>"

    @property
    def host_cores(self) -> frozenset[int] | None:
        return None

    @property
    def idle(self) -> bool:
        return False

    @property
    def holding(self) -> Stream | None:
        """The stream for `hold`; None where one is made for each."""
        return Stream.from_handle(self._green.holding) if self._green.holding else None

    @property
    def handle(self) -> int:
        """The stream as the integer (CUstream) that other libraries take."""
        return int(self.stream.handle)

    def attach(self) -> None:
        """Make the device's primary context current in the calling thread; the stream confines work to the partition."""
        if self._closed:
            raise PartitionError(f"{self!r} cannot take another thread")
        self.device.make_current()

    def run(self, function: Callable[[], T]) -> T:
        def body() -> T:
            self.attach()
            return function()

        with ThreadPoolExecutor(1, thread_name_prefix=f"granules {self.granules}") as thread:
            return thread.submit(copy_context().run, body).result()

    def make_stream(self) -> "SideStream":
        """Another stream on this partition's SMs, with the same priority. The caller closes it before the partition.

        Call it on an attached thread; takes some 20 microseconds. Raises PartitionError, DeviceLost.
        """
        with translated(f"making a stream on {self!r}"), self.device.driver_memory.changing(in_turn=True):
            context = handle_return(driver.cuStreamGetGreenCtx(self.stream.handle))
            return SideStream(int(handle_return(driver.cuGreenCtxStreamCreate(context, NONBLOCKING, self._green.priority))))

    def locate(self) -> frozenset[int]:
        """The SMs that a kernel on this partition's stream ran on. Waits for the work before it.

        Not while a graph is captured from the stream. Raises PartitionError, DeviceLost.
        """
        return self.run(lambda: self.device.locate(self))

    def hold(self, seconds: float) -> Held:
        """See `Partition.hold`. The work has a stream of its own, so it does not wait for what is queued in the partition's.

        Under MPS the stream and the kernel are there since `carve`, as making a stream waits while a load is measured.

        Raises PartitionError, DeviceLost.
        """
        return self.run(lambda: self.device.hold(self, seconds))

    def strain(self, kind: Strain, seconds: float, before: Before = unheld) -> Strained:
        """See `Partition.strain`. The work has a stream of its own beside each partition's. Raises DeviceLost, too.

        The first one on a device compiles its kernels, which takes up to 0.4 s of the time.
        """
        check(kind, seconds)
        return self.run(lambda: self.device.strain(self, kind, seconds, before))

    def close(self) -> None:
        """Wait for the stream, then keep it and its context for the next partition of the same granules. Raises DeviceLost."""
        if self._closed:
            return
        self._closed = True
        with translated(f"closing {self!r}"), ExitStack() as closing:
            closing.callback(self._green.release)
            with self.device.current():
                self.stream.sync()
            closing.pop_all()
        self.device.keep_context(self.granules, self._green)


class AdoptedPartition(CudaPartition):
    """The SMs of a stream that the caller made, whose granules are unknown; see `CudaDevice.adopt`."""

    def __init__(self, device: "CudaDevice", green: Green, confined: bool) -> None:
        super().__init__(device, (), green)
        self._confined = confined

    def __repr__(self) -> str:
        whose = "of a green context" if self._confined else "with all of the device"
        state = ", closed" if self._closed else ""
        return f"<AdoptedPartition, stream {self.handle:#x} {whose}, {self.size} SMs{state}>"

    def make_stream(self) -> "SideStream":
        if self._confined:
            return super().make_stream()
        with self.device.current(), translated(f"making a stream on {self!r}"):
            return SideStream(int(handle_return(driver.cuStreamCreate(NONBLOCKING))))

    def close(self) -> None:
        """Wait for the stream. It and its context belong to the caller. Raises DeviceLost."""
        if not self._closed:
            self._closed = True
            with translated(f"closing {self!r}"), self.device.current():
                self.stream.sync()


class SideStream:
    """Another stream of a partition's green context."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        """The CUstream as an integer."""
        self.stream = Stream.from_handle(handle)
        self._closed = False

    def __repr__(self) -> str:
        return f"<SideStream {self.handle:#x}{', closed' if self._closed else ''}>"

    def close(self) -> None:
        """Destroy it, once; nothing may be in flight on it. Raises PartitionError, DeviceLost."""
        if not self._closed:
            self._closed = True
            with translated(f"closing {self!r}"):
                handle_return(driver.cuStreamDestroy(self.handle))


class Pinned:
    """Page-locked host memory that the device accesses in place, until it is closed."""

    def __init__(self, device: "CudaDevice", address: int, nbytes: int, device_address: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device_address = device_address
        self._device = device
        self._closed = False

    def close(self) -> None:
        """Unpin it; the device must not use the memory any more. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self._device.unpin(self.address)


class CudaDevice:
    """A GPU, split into groups of SMs once. Any thread may call any method.

    Unused green contexts are kept, by their granules and priority: the driver takes 4 MiB of device memory for each and does
    not free it when one is destroyed (seen with raw driver calls on an H100, driver 580.159, 2026-11-21).
    """

    kind = "cuda"
    unit = "SM"

    def __init__(
        self,
        index: int,
        name: str,
        uuid: str,
        groups: Split,
        priorities: tuple[int, int],
        free_stream: Stream,
        clusters: bool = True,
        shared: bool = False,
        nvml: Nvml | None = None,
        own: Bytes | None = None,
    ) -> None:
        self.free_stream = free_stream
        """To free memory on that may outlive the stream it was allocated on; what uses it must have ended. It exists as long as
        such memory."""
        self.index = index
        self.name = name
        self.uuid = uuid
        """Which GPU it is, of all there are; its index depends on the process's environment."""
        self._lowest, self._highest = priorities
        self.granules = groups.sizes
        self._groups = groups
        self._clusters = clusters
        self.shared = shared
        self.loads = KERNEL_LOADS
        self.kernels = Kernels()
        self.driver_memory = DriverMemory(partial(level, index, own), self.loads.hurrying, own is not None)
        """Measures what the driver takes of its memory."""
        self._probe: SmProbe | None = None
        self._nvml = nvml
        self._lock = Lock()
        self._idle: dict[tuple[tuple[int, ...], int], list[Green]] = {}
        self._pinned: tuple[tuple[int, ...], tuple[int, ...]] = (), ()  # The start addresses, ascending, and the ends.
        self.unpin_count = 0
        """How often memory was unpinned. If it has changed, a result of `is_pinned` that was kept is no longer valid."""

    def __repr__(self) -> str:
        return f"<CudaDevice {self.index}, {self.name}, granules {_shares(self.granules)}>"

    def describe(self) -> str:
        note = "" if self._clusters else "; no thread-block clusters"
        note += "" if self.driver_memory.own else "; what models take is measured as what the whole GPU has less"
        total, count = sum(self.granules), len(self.granules)
        queues = "balanced" if self._groups.balanced else "shared"
        under = " under MPS" if self.shared else ""
        return f"{self.name}{under}, {total} SMs in {count} granules ({_shares(self.granules)}), {queues} work queues{note}"

    def make_current(self) -> Device:
        """Make the primary context current in the calling thread, permanently, and return the device as that thread has to use
        it.

        For threads that belong to the device; in a caller's thread use `current`. Raises PartitionError, DeviceLost.
        """
        with translated(f"using {self!r}"):
            device = Device(self.index)
            device.set_current()
            return device

    @contextmanager
    def current(self) -> Iterator[Device]:
        """Make the primary context current in the block, and restore the previous one after it. Raises as `make_current`."""
        with restored():
            yield self.make_current()

    def carve(self, granules: Sequence[int], lent: Sequence[int] = ()) -> CudaPartition:
        """See `Device.carve`. Unless these granules were a partition before, it blocks for a millisecond and takes some MiB of
        device memory. The first one under MPS may block for a good part of a second, until the kernel of `hold` is compiled.
        """
        wanted = choose(granules, len(self.granules))
        borrowed = choose_lent(lent, wanted)
        with translated(f"carving granules {wanted} from {self!r}"):
            if self.shared:
                with self.current():
                    self._opened_probe()
            green = self._green_context(tuple(wanted), self._lowest if borrowed else self._highest)
            if green.sms != (granted := sum(self.granules[granule] for granule in wanted)):
                with self.current():
                    green.release()
                raise PartitionError(f"the driver gave {green.sms} SMs for granules {wanted}, which hold {granted}")
            return CudaPartition(self, wanted, green, borrowed)

    def adopt(self, stream: object) -> AdoptedPartition:
        """A partition over a stream that the caller made, for `Engine.bind`: what is bound to it runs on that stream.

        `stream` is its handle (CUstream), or an object with `__cuda_stream__`. It has the SMs of its green context, or without
        one those of the whole device, other partitions' included: the manager does not account for it. Work may be submitted
        to it from one thread at a time, the caller's own included. Closing the partition waits for the stream and destroys
        nothing. The stream has to exist until the executors on it are closed.

        Does not block. Raises PartitionError for a default stream, one that is being captured, or one of another device or
        context; TypeError for an object that is no stream.
        """
        handle = stream_handle(stream)
        if handle in DEFAULT_STREAMS:
            raise PartitionError(
                f"{DEFAULT_STREAMS[handle]} cannot be adopted, as all code shares it; create a stream and adopt that"
            )
        with self.current(), translated(f"adopting stream {handle:#x}"):
            if (index := int(handle_return(driver.cuStreamGetDevice(handle)))) != self.index:
                raise PartitionError(f"stream {handle:#x} is of device {index}, not of device {self.index}; adopt it there")
            if handle_return(driver.cuStreamIsCapturing(handle)) != NOT_CAPTURED:
                raise PartitionError(f"stream {handle:#x} is being captured; end the capture first")
            context = handle_return(driver.cuStreamGetGreenCtx(handle))
            confined = context is not None and int(context) != 0
            if not confined and int(handle_return(driver.cuStreamGetCtx(handle))) != int(
                handle_return(driver.cuCtxGetCurrent())
            ):
                raise PartitionError(
                    f"stream {handle:#x} is of a context that is neither green nor the primary one of {self!r}"
                )
            sms = handle_return(driver.cuGreenCtxGetDevResource(context, SM)).sm.smCount if confined else sum(self.granules)
        return AdoptedPartition(self, Green(sms, Stream.from_handle(handle), lambda: None), confined)

    def keep_context(self, granules: tuple[int, ...], green: Green) -> None:
        """Keep an idle green context for the next partition; `CudaPartition.close` calls it."""
        with self._lock:
            self._idle.setdefault((granules, green.priority), []).append(green)

    def _green_context(self, granules: tuple[int, ...], priority: int) -> Green:
        with self._lock:
            if idle := self._idle.get((granules, priority)):
                return idle.pop()
        with self.current() as device, self.driver_memory.changing():
            green = self._groups.create(device, granules, priority)
            return _with_holding(green) if self.shared and priority == self._highest else green

    def locate(self, partition: CudaPartition) -> frozenset[int]:
        """The SMs that a kernel on the partition's stream runs on; none under MPS, which numbers them again in each context.

        Call it on a thread attached to the partition. Blocks. Raises Misplaced under MPS if they are more than it has.
        """
        with translated(f"looking where {partition!r} runs"):
            found = self._opened_probe().run(partition.stream, partition.size)
        if not self.shared:
            return found
        if len(found) > partition.size:
            raise Misplaced(f"{partition!r} ran on {len(found)} SMs")
        return frozenset()

    def hold(self, partition: CudaPartition, seconds: float) -> Held:
        """Fill the partition's SMs for so long. Call it on a thread attached to the partition. Blocks."""
        with translated(f"filling {partition!r}"), ExitStack() as left:
            stream = partition.holding or left.enter_context(closing(partition.make_stream())).stream
            blocks = self._opened_probe().fill(stream, partition.size, seconds)
        units = len({block.sm for block in blocks})
        return Held(units, max(block.began for block in blocks), min(block.ended for block in blocks))

    def strain(self, partition: CudaPartition, kind: Strain, seconds: float, before: Before) -> Strained:
        """Move bytes by the partition's SMs for so long. Call it on a thread attached to the partition. Blocks."""
        with translated(f"straining {kind} by {partition!r}"), ExitStack() as left:
            places: dict[CudaPartition, Place] = {}

            def place(of: CudaPartition, held: bool) -> Place:
                if of not in places:
                    stream = left.enter_context(closing(of.make_stream())).stream
                    places[of] = Place(stream, of.size)
                return places[of]._replace(held=held)

            def decide(nbytes: int) -> Place:
                found = before(nbytes)
                return place(found or partition, found is not None)

            home = place(partition, False)
            left.enter_context(self.driver_memory.changing())
            return strain(Device(self.index), self.kernels, home, kind, seconds, decide)

    def _opened_probe(self) -> SmProbe:
        with self._lock:
            if not self._probe:
                with self.driver_memory.changing():
                    self._probe = open_probe(Device(self.index), self.kernels, sum(self.granules))
            return self._probe

    @property
    def address(self) -> str:
        """See `Device.address`."""
        with self.current() as device:
            return str(device.pci_bus_id)

    def memory(self) -> int | None:
        """See `Device.memory`. Raises PartitionError, DeviceLost."""
        with self.current(), translated(f"asking for the memory of {self!r}"):
            return int(handle_return(driver.cuDeviceTotalMem(self.index)))

    def bandwidth(self) -> Bandwidth | None:
        """See `Device.bandwidth`. 64 bytes each clock are counted for an SM.

        Of an H200 one was seen to read 57 from memory, and 74 from the L2 cache.
        """
        if (nvml := self._nvml) is None:
            return None
        memory, clock = nvml.bandwidth(), nvml.sm_clock()
        return Bandwidth(memory, 64 * clock, nvml.link() or 0) if memory and clock else None

    def energy(self) -> int | None:
        """See `Device.energy`."""
        return self._nvml.energy() if self._nvml else None

    def pin(self, address: int, nbytes: int) -> Pinned:
        """Page-lock host memory and map it for the device, for all contexts.

        Blocks for some 0.1 ms a MiB, or for 0.4 if its pages are not populated before. Tenants may be served meanwhile: pages
        are populated first, which takes no lock of the driver's, and what is larger than `PIN_PIECE` is pinned in pieces. They
        end where addresses are multiples of it, and one `cuMemcpyAsync` may not cross from one to the next.

        Raises PartitionError for memory that is pinned already, is not the process's, or exceeds its limit.
        """
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        try:
            populate(address, nbytes)
        except OSError as error:
            raise PartitionError(f"taking {nbytes} bytes at {address:#x} to pin them: {error.strerror}") from error
        with (
            self.current(),
            translated(f"pinning {nbytes} bytes at {address:#x}"),
            self.driver_memory.changing(),
            ExitStack() as done,
        ):
            for at, size in _registrations(address, nbytes):
                handle_return(driver.cuMemHostRegister(at, size, flags))
                done.callback(_unregister, at)
            device_address = int(handle_return(driver.cuMemHostGetDevicePointer(address, 0)))
            done.pop_all()
        self._record_pinned(address, nbytes)
        return Pinned(self, address, nbytes, device_address)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Whether all of this memory was pinned by one `pin`."""
        starts, ends = self._pinned
        place = bisect_right(starts, address) - 1
        return place >= 0 and address + nbytes <= ends[place]

    def unpin(self, address: int) -> None:
        """Undo a `pin`, piece by piece; `Pinned.close` calls it. Raises PartitionError for memory that is not pinned."""
        end = self._record_pinned(address, None)
        self.unpin_count += 1
        with (
            self.current(),
            translated(f"unpinning the memory at {address:#x}"),
            self.driver_memory.changing(),
            ExitStack() as left,
        ):
            for at, _ in _registrations(address, (end or address + 1) - address):
                left.callback(_unregister, at)

    def _record_pinned(self, address: int, nbytes: int | None) -> int | None:
        """Record that so many bytes are pinned at an address, or with None that they no longer are. Returns the end of what was
        pinned there before.
        """
        with self._lock:
            known = dict(zip(*self._pinned, strict=True))
            before = known.pop(address, None)
            if nbytes is not None:
                known[address] = address + nbytes
            self._pinned = tuple(sorted(known)), tuple(known[start] for start in sorted(known))
            return before

    def share(self, deposit: Deposit) -> None:
        """See `Device.share`."""
        self.kernels.share(deposit)

    def close(self) -> None:
        """Destroy the contexts that were kept, and free the memory of `locate`; every partition must be closed.

        The primary context stays current: other libraries of the process may be using it. Raises DeviceLost.
        """
        idle, self._idle = self._idle, {}
        probe, self._probe = self._probe, None
        with translated(f"closing {self!r}"), ExitStack() as closing:
            context = closing.enter_context(ExitStack())
            closing.callback(self.kernels.close)
            for green in chain.from_iterable(idle.values()):
                closing.callback(green.release)
            if probe:
                closing.callback(probe.close)
            if probe or idle or self.kernels.in_use:
                context.enter_context(self.current())


def open_cuda(index: int = 0, granule_sms: int | None = None) -> CudaDevice:
    """Open the GPU with this ordinal and split its SMs. Once in a process: partitions of two splits overlap.

    `granule_sms` asks for granules of another size than the driver's smallest (8 SMs on Hopper). Fewer than that, 2 for
    instance, divide more finely at a note: no thread-block clusters, and models that need them do not run.
    Raises DeviceUnavailable with what is missing, ValueError for a size below 1.
    """
    if granule_sms is not None and granule_sms < 1:
        raise ValueError(f"granules of {granule_sms} SMs; expected 1 or more")
    try:
        device = Device(index)
        with restored():
            device.set_current()
            smallest = device.resources.sm.min_partition_size
            clusters = granule_sms is None or granule_sms >= smallest
            priorities = handle_return(driver.cuCtxGetStreamPriorityRange())  # The lowest, then the highest.
            groups, free_stream = split(device, granule_sms), device.create_stream()
            if shared := is_mps_client(index):
                handle_return(driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE, STACK))
            nvml = open_nvml(device.pci_bus_id)
            own = find_own(nvml)
            return CudaDevice(index, device.name, device.uuid, groups, priorities, free_stream, clusters, shared, nvml, own)
    except (CUDAError, RuntimeError, ValueError) as error:  # RuntimeError: no libcuda, or a driver without green contexts
        reasons = {"CUDA_ERROR_MPS_": NO_CLIENT, "CUDA_ERROR_OUT_OF_MEMORY": FULL}
        why = next((why for name, why in reasons.items() if name in str(error)), NEEDED)
        raise DeviceUnavailable(f"CUDA device {index} cannot be carved: {error} ({why})") from error


def _registrations(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """The pieces in which memory is pinned: what is no larger than one is one."""
    return pieces(address, nbytes, PIN_PIECE if nbytes > PIN_PIECE else address + nbytes)


def _with_holding(green: Green) -> Green:
    """The same with a stream for `Partition.hold`. Releases it if the stream cannot be made. Raises CUDAError."""
    with ExitStack() as made:
        made.callback(green.release)
        context = handle_return(driver.cuStreamGetGreenCtx(int(green.stream.handle)))
        stream = int(handle_return(driver.cuGreenCtxStreamCreate(context, NONBLOCKING, green.priority)))
        made.callback(lambda: handle_return(driver.cuStreamDestroy(stream)))
        return replace(green, holding=stream, release=made.pop_all().close)


def _unregister(address: int) -> None:
    handle_return(driver.cuMemHostUnregister(address))


def _shares(sizes: Sequence[int]) -> str:
    """14 of 8, 1 of 20."""
    return ", ".join(f"{count} of {size}" for size, count in Counter(sizes).items())
