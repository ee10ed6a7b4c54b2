"""Data-dependent outputs, such as those of NMS and NonZero: their size is known only while the inference runs.

The library asks an output allocator for their memory, inside `execute_async_v3` and with the GIL held, once it knows how
large an output is; for that it waits for the stream itself. `notify_shape` is called "sometime between when it calls
reallocateOutput and enqueueV3 returns" (nvinfer1::IOutputAllocator in the TensorRT API documentation), so the shapes are
known when `execute` returns, before the data are there. No memory is allocated then: each output has as much as the library
says that it can ever need.

TensorRT-RTX 1.6.1 refuses to build networks with such outputs, so all this was run on the simulated library only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ExecutionFailed, ModelRefused
from ..signature import Shape
from .api import TensorRT


class DataDependentOutputs:
    """The memory and the last shape of each data-dependent output of a context. For the thread that runs the context."""

    def __init__(self, memory: Mapping[str, tuple[int, int]]) -> None:
        """`memory` is the device address and the size in bytes of each output."""
        self._memory = dict(memory)
        self._shapes: dict[str, Shape] = {}
        self._requested: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<DataDependentOutputs {list(self._memory)}>"

    def begin(self) -> None:
        """Forget the shapes of the last inference."""
        self._shapes.clear()
        self._requested.clear()

    def allocate(self, output: str, nbytes: int) -> int:
        """The address of an output's memory; 0 if that is smaller than `nbytes`."""
        self._requested[output] = nbytes
        address, size = self._memory[output]
        return address if nbytes <= size else 0

    def set_shape(self, output: str, shape: Sequence[int]) -> None:
        """Record the shape of an output of this inference."""
        self._shapes[output] = tuple(shape)

    def shapes(self, known: Mapping[str, Shape]) -> tuple[Shape, ...]:
        """The shapes in `known`, with those of this inference filled in. Raises ExecutionFailed where one is missing."""
        if missing := [name for name in self._memory if name not in self._shapes]:
            raise ExecutionFailed(f"the library did not report the shape of {', '.join(missing)}")
        return tuple([self._shapes.get(name, shape) for name, shape in known.items()])

    def explain(self, refused: str) -> str:
        """The library's error text, and which output needed more than the library's own bound, if one did."""
        for name, requested in self._requested.items():
            if requested > self._memory[name][1]:
                bound = self._memory[name][1]
                return f"{refused}; output {name!r} needs {requested} bytes, and the library's bound was {bound}"
        return refused


def make_allocator(api: TensorRT, outputs: DataDependentOutputs) -> Any:
    """An IOutputAllocator of the library that allocates from `outputs`. Raises ModelRefused where the library has none."""
    if not hasattr(api.module, "IOutputAllocator"):
        raise ModelRefused(f"the size of an output depends on data, for which {api} lacks IOutputAllocator")

    base: Any = api.module.IOutputAllocator

    class Allocator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def reallocate_output_async(self, name: str, memory: object, size: int, alignment: int, stream: object) -> int:
            return outputs.allocate(name, size)

        def notify_shape(self, name: str, shape: Sequence[int]) -> None:
            outputs.set_shape(name, shape)

    return Allocator()
