"""Memory of other libraries. GPU arrays are NumPy arrays that claim to be on a GPU, as their memory is not read here."""

import ctypes
import sys
from typing import Any

import numpy as np
import pytest

from engines import DATATYPES, Room, Tensor, TensorMismatch, on_stream
from engines.arrays import view_array
from tests.engines.tensors import Array

CUDA, PINNED = 2, 3


class Cuda:
    """An array as `__cuda_array_interface__` shows it."""

    def __init__(self, array: Array, **fields: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, not array.flags.writeable),
            "strides": array.strides,
            "version": 3,
            **fields,
        }


class Lender:
    """A NumPy array that DLPack exports as one of this kind of device; records the stream that it was asked for."""

    def __init__(self, array: Array, kind: int = CUDA, code: int | None = None) -> None:
        self.array = array
        self.kind = kind
        self.code = code
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, stream: int | None = None, **options: Any) -> object:
        self.streams.append(stream)
        capsule = self.array.__dlpack__(max_version=options.get("max_version"))
        if self.kind != 1:
            _move(capsule, self.kind, self.code)
        return capsule


def _move(capsule: Any, kind: int, code: int | None) -> None:
    """Write another device, and optionally another type code, into the exported capsule."""
    name = b"dltensor_versioned" if "versioned" in repr(capsule) else b"dltensor"
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    at = pointer(capsule, name) + (32 if name.endswith(b"versioned") else 0)
    ctypes.c_int32.from_address(at + 8).value = kind
    if code is not None:
        ctypes.c_uint8.from_address(at + 20).value = code


@pytest.fixture
def lent() -> Array:
    return np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def cuda_core() -> None:
    pytest.importorskip("cuda.core.utils", reason="needs the cuda extra")


@pytest.mark.parametrize("kind", [Cuda, Lender])
@pytest.mark.usefixtures("cuda_core")
def test_a_tensor_of_an_array_on_a_gpu_is_its_own_memory_and_keeps_it(lent: Array, kind: Any) -> None:
    address, before = lent.ctypes.data, sys.getrefcount(lent)
    tensor = Tensor.of(kind(lent), DATATYPES["FP32"])
    assert (tensor.shape, tensor.address, tensor.nbytes) == ((2, 3), address, 24)
    assert sys.getrefcount(lent) > before
    del tensor
    assert sys.getrefcount(lent) == before


@pytest.mark.usefixtures("cuda_core")
def test_pinned_memory_is_viewed_like_gpu_memory(lent: Array) -> None:
    assert Tensor.of(Lender(lent, PINNED)).address == lent.ctypes.data


def test_host_memory_is_viewed_through_dlpack(lent: Array) -> None:
    tensor = Tensor.of(Lender(lent, kind=1))
    assert tensor.address == lent.ctypes.data
    assert tensor.array(DATATYPES["FP32"]).tolist() == lent.tolist()


@pytest.mark.usefixtures("cuda_core")
def test_dlpack_gets_the_selected_stream(lent: Array) -> None:
    lender = Lender(lent)
    Tensor.of(lender)
    for stream in (0x5EA, 0, 2):
        with on_stream(stream):
            Tensor.of(lender)
    assert lender.streams == [-1, 0x5EA, 1, 2]


@pytest.mark.parametrize("kind", [Cuda, Lender])
@pytest.mark.usefixtures("cuda_core")
def test_gaps_are_refused_with_the_strides_that_came_and_those_expected(lent: Array, kind: Any) -> None:
    with pytest.raises(TensorMismatch) as caught:
        Tensor.of(kind(lent.T))
    assert str(caught.value).startswith(
        f"an array of shape [3, 2], {__name__}.{kind.__name__}," if kind is Cuda else "an array"
    )
    assert "has strides [1, 3] (in elements); expected [2, 1], rows without gaps" in str(caught.value)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4, 1, 2)])
@pytest.mark.parametrize("kind", [Cuda, Lender])
@pytest.mark.usefixtures("cuda_core")
def test_every_shape_of_rows_is_taken(shape: tuple[int, ...], kind: Any) -> None:
    assert Tensor.of(kind(np.zeros(shape, np.int64))).shape == shape


