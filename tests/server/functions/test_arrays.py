"""Tensors to arrays of a function's own and back, by data type, and what is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engines import TensorSpec, wire
from engines.datatypes import DATATYPES
from engines.signature import Default, Form
from server.errors import Failed
from server.functions.arrays import Data, arrays, checked, copied

NUMBERS = [datatype for datatype in DATATYPES.values() if datatype.size]


@given(st.sampled_from(NUMBERS), st.data())
def test_numbers_come_back_as_they_were(datatype: Any, data: st.DataObject) -> None:
    array = data.draw(hnp.arrays(datatype.numpy, hnp.array_shapes(max_dims=3, max_side=3, min_side=0)))
    spec = TensorSpec("x", datatype, ("",) * array.ndim)
    memory = bytearray(b"......" + array.tobytes())
    (raw,) = copied([spec], [(array.shape, 6, array.nbytes)], memoryview(memory))
    found = arrays([raw])["x"]
    memory[:] = bytes(len(memory))  # The function's array is a copy.
    assert (found.tobytes(), found.shape, found.flags.writeable or not found.size) == (array.tobytes(), array.shape, True)
    ((shape, returned),) = checked("f", {"x": found}, [spec])
    assert (shape, bytes(memoryview(returned).cast("B")) if array.size else b"") == (array.shape, array.tobytes())


@given(st.lists(st.binary(max_size=4), max_size=6))
def test_bytes_come_back_as_they_were(elements: list[bytes]) -> None:
    spec, packed = TensorSpec("x", DATATYPES["BYTES"], ("", 1)), wire.pack(elements)
    (raw,) = copied([spec], [((len(elements), 1), 0, len(packed))], memoryview(packed))
    found = arrays([raw])["x"]
    assert found.reshape(-1).tolist() == elements
    assert checked("f", {"x": found}, [spec]) == [Data((len(elements), 1), packed)]


def test_text_is_bytes_of_utf_8_and_defaults_are_filled_in() -> None:
    text = TensorSpec("text", DATATYPES["BYTES"], ("",))
    other = TensorSpec("other", DATATYPES["INT32"], (1,), default=Default((1,), b"\1\0\0\0"))
    found = checked("f", {"text": np.array(["\u00e4"])}, [text, other])
    assert found == [Data((1,), wire.pack(["\u00e4".encode()])), Data((1,), b"\1\0\0\0")]


def test_a_reshape_of_the_configuration_is_between_function_and_model() -> None:
    spec = TensorSpec("x", DATATYPES["INT32"], ("", 1), form=Form((-1,), (-1, 1)))
    (raw,) = copied([spec], [((2, 1), 0, 8)], memoryview(bytes(8)))
    assert arrays([raw])["x"].shape == (2,)
    ((shape, _),) = checked("f", {"x": np.zeros(2, np.int32)}, [spec])
    assert shape == (2, 1)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "f returned NoneType; expected a dict of arrays by name"),
        ({"y": 1}, "f returned 'y'; expected 'x', 't'"),
        ({}, "f returned no 'x'; expected 'x', 't'"),
        ({"x": np.zeros(2)}, r"f returned 'x' as an array of float64; expected FP32\[-1\], as an array of float32"),
        ({"x": np.float32(1)}, r"f returned 'x' of shape \[\]; expected FP32\[-1\]"),
        ({"x": np.zeros(1, np.float32), "t": np.array([1])}, "f returned 't' as an array of int64; expected BYTES"),
        ({"x": np.zeros(1, np.float32), "t": np.array([1], object)}, "f returned 't' with an element of type int"),
        ({"x": np.zeros(1, np.float32), "t": ["\udc80"]}, "f returned 't' with an element that is no UTF-8: 'utf-8' codec"),
        ({"x": [[1.0], [1.0, 2.0]]}, "f returned 'x' as a list that is no array: .* inhomogeneous shape"),
    ],
)
def test_what_is_no_tensor_of_the_model_is_refused(returned: Any, text: str) -> None:
    specs = [TensorSpec("x", DATATYPES["FP32"], ("",)), TensorSpec("t", DATATYPES["BYTES"], ("",))]
    with pytest.raises(Failed, match=text):
        checked("f", returned, specs)


def test_a_function_may_write_to_what_it_has_returned() -> None:
    """As one that keeps an array for its results, and is called again before the first result is used."""
    kept = np.ones((2, 2), np.float32)
    for returned in (kept, kept.T, kept[:1]):
        ((_, data),) = checked("f", {"x": returned}, [TensorSpec("x", DATATYPES["FP32"], ("", ""))])
        assert not np.shares_memory(data, kept)
