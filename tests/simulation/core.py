"""`cuda.core` for a simulated GPU. Names that begin with an underscore belong to the simulation."""

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import gpu as hardware
from . import streams
from .errors import CUDAError, Misuse
from .gpu import Gpu
from .kernels import KERNELS
from .program_cache import ProgramCacheResource
from .streams import Operation


class Device:
    """One object for each thread and ordinal, which has to be initialised in that thread, as in the real one."""

    _gpu: Gpu

    def __new__(cls, device_id: int | None = None) -> "Device":
        cls._gpu.enter("Device")
        if device_id not in (None, cls._gpu.index):  # None is the current one.
            raise ValueError(f"device_id must be within [0, 1), got {device_id}")
        if not hasattr(cls._gpu.here, "device"):
            cls._gpu.here.device = object.__new__(cls)
        return cls._gpu.here.device  # type: ignore[no-any-return]

    @property
    def device_id(self) -> int:
        return self._gpu.index

    @property
    def name(self) -> str:
        return self._gpu.name

    @property
    def uuid(self) -> str:
        return self._gpu.uuid

    @property
    def arch(self) -> str:
        return self._gpu.arch

    @property
    def pci_bus_id(self) -> str:
        return "0000:ff:1f.7"

    @property
    def compute_capability(self) -> hardware.Capability:
        self._gpu.enter("Device.compute_capability", current=True)
        return hardware.Capability(int(self._gpu.arch[:-1]), int(self._gpu.arch[-1]))

    @property
    def properties(self) -> hardware.Properties:
        return hardware.Properties()

    @property
    def resources(self) -> "DeviceResources":
        return DeviceResources(self._gpu, self._gpu.whole())

    def set_current(self, ctx: None = None) -> None:
        self._gpu.enter("Device.set_current")
        self._gpu.set_current(self._gpu.primary.handle)

    def create_context(self, options: "ContextOptions") -> "Context":
        self._gpu.enter("Device.create_context", current=True)
        sms = self._gpu.merge([each._resource for each in options.resources if isinstance(each, SMResource)])
        queues = [each._sharing_scope for each in options.resources if isinstance(each, WorkqueueResource)]
        return Context(self._gpu, self._gpu.create_context(sms, queues))

    def create_stream(self) -> "Stream":
        """On all SMs."""
        self._gpu.enter("Device.create_stream", current=True)
        return Stream._of(self._gpu, self._gpu.create_stream(self._gpu.primary), owned=True)

    def create_event(self, options: "EventOptions | None" = None) -> "Event":
        self._gpu.enter("Device.create_event", current=True)
        return Event._of(self._gpu)

    def allocate(self, size: int, *, stream: "Stream") -> "Buffer":
        self._gpu.enter("Device.allocate", current=True, safe=False)
        return Buffer(self._gpu, size, stream.simulated)


class DeviceResources:
    def __init__(self, gpu: Gpu, resource: hardware.Resource) -> None:
        self._gpu = gpu
        self._resource = resource

    @property
    def sm(self) -> "SMResource":
        self._gpu.enter("DeviceResources.sm")
        return SMResource(self._gpu, self._resource)

    @property
    def workqueue(self) -> "WorkqueueResource":
        if not self._gpu.is_structured:
            raise RuntimeError("WorkqueueResource requires CUDA driver 13.1 or newer")
        self._gpu.enter("DeviceResources.workqueue")
        return WorkqueueResource(self._gpu)


class SMResource:
    def __init__(self, gpu: Gpu, resource: hardware.Resource) -> None:
        self._gpu = gpu
        self._resource = resource

    @property
    def sm_count(self) -> int:
        return len(self._resource.sms)

    @property
    def min_partition_size(self) -> int:
        return self._gpu.smallest

    @property
    def coscheduled_alignment(self) -> int:
        return self._resource.together

    def split(self, options: "SMResourceOptions") -> "tuple[list[SMResource], SMResource]":
        together = options.coscheduled_sm_count
        if together is not None and not self._gpu.is_structured:
            raise RuntimeError("SMResourceOptions.coscheduled_sm_count requires the CUDA 13.1 structured SM split API")
        self._gpu.enter("SMResource.split")
        if self._gpu.is_structured:
            groups, rest = self._gpu.split_structured(self._resource, options.count, together or self._gpu.smallest)
        else:
            groups, rest = self._gpu.split(self._resource, len(options.count), options.count[0])
        return [SMResource(self._gpu, group) for group in groups], SMResource(self._gpu, rest)


@dataclass
class SMResourceOptions:
    """All counts have to be equal."""

    count: Sequence[int]
    coscheduled_sm_count: int | None = None


