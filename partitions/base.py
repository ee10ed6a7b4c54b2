"""The protocols of hardware: a device is N granules, and a partition is some of them, reserved for one holder.

An engine library names the kinds of devices that it serves from; hardly anything else asks for a kind. One contract test
(tests/contract.py) runs against every implementation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from .deposit import Deposit
from .strain import Before, Strain, Strained, unheld


class Loads(Protocol):
    """The loads of models onto a device that also serves: when they wait, and when they must not. Any thread may call."""

    def open(self) -> None:
        """Have loads in the background give way from now on. Calling it again does nothing. Raises DeviceUnavailable."""

    def background(self) -> AbstractContextManager[None]:
        """In the block the calling thread's loads give way, as no request waits for them."""

    def hurrying(self) -> AbstractContextManager[None]:
        """In the block nothing takes its time, as something waits for a load, unless that is in the background too."""

    def hurry(self) -> None:
        """Nothing takes its time any more: the device is about to be closed."""

    def waited(self) -> float:
        """The seconds for which loads have waited so far, to give way."""


class UnpacedLoads:
    """The loads of a device whose work does not wait for them."""

    def open(self) -> None:
        """Nothing gives way."""

    @contextmanager
    def background(self) -> Iterator[None]:
        yield

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        yield

    def hurry(self) -> None:
        """Nothing takes its time."""

    def waited(self) -> float:
        return 0.0


T = TypeVar("T")


class Closing(Protocol):
    """Something to be closed once."""

    def close(self) -> None:
        """Release it."""


@dataclass(frozen=True, slots=True)
class Held:
    """A partition whose units were all taken at one time: how many they were, and from when to when, in nanoseconds.

    The clock is the device's, the same for all processes. Where `until` is not later than `since`, some had to wait for others.
    """

    units: int
    since: int
    until: int


class Bandwidth(NamedTuple):
    """What a device moves at most, in bytes a second, by its clocks and the widths of its buses: peaks that no work reaches.

    `memory` is its own memory's, `unit` what one unit (an SM) draws of that and its caches, whatever it runs, and `pcie` the
    host's link, each way; 0 if that is not known.
    """

    memory: int
    unit: int
    pcie: int = 0


