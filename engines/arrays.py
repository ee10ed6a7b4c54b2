"""Memory that belongs to other libraries: arrays of any that speaks DLPack or `__cuda_array_interface__`, where they lie.

Nothing is copied and CUDA is not called. Only DLPack's capsules need a library to be read, `cuda.core`, and only for arrays
that are not in the host's own memory: NumPy reads the others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from .datatypes import DATATYPES, DataType
from .errors import TensorMismatch

_HOST = 1  # kDLCPU
_NULL, _LEGACY = 0, 1  # DLPack has no number for the NULL stream but that of the legacy one, which it is.
_BORROWED = {"bfloat16": DATATYPES["BF16"].numpy}


@dataclass(frozen=True, slots=True)
class Lent:
    """Where an array lies. `strides` are in elements, None for rows without gaps; `owner` keeps it there."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: "np.dtype[np.generic]"
    address: int
    readonly: bool
    owner: object

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self, datatype: DataType | None = None) -> None:
        """Raises TensorMismatch unless it is rows without gaps of a type of the protocol, and of this one if it is given."""
        expected = [datatype] if datatype else [each for each in DATATYPES.values() if each.size]
        dtype = _BORROWED.get(self.dtype.name, self.dtype)
        if dtype not in [each.numpy for each in expected]:
            names = ", ".join(each.name for each in expected)
            raise TensorMismatch(f"{self._described()} has elements of {_typed(self.dtype)}; expected {names}")
        if not self._is_contiguous():
            raise TensorMismatch(
                f"{self._described()} has strides {list(self.strides or ())} (in elements); "
                f"expected {list(_rows(self.shape))}, rows without gaps: copy it, with ascontiguousarray or contiguous()"
            )

    def _described(self) -> str:
        return f"an array of shape {list(self.shape)}, {type(self.owner).__module__}.{type(self.owner).__name__},"

    def _is_contiguous(self) -> bool:
        """Strides say nothing where there is one element or none to step to."""
        if self.strides is None or not math.prod(self.shape):
            return True
        wanted = zip(self.shape, self.strides, _rows(self.shape), strict=True)
        return all(size == 1 or stride == row for size, stride, row in wanted)


def borrow(array: object, stream: int | None = None) -> Lent:
    """Where an array lies, on a GPU or not. Raises TensorMismatch for what is no array, or has no such memory.

    `stream` is the handle of the stream on which it will be used: a library that works asynchronously makes it wait for
    what is still being written there. With None nobody waits.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return _of_numpy(np.asarray(array), array)
    if hasattr(array, "__dlpack_device__"):
        return _of_dlpack(array, stream)
    if hasattr(array, "__cuda_array_interface__"):
        return _of_cuda(array.__cuda_array_interface__, array)
    return _of_numpy(np.asarray(array), array)


def _of_numpy(array: "np.ndarray[Any, np.dtype[Any]]", owner: object) -> Lent:
    if array.dtype.hasobject:
        raise TensorMismatch(
            f"{type(owner).__name__} is no array of numbers; "
            "expected a NumPy array, or one with __dlpack__ or __cuda_array_interface__"
        )
    size = array.dtype.itemsize or 1
    strides = tuple(stride // size for stride in array.strides)
    return Lent(array.shape, strides, array.dtype, array.ctypes.data, not array.flags.writeable, array)


def _of_dlpack(array: Any, stream: int | None) -> Lent:
    try:
        if int(array.__dlpack_device__()[0]) == _HOST:
            return _of_numpy(np.from_dlpack(array), array)
        view = _view(array, -1 if stream is None else _LEGACY if stream == _NULL else stream)
        dtype = np.dtype(view.dtype)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise TensorMismatch(f"{type(array).__name__} does not lend its memory through DLPack: {error}") from error
    strides = None if view.strides is None else tuple(view.strides)
    return Lent(tuple(view.shape), strides, dtype, view.ptr, view.readonly, _Held(array, view))


def _view(array: object, stream: int) -> Any:
    """The one place of this module where a library of CUDA's is imported: what is lent here belongs to CUDA already."""
    try:
        from cuda.core.utils import StridedMemoryView
    except ImportError as error:
        raise TensorMismatch(f"{type(array).__name__} is on a GPU; to use it run scripts/install cuda ({error})") from error
    return StridedMemoryView.from_dlpack(array, stream_ptr=stream)


def _of_cuda(interface: Mapping[str, Any], owner: object) -> Lent:
    if interface.get("mask") is not None:
        raise TensorMismatch(f"{type(owner).__name__} has a mask, which a model cannot see; expected an array without one")
    dtype = np.dtype(interface["typestr"])
    gaps = interface.get("strides")
    strides = None if gaps is None else tuple(gap // dtype.itemsize for gap in gaps)
    address, readonly = interface["data"]
    return Lent(tuple(interface["shape"]), strides, dtype, int(address or 0), bool(readonly), owner)


class _Held:
    """An array and what DLPack gave for it, which both keep its memory where it is."""

    __slots__ = ("array", "view")

    def __init__(self, array: object, view: object) -> None:
        self.array = array
        self.view = view


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of rows without gaps: (12, 4, 1) for (2, 3, 4)."""
    return tuple(accumulate((1, *shape[:0:-1]), mul))[::-1] if shape else ()


def _typed(dtype: "np.dtype[Any]") -> str:
    return f"{dtype.name} ({dtype.str})"
