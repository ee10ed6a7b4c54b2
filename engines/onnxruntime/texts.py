"""Strings as ONNX Runtime's tensors and back, in steps that release the GIL, however many; and defaults of optional inputs.

Problem: the library's bindings turn Python strings into a tensor, and a tensor into strings, in one call that holds the GIL:
50 ns an element each way. They take nothing but UTF-8, and have no other call for it.

Solution:
- Inputs become a model of one constant (`string_data` of a TensorProto), which the library loads and runs without the GIL.
  That takes a quarter of a millisecond and 0.1 us an element, and takes any bytes.
- Outputs are read from the library's memory: C++ objects of libstdc++ with the address of the characters, their number, and 16
  bytes. Whether this layout is right is tested once, with known strings. If it is not, the library's call is used.
"""

import ctypes
import math
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from .. import wire
from ..base import Tensor
from ..errors import ModelRefused
from ..memory import SMALL, copy, view
from ..model_files.onnx_file import initializer
from ..model_files.onnx_writer import IR_VERSION, OPSET, field, number, varint
from ..signature import Default, Shape, TensorSpec
from .errors import clean_message

FEW = 256
"""Elements that may be converted in one call that holds the GIL."""
SLICE = 256
"""Elements to convert before other threads get the GIL: some 50 us."""
PAUSE = 20e-6
"""Seconds to sleep for that; with the kernel's timer slack some 80 us."""

_STRING_DATA = 6 << 3 | 2
_STRING = 8
_LONG = 1 << 21
"""From this many bytes on, the length of an element does not fit in three bytes of a varint."""
_OBJECT = 32
"""Bytes of a `std::string` of libstdc++."""
_WITHIN = 15
"""The maximum bytes of a string that is stored within its object."""
_LENGTH = struct.Struct("<I")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint64]]

_KNOWN = (b"", b"\xff", b"fifteen letters", b"sixteen letters.", b"many" * 1000)


def to_value(address: int, nbytes: int, shape: Shape) -> Any:
    """An OrtValue of a BYTES tensor in wire form. Blocks. Raises ValueError that says what is wrong."""
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
    """The wire form of an OrtValue of strings. Blocks. Raises UnicodeDecodeError where the library's call is used."""
    count = math.prod(value.shape())
    if not count:
        return np.empty(0, np.uint8)
    if not layout_is_known():
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
    """A BYTES tensor with this wire form."""
    return Tensor(shape, packed.ctypes.data, packed.nbytes, packed)


def to_array(spec: TensorSpec, tensor: Tensor) -> "np.ndarray[Any, Any]":
    """A tensor as `InferenceSession.run` takes it, for few elements. Raises ValueError, and UnicodeDecodeError for strings."""
    data = view(tensor.address, tensor.nbytes)
    if spec.datatype.size:
        return np.frombuffer(data, spec.datatype.numpy).reshape(tensor.shape)
    texts = [element.decode() for element in wire.unpack(data, math.prod(tensor.shape))]
    return np.array(texts, dtype=object).reshape(tensor.shape)


def of_array(array: "np.ndarray[Any, Any]") -> Tensor:
    """A tensor of an array that `InferenceSession.run` returned."""
    if array.dtype != object:
        return Tensor.of(array)
    return of_wire(array.shape, np.frombuffer(wire.pack(str(text).encode() for text in array.ravel()), np.uint8))


def _to_proto(texts: Bytes, starts: "np.ndarray[Any, np.dtype[np.int64]]") -> list[tuple[int, int]]:
    """Replace the 4-byte lengths at these offsets, in place, by a key and a varint that take as many bytes.

    Returns the offset and length of elements that are too long for that.
    """
    lengths = texts[starts[:, None] + np.arange(_LENGTH.size)].view("<u4").ravel()
    fits = lengths < _LONG
    starts, ends = starts[fits], starts[~fits]
    short = lengths[fits]
    texts[starts] = _STRING_DATA
    for place in (1, 2, 3):  # A varint may be longer than needed: it ends with the byte without the highest bit.
        texts[starts + place] = short >> 7 * (place - 1) & 0x7F | (0x80 if place < 3 else 0)
    return list(zip(ends.tolist(), lengths[~fits].tolist(), strict=True))


def _parts(texts: memoryview, long: Sequence[tuple[int, int]]) -> Iterator["bytes | memoryview"]:
    """The `string_data` of all elements, after `_to_proto`."""
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
    """For each string of a tensor its address, its length, and the 16 bytes where a short one is, with a zero at its end."""
    return np.frombuffer(view(value.data_ptr(), count * _OBJECT), np.uint64).reshape(count, -1)


def _read(objects: Words, packed: Bytes, at: int) -> int:
    """Write these strings in wire form to `packed` from `at` on; return the offset after the last one."""
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
    """As `_read`, for strings of many bytes."""
    for address, length in objects[:, :2].tolist():
        _LENGTH.pack_into(packed.data, at, length)
        copy(packed.ctypes.data + at + _LENGTH.size, address, length)
        at += _LENGTH.size + length
    return at


@cache
def layout_is_known() -> bool:
    """Whether the library's strings have the layout that `_objects` reads, short ones within their objects, long ones
    elsewhere.
    """
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


def constant(tensor: bytes, name: str, kind: int, more: int = 0) -> bytes:
    """A model without inputs whose one output, `value`, is this TensorProto, of this name and TensorProto.DataType.

    The last `more` bytes of the tensor are left out: the caller appends them to the result.
    """
    node = field(1, name.encode()) + field(2, b"value") + field(4, b"Identity")
    output = field(1, b"value") + field(2, field(1, number(1, kind)))
    graph = field(1, node) + field(2, b"constant") + field(12, output) + field(5, tensor, more)
    return number(1, IR_VERSION) + field(8, number(2, OPSET)) + field(7, graph, more)


def with_default(spec: TensorSpec, kind: int, model: memoryview, path: Path) -> TensorSpec:
    """The input with the initializer of its name, from a model's bytes, as its default; unchanged if there is none.

    `kind` is its TensorProto.DataType. A file may keep it in one of five fields or, in the folder of `path`, in another file,
    so ONNX Runtime reads it, as a model of one constant. Blocks. Raises ModelRefused.
    """
    tensor = initializer(model, spec.name)
    if tensor is None:
        return spec
    try:
        value = of_array(_value(constant(bytes(tensor), spec.name, kind), path.parent))
    except Exception as error:
        raise ModelRefused(f"{path}: input {spec.name!r}, which is optional: {clean_message(error, path.parent)}") from error
    return replace(spec, default=Default(value.shape, bytes(view(value.address, value.nbytes))))


def _value(model: bytes, folder: Path) -> "np.ndarray[Any, np.dtype[Any]]":
    options = _options()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    (value,) = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, {})
    return np.asarray(value)
