from typing import Any

import numpy as np
import pytest

from engines import DATATYPES, Signature, Tensor, TensorMismatch, TensorSpec
from engines.base import check_tensors
from engines.memory import view

from .tensors import packed

ROWS = TensorSpec("rows", DATATYPES["FP32"], ("n", 3))
TEXTS = TensorSpec("texts", DATATYPES["BYTES"], ("n",))
NUMBERS = Tensor.of(np.zeros((2, 3), np.float32))
TAKES = Signature((ROWS, TEXTS), ())
TWO = "2: rows FP32[-1, 3], texts BYTES[-1]"


def test_a_tensor_of_an_array_is_its_own_memory() -> None:
    data = np.arange(6, dtype=np.int16).reshape(2, 3)
    tensor = Tensor.of(data)
    assert (tensor.shape, tensor.address, tensor.nbytes) == ((2, 3), data.ctypes.data, 12)


def test_a_tensor_of_an_array_with_gaps_is_a_copy_in_rows() -> None:
    data = np.arange(6, dtype=np.int16).reshape(2, 3).T
    tensor = Tensor.of(data)
    assert tensor.shape == (3, 2)
    assert tensor.address != data.ctypes.data
    assert np.frombuffer(view(tensor.address, tensor.nbytes), np.int16).tolist() == [0, 3, 1, 4, 2, 5]


def test_an_array_of_a_tensor_is_a_copy_of_the_same_shape() -> None:
    data = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    taken = Tensor.of(data).array(DATATYPES["FP32"])
    data[:] = 0
    assert taken.shape == (3, 1, 2)
    assert taken.ravel().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("shape", [(2,), (0,)])
def test_a_tensor_for_each_input_of_as_many_bytes_as_its_shape_has_is_taken(shape: tuple[int, ...]) -> None:
    check_tensors(TAKES, [NUMBERS, packed([b"a", b"bc"][: shape[0]], shape)])
    check_tensors(TAKES, (Tensor.of(np.zeros((0, 3), np.float32)), packed([b"of any length"])))
    check_tensors(Signature((), ()), ())


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([], f"0 tensors given, but the model's inputs are {TWO}"),
        ([NUMBERS], f"1 tensor given, but the model's inputs are {TWO}"),
        ([NUMBERS] * 3, f"3 tensors given, but the model's inputs are {TWO}"),
        (NUMBERS, f"one Tensor by itself; expected a list with one for each of the model's inputs ({TWO})"),
        ([NUMBERS, None], "input 'texts': a NoneType; expected an engines.Tensor, as Tensor.of(array) makes it"),
        ({"rows": 1, "texts": 2}, "input 'rows': a str; expected an engines.Tensor, as Tensor.of(array) makes it"),
        ([np.zeros((2, 3))] * 2, "input 'rows': a numpy.ndarray; expected an engines.Tensor, as Tensor.of(array) makes it"),
        ([NUMBERS._replace(nbytes=12), packed([])], "input 'rows': 12 bytes for shape [2, 3] of FP32; expected 24"),
        ([Tensor.of(np.zeros((2, 3))), packed([])], "input 'rows': 48 bytes for shape [2, 3] of FP32; expected 24"),
    ],
)
def test_check_tensors_refuses_what_is_not_one_tensor_for_each_input(tensors: Any, text: str) -> None:
    with pytest.raises(TensorMismatch) as caught:
        check_tensors(TAKES, tensors)
    assert str(caught.value) == text


def test_a_tensor_for_a_model_that_takes_none_is_refused() -> None:
    with pytest.raises(TensorMismatch, match=r"^1 tensor given, but the model's inputs are none$"):
        check_tensors(Signature((), ()), [NUMBERS])
