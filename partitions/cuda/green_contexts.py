"""Splits a device into granules of SMs, once, and makes green contexts of granules.

Hazard: a device must be split only once, since two splits overlap and the driver does not report it. A context may be made of
any groups of one split, the remainder included.

Hazard: the SMs that are left over, 12 on an H100, are of several GPCs, so no clusters of 4 or 8 thread blocks can be launched
there (CUDA_ERROR_INVALID_CLUSTER_SIZE), while they can on every group and on several, the remainder included (seen on H100s,
2026-11-26). So the remainder is no granule of its own: it belongs to the last one.

With a driver and bindings of CUDA 13.1 or newer the structured split is used, and each context asks for work queues apart from
the others': work of different streams that goes through one queue waits for each other, on whatever SMs it runs. This was
written from NVIDIA's documents and never ran on such a driver. If it is refused, the calls from before 13.1 are used.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from cuda.bindings import driver
from cuda.core import (
    ContextOptions,
    Device,
    SMResource,
    SMResourceOptions,
    Stream,
    StreamOptions,
    WorkqueueResource,
    WorkqueueResourceOptions,
)

from .driver import CUDAError, handle_return

log = logging.getLogger("greenlane.partitions")

T = TypeVar("T")
Groups = tuple[list[SMResource], list[SMResource]]
"""Those of a split, and what is left over: nothing or one."""

# CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING, whose enum is called differently by different bindings.
IGNORE_SM_COSCHEDULING = 1
DEFAULT_STREAM = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM  # "required" by cuGreenCtxCreate
NONBLOCKING = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
SM = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM

PAIR = 2
"""SMs that are scheduled together on every GPU: the minimum of the structured split."""
# The limit is the number of streams that a context runs at once: its own, and one other. The driver separates contexts as long
# as the limits add up to CUDA_DEVICE_MAX_CONNECTIONS or less, which is 32 at most: 16 contexts, wide partitions' included.
BALANCED = WorkqueueResourceOptions(sharing_scope="green_ctx_balanced", concurrency_limit=2)


@dataclass(frozen=True, slots=True)
class Green:
    """A green context and its one stream."""

    sms: int
    """The number of SMs that the context itself reports."""
    stream: Stream
    release: Callable[[], None]
    """Destroys the stream, then the context. Call it once, with nothing in flight."""
    priority: int = 0
    """The stream's; a lower number comes first."""
    holding: int = 0
    """Another stream, made with the context, for `Partition.hold`: its CUstream as an integer; 0 if there is none."""


class Split(Protocol):
    """The granules of one split. The device must be current in the thread that calls `create`."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The SMs of each granule; the last may have others than the rest."""

    @property
    def balanced(self) -> bool:
        """Whether the next context asks for work queues of its own; otherwise all share the device's."""

    def create(self, device: Device, granules: Sequence[int], priority: int) -> Green:
        """Make a green context of the granules with these indices, with a stream of this priority. Raises CUDAError."""


class CoreSplit:
    """Granules of groups that cuda.core has split; `balanced` until the driver refuses that."""

    def __init__(self, granules: Sequence[Sequence[SMResource]], balanced: bool = False) -> None:
        self.balanced = balanced
        self._granules = tuple(granules)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(group.sm_count for group in granule) for granule in self._granules)

    def create(self, device: Device, granules: Sequence[int], priority: int) -> Green:
        sms = [group for granule in granules for group in self._granules[granule]]
        if not self.balanced:
            return _create(device, sms, priority)
        try:
            return _create(device, [*sms, _balanced_queues(device)], priority)
        except CUDAError as error:
            green = _create(device, sms, priority)  # Raises if the queues were not the reason.
            if self.balanced:
                self.balanced = False
                _log_shared_queues(error)
            return green


class CountSplit:
    """The same of the driver's call from before CUDA 13.1, of which cuda.core does not support all options."""

    balanced = False

    def __init__(self, granules: Sequence[Sequence["driver.CUdevResource"]]) -> None:
        self._granules = tuple(granules)
        self._descriptors: dict[tuple[int, ...], Any] = {}  # There is no call to free one, so each is made once.

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(group.sm.smCount for group in granule) for granule in self._granules)

    def create(self, device: Device, granules: Sequence[int], priority: int) -> Green:
        descriptor = self._descriptor(tuple(granules))
        with ExitStack() as made:
            context = handle_return(driver.cuGreenCtxCreate(descriptor, device.device_id, DEFAULT_STREAM))
            made.callback(lambda: handle_return(driver.cuGreenCtxDestroy(context)))
            stream = handle_return(driver.cuGreenCtxStreamCreate(context, NONBLOCKING, priority))
            made.callback(lambda: handle_return(driver.cuStreamDestroy(stream)))
            sms = handle_return(driver.cuGreenCtxGetDevResource(context, SM)).sm.smCount
            return Green(sms, Stream.from_handle(int(stream)), made.pop_all().close, priority)

    def _descriptor(self, granules: tuple[int, ...]) -> Any:
        if granules not in self._descriptors:
            resources = [group for granule in granules for group in self._granules[granule]]
            self._descriptors[granules] = handle_return(driver.cuDevResourceGenerateDesc(resources, len(resources)))
        return self._descriptors[granules]


