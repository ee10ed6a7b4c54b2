"""One run of a session, and its outputs: their sizes and offsets where shapes determine them, and where they are after it."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from partitions.cpu import CpuStream, CpuTask

from ..base import Room, Tensor
from ..errors import Cancelled, ExecutionFailed, OutputsTooLarge
from ..memo import Memo
from ..memory import SMALL, copy
from ..signature import Shape, Signature, TensorSpec, align
from .errors import clean_message
from .texts import FEW, of_wire, to_wire

MAX_PLACEMENTS = 64


class Placement(NamedTuple):
    """Where to write an output: its shape, its size, and its offset in the room."""

    shape: Shape
    nbytes: int
    offset: int


class Outputs:
    """The outputs of one model, with the placements for recent shapes. For one thread."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._trusted = True
        self._memo: Memo[tuple[Shape, ...], tuple[tuple[Placement | None, ...], bool]] = Memo(MAX_PLACEMENTS)

    def distrust(self) -> None:
        """The signature is wrong about shapes: treat every size as unknown from now on."""
        self._trusted = False

    def placements(self, shapes: Sequence[Shape], room: Room) -> list[Placement | None]:
        """The placement of each output whose size is known and that fits in the room; None for others."""
        if not self._trusted or not room.nbytes:
            return [None] * len(self._signature.outputs)
        placements, _ = self._find(shapes)
        return [place if place and place.offset + place.nbytes <= room.nbytes else None for place in placements]

    def are_few(self, shapes: Sequence[Shape]) -> bool:
        """Whether their sizes are known and small. The length of strings is never known."""
        return self._trusted and self._find(shapes)[1]

    def _find(self, shapes: Sequence[Shape]) -> tuple[tuple[Placement | None, ...], bool]:
        key = tuple(shapes)
        if (known := self._memo.get(key)) is None:
            found = self._signature.output_shapes(self._signature.check(shapes))
            known = tuple(_lay_out(self._signature, found)), _are_few(self._signature, found)
            self._memo.remember(key, known)
        return known


def _lay_out(signature: Signature, shapes: Sequence[Shape | None]) -> Iterator[Placement | None]:
    offset = 0
    for spec, shape in zip(signature.outputs, shapes, strict=True):
        if shape is None or not spec.datatype.size:
            yield None
        else:
            yield Placement(shape, spec.nbytes(shape), offset)
            offset = align(offset + spec.nbytes(shape))


def _are_few(signature: Signature, shapes: Sequence[Shape | None]) -> bool:
    outputs = zip(signature.outputs, shapes, strict=True)
    return all(
        shape is not None and math.prod(shape) * (spec.datatype.size or SMALL // FEW) <= SMALL for spec, shape in outputs
    )


def to_tensor(spec: TensorSpec, value: Any, placed: Tensor | None, given: set[int]) -> Tensor:
    """An output of a run: in the memory chosen for it, in the session's memory, or, if it is in an input, as a copy."""
    shape = tuple(value.shape())
    if not spec.datatype.size:
        return of_wire(shape, to_wire(value))
    address = value.data_ptr()
    if placed is not None and address == placed.address:
        return placed
    nbytes = spec.nbytes(shape)
    if address not in given:
        return Tensor(shape, address, nbytes, value)
    if placed is None:
        memory = np.empty(nbytes, np.uint8)
        placed = Tensor(shape, memory.ctypes.data, nbytes, memory)
    copy(placed.address, address, nbytes)
    return placed


class OnnxWork(CpuTask):
    """See `engines.base.Work`."""

    def __init__(
        self, stream: CpuStream, inputs: Sequence[Tensor], room: Room, key: object, run: Callable[..., tuple[Tensor, ...]]
    ) -> None:
        """`key` is of these inputs and this room, for `run`."""
        self._stream = stream
        self._call = (inputs, room, key)
        self._run = run
        self._options = ort.RunOptions()  # Its log level is the session's.
        self._outputs: tuple[Tensor, ...] = ()
        stream.put(self)

    def __repr__(self) -> str:
        return f"<OnnxWork {self.state}>"

    def wait(self) -> tuple[Tensor, ...]:
        self._stream.wait(self)
        return self._outputs

    def cancel(self) -> None:
        self._options.terminate = True

    def run(self) -> None:
        """See `CpuTask.run`."""
        try:
            if self._options.terminate:
                raise Cancelled("cancelled before it began")
            self._outputs = self._run(*self._call, self._options)
        except (Cancelled, OutputsTooLarge) as error:
            self.error = error
        except Exception as error:
            cancelled = self._options.terminate
            self.error = Cancelled("cancelled while it ran") if cancelled else ExecutionFailed(clean_message(error))
            self.error.__cause__ = error
        except BaseException as error:
            self.error = error
        self.done = True
