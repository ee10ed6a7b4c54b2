"""Outputs whose size depends on data, as those of NMS and NonZero do: the library asks an allocator for their memory.

It calls the allocator from inside `execute_async_v3`, with the interpreter's lock, once it knows how large an output is; for
that it waits for the stream itself. `notify_shape` is called "sometime between when it calls reallocateOutput and enqueueV3
returns" (nvinfer1::IOutputAllocator in the TensorRT API documentation), so the shapes are known when `execute` returns,
before the data are there. Memory is never made then: each output has as much as the library says that it can ever need.

TensorRT-RTX 1.6.1 refuses to build networks with such outputs, so all this was run on the simulated library only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ExecutionFailed, ModelRefused
from ..signature import Shape
from .api import TensorRT


class UnsizedOutputs:
    """Of one context: the memory of each output, and the shape that it had last. For the thread that runs the context."""

    def __init__(self, memory: Mapping[str, tuple[int, int]]) -> None:
        """`memory` is each output's address on the device and its bytes."""
        self._memory = dict(memory)
        self._shapes: dict[str, Shape] = {}
        self._asked: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<UnsizedOutputs {list(self._memory)}>"

    def begin(self) -> None:
        """Forget what the last inference was told."""
        self._shapes.clear()
        self._asked.clear()

    def find(self, output: str, nbytes: int) -> int:
        """The address of memory for so many bytes; 0 if it has fewer."""
        self._asked[output] = nbytes
        address, size = self._memory[output]
        return address if nbytes <= size else 0

    def note(self, output: str, shape: Sequence[int]) -> None:
        """What this inference's output is like."""
        self._shapes[output] = tuple(shape)

    def shapes(self, known: Mapping[str, Shape]) -> tuple[Shape, ...]:
        """Those of `known`, these outputs' as they were told. Raises ExecutionFailed where one was not."""
        if missing := [name for name in self._memory if name not in self._shapes]:
            raise ExecutionFailed(f"the library did not say of which shape {', '.join(missing)} is")
        return tuple([self._shapes.get(name, shape) for name, shape in known.items()])

    def explain(self, refused: str) -> str:
        """What the library said, and where it asked for more than it had said that it could need, that."""
        for name, asked in self._asked.items():
            if asked > self._memory[name][1]:
                return f"{refused}; output {name!r} needs {asked} bytes, and the library's bound was {self._memory[name][1]}"
        return refused


def make_allocator(api: TensorRT, outputs: UnsizedOutputs) -> Any:
    """The library's allocator that answers with these. Raises ModelRefused where the library has none."""
    if not hasattr(api.module, "IOutputAllocator"):
        raise ModelRefused(f"the size of an output depends on data, for which {api} lacks IOutputAllocator")

    base: Any = api.module.IOutputAllocator

    class Allocator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def reallocate_output_async(self, name: str, memory: object, size: int, alignment: int, stream: object) -> int:
            return outputs.find(name, size)

        def notify_shape(self, name: str, shape: Sequence[int]) -> None:
            outputs.note(name, shape)

    return Allocator()
