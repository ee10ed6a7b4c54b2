"""`cuda.bindings.driver` for a simulated GPU: functions that return tuples beginning with a result."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from . import gpu as hardware
from .errors import CUDAError, Misuse
from .gpu import Gpu
from .shared import PAGE, Handle
from .streams import Event, Graph, Operation

CU_MEMHOSTREGISTER_PORTABLE = 1
CU_MEMHOSTREGISTER_DEVICEMAP = 2


class CUresult(IntEnum):
    """Failures are their names, with an explanation."""

    CUDA_SUCCESS = 0


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class CUpointer_attribute(IntEnum):
    CU_POINTER_ATTRIBUTE_CONTEXT = 1
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9
    CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17


class CUmemorytype(IntEnum):
    CU_MEMORYTYPE_HOST = 1
    CU_MEMORYTYPE_DEVICE = 2


FIRST_POOL = 0x9000
"""The memory pool of the first device; the next devices' follow it."""


class CUstreamCaptureStatus(IntEnum):
    CU_STREAM_CAPTURE_STATUS_NONE = 0
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1


class CUlimit(IntEnum):
    CU_LIMIT_STACK_SIZE = 0


class CUdevResourceType(IntEnum):
    CU_DEV_RESOURCE_TYPE_SM = 1


class CUgreenCtxCreate_flags(IntEnum):
    CU_GREEN_CTX_DEFAULT_STREAM = 1


