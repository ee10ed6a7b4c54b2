"""The one split of a device into granules of SMs, and green contexts made of granules.

A device is split once and its groups are handed out: two splits overlap, and the driver does not say so. A context may
be made of any groups of one split, the remainder included. What CUDA 13.1 adds is left out until it can be tried:
work queues of a context's own (cuda.core's `WorkqueueResource`, sharing scope `green_ctx_balanced`).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from cuda.bindings import driver
from cuda.core import ContextOptions, Device, SMResource, SMResourceOptions, Stream, StreamOptions
from cuda.core._utils.cuda_utils import CUDAError, handle_return

# CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING, whose enum is called differently by different bindings.
IGNORE_SM_COSCHEDULING = 1
DEFAULT_STREAM = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM  # "required" by cuGreenCtxCreate
NONBLOCKING = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
SM = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM


@dataclass(frozen=True, slots=True)
class Green:
    """A green context and its one stream."""

    sms: int
    """What the context itself says it holds."""
    stream: Stream
    release: Callable[[], None]
    """Destroys the stream, then the context. Once only, with nothing in flight."""


class Split(Protocol):
    """Groups of one split. The device must be current in the thread that calls `create`."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """SMs of each group; the remainder, if there is one, comes last."""

    def create(self, device: Device, groups: Sequence[int]) -> Green:
        """Make a green context of the groups with these indices. Raises CUDAError."""


class CoreSplit:
    """Groups on which thread-block clusters run, as cuda.core splits them."""

    def __init__(self, resources: Sequence[SMResource]) -> None:
        self._resources = tuple(resources)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(resource.sm_count for resource in self._resources)

    def create(self, device: Device, groups: Sequence[int]) -> Green:
        with ExitStack() as made:
            context = device.create_context(ContextOptions(resources=[self._resources[group] for group in groups]))
            made.callback(context.close)
            stream = context.create_stream(StreamOptions(nonblocking=True))
            made.callback(stream.close)
            return Green(context.resources.sm.sm_count, stream, made.pop_all().close)


class FineSplit:
    """Groups smaller than a cluster needs, which cuda.core cannot ask a driver before CUDA 13.1 for."""

    def __init__(self, resources: Sequence["driver.CUdevResource"]) -> None:
        self._resources = tuple(resources)
        self._descriptors: dict[tuple[int, ...], Any] = {}  # nothing frees one, so each is made once

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(resource.sm.smCount for resource in self._resources)

    def create(self, device: Device, groups: Sequence[int]) -> Green:
        descriptor = self._descriptor(tuple(groups))
        with ExitStack() as made:
            context = handle_return(driver.cuGreenCtxCreate(descriptor, device.device_id, DEFAULT_STREAM))
            made.callback(lambda: handle_return(driver.cuGreenCtxDestroy(context)))
            stream = handle_return(driver.cuGreenCtxStreamCreate(context, NONBLOCKING, 0))
            made.callback(lambda: handle_return(driver.cuStreamDestroy(stream)))
            sms = handle_return(driver.cuGreenCtxGetDevResource(context, SM)).sm.smCount
            return Green(sms, Stream.from_handle(int(stream)), made.pop_all().close)

    def _descriptor(self, groups: tuple[int, ...]) -> Any:
        if groups not in self._descriptors:
            resources = [self._resources[group] for group in groups]
            self._descriptors[groups] = handle_return(driver.cuDevResourceGenerateDesc(resources, len(resources)))
        return self._descriptors[groups]


def split(device: Device, granule_sms: int | None = None) -> Split:
    """Split a device into as many groups of this many SMs as its topology gives; by default, of the driver's smallest.

    Groups below the driver's smallest ignore which SMs can be scheduled together: no thread-block clusters on them.
    Raises CUDAError, or NotImplementedError for a driver older than CUDA 12.4.
    """
    smallest = device.resources.sm.min_partition_size
    if granule_sms is None or granule_sms >= smallest:
        return _split_coarsely(device.resources.sm, granule_sms or smallest)
    return _split_finely(device, granule_sms)


def _split_coarsely(sms: SMResource, size: int) -> CoreSplit:
    """Drivers before CUDA 13.1 give fewer groups than asked for where these do not fit; later ones refuse instead."""
    for count in range(sms.sm_count // size, 1, -1):
        try:
            return CoreSplit(_nonempty(*sms.split(SMResourceOptions(count=[size] * count))))
        except CUDAError:
            continue
    return CoreSplit(_nonempty(*sms.split(SMResourceOptions(count=[size]))))


def _split_finely(device: Device, size: int) -> FineSplit:
    whole = handle_return(driver.cuDeviceGetDevResource(device.device_id, SM))
    most = whole.sm.smCount // size
    groups, count, rest = handle_return(driver.cuDevSmResourceSplitByCount(most, whole, IGNORE_SM_COSCHEDULING, size))
    return FineSplit([*groups[:count], *([rest] if rest.sm.smCount else [])])


def _nonempty(groups: Sequence[SMResource], rest: SMResource) -> list[SMResource]:
    return [*groups, *([rest] if rest.sm_count else [])]
