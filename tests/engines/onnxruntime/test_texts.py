import struct
from math import prod

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import wire
from engines.onnxruntime import texts
from engines.onnxruntime.texts import SLICE, to_value, to_wire
from tests import models
from tests.engines.tensors import packed
from tests.interpreter import Watcher

LONG = 1 << 21
"""Elements of this many bytes or more have their length in another form."""


def there_and_back(elements: list[bytes], shape: tuple[int, ...] | None = None) -> list[bytes]:
    tensor = packed(elements, shape)
    value = to_value(tensor.address, tensor.nbytes, tensor.shape)
    assert tuple(value.shape()) == tensor.shape
    return wire.unpack(to_wire(value).data, prod(tensor.shape))


@given(st.lists(st.binary() | st.binary(min_size=14, max_size=17), max_size=2 * SLICE))
@settings(deadline=None)
def test_texts_of_any_bytes_go_through(elements: list[bytes]) -> None:
    assert there_and_back(elements) == elements


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (0, 3), (2, 0), (3, 2)])
def test_texts_keep_their_shape(shape: tuple[int, ...]) -> None:
    elements = [b"%d" % index for index in range(prod(shape))]
    assert there_and_back(elements, shape) == elements


@pytest.mark.parametrize("count", [SLICE - 1, SLICE, SLICE + 1, 10 * SLICE + 1])
def test_any_number_of_texts_goes_through(count: int) -> None:
    elements = [b"x" * (index % 40) for index in range(count)]
    assert there_and_back(elements) == elements


@pytest.mark.parametrize("length", [127, 128, 16_383, 16_384, LONG - 1, LONG, LONG + 1, 5 * LONG])
def test_texts_of_every_length_go_through(length: int) -> None:
    elements = [b"before", b"x" * length, b"", b"y" * length, b"after"]
    assert there_and_back(elements) == elements


@pytest.mark.parametrize(
    ("data", "count", "wrong"),
    [
        (b"\1\0\0\0", 1, "element 0 claims 1 bytes, but 0 are left"),
        (b"\0\0\0\0\1\0", 2, "element 1 of 2 has no length: the data ends at byte 6"),
        (b"\0\0\0\0\7", 1, "1 bytes left after 1 elements"),
        (struct.pack("<I", 2**32 - 1) * 2, 1, "element 0 claims 4294967295 bytes, but 4 are left"),
        (b"\0\0\0\0" * SLICE, SLICE + 1, f"element {SLICE} of {SLICE + 1} has no length: the data ends at byte {4 * SLICE}"),
    ],
)
def test_malformed_wire_forms_are_refused_with_what_is_wrong(data: bytes, count: int, wrong: str) -> None:
    array = np.frombuffer(data, np.uint8)
    with pytest.raises(ValueError, match=f"^{wrong}$"):
        to_value(array.ctypes.data, array.nbytes, (count,))


def test_the_memory_of_the_texts_is_left_as_it_is() -> None:
    tensor = packed([b"a", b"bc" * LONG, b"def"])
    before = bytes(np.asarray(tensor.owner))
    to_value(tensor.address, tensor.nbytes, tensor.shape)
    assert bytes(np.asarray(tensor.owner)) == before


def test_strings_of_another_layout_are_read_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "layout_is_known", lambda: False)
    elements = [b"short", "é".encode(), b"longer than the others are", b""]
    assert there_and_back(elements, (2, 2)) == elements


def test_the_string_layout_of_the_installed_library_is_known() -> None:
    assert texts.layout_is_known()


def test_converting_many_texts_releases_the_gil() -> None:
    count = 400_000
    tensor = packed([b"text"] * count)
    source = onnx.parser.parse_model(models.HEADER + models.identity("string", "n")).SerializeToString()
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    array = np.full(count, "text", object)
    with Watcher() as control:
        session.run(None, {"x": array})
    with Watcher() as watcher:
        value = to_value(tensor.address, tensor.nbytes, tensor.shape)
        to_wire(value)
    assert watcher.longest < max(0.005, control.longest / 3), control.longest
