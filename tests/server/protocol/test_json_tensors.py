import json
import re
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engines import DATATYPES, TensorSpec, wire
from server.errors import BadRequest
from server.protocol.json_tensors import InputDeclaration, to_array, to_wire

from .messages import INTEGERS

NUMBERS = tuple(name for name in DATATYPES if name not in ("BYTES", "FP16", "BF16"))


def declared(datatype: str, shape: tuple[int, ...]) -> InputDeclaration:
    return InputDeclaration("inputs[0].", TensorSpec("x", DATATYPES[datatype], ()), shape)


def array(data: list[Any], datatype: str = "FP32", shape: tuple[int, ...] | None = None) -> list[Any]:
    values: list[Any] = to_array(data, declared(datatype, (len(data),) if shape is None else shape)).tolist()
    return values


def texts(data: list[Any], shape: tuple[int, ...]) -> list[str]:
    packed = to_wire(data, declared("BYTES", shape))
    return wire.texts(wire.unpack(packed, int(np.prod(shape))))


def limits(datatype: str) -> tuple[int, int]:
    dtype: Any = DATATYPES[datatype].numpy
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


@given(st.data(), st.sampled_from(NUMBERS), hnp.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=4), st.booleans())
def test_every_value_of_every_type_nested_or_flat(data: st.DataObject, name: str, shape: tuple[int, ...], flat: bool) -> None:
    datatype = DATATYPES[name]
    values = data.draw(
        hnp.arrays(
            datatype.numpy, shape, elements={"allow_nan": False, "allow_infinity": False} if datatype.kind == "float" else None
        )
    )
    nested = values.ravel().tolist() if flat or not shape else values.tolist()
    found = to_array(json.loads(json.dumps(nested)), declared(name, shape))
    assert found.dtype == datatype.numpy
    np.testing.assert_array_equal(found, values.ravel())


@given(st.data(), hnp.array_shapes(min_dims=1, min_side=0, max_dims=3, max_side=3), st.booleans())
def test_every_string_nested_or_flat(data: st.DataObject, shape: tuple[int, ...], flat: bool) -> None:
    values = data.draw(hnp.arrays(object, shape, elements=st.text(max_size=5)))
    assert texts(values.ravel().tolist() if flat else values.tolist(), shape) == values.ravel().tolist()


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_type_takes_its_limits_and_nothing_beyond(name: str) -> None:
    low, high = limits(name)
    assert array([low, high, 0], name) == [low, high, 0]
    for beyond in (low - 1, high + 1):
        with pytest.raises(BadRequest, match=re.escape(f"data[1]: {beyond} is out of range for {name} ({low} to {high})")):
            array([0, beyond], name)


@pytest.mark.parametrize("name", [*INTEGERS, "FP32", "FP64"])
@pytest.mark.parametrize(
    ("value", "what"),
    [("1", '"1" is a string'), (None, "null"), ({}, "{} is an object"), (True, "true is a boolean")],
)
def test_non_numbers_are_refused_in_numeric_data(name: str, value: object, what: str) -> None:
    expected = "an integer" if name in INTEGERS else "a number"
    with pytest.raises(BadRequest, match=re.escape(f"data[2]: {what}; expected {expected} for {name}")):
        array([1, 0, value, 1], name)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, 0.5, 1e18])
def test_a_float_is_no_integer_even_when_it_is_whole(name: str, value: float) -> None:
    with pytest.raises(BadRequest, match=re.escape(f"data[0]: {value} is a number; expected an integer for {name}")):
        array([value], name)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(
    ("beyond", "shown"),
    [(2**64, "18446744073709552000"), (-(2**63) - 4096, "-9223372036854780000"), (10**23, f"{10**23}"), (10**30, f"{10**30}")],
)
def test_integer_beyond_64_bits_is_out_of_range(name: str, beyond: int, shown: str) -> None:
    parsed = orjson.loads(str(beyond))
    assert type(parsed) is float
    with pytest.raises(BadRequest, match=re.escape(f"data[1]: {shown} is out of range for {name} ")):
        array([0, parsed], name)


@pytest.mark.parametrize("value", [0, 1, 1.0, "true", None, 1e300, 1e22, float(2**64)])
def test_a_number_is_no_boolean(value: object) -> None:
    assert array([True, False], "BOOL") == [True, False]
    with pytest.raises(BadRequest, match=r"^inputs\[0\]\.data\[1\]: .*; expected true or false for BOOL$"):
        array([True, value], "BOOL")