class WorkqueueResource:
    """Shared by all contexts until it is configured."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._sharing_scope = hardware.Context.queues

    def configure(self, options: "WorkqueueResourceOptions") -> None:
        self._gpu.enter("WorkqueueResource.configure")
        if options.concurrency_limit < 1:
            raise ValueError("concurrency_limit must be >= 1")
        self._sharing_scope = options.sharing_scope


@dataclass
class WorkqueueResourceOptions:
    sharing_scope: str
    concurrency_limit: int

    def __post_init__(self) -> None:
        if self.sharing_scope not in ("device_ctx", "green_ctx_balanced"):
            raise ValueError(f"{self.sharing_scope!r} is not a WorkqueueSharingScopeType")


@dataclass
class ContextOptions:
    resources: Sequence[SMResource | WorkqueueResource]


@dataclass
class StreamOptions:
    nonblocking: bool = True
    priority: int | None = None


@dataclass
class EventOptions:
    blocking_sync: bool = False


class Context:
    def __init__(self, gpu: Gpu, context: hardware.Context) -> None:
        self._gpu = gpu
        self._context = context

    @property
    def resources(self) -> DeviceResources:
        return DeviceResources(self._gpu, hardware.Resource(self._context.sms, self._gpu.splits))

    def create_stream(self, options: StreamOptions) -> "Stream":
        self._gpu.enter("Context.create_stream")
        if not options.nonblocking:
            raise Misuse("a stream that waits for the NULL stream waits for all streams")
        least, greatest = self._gpu.priorities
        if options.priority is not None and not greatest <= options.priority <= least:
            raise ValueError(f"{options.priority=} is out of range [{greatest}, {least}]")
        return Stream._of(self._gpu, self._gpu.create_stream(self._context, options.priority or 0), owned=True)

    def close(self) -> None:
        self._gpu.log.append("Context.close")
        self._gpu.destroy_context(self._context)


class Stream:
    _gpu: Gpu
    simulated: hardware.Stream
    _owned: bool

    @classmethod
    def _of(cls, gpu: Gpu, stream: hardware.Stream, owned: bool) -> "Stream":
        self = object.__new__(cls)
        self._gpu, self.simulated, self._owned = gpu, stream, owned
        return self

    @classmethod
    def from_handle(cls, handle: int) -> "Stream":
        return cls._of(cls._gpu, cls._gpu.find_stream(handle), owned=False)

    @property
    def handle(self) -> int:
        return self.simulated.handle

    def sync(self) -> None:
        self._gpu.enter("Stream.sync", current=True)
        self.simulated.wait()

    def record(self, event: "Event | None" = None, options: None = None) -> "Event":
        if event is None:
            raise Misuse("an event made for every inference costs more than the record")
        self._gpu.enter("Stream.record", current=True)
        event._here.record(self.simulated)
        return event

    def close(self) -> None:
        """Never raises: errors so far were raised before."""
        self._gpu.log.append("Stream.close")
        if not self._owned:
            raise Misuse("closing a borrowed stream destroys nothing")
        self._gpu.destroy_stream(self.simulated)


class Event:
    _gpu: Gpu
    _event: streams.Event | None

    @classmethod
    def _of(cls, gpu: Gpu) -> "Event":
        self = object.__new__(cls)
        self._gpu, self._event = gpu, streams.Event()
        gpu.events.add(self._event)
        return self

    @property
    def _here(self) -> streams.Event:
        if self._event is None:
            raise Misuse("an event was used after it was closed")
        return self._event

    @property
    def handle(self) -> streams.Event:
        return self._here

    @property
    def is_done(self) -> bool:
        self._gpu.enter("Event.is_done")
        return self._here.done

    def sync(self) -> None:
        self._gpu.enter("Event.sync")
        self._here.wait()

    def close(self) -> None:
        self._gpu.log.append("Event.close")
        self._gpu.events.discard(self._event)
        self._event = None


class Buffer:
    """Freed when it is closed or collected. The real one does not report a failure of that."""

    def __init__(self, gpu: Gpu, size: int, stream: streams.Stream | None = None) -> None:
        """Memory that was allocated on a stream is freed in the stream's order."""
        self._gpu = gpu
        self._handle = gpu.allocate(size, gpu.index if stream else -1)
        self._size = size
        self._stream = stream
        self._free = weakref.finalize(self, gpu.release_on, stream, self._handle)
        self._free.atexit = False  # The real one, too, is freed with its object only.

    @classmethod
    def from_handle(cls, ptr: int, size: int) -> "Buffer":
        """Memory of another owner, which frees it."""
        self = object.__new__(cls)
        self._handle, self._size, self._free = ptr, size, weakref.finalize(self, int)
        return self

    @property
    def handle(self) -> int:
        if not self._free.alive:
            raise Misuse("memory was used after it was closed")
        return self._handle

    @property
    def size(self) -> int:
        return self._size if self._free.alive else 0

    def fill(self, value: int, *, stream: Stream) -> None:
        self._gpu.enter("Buffer.fill", current=True)
        data = bytes([value]) * self.size
        stream.simulated.put(Operation(partial(self._gpu.write, self.handle, data)))

    def set_deallocation_stream(self, stream: Stream) -> None:
        self._free.detach()
        self._stream = stream.simulated
        self._free = weakref.finalize(self, self._gpu.release_on, self._stream, self._handle)

    def close(self) -> None:
        self._gpu.log.append("Buffer.close")
        if not self._gpu.current() and not self._gpu.lost:
            raise Misuse("memory is not freed in a thread without a context, and nothing reports it")
        if self._stream and self._stream.closed and self._free.alive:
            raise Misuse("memory of a destroyed stream was freed, where the real one crashes the process")
        self._free()