def split(device: Device, granule_sms: int | None = None) -> Split:
    """Split a device into as many granules of this many SMs as its topology allows; by default, of the driver's minimum.

    What is left over belongs to the last, unless there is one granule only: that and the rest are two. Granules below that
    minimum ignore which SMs can be scheduled together, so none has thread-block clusters, and the rest is a granule. Raises
    CUDAError, or RuntimeError for a driver older than CUDA 12.4.
    """
    sms = device.resources.sm
    size = granule_sms or sms.min_partition_size
    fine = size < sms.min_partition_size
    try:
        groups = _split_structured(sms, size, PAIR if fine else sms.coscheduled_alignment)
        return CoreSplit(_granules(*groups, fine), _offers_queues(device))
    except RuntimeError:  # From cuda.core, unless driver and bindings are of CUDA 13.1 or newer.
        return _split_by_count(device, size, fine) if fine else CoreSplit(_granules(*_split_evenly(sms, size), fine))
    except (CUDAError, IncompatibleGroups) as error:
        log.warning("no structured split; splitting as before CUDA 13.1, with shared work queues: %s", error)
        return _split_by_count(device, size, fine)


class IncompatibleGroups(Exception):
    """Groups of one split that the driver would not allow in one context."""


def _create(device: Device, resources: Sequence[SMResource | WorkqueueResource], priority: int) -> Green:
    with ExitStack() as made:
        context = device.create_context(ContextOptions(resources=resources))
        made.callback(context.close)
        stream = context.create_stream(StreamOptions(nonblocking=True, priority=priority))
        made.callback(stream.close)
        return Green(context.resources.sm.sm_count, stream, made.pop_all().close, priority)


def _balanced_queues(device: Device) -> WorkqueueResource:
    """Each context configures its own."""
    queues = device.resources.workqueue
    queues.configure(BALANCED)
    return queues


def _offers_queues(device: Device) -> bool:
    try:
        _balanced_queues(device)
    except CUDAError as error:
        _log_shared_queues(error)
        return False
    return True


def _log_shared_queues(error: CUDAError) -> None:
    log.warning("the driver refuses separate work queues for partitions, so they share the device's: %s", error)


def _granules(groups: Sequence[T], rest: Sequence[T], fine: bool) -> list[list[T]]:
    """A granule of each group. `rest` is what is left over, nothing or one."""
    granules = [[group] for group in groups]
    if fine or len(groups) == 1:
        return [*granules, *[[each] for each in rest]]
    return [*granules[:-1], [*granules[-1], *rest]]


def _split_structured(sms: SMResource, size: int, together: int) -> Groups:
    """Groups of a multiple of `together` SMs, which are scheduled together. Raises CUDAError, IncompatibleGroups."""
    groups, rest = _split_evenly(sms, -(-size // together) * together, together)
    if len(found := {group.coscheduled_alignment for group in (*groups, *rest)}) > 1:
        raise IncompatibleGroups(f"groups of SMs scheduled together by {sorted(found)} cannot be in one context")
    return groups, rest


def _split_evenly(sms: SMResource, size: int, together: int | None = None) -> Groups:
    """Drivers before CUDA 13.1 return fewer groups than requested if these do not fit; later ones refuse instead."""
    for count in range(sms.sm_count // size, 1, -1):
        try:
            return _split(sms, size, count, together)
        except CUDAError:
            continue
    return _split(sms, size, 1, together)


def _split(sms: SMResource, size: int, count: int, together: int | None) -> Groups:
    groups, rest = sms.split(SMResourceOptions(count=[size] * count, coscheduled_sm_count=together))
    return list(groups), [rest] if rest.sm_count else []


def _split_by_count(device: Device, size: int, fine: bool) -> CountSplit:
    whole = handle_return(driver.cuDeviceGetDevResource(device.device_id, SM))
    most, flags = whole.sm.smCount // size, IGNORE_SM_COSCHEDULING if fine else 0
    groups, count, rest = handle_return(driver.cuDevSmResourceSplitByCount(most, whole, flags, size))
    return CountSplit(_granules(groups[:count], [rest] if rest.sm.smCount else [], fine))
