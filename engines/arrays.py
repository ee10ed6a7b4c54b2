"""Views the memory of other libraries' arrays, through DLPack or `__cuda_array_interface__`.

Nothing is copied and CUDA is not called. Only DLPack's capsules need a library to read them, `cuda.core`, and only for arrays
that are not in host memory: NumPy reads the others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from partitions.installing import install_command

from .datatypes import DATATYPES, DataType
from .errors import TensorMismatch

_HOST = 1  # kDLCPU
_NULL, _LEGACY = 0, 1  # In DLPack, the NULL stream is the legacy default stream.
_DTYPE_ALIASES = {"bfloat16": DATATYPES["BF16"].numpy}


@dataclass(frozen=True, slots=True)
class ArrayView:
    """The memory of an array. `strides` are in elements, None if contiguous; `owner` keeps the memory alive."""

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
        """Raise TensorMismatch unless it is contiguous and of a type of the protocol, or of `datatype` if that is given."""
        expected = [datatype] if datatype else [each for each in DATATYPES.values() if each.size]
        dtype = _DTYPE_ALIASES.get(self.dtype.name, self.dtype)
        if dtype not in [each.numpy for each in expected]:
            names = ", ".join(each.name for each in expected)
            raise TensorMismatch(f"{self._description()} has elements of {_dtype_text(self.dtype)}; expected {names}")
        if not self._is_contiguous():
            raise TensorMismatch(
                f"{self._description()} has strides {list(self.strides or ())} (in elements); "
                f"expected {list(_contiguous_strides(self.shape))}, rows without gaps: "
                "copy it, with ascontiguousarray or contiguous()"
            )

    def _description(self) -> str:
        return f"an array of shape {list(self.shape)}, {type(self.owner).__module__}.{type(self.owner).__name__},"

    def _is_contiguous(self) -> bool:
        """Strides do not matter for dimensions of one element or without any."""
        if self.strides is None or not math.prod(self.shape):
            return True
        wanted = zip(self.shape, self.strides, _contiguous_strides(self.shape), strict=True)
        return all(size == 1 or stride == row for size, stride, row in wanted)


def view_array(array: object, stream: int | None = None) -> ArrayView:
    """The memory of an array, on a GPU or not. Raises TensorMismatch for what is no array, or has no such memory.

    `stream` is the handle of the stream on which it will be used: a library that works asynchronously makes that stream wait
    for writes in progress. With None there is no waiting.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return _view_numpy(np.asarray(array), array)
    if hasattr(array, "__dlpack_device__"):
        return _view_dlpack(array, stream)
    if hasattr(array, "__cuda_array_interface__"):
        return _view_cuda(array.__cuda_array_interface__, array)
    return _view_numpy(np.asarray(array), array)


def _view_numpy(array: "np.ndarray[Any, np.dtype[Any]]", owner: object) -> ArrayView:
    if array.dtype.hasobject:
        raise TensorMismatch(
            f"{type(owner).__name__} is no array of numbers; "
            "expected a NumPy array, or one with __dlpack__ or __cuda_array_interface__"
        )
    size = array.dtype.itemsize or 1
    strides = tuple(stride // size for stride in array.strides)
    return ArrayView(array.shape, strides, array.dtype, array.ctypes.data, not array.flags.writeable, array)


def _view_dlpack(array: Any, stream: int | None) -> ArrayView:
    try:
        if int(array.__dlpack_device__()[0]) == _HOST:
            return _view_numpy(np.from_dlpack(array), array)
        view = _dlpack_view(array, -1 if stream is None else _LEGACY if stream == _NULL else stream)
        dtype = np.dtype(view.dtype)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise TensorMismatch(f"{type(array).__name__} does not share its memory through DLPack: {error}") from error
    strides = None if view.strides is None else tuple(view.strides)
    return ArrayView(tuple(view.shape), strides, dtype, view.ptr, view.readonly, _DlpackOwner(array, view))


def _dlpack_view(array: object, stream: int) -> Any:
    """The only place here that imports a CUDA library: an array that gets here is in CUDA's memory already."""
    try:
        from cuda.core.utils import StridedMemoryView
    except ImportError as error:
        command = install_command("cuda")
        raise TensorMismatch(f"{type(array).__name__} is on a GPU; to use it run {command} ({error})") from error
    return StridedMemoryView.from_dlpack(array, stream_ptr=stream)


def _view_cuda(interface: Mapping[str, Any], owner: object) -> ArrayView:
    if interface.get("mask") is not None:
        raise TensorMismatch(f"{type(owner).__name__} has a mask, which a model cannot see; expected an array without one")
    dtype = np.dtype(interface["typestr"])
    gaps = interface.get("strides")
    strides = None if gaps is None else tuple(gap // dtype.itemsize for gap in gaps)
    address, readonly = interface["data"]
    return ArrayView(tuple(interface["shape"]), strides, dtype, int(address or 0), bool(readonly), owner)


class _DlpackOwner:
    """Keeps an array and its DLPack capsule alive, which both keep the memory."""

    __slots__ = ("array", "view")

    def __init__(self, array: object, view: object) -> None:
        self.array = array
        self.view = view


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array: (12, 4, 1) for (2, 3, 4)."""
    return tuple(accumulate((1, *shape[:0:-1]), mul))[::-1] if shape else ()


def _dtype_text(dtype: "np.dtype[Any]") -> str:
    return f"{dtype.name} ({dtype.str})"
