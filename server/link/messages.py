"""The messages between the HTTP side and the device side: small, flat, and never a tensor.

Tickets go to the device side, completions (`Done`) come back. Both are plain numbers and strings, so the two sides may be
threads or processes; the tensors are in the slot's memory, which both sides share.
"""

from typing import Literal, NamedTuple

Shape = tuple[int, ...]
ModelKey = str
"""`name/version#load`: one load of one version of a model; a reload has a new key."""


FailureKind = Literal["raised", "cancelled", "expired", "lost", "outgrown", "overrun", "stopped", "full"]


class Malformed(Exception):
    """The other end of a link wrote what it may not write. The link is not used any more, and that process is replaced."""


def label_of(key: ModelKey) -> str:
    """A key's model and version, as problems and the log name it."""
    return key.rpartition("#")[0]


def load_of(key: ModelKey) -> int:
    """The number of a key's load."""
    return int(key.rpartition("#")[2])


class Ticket(NamedTuple):
    """One inference to run: the slot with its inputs, their shapes in the signature's order, and its deadline.

    `serial` distinguishes it from earlier tickets in the same slot. `deadline` is in seconds on the clock of `time.monotonic`,
    infinity for none. The slot's tensors are in `capacity` bytes from `start` on in the tenant's memory.

    A model that answers in parts gives one part a ticket: `after` is the ticket's own serial for the first part, and that of
    the ticket before for each later part. The answer ends with a completion without outputs. A ticket whose deadline has passed
    frees what the device side keeps of the answer. `after` is 0 for models that answer as a whole. `priority` is set on the way
    from a helper to its lead only (see `tenants.relay`), as `begun` is: part of a request that is not to be refused any more.
    `unasked` is as in `Room`: outputs that its request does not name, which are not copied from the device.
    """

    slot: int
    serial: int
    model: ModelKey
    shapes: tuple[Shape, ...]
    deadline: float
    capacity: int
    start: int = 0
    after: int = 0
    priority: int = 0
    unasked: int = 0
    begun: bool = False


class Extent(NamedTuple):
    """Where an output is in its slot: its shape, and offset and size in bytes. BYTES are in wire form."""

    shape: Shape
    offset: int
    nbytes: int


NOWHERE = Extent((), 0, 0)
"""For an output that was not asked for."""


class Failure(NamedTuple):
    """Why there are no outputs.

    - `raised`: the model raised an error; `cancelled`: its request was released; `expired`: its deadline passed before it began
    - `lost`: the device is lost; `overrun`: it ran for too long; `stopped`: the server stopped it, for the reason in `text`
    - `outgrown`: the outputs do not fit into the slot; `text` is the number of bytes that it needs, inputs included
    - `full`: the tenant's queue has no room for it; only from a lead to its helper
    """

    kind: FailureKind
    text: str


class Done(NamedTuple):
    """An inference that has ended, or one part of its answer (see `Ticket`).

    `began` and `ended` are in nanoseconds on the clock of `time.monotonic_ns`. `rows` is set on the HTTP side only (also from
    a lead to its helper), for requests that ran in a batch: the rows of the whole batch.
    """

    slot: int
    outputs: tuple[Extent, ...]
    failure: Failure | None
    began: int
    ended: int
    rows: int = 0