class CUstream_flags(IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemLocation:
    type = CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    id = -1


class CUmemAllocationProp:
    def __init__(self) -> None:
        self.type: CUmemAllocationType | None = None
        self.requestedHandleTypes: CUmemAllocationHandleType | None = None
        self.location = CUmemLocation()


class CUmemAccessDesc:
    def __init__(self) -> None:
        self.location = CUmemLocation()
        self.flags: CUmemAccess_flags | None = None


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133


class CUmemPool_attribute(IntEnum):
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5


class CUdevSmResource:
    def __init__(self, count: int) -> None:
        self.smCount = count


class CUdevResource:
    def __init__(self, resource: hardware.Resource) -> None:
        self._resource = resource
        self.sm = CUdevSmResource(len(resource.sms))


def handle_return(result: tuple[Any, ...]) -> Any:
    """As cuda.core's: raise unless the result is success, else return the values after it."""
    if result[0] != CUresult.CUDA_SUCCESS:
        raise CUDAError(result[0])
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


class Driver:
    """The functions, as methods: `installed` makes a module of them."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def _call(
        self, name: str, body: Callable[[], Any], current: bool = False, gives: bool = False, safe: bool = True
    ) -> tuple[Any, ...]:
        """A call that `gives` a value returns None if it fails; `safe`: it is allowed during captures."""
        success = CUresult.CUDA_SUCCESS
        try:
            self._gpu.enter(name, current, safe)
            result = body()
        except CUDAError as error:
            return (str(error), None) if gives else (str(error),)
        return (success,) if result is None else (success, *result) if isinstance(result, tuple) else (success, result)

    def _its(self, device: int) -> Gpu:
        """The GPU, where this is its ordinal: nothing asks for another one."""
        if device != self._gpu.index:
            raise Misuse(f"the server used device {device}, where it serves on device {self._gpu.index}")
        return self._gpu

    def cuDeviceTotalMem(self, dev: int) -> tuple[Any, ...]:
        return self._call("cuDeviceTotalMem", lambda: self._its(dev) and hardware.TOTAL, gives=True)

    def cuDeviceGetAttribute(self, attrib: CUdevice_attribute, dev: int) -> tuple[Any, ...]:
        return self._call("cuDeviceGetAttribute", lambda: int(self._its(dev).mps is not None), gives=True)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._call("cuDeviceGetCount", lambda: self._gpu.index + 1, gives=True)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        """What is free of the whole device "according to the OS", and all there is."""
        answer = self._call("cuMemGetInfo", lambda: (self._gpu.reported_free, hardware.TOTAL), current=True)
        return answer if len(answer) == 3 else (*answer, None, None)

    def cuDeviceGetMemPool(self, dev: int) -> tuple[Any, ...]:
        def body() -> int:
            if not self._gpu.has_pool:
                raise CUDAError("CUDA_ERROR_NOT_SUPPORTED: no memory pools")
            return FIRST_POOL + dev

        return self._call("cuDeviceGetMemPool", body, gives=True)

    def cuMemPoolGetAttribute(self, pool: int, attr: CUmemPool_attribute) -> tuple[Any, ...]:
        return self._call("cuMemPoolGetAttribute", lambda: self._its(pool - FIRST_POOL).pool_has, gives=True)

    def cuDeviceGetDevResource(self, device: int, typename: int) -> tuple[Any, ...]:
        return self._call("cuDeviceGetDevResource", lambda: CUdevResource(self._its(device).whole()))

    def cuDevSmResourceSplitByCount(
        self, nbGroups: int, input_: CUdevResource, useFlags: int, minCount: int
    ) -> tuple[Any, ...]:
        def body() -> tuple[Any, ...]:
            groups, rest = self._gpu.split(input_._resource, nbGroups, minCount, fine=bool(useFlags & 1))
            unused = [CUdevResource(hardware.Resource((), 0))] * (nbGroups - len(groups))
            return [*map(CUdevResource, groups), *unused], len(groups), CUdevResource(rest)

        return self._call("cuDevSmResourceSplitByCount", body)

    def cuDevResourceGenerateDesc(self, resources: Sequence[CUdevResource], nbResources: int) -> tuple[Any, ...]:
        chosen = [resource._resource for resource in resources[:nbResources]]
        return self._call("cuDevResourceGenerateDesc", lambda: [self._gpu.merge(chosen)])

    def cuGreenCtxCreate(self, desc: list[tuple[int, ...]], dev: int, flags: int) -> tuple[Any, ...]:
        return self._call("cuGreenCtxCreate", lambda: self._its(dev).create_context(desc[0]))

    def cuGreenCtxDestroy(self, hCtx: hardware.Context) -> tuple[Any, ...]:
        return self._call("cuGreenCtxDestroy", lambda: self._gpu.destroy_context(hCtx))

    def cuGreenCtxGetDevResource(self, hCtx: hardware.Context | int, typename: int) -> tuple[Any, ...]:
        """Takes the context as it was created, or the handle by which a stream refers to it."""
        (context,) = [each for each in self._gpu.contexts if hCtx in (each, each.handle)]
        return self._call("cuGreenCtxGetDevResource", lambda: CUdevResource(hardware.Resource(context.sms, 0)))

    def cuGreenCtxStreamCreate(self, greenCtx: hardware.Context | int, flags: int, priority: int) -> tuple[Any, ...]:
        """Takes the context as it was created, or the handle by which a stream refers to it."""
        (context,) = [each for each in self._gpu.contexts if greenCtx in (each, each.handle)]
        return self._call("cuGreenCtxStreamCreate", lambda: self._gpu.create_stream(context, priority).handle)

    def cuStreamDestroy(self, hStream: int) -> tuple[Any, ...]:
        return self._call("cuStreamDestroy", lambda: self._gpu.destroy_stream(self._gpu.find_stream(hStream)))

    def cuStreamGetGreenCtx(self, hStream: int) -> tuple[Any, ...]:
        context = self._gpu.find_stream(hStream).context
        return self._call("cuStreamGetGreenCtx", lambda: context.handle if context.green else 0)

    def cuStreamGetCtx(self, hStream: int) -> tuple[Any, ...]:
        return self._call("cuStreamGetCtx", lambda: self._gpu.find_stream(hStream).context.handle, gives=True)

    def cuStreamCreate(self, Flags: int) -> tuple[Any, ...]:
        return self._call("cuStreamCreate", lambda: self._gpu.create_stream(self._gpu.primary).handle, current=True, gives=True)

    def cuStreamGetDevice(self, hStream: int) -> tuple[Any, ...]:
        return self._call("cuStreamGetDevice", lambda: self._gpu.find_stream(hStream).context.device)

    def cuStreamIsCapturing(self, hStream: int) -> tuple[Any, ...]:
        capture = self._gpu.find_stream(hStream).capture
        return self._call("cuStreamIsCapturing", lambda: CUstreamCaptureStatus(bool(capture)))

    def cuStreamWaitEvent(self, hStream: int, hEvent: Event, Flags: int) -> tuple[Any, ...]:
        return self._call("cuStreamWaitEvent", lambda: hEvent.hold(self._gpu.find_stream(hStream)), current=True)

    def cuEventRecord(self, hEvent: Event, hStream: int) -> tuple[Any, ...]:
        return self._call("cuEventRecord", lambda: hEvent.record(self._gpu.find_stream(hStream)), current=True)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return self._call("cuCtxGetCurrent", self._gpu.current, gives=True)

    def cuCtxGetDevice(self) -> tuple[Any, ...]:
        def body() -> int:
            (found,) = [each for each in (*self._gpu.contexts, *self._gpu.ordinary) if each.handle == self._gpu.current()]
            return found.device

        return self._call("cuCtxGetDevice", body, current=True, gives=True)

    def cuCtxGetStreamPriorityRange(self) -> tuple[Any, ...]:
        return self._call("cuCtxGetStreamPriorityRange", lambda: self._gpu.priorities, current=True)

    def cuCtxSetLimit(self, limit: CUlimit, value: int) -> tuple[Any, ...]:
        return self._call("cuCtxSetLimit", lambda: self._gpu.limits.update({CUlimit(limit): value}), current=True)

    def cuCtxSetCurrent(self, ctx: int) -> tuple[Any, ...]:
        return self._call("cuCtxSetCurrent", lambda: self._gpu.set_current(int(ctx)))

    def cuCtxPushCurrent(self, ctx: int) -> tuple[Any, ...]:
        self._gpu.here.pushed = [*getattr(self._gpu.here, "pushed", ()), ctx]
        return self._call("cuCtxPushCurrent", lambda: None)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return self._call("cuCtxPopCurrent", lambda: self._gpu.here.pushed.pop())

    def cuMemHostRegister(self, p: int, bytesize: int, Flags: int) -> tuple[Any, ...]:
        return self._call("cuMemHostRegister", lambda: self._gpu.pin(p, bytesize), current=True, safe=False)

    def cuMemAlloc(self, bytesize: int) -> tuple[Any, ...]:
        def body() -> int:
            return self._gpu.allocate(bytesize, self._gpu.index, self._gpu.current())

        return self._call("cuMemAlloc", body, current=True, gives=True, safe=False)

    def cuMemsetD8(self, dstDevice: int, uc: int, N: int) -> tuple[Any, ...]:
        """On the NULL stream, which is not waited for."""
        written = Operation(lambda: self._gpu.write(dstDevice, bytes([uc]) * N))
        return self._call("cuMemsetD8", lambda: self._gpu.find_stream(0).put(written), current=True, safe=False)

    def cuStreamSynchronize(self, hStream: int) -> tuple[Any, ...]:
        return self._call("cuStreamSynchronize", lambda: self._gpu.find_stream(hStream).wait(), current=True)

    def cuMemFree(self, dptr: int) -> tuple[Any, ...]:
        return self._call("cuMemFree", lambda: self._gpu.release(dptr), current=True, safe=False)

    def cuMemGetAllocationGranularity(
        self, prop: CUmemAllocationProp, option: CUmemAllocationGranularity_flags
    ) -> tuple[Any, ...]:
        return self._call("cuMemGetAllocationGranularity", lambda: self._its(prop.location.id) and PAGE, gives=True)

    def cuMemCreate(self, size: int, prop: CUmemAllocationProp, flags: int) -> tuple[Any, ...]:
        def body() -> Handle:
            if prop.type is None or prop.requestedHandleTypes is None:
                raise Misuse("memory of no type, or that is not shared")
            return self._its(prop.location.id).pages.create(size)

        return self._call("cuMemCreate", body, current=True, gives=True, safe=False)

    def cuMemRelease(self, handle: Handle) -> tuple[Any, ...]:
        return self._call("cuMemRelease", handle.release, safe=False)

    def cuMemExportToShareableHandle(
        self, handle: Handle, handleType: CUmemAllocationHandleType, flags: int
    ) -> tuple[Any, ...]:
        return self._call("cuMemExportToShareableHandle", lambda: self._gpu.pages.export(handle), gives=True)

    def cuMemImportFromShareableHandle(self, osHandle: int, shHandleType: CUmemAllocationHandleType) -> tuple[Any, ...]:
        return self._call("cuMemImportFromShareableHandle", lambda: self._gpu.pages.take(osHandle), gives=True)

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> tuple[Any, ...]:
        return self._call("cuMemAddressReserve", lambda: self._gpu.pages.reserve(size), gives=True, safe=False)

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[Any, ...]:
        return self._call("cuMemAddressFree", lambda: self._gpu.pages.free(ptr, size), safe=False)

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: Handle, flags: int) -> tuple[Any, ...]:
        return self._call("cuMemMap", lambda: self._gpu.pages.map(ptr, size, handle), safe=False)

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]:
        return self._call("cuMemUnmap", lambda: self._gpu.pages.unmap(ptr, size), safe=False)

    def cuMemSetAccess(self, ptr: int, size: int, desc: list[CUmemAccessDesc], count: int) -> tuple[Any, ...]:
        def body() -> None:
            self._gpu.pages.allow(ptr, size, desc, self._gpu.index, self._gpu.current())

        return self._call("cuMemSetAccess", body, current=True, safe=False)

    def cuMemHostGetDevicePointer(self, p: int, Flags: int) -> tuple[Any, ...]:
        return self._call("cuMemHostGetDevicePointer", lambda: p, current=True)

    def cuMemHostUnregister(self, p: int) -> tuple[Any, ...]:
        return self._call("cuMemHostUnregister", lambda: self._gpu.unpin(p), current=True, safe=False)

    def cuPointerGetAttributes(
        self, numAttributes: int, attributes: Sequence[CUpointer_attribute], ptr: int
    ) -> tuple[Any, ...]:
        """Zeros for memory that CUDA does not know.

        The ordinal is 0 whoever owns the memory: so it is with driver 580.159 on two H100s, and with cuda-bindings 13.2 and
        13.3 on any machine. Memory of a pool has no context.
        """

        def body() -> list[int]:
            region = self._gpu.region_of(ptr)
            device, context = (region.device, region.context) if region else (-1, 0)
            kind = CUmemorytype.CU_MEMORYTYPE_HOST if device < 0 else CUmemorytype.CU_MEMORYTYPE_DEVICE
            known = {
                CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT: context,
                CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: int(kind),
                CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: 0,
                CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: 0 if device < 0 or context else FIRST_POOL + device,
            }
            reachable = self._gpu.is_reachable(ptr)
            return [known[attribute] if reachable else 0 for attribute in attributes[:numAttributes]]

        return self._call("cuPointerGetAttributes", body, current=True, gives=True)

    def cuMemcpyAsync(self, dst: int, src: int, ByteCount: int, hStream: int) -> tuple[Any, ...]:
        return self._call("cuMemcpyAsync", lambda: self._gpu.enqueue_copy(dst, src, ByteCount, hStream), current=True)

    def cuMemcpyHtoDAsync(self, dstDevice: int, srcHost: int, ByteCount: int, hStream: int) -> tuple[Any, ...]:
        return self._call(
            "cuMemcpyHtoDAsync", lambda: self._gpu.enqueue_staged_copy(dstDevice, srcHost, ByteCount, hStream), current=True
        )

    def cuMemcpyDtoHAsync(self, dstHost: int, srcDevice: int, ByteCount: int, hStream: int) -> tuple[Any, ...]:
        return self._call(
            "cuMemcpyDtoHAsync", lambda: self._gpu.copy_back(dstHost, srcDevice, ByteCount, hStream), current=True
        )

    def cuThreadExchangeStreamCaptureMode(self, mode: CUstreamCaptureMode) -> tuple[Any, ...]:
        def body() -> CUstreamCaptureMode:
            before: CUstreamCaptureMode = getattr(self._gpu.here, "mode", CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
            self._gpu.here.mode = CUstreamCaptureMode(mode)
            return before

        return self._call("cuThreadExchangeStreamCaptureMode", body)

    def cuStreamBeginCapture(self, hStream: int, mode: CUstreamCaptureMode) -> tuple[Any, ...]:
        thread_local = mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        stream = self._gpu.find_stream(hStream)
        return self._call("cuStreamBeginCapture", lambda: self._gpu.begin_capture(stream, thread_local), current=True)

    def cuStreamEndCapture(self, hStream: int) -> tuple[Any, ...]:
        """The capture has ended even if this fails."""
        stream = self._gpu.find_stream(hStream)
        answer = self._call("cuStreamEndCapture", lambda: self._gpu.end_capture(stream), current=True, gives=True)
        stream.capture = self._gpu.here.capture = None
        return answer

    def cuGraphInstantiate(self, hGraph: Graph, flags: int) -> tuple[Any, ...]:
        return self._call("cuGraphInstantiate", lambda: self._gpu.instantiate(hGraph), current=True, gives=True)

    def cuGraphLaunch(self, hGraphExec: Graph, hStream: int) -> tuple[Any, ...]:
        stream = self._gpu.find_stream(hStream)
        return self._call("cuGraphLaunch", lambda: self._gpu.launch_graph(hGraphExec, stream), current=True)

    def cuGraphExecDestroy(self, hGraphExec: Graph) -> tuple[Any, ...]:
        return self._call("cuGraphExecDestroy", lambda: self._gpu.destroy_graph(hGraphExec), current=True)

    def cuGraphDestroy(self, hGraph: Graph) -> tuple[Any, ...]:
        return self._call("cuGraphDestroy", lambda: self._gpu.destroy_graph(hGraph), current=True)
