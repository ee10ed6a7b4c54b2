"""The simulated GPU: SMs, splits, green contexts, streams, pinned memory, a log of every call, and faults on demand."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

MIB = 1 << 20
STICKY = {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ECC_UNCORRECTABLE"}


class CUDAError(Exception):
    """As cuda.core's: the name of the result, a colon, an explanation."""


class Misuse(AssertionError):
    """What the real driver answers with a leak, a crash or nothing at all."""


@dataclass
class Resource:
    """SMs that came out of one split; split 0 is the device itself."""

    sms: tuple[int, ...]
    split: int


@dataclass
class Stream:
    """Work that runs when somebody waits for it."""

    context: "Context"
    handle: int
    pending: deque[Callable[[], None]] = field(default_factory=deque)
    closed: bool = False


@dataclass
class Context:
    """A green context."""

    sms: tuple[int, ...]
    handle: int
    streams: list[Stream] = field(default_factory=list)
    closed: bool = False


class Gpu:
    """One GPU. By default an H100: 132 SMs, which divide into 15 groups of 8 and 12 left, or 64 of 2 and 4 left.

    A driver of CUDA 13.1 is `strict`: it refuses to split into more groups than there are, where earlier ones give fewer.
    """

    name = "Simulated H100"
    index = 0
    arch = "90"

    def __init__(self, sms: int = 132, coarse: int = 120, smallest: int = 8, fine: int = 128, strict: bool = False) -> None:
        self.sms = sms
        self.smallest = smallest
        self.grouped = {smallest: coarse, 2: fine}
        self.strict = strict
        self.splits = 0
        self.log: list[str] = []
        self.lost = ""
        self.free = 80 * 1024 * MIB
        self.contexts: list[Context] = []
        self.pinned: dict[int, int] = {}
        self.allocated: dict[int, object] = {}
        self.nvrtc = True
        self.confines = True
        """Whether streams stay on their context's SMs; if not, blocks run anywhere."""
        self.short = 0
        """SMs that contexts lack of what they were made of."""
        self.here = threading.local()
        self._calls: Counter[str] = Counter()
        self._faults: dict[tuple[str, int], str] = {}
        self._handles = count(0x1000, 0x10)

    def fail(self, call: str, nth: int = 1, error: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Make the n-th call of this name from now fail; a sticky error loses the device."""
        self._faults[call, self._calls[call] + nth] = error

    def enter(self, call: str, current: bool = False) -> None:
        """Every call comes by: log it, and raise what was asked for or what is due. `current`: it needs a context."""
        self._calls[call] += 1
        self.log.append(call)
        if fault := self._faults.pop((call, self._calls[call]), ""):
            self.lost = fault if fault in STICKY else self.lost
            raise CUDAError(f"{fault}: as told")
        if self.lost:
            raise CUDAError(f"{self.lost}: and ever after")
        if current and not getattr(self.here, "current", False):
            raise CUDAError("CUDA_ERROR_INVALID_CONTEXT: this thread has no context")

    def whole(self) -> Resource:
        return Resource(tuple(range(self.sms)), 0)

    def split(self, resource: Resource, groups: int, size: int, fine: bool = False) -> tuple[list[Resource], Resource]:
        """Only the first split of the device begins at SM 0: a later one overlaps it, and nobody is told."""
        if resource.split:
            raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: this came out of a split")
        step = 2 if fine else self.smallest
        size = -(-size // step) * step
        most = self.grouped[step] // size
        if most == 0 or (self.strict and groups > most):
            raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: the topology does not give that")
        self.splits += 1
        turn = 3 * (self.splits - 1) % self.sms
        sms = resource.sms[turn:] + resource.sms[:turn]
        given = min(groups, most)
        parts = [Resource(sms[at : at + size], self.splits) for at in range(0, given * size, size)]
        return parts, Resource(sms[given * size :], self.splits)

    def merge(self, resources: Sequence[Resource]) -> tuple[int, ...]:
        if len({resource.split for resource in resources}) != 1:
            raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: not of one split")
        return tuple(sm for resource in resources for sm in resource.sms)

    def create_context(self, sms: tuple[int, ...]) -> Context:
        self.free -= 5 * MIB
        context = Context(sms[self.short :], next(self._handles))
        self.contexts.append(context)
        return context

    def create_stream(self, context: Context) -> Stream:
        if context.closed:
            raise Misuse("a stream of a destroyed context")
        context.streams.append(Stream(context, next(self._handles)))
        return context.streams[-1]

    def find_stream(self, handle: int) -> Stream:
        (stream,) = [stream for context in self.contexts for stream in context.streams if stream.handle == handle]
        return stream

    def synchronise(self, stream: Stream) -> None:
        if stream.closed:
            raise Misuse("a destroyed stream was waited for")
        while stream.pending:
            stream.pending.popleft()()

    def destroy_stream(self, stream: Stream) -> None:
        if stream.closed or stream.context.closed:
            raise Misuse("a stream was destroyed twice, or after its context")
        if stream.pending and not self.lost:
            raise Misuse("a stream was destroyed with work in flight")
        stream.closed = True

    def destroy_context(self, context: Context) -> None:
        if context.closed or any(not stream.closed for stream in context.streams):
            raise Misuse("a context was destroyed twice, or before its streams")
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

    def run_blocks(self, stream: Stream, blocks: int) -> list[int]:
        """The SM of each block, when it comes to it: in turn over those of the stream's context."""
        sms = stream.context.sms if self.confines else tuple(range(self.sms))
        return [sms[block % len(sms)] for block in range(blocks)]
