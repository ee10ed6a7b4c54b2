"""`cuda.core` for a simulated GPU. What begins with an underscore is the simulation's own."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import gpu as hardware
from .gpu import CUDAError, Gpu, Misuse


class Device:
    """One object a thread and ordinal, which is initialised in that thread or not at all, as in the real one."""

    _gpu: Gpu

    def __new__(cls, device_id: int | None = None) -> "Device":
        cls._gpu.enter("Device")
        if device_id != cls._gpu.index:
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
    def arch(self) -> str:
        return self._gpu.arch

    @property
    def resources(self) -> "DeviceResources":
        return DeviceResources(self._gpu, self._gpu.whole())

    def set_current(self, ctx: None = None) -> None:
        self._gpu.enter("Device.set_current")
        self._gpu.here.current = True

    def create_context(self, options: "ContextOptions") -> "Context":
        self._gpu.enter("Device.create_context", current=True)
        sms = self._gpu.merge([resource._resource for resource in options.resources])
        return Context(self._gpu, self._gpu.create_context(sms))


class DeviceResources:
    def __init__(self, gpu: Gpu, resource: hardware.Resource) -> None:
        self._gpu = gpu
        self._resource = resource

    @property
    def sm(self) -> "SMResource":
        self._gpu.enter("DeviceResources.sm")
        return SMResource(self._gpu, self._resource)


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

    def split(self, options: "SMResourceOptions") -> "tuple[list[SMResource], SMResource]":
        self._gpu.enter("SMResource.split")
        if len(set(options.count)) != 1:
            raise NotImplementedError("counts that differ need CUDA 13.1")
        groups, rest = self._gpu.split(self._resource, len(options.count), options.count[0])
        return [SMResource(self._gpu, group) for group in groups], SMResource(self._gpu, rest)


@dataclass
class SMResourceOptions:
    count: Sequence[int]


@dataclass
class ContextOptions:
    resources: Sequence[SMResource]


@dataclass
class StreamOptions:
    nonblocking: bool = True


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
            raise Misuse("a stream that waits for the NULL stream waits for everybody")
        return Stream._of(self._gpu, self._gpu.create_stream(self._context), owned=True)

    def close(self) -> None:
        self._gpu.log.append("Context.close")
        self._gpu.destroy_context(self._context)


class Stream:
    _gpu: Gpu
    _stream: hardware.Stream
    _owned: bool

    @classmethod
    def _of(cls, gpu: Gpu, stream: hardware.Stream, owned: bool) -> "Stream":
        self = object.__new__(cls)
        self._gpu, self._stream, self._owned = gpu, stream, owned
        return self

    @classmethod
    def from_handle(cls, handle: int) -> "Stream":
        return cls._of(cls._gpu, cls._gpu.find_stream(handle), owned=False)

    @property
    def handle(self) -> int:
        return self._stream.handle

    def sync(self) -> None:
        self._gpu.enter("Stream.sync", current=True)
        self._gpu.synchronise(self._stream)

    def close(self) -> None:
        """Destroying never raises: what is wrong by now was said before."""
        self._gpu.log.append("Stream.close")
        if not self._owned:
            raise Misuse("closing a borrowed stream destroys nothing")
        self._gpu.destroy_stream(self._stream)


class Buffer:
    def __init__(self, gpu: Gpu, memory: "ctypes.Array[ctypes.c_char]") -> None:
        self._gpu = gpu
        self._memory = memory
        gpu.allocated[self.handle] = memory

    @property
    def handle(self) -> int:
        return ctypes.addressof(self._memory)

    @property
    def size(self) -> int:
        return len(self._memory)

    def close(self) -> None:
        self._gpu.enter("Buffer.close", current=True)
        del self._gpu.allocated[self.handle]


class LegacyPinnedMemoryResource:
    _gpu: Gpu

    def allocate(self, size: int) -> Buffer:
        self._gpu.enter("LegacyPinnedMemoryResource.allocate", current=True)
        return Buffer(self._gpu, ctypes.create_string_buffer(size))


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

    def compile(self, target_type: str) -> "ObjectCode":
        return ObjectCode(self._code, target_type)


class ObjectCode:
    def __init__(self, code: str, target_type: str) -> None:
        self._code = code
        self._target_type = target_type

    def get_kernel(self, name: str) -> "Kernel":
        if self._target_type != "cubin" or f"__global__ void {name}(" not in self._code:
            raise CUDAError("CUDA_ERROR_NOT_FOUND: no such kernel")
        return Kernel(name)


class Kernel:
    """Runs as what its name says: `where_am_i(seen, cycles)` has each block write its SM."""

    def __init__(self, name: str) -> None:
        self._name = name


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
        seen, cycles = kernel_args
        if seen.size < 4 * config.grid or cycles <= 0 or config.block > 1024:
            raise Misuse(f"{kernel._name} writes beyond its memory, or does not fill an SM")

        def execute() -> None:
            if seen.handle not in self._gpu.allocated:
                raise Misuse("the device wrote to memory that was freed")
            placed = self._gpu.run_blocks(stream._stream, config.grid)
            ctypes.memmove(seen.handle, (ctypes.c_uint32 * config.grid)(*placed), 4 * config.grid)

        stream._stream.pending.append(execute)