def test_strides_of_dimensions_of_size_1_are_ignored(lent: Array) -> None:
    column = np.lib.stride_tricks.as_strided(lent, (1, 3), (4096, 4))
    assert Tensor.of(Cuda(column)).address == lent.ctypes.data
    assert Tensor.of(Cuda(lent, strides=None)).nbytes == 24


@pytest.mark.parametrize("kind", [Cuda, Lender, np.asarray])
@pytest.mark.usefixtures("cuda_core")
def test_another_element_type_is_refused_with_both(kind: Any) -> None:
    with pytest.raises(TensorMismatch, match=r"has elements of float64 \(<f8\); expected FP32"):
        Tensor.of(kind(np.zeros(3)), DATATYPES["FP32"])
    with pytest.raises(TensorMismatch, match=r"has elements of complex128 \(<c16\); expected BOOL, .*BF16"):
        Tensor.of(kind(np.zeros(3, np.complex128)))


@pytest.mark.usefixtures("cuda_core")
def test_an_element_type_that_numpy_has_no_name_for_is_refused() -> None:
    with pytest.raises(TensorMismatch, match="Lender does not share its memory through DLPack: Unsupported dtype"):
        Tensor.of(Lender(np.zeros(3, np.uint16), code=99))


def test_other_byte_orders_are_refused(lent: Array) -> None:
    with pytest.raises(TensorMismatch, match=r"float32 \(>f4\)"):
        Tensor.of(lent.astype(">f4"))


@pytest.mark.usefixtures("cuda_core")
def test_bf16_is_viewed_as_bf16_or_as_16_bits() -> None:
    bits = np.array([0x3F80, 0x4000], np.uint16)
    assert Tensor.of(bits, DATATYPES["BF16"]).nbytes == 4
    try:
        import ml_dtypes
    except ImportError:
        return
    for array in (bits.view(ml_dtypes.bfloat16), Lender(bits, code=4)):
        assert Tensor.of(array, DATATYPES["BF16"]).address == bits.ctypes.data


def test_objects_that_are_no_array_are_refused() -> None:
    with pytest.raises(TensorMismatch, match="object is no array of numbers; expected a NumPy array, or one with __dlpack__"):
        Tensor.of(object())


def test_a_masked_array_is_refused(lent: Array) -> None:
    with pytest.raises(TensorMismatch, match="Cuda has a mask"):
        Tensor.of(Cuda(lent, mask=Cuda(lent)))


def test_an_error_of_dlpack_is_passed_on(lent: Array) -> None:
    class Reluctant(Lender):
        def __dlpack__(self, **options: Any) -> object:
            raise BufferError("it requires a gradient")

    for kind in (1, CUDA):
        with pytest.raises(TensorMismatch, match="Reluctant does not share its memory through DLPack: it requires a gradient"):
            Tensor.of(Reluctant(lent, kind))


def test_gpu_arrays_without_cuda_core_are_refused_with_what_to_install(lent: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core.utils", None)
    with pytest.raises(TensorMismatch, match=r"Lender is on a GPU; to use it run scripts/install cuda"):
        Tensor.of(Lender(lent))


def test_an_array_of_no_bytes_may_have_no_address(lent: Array) -> None:
    assert Tensor.of(Cuda(lent[:0], data=(None, False)))[1:3] == (0, 0)


def test_a_list_is_taken_as_numpy_takes_it() -> None:
    tensor = Tensor.of([[1.5, 2.5]], DATATYPES["FP64"])
    assert tensor.array(DATATYPES["FP64"]).tolist() == [[1.5, 2.5]]


def test_a_room_of_an_array_is_its_memory() -> None:
    memory = np.zeros(64, np.float32)
    at = -memory.ctypes.data % 64 // 4
    piece = memory[at : at + 16]
    assert Room.of(Cuda(piece)) == Room(piece.ctypes.data, 64)
    with pytest.raises(TensorMismatch, match=rf"begins at {piece.ctypes.data + 4:#x}; expected .* multiple of 64"):
        Room.of(Cuda(piece[1:]))
    piece.flags.writeable = False
    with pytest.raises(TensorMismatch, match=r"shape \[16\] is read-only; expected one that outputs may be written to"):
        Room.of(Cuda(piece))


def test_a_scalar_is_viewed_as_an_array_without_dimensions() -> None:
    assert view_array(np.float32(2)).shape == ()
