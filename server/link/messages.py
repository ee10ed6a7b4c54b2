"""What crosses between the HTTP side and the device side: small, flat, and never a tensor.

Tickets go in, completions come out. Both are plain numbers and strings, so that the two sides may be two threads or two
processes; the tensors lie in the slot's memory, which both sides see.
"""

from typing import Literal, NamedTuple

Shape = tuple[int, ...]
ModelKey = str
"""`name/version#load`: one model at one version as it was loaded once; a reload is another."""


class Ticket(NamedTuple):
    """One inference to run: the slot that holds its inputs, their shapes in the signature's order, and until when.

    `serial` tells it from what was in the same slot before. `deadline` is on the clock of `time.monotonic`, in seconds;
    infinity for none. The slot's tensors lie in `capacity` bytes from `start` on, in the tenant's memory.
    """

    slot: int
    serial: int
    model: ModelKey
    shapes: tuple[Shape, ...]
    deadline: float
    capacity: int
    start: int = 0


class Extent(NamedTuple):
    """Where in the slot an output lies: its shape, and its place in bytes. BYTES are in wire form."""

    shape: Shape
    offset: int
    nbytes: int


class Failure(NamedTuple):
    """Why there are no outputs: the model `raised`, the work was `cancelled`, had `expired`, or the device is `lost`.

    It may also have `overrun` what an inference may take, or been `stopped` for the server's own reasons; the text says which.

    Outputs that have `outgrown` the slot need as many bytes of it, inputs included, as the text says.
    """

    kind: Literal["raised", "cancelled", "expired", "lost", "outgrown", "overrun", "stopped"]
    text: str


class Done(NamedTuple):
    """An inference that ended. `began` and `ended` are nanoseconds on the clock of `time.monotonic_ns`.

    `rows` never crosses: the HTTP side says to each of several requests that ran together how many rows they had in all.
    """

    slot: int
    outputs: tuple[Extent, ...]
    failure: Failure | None
    began: int
    ended: int
    rows: int = 0