class Partition(Protocol):
    """Granules that one holder may use. Any thread may call any method unless it says otherwise.

    A home partition has its holder's own granules only. A wide partition also has some that other holders lend: work there
    makes way for theirs.
    """

    @property
    def granules(self) -> tuple[int, ...]:
        """The indices of the granules in this partition, ascending."""

    @property
    def lent(self) -> tuple[int, ...]:
        """Those of the granules that belong to other holders, ascending; () for a home partition."""

    @property
    def size(self) -> int:
        """The units (cores, SMs) that the granules have together."""

    @property
    def host_cores(self) -> frozenset[int] | None:
        """The host's cores that are the holder's own, by number; None if the device reserves none."""

    def attach(self) -> None:
        """Attach the calling thread to this partition, and to no other, until it is attached to another. Does not block.

        Raises PartitionError.
        """

    @property
    def idle(self) -> bool:
        """Whether a work that an attached thread enqueues and waits for now would run at once, on that thread.

        False if works do not run on the threads that wait for them. A hint: another thread may enqueue in between.
        """

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` on a new thread attached to this partition. Blocks until it returns; raises what it raises."""

    def locate(self) -> frozenset[int]:
        """Run a small amount of work here and return the units on which it ran or was free to run. Blocks.

        Empty where units have no numbers of their own: on a GPU under MPS.
        """

    def hold(self, seconds: float) -> Held:
        """Take every unit for so long, by work of its own; when that was. Blocks, and other work on these units waits.

        Where units have no numbers this shows that partitions are apart. Raises PartitionError on cores, which have numbers.
        """

    def strain(self, kind: Strain, seconds: float, before: Before = unheld) -> Strained:
        """Move bytes through what partitions share by work of its own on these units, as fast as they can; how many it moved.

        Blocks for so many seconds, at most `strain.MOST`, or a little longer if the preparations alone take them. Other work on
        these units goes on in between. What memory it takes it frees again: on a GPU some 16 times what the last cache holds,
        on cores twice that, 1 GiB at most; it takes no more than half of what is free. Raises Unsupported where there is no
        such thing, such as PCIe on cores, ValueError for other times, PartitionError, for lack of memory as well.

        On a GPU there are many passes, of some milliseconds each, and `before` is called for each: a pass runs on the partition
        that it returns, once passes elsewhere have ended, and one over PCIe then takes only as many SMs as fill the bus; if it
        returns None the pass runs here. On cores all is one pass, and runs here.
        """

    def close(self) -> None:
        """Release the hardware. No work may be in flight. Calling it again does nothing."""


class Device(Protocol):
    """Hardware that is divided into granules."""

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`."""

    @property
    def unit(self) -> str:
        """The unit that granules are counted in: `core` or `SM`.

        Shares of another unit are `granules`, unless `server.config.tenant` has a key for it. What is no core is taken to be an
        SM by `greenlane init`, and to have PCIe by `greenlane prove` and `top` and by `server.control.fence`.
        """

    @property
    def granules(self) -> tuple[int, ...]:
        """The size of each granule in units, by its index."""

    @property
    def address(self) -> str:
        """Where the host's tools find it: the PCI address of a GPU, or its cores in the order of granules, as in `0,1,4`.

        "" if there is no such place. Where it has a colon `partitions.health` has NVML asked about it.
        """

    @property
    def uuid(self) -> str:
        """Which GPU it is, of all there are; "" for a device without a UUID. The server offers MPS to devices with one."""

    @property
    def shared(self) -> bool:
        """Whether other processes may have partitions of it at the same time, as clients of one MPS daemon."""

    @property
    def loads(self) -> Loads:
        """Paces what is loaded onto the device, so that tenants that are served do not wait for it."""

    def describe(self) -> str:
        """One line of text: what the device is and how it is divided."""

    def carve(self, granules: Sequence[int], lent: Sequence[int] = ()) -> Partition:
        """Make a partition of the granules with these indices, each named once. The manager keeps account of who has which.

        `lent` names those of them that belong to other holders; at least one does not. What runs in a partition with such
        granules has a lower priority than the lenders' work: streams of the lowest priority on a GPU, and on CPU cores threads
        that run there while the lender's threads sleep. Raises PartitionError, and TypeError for something other than lists of
        numbers.
        """

    def pin(self, address: int, nbytes: int) -> Closing:
        """Page-lock host memory, so that work of every partition can access it in place, until the result is closed.

        Both block, and may block all other work on the device, so do this before serving. A device that reaches all host
        memory does nothing. Raises PartitionError.
        """

    def memory(self) -> int | None:
        """Bytes of memory that the device has; None if that cannot be found out. May block."""

    def bandwidth(self) -> Bandwidth | None:
        """What the device moves at most; None if that cannot be found out, or is not shared out by units. May block.

        Where there is an answer, tenants can be held to parts of it. What their works move is guessed as long as
        `partitions.health` has no meter for this kind of device.
        """

    def energy(self) -> int | None:
        """Microjoules that the device has taken, on a meter that only grows but may begin again; None if there is none.

        Any thread. May block for a millisecond.
        """

    def share(self, deposit: Deposit) -> None:
        """Have works of all processes with this deposit take turns, as copies on a GPU do, by memory that they share.

        Where `shared`, before anything is loaded; elsewhere it does nothing. The deposit is the device's from then on.
        """

    def close(self) -> None:
        """Release the device; every partition must be closed before."""


def stream_handle(stream: object) -> int:
    """The handle (CUstream) of a stream, given as an integer or as an object with `__cuda_stream__`. Raises TypeError."""
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise TypeError(
            f"{stream!r} is no stream; expected its handle as an integer, such as torch's stream.cuda_stream, "
            "or an object with __cuda_stream__"
        )
    _, handle = protocol() if callable(protocol) else protocol
    return int(handle)
