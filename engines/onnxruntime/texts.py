"""Texts to ONNX Runtime and back in steps that leave the interpreter to other threads, however many texts there are.

The library's bindings turn Python's strings into a tensor, and a tensor into strings, in one call that keeps the interpreter:
50 ns an element each way. They take nothing but UTF-8, and have no other call for it. So:

- What goes in becomes a model of one constant (`string_data` of a TensorProto), which the library loads and runs without the
  interpreter. That takes a quarter of a millisecond and 0.1 us an element, and any bytes will do.
- What comes out is read where it lies: as C++ objects of libstdc++, the address of the characters, their number, and 16 bytes.
  Whether these are so is tried once, with known texts. Where they are not, it is left to the library's call.
"""

import ctypes
import math
import os
import struct
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # As in engines.onnxruntime.engine, if this is imported first.
# isort: split
import onnxruntime as ort

from .. import wire
from ..base import Tensor
from ..memory import SMALL, copy, view
from ..model_files.onnx_writer import field, number, varint
from ..signature import Shape, TensorSpec
from .small_models import constant

FEW = 256
"""Elements that may be converted in one call that keeps the interpreter."""
SLICE = 256
"""Elements to deal with before others get the interpreter: some 50 us."""
PAUSE = 20e-6
"""Seconds to leave it to them; with the kernel's slack some 80 us."""

_STRING_DATA = 6 << 3 | 2
_STRING = 8
_LONG = 1 << 21
"""Bytes of an element from which on three bytes of a varint do not hold their number."""
_OBJECT = 32
"""Bytes of a `std::string` of libstdc++."""
_WITHIN = 15
"""The most bytes of a text that lies within its object."""
_LENGTH = struct.Struct("<I")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint64]]

_KNOWN = (b"", b"\xff", b"fifteen letters", b"sixteen letters.", b"many" * 1000)


def to_value(address: int, nbytes: int, shape: Shape) -> Any:
    """The library's tensor, an OrtValue, of a BYTES tensor in wire form. Blocks. Raises ValueError that says what is wrong."""
    texts = np.empty(nbytes, np.uint8)
    copy(texts.ctypes.data, address, nbytes)
    starts, long = wire.starts(view(address, nbytes), math.prod(shape)), []
    while some := list(islice(starts, SLICE)):
        long += _to_proto(texts, np.array(some, np.int64))
        if len(some) == SLICE:
            time.sleep(PAUSE)
    parts = list(_parts(texts.data, long))
    head = b"".join(number(1, size) for size in shape) + number(2, _STRING) + field(8, b"texts")
    descriptor = os.memfd_create("greenlane texts")
    try:
        for part in (constant(head, "texts", _STRING, sum(map(len, parts))), *parts):
            _write(descriptor, part)
        session = ort.InferenceSession(f"/proc/self/fd/{descriptor}", _options(), providers=["CPUExecutionProvider"])
    finally:
        os.close(descriptor)
    return session.run_with_ort_values(None, {})[0]


def to_wire(value: Any) -> Bytes:
    """The BYTES tensor, in wire form, of the library's. Blocks. Raises UnicodeDecodeError where the library has to be asked."""
    count = math.prod(value.shape())
    if not count:
        return np.empty(0, np.uint8)
    if not _is_known():
        return np.frombuffer(wire.pack(text.encode() for text in value.numpy().ravel()), np.uint8)
    objects = _objects(value, count)
    packed = np.empty(int(objects[:, 1].sum()) + count * _LENGTH.size, np.uint8)
    at = 0
    for end in range(SLICE, count + SLICE, SLICE):
        at = _read(objects[end - SLICE : end], packed, at)
        if end < count:
            time.sleep(PAUSE)
    return packed


def of_wire(shape: Shape, packed: Bytes) -> Tensor:
    """A BYTES tensor that has this in wire form."""
    return Tensor(shape, packed.ctypes.data, packed.nbytes, packed)


def to_array(spec: TensorSpec, tensor: Tensor) -> "np.ndarray[Any, Any]":
    """A tensor as `InferenceSession.run` takes it, for few elements. Raises ValueError, and UnicodeDecodeError for texts."""
    data = view(tensor.address, tensor.nbytes)
    if spec.datatype.size:
        return np.frombuffer(data, spec.datatype.numpy).reshape(tensor.shape)
    texts = [element.decode() for element in wire.unpack(data, math.prod(tensor.shape))]
    return np.array(texts, dtype=object).reshape(tensor.shape)