@pytest.mark.parametrize("value", [1e39, -1e39, 3.5e38])
def test_a_number_beyond_single_precision_is_refused_not_made_infinite(value: float) -> None:
    expected = r"^inputs\[0\]\.data\[1\]: .* is out of range for FP32 \(-3.40.*e\+38 to 3.40.*e\+38\)$"
    with pytest.raises(BadRequest, match=expected):
        array([0.5, value, value])
    assert array([value], "FP64") == [value]


@pytest.mark.parametrize("name", ["FP16", "BF16"])
def test_half_precision_has_no_json_form(name: str) -> None:
    with pytest.raises(BadRequest, match=rf"^inputs\[0\]\.data: {name} has no JSON form; send it as a binary tensor"):
        array([1.0], name)


@pytest.mark.parametrize(
    ("data", "shape", "message"),
    [
        ([[1], [1, 2]], (2, 1), "data[1] is a row of 2; the shape asks for a row of 1 there"),
        ([[1], 2], (2, 1), "data[1] is an integer; the shape asks for a row of 1 there"),
        ([[1], 2], (1, 2), "data is a row of 2; the shape asks for a row of 1 there"),
        ([[1], []], (2, 1), "data[1] is a row of 0; the shape asks for a row of 1 there"),
        ([[1], "a"], (2, 1), "data[1] is a string; the shape asks for a row of 1 there"),
        ([[1], {"a": 1}], (2, 1), "data[1] is an object; the shape asks for a row of 1 there"),
        ([[1, 2], [3, 4], [5, 6]], (2, 3), "data is a row of 3; the shape asks for a row of 2 there"),
        ([[], []], (0, 2), "data is a row of 2; the shape asks for a row of 0 there"),
        ([[1, 2, 3, 4]], (2, 2), "data is a row of 1; the shape asks for a row of 2 there"),
        ([[[1], [2]], [[3], []]], (2, 2, 1), "data[1][1] is a row of 0; the shape asks for a row of 1 there"),
    ],
)
@pytest.mark.parametrize("name", ["FP32", "INT8", "BOOL", "BYTES"])
def test_first_row_of_the_wrong_shape_is_named(data: list[Any], shape: tuple[int, ...], message: str, name: str) -> None:
    convert = to_wire if name == "BYTES" else to_array
    expected = re.escape(f"inputs[0] ('x'), {name} {list(shape)}: {message}, or for all elements flat")
    with pytest.raises(BadRequest, match=f"^{expected}$"):
        convert(data, declared(name, shape))


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        ([1, 2], (3,)),
        ([1, 2, 3], (2,)),
        ([], (1,)),
        ([1], (0,)),
        ([1], (2**40,)),
        ([1, 2], ()),
        ([[1], [1, 2]], (3,)),
        ([[]], (0,)),
    ],
)
def test_a_flat_list_of_another_length_is_refused(data: list[Any], shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape, dtype=object))
    came = f"{len(data)} element" if len(data) == 1 else f"{len(data)} elements"
    expected = f"inputs[0] ('x'), FP32 {list(shape)}: {came} in data; the shape asks for {size}, nested that way or flat"
    with pytest.raises(BadRequest, match=f"^{re.escape(expected)}$"):
        array(data, shape=shape)


@given(hnp.array_shapes(min_dims=1, max_dims=4, max_side=3), st.data())
def test_first_wrong_element_is_named_with_its_path(shape: tuple[int, ...], data: st.DataObject) -> None:
    values = np.zeros(shape, object)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    values[place] = data.draw(st.sampled_from([-1, 300, None, 0.5]))
    with pytest.raises(BadRequest) as refusal:
        array(values.tolist(), "UINT8", shape)
    assert str(refusal.value).startswith("inputs[0].data" + "".join(f"[{index}]" for index in place) + ": ")


@pytest.mark.parametrize("levels", [100, 5000])
@pytest.mark.parametrize("rank", [1, 2, 64])
@pytest.mark.parametrize("name", ["FP32", "BYTES"])
def test_data_nested_deeper_than_any_shape_is_refused(levels: int, rank: int, name: str) -> None:
    data: list[Any] = ["a"] if name == "BYTES" else [1]
    for _ in range(levels):
        data = [data]
    convert = to_wire if name == "BYTES" else to_array
    with pytest.raises(BadRequest, match=r"^inputs\[0\].*is (an array; expected a|a row of 1; the shape)"):
        convert(data, declared(name, (1,) * rank))


def test_a_long_string_among_many_numbers_takes_no_memory_for_each_of_them() -> None:
    data = ["9" * 100_000, *range(10_000)]
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match=r"data\[0\]: .* is a string; expected a number for FP64"):
            array(data, "FP64")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