class LegacyPinnedMemoryResource:
    _gpu: Gpu

    def allocate(self, size: int) -> Buffer:
        self._gpu.enter("LegacyPinnedMemoryResource.allocate", current=True, safe=False)
        return Buffer(self._gpu, size)


@dataclass
class ProgramOptions:
    arch: str


class Program:
    _gpu: Gpu

    def __init__(self, code: str, code_type: str, options: ProgramOptions) -> None:
        self._gpu.enter("Program")
        if not self._gpu.nvrtc:
            raise RuntimeError('Failure finding "libnvrtc.so.13 or libnvrtc.so.12"')
        if code_type != "c++" or options.arch != f"sm_{self._gpu.arch}":
            raise CUDAError("NVRTC_ERROR_INVALID_OPTION: not for this GPU")
        self._code = code

    def compile(
        self,
        target_type: str,
        name_expressions: Sequence[str] = (),
        logs: object = None,
        *,
        cache: ProgramCacheResource | None = None,
    ) -> "ObjectCode":
        """The source is in place of code."""
        key = self._code.encode()
        if cache is not None and (found := cache.get(key)) is not None:
            return ObjectCode(found.decode(), target_type)
        self._gpu.enter("Program.compile")
        compiled = ObjectCode(self._code, target_type)
        if cache is not None:
            cache[key] = compiled
        return compiled


class ObjectCode:
    def __init__(self, code: str, target_type: str) -> None:
        self._code = code
        self._target_type = target_type

    @property
    def code(self) -> bytes:
        return self._code.encode()

    def get_kernel(self, name: str) -> "Kernel":
        declared = re.search(rf"__global__ void (?:__launch_bounds__\([^)]*\) )?{name}\(([^)]*)\)", self._code)
        if self._target_type != "cubin" or not declared:
            raise CUDAError("CUDA_ERROR_NOT_FOUND: no such kernel")
        return Kernel(name, re.split(r",\s+", declared[1]))


class Kernel:
    """Runs the function of the same name in tests.simulation.kernels."""

    def __init__(self, name: str, parameters: Sequence[str]) -> None:
        self._name = name
        self._parameters = parameters

    def _check(self, arguments: Sequence[Any]) -> None:
        """Check arguments against the kernel's declaration, which no real layer does: of too small ones, bytes beyond are
        read.
        """
        if (given := list(map(_declared, arguments))) != (wanted := [_type(text) for text in self._parameters]):
            raise Misuse(f"{self._name} takes {wanted}, but was given {given}")


def _type(text: str) -> str:
    return "pointer" if "*" in text else text.rpartition(" ")[0]


_TYPES = {"uint32": "unsigned", "uint64": "unsigned long long", "int": "long long"}


def _declared(argument: Any) -> str:
    return "pointer" if isinstance(argument, Buffer) else _TYPES[type(argument).__name__]


@dataclass
class LaunchConfig:
    grid: int
    block: int


class Launch:
    """`launch`, bound to a GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def __call__(self, stream: Stream, config: LaunchConfig, kernel: Kernel, *kernel_args: Any) -> None:
        self._gpu.enter("launch", current=True)
        kernel._check(kernel_args)
        if config.block > 1024:
            raise CUDAError("CUDA_ERROR_INVALID_VALUE: a block has 1024 threads at most")
        self._gpu.launched.append((kernel._name, len(stream.simulated.context.sms), config.grid))
        values = [argument.handle if isinstance(argument, Buffer) else int(argument) for argument in kernel_args]
        stream.simulated.put(Operation(KERNELS[kernel._name](self._gpu, stream.simulated, config.grid, *values)))