def of_array(array: "np.ndarray[Any, Any]") -> Tensor:
    """A tensor of what that gives."""
    if array.dtype != object:
        return Tensor.of(array)
    return of_wire(array.shape, np.frombuffer(wire.pack(str(text).encode() for text in array.ravel()), np.uint8))


def _to_proto(texts: Bytes, starts: "np.ndarray[Any, np.dtype[np.int64]]") -> list[tuple[int, int]]:
    """Turn the lengths that begin here, of four bytes, into keys and varints of as many, but for those in the result.

    These are elements that are too long for it: where they begin, and their lengths.
    """
    lengths = texts[starts[:, None] + np.arange(_LENGTH.size)].view("<u4").ravel()
    fits = lengths < _LONG
    starts, ends = starts[fits], starts[~fits]
    short = lengths[fits]
    texts[starts] = _STRING_DATA
    for place in (1, 2, 3):  # A varint may have more bytes than it needs: the last is the one without the highest bit.
        texts[starts + place] = short >> 7 * (place - 1) & 0x7F | (0x80 if place < 3 else 0)
    return list(zip(ends.tolist(), lengths[~fits].tolist(), strict=True))


def _parts(texts: memoryview, long: Sequence[tuple[int, int]]) -> Iterator["bytes | memoryview"]:
    """The `string_data` of all elements, once `_to_proto` has been through them."""
    at = 0
    for start, length in long:
        yield texts[at:start]
        yield varint(_STRING_DATA) + varint(length)
        at = start + _LENGTH.size
    yield texts[at:]


def _write(descriptor: int, data: "bytes | memoryview") -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 4
    return options


def _objects(value: Any, count: int) -> Words:
    """Of each text of a tensor its address, its length, and the 16 bytes that a short one, with a zero at its end, lies in."""
    return np.frombuffer(view(value.data_ptr(), count * _OBJECT), np.uint64).reshape(count, -1)


def _read(objects: Words, packed: Bytes, at: int) -> int:
    """Put these texts there from `at` on; return where the last one ends."""
    lengths = objects[:, 1]
    if lengths.max() <= _WITHIN:
        rows = np.empty((len(objects), _LENGTH.size + _WITHIN), np.uint8)
        rows[:, : _LENGTH.size] = lengths.astype("<u4")[:, None].view(np.uint8)
        rows[:, _LENGTH.size :] = objects[:, 2:].view(np.uint8)[:, :_WITHIN]
        data = rows[np.arange(rows.shape[1]) < lengths[:, None] + _LENGTH.size]
    elif lengths.sum() <= SMALL:
        found = wire.pack(ctypes.string_at(address, length) for address, length in objects[:, :2].tolist())
        data = np.frombuffer(found, np.uint8)
    else:
        return _copy(objects, packed, at)
    packed[at : at + len(data)] = data
    return at + len(data)


def _copy(objects: Words, packed: Bytes, at: int) -> int:
    """As `_read`, for those that have many bytes."""
    for address, length in objects[:, :2].tolist():
        _LENGTH.pack_into(packed.data, at, length)
        copy(packed.ctypes.data + at + _LENGTH.size, address, length)
        at += _LENGTH.size + length
    return at


@cache
def _is_known() -> bool:
    """Whether the library's texts lie as `_objects` reads them, short ones within their objects, long ones elsewhere."""
    data = np.frombuffer(wire.pack(_KNOWN), np.uint8)
    value = to_value(data.ctypes.data, data.nbytes, (len(_KNOWN),))
    if value.tensor_size_in_bytes() != len(_KNOWN) * _OBJECT:
        return False
    found, begin = _objects(value, len(_KNOWN))[:, :2].tolist(), value.data_ptr()
    for place, ((address, length), text) in enumerate(zip(found, _KNOWN, strict=True)):
        is_within = address == begin + place * _OBJECT + 16
        if length != len(text) or is_within != (length <= _WITHIN) or ctypes.string_at(address, length) != text:
            return False
    return True
