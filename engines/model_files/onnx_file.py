"""Reads from an ONNX file what TensorRT's parser does not report. No ONNX library is needed.

The parser drops the names of outputs' dimensions, from which their sizes are known before a run, and treats doubles as floats;
and weights may be in separate files. Field numbers are from https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from partitions.regular_file import open_regular

from ..signature import dimension_name

MOST_BYTES = (1 << 31) - 1
"""No message of protobuf is larger, so no ONNX file is; more weights than that are in files of their own."""
_LFS = b"version https://git-lfs.github.com/spec/"
_DOUBLE = 11
_INT32, _INT64, _BOOL = 6, 7, 9
_MOST_SIZES = 256
"""Bytes of an integer tensor that may hold sizes or axes; a larger one holds weights."""
_TENSOR_DATA = frozenset({4, 5, 6, 7, 9, 10, 11, 13})
"""TensorProto: float_data, int32_data, string_data, int64_data, raw_data, double_data, uint64_data, external_data."""

_COARSE = MappingProxyType({10: "FP16", 16: "BF16"})
_QUANTISED = frozenset({"ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits"})
_PASSING = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Nodes whose output has the values of their first input."""
_FLOATS = frozenset({1, 10, 11, 16})
_COUNTING = frozenset({
    "And", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual",
    "NonMaxSuppression", "NonZero", "Not", "Or", "Shape", "Size", "Xor",
})  # fmt: skip
"""Nodes whose output is within what the shapes of their inputs allow, or true or false, however large the values are."""
_LOCATING = frozenset({"MaxPool", "TopK", "Unique"})
"""Nodes of which that holds for all outputs but the first."""
_MEASURING = MappingProxyType({
    "CastLike": slice(1), "OneHot": slice(1, 2), "Range": slice(3), "Resize": slice(1, None), "RoiAlign": slice(1, 2),
    "Upsample": slice(1, None),
})  # fmt: skip
"""Nodes by whose inputs of floats, which these are, sizes or indices are decided; beside `Cast`."""

Message = Mapping[int, list[int | memoryview]]


class Declared(NamedTuple):
    """An input or output as the file declares it: a size, a name, or "" for each dimension."""

    name: str
    dims: tuple[int | str, ...]
    is_double: bool


class OnnxFile(NamedTuple):
    """The parts of a model that were read; empty if the bytes are not ONNX."""

    inputs: tuple[Declared, ...] = ()
    outputs: tuple[Declared, ...] = ()
    external: tuple[str, ...] = ()


def read_onnx(data: "bytes | memoryview") -> OnnxFile:
    """Read a model's bytes. Bytes that cannot be parsed count as empty: the library refuses them."""
    try:
        graph = next(_messages(_message(memoryview(data)), 7), None)
        if graph is None:
            return OnnxFile()
        inputs, outputs = (tuple(map(_declared, _messages(graph, number))) for number in (11, 12))
        return OnnxFile(inputs, outputs, tuple(sorted(set(_external(graph)))))
    except (ValueError, IndexError, RecursionError):
        return OnnxFile()


def unranked_outputs(data: "bytes | memoryview") -> frozenset[str]:
    """The outputs of which a model does not say how many dimensions they have. Those of a scalar are said to be none."""
    with suppress(ValueError, IndexError, RecursionError):
        outputs = [value for graph in _messages(_message(memoryview(data)), 7) for value in _messages(graph, 12)]
        return frozenset(_text(value, 1) for value in outputs if 2 not in _tensor_type(value))
    return frozenset()


def blame(data: "bytes | memoryview", error: str) -> str:
    """An error text for bytes that the library refused with this error. Says whether they are ONNX at all, which the library
    may not say.
    """
    if not data:
        return "not an ONNX file (0 bytes)"
    if bytes(data[: len(_LFS)]) == _LFS:
        return "a pointer of Git LFS in place of the file; `git lfs pull` brings that"
    return error if any(read_onnx(data)) else f"not an ONNX file, or a truncated one: {error}"


def weight_files(data: bytes, folder: Path) -> list[Path]:
    """The files in the folder that hold a model's weights, as it names them; one may be missing."""
    return [folder / name for name in read_onnx(data).external]


def source_digest(data: bytes, weights: Iterable[Path]) -> str:
    """SHA-256 in hexadecimal of a model's bytes, followed by the files that hold its weights. Blocks. Raises OSError."""
    digest = hashlib.sha256(data)
    for path in weights:
        if path.is_file():  # The library reports a file that is missing.
            with open_regular(path) as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def structure_digest(data: bytes) -> str:
    """SHA-256 in hexadecimal of a model without its weights: the same for every training of one network.

    Small integer tensors count, as they may be sizes or axes, and scalars and the attributes of nodes do. "" for bytes that
    cannot be parsed.
    """
    digest = hashlib.sha256()
    try:
        model = _message(memoryview(data))
        _update(digest, model, (8, 25))  # opset_import, functions
        for graph in _messages(model, 7):
            _update(digest, graph, (1, 11, 12))  # node, input, output
            for tensor in _messages(graph, 5):  # initializer
                _update(digest, tensor, sorted(set(tensor) - (frozenset() if _is_structure(tensor) else _TENSOR_DATA)))
    except (ValueError, IndexError, RecursionError):
        return ""
    return digest.hexdigest()


def initializer(data: bytes | memoryview, name: str) -> memoryview | None:
    """The TensorProto of the weight of this name, as it is in the file; None if there is none."""
    with suppress(ValueError, IndexError):
        for graph in _messages(_message(memoryview(data)), 7):
            for tensor in graph.get(5, ()):
                if isinstance(tensor, memoryview) and _text(_message(tensor), 8) == name:
                    return tensor
    return None


def precisions(data: bytes | memoryview) -> frozenset[str]:
    """Which datatypes coarser than FP32 a model computes with: FP16, BF16, and INT8 where it is quantised."""
    with suppress(ValueError, IndexError, RecursionError):
        found = set()
        for graph in _messages(_message(memoryview(data)), 7):
            kinds = {kind for tensor in _messages(graph, 5) for kind in tensor.get(2, ())}
            found |= {name for kind, name in _COARSE.items() if kind in kinds}
            if any("QuantizeLinear" in _text(node, 4) or _text(node, 4) in _QUANTISED for node in _messages(graph, 1)):
                found.add("INT8")
        return frozenset(found)
    return frozenset()


def index_bounds(data: bytes | memoryview) -> dict[str, int]:
    """For inputs that index the rows of a table (`Gather` from a weight, as embeddings do): how many rows that has at least.

    For other inputs of floats of which an index or a size may be made: 1.
    """
    bounds: dict[str, int] = {}
    with suppress(ValueError, IndexError, RecursionError):
        model = _message(memoryview(data))
        for graph in _messages(model, 7):
            rows = {_text(tensor, 8): tensor.get(1, [0])[0] for tensor in _messages(graph, 5)}
            origin = {_text(value, 1): _text(value, 1) for value in _messages(graph, 11) if _text(value, 1) not in rows}
            for node in _messages(graph, 1):
                taken, given = _texts(node, 1), _texts(node, 2)
                if _text(node, 4) in _PASSING and not _counts(node) and taken and given and taken[0] in origin:
                    origin[given[0]] = origin[taken[0]]
                axis = [attribute.get(3, [0])[0] for attribute in _messages(node, 5) if _text(attribute, 1) == "axis"]
                if _text(node, 4) == "Gather" and axis in ([], [0]) and len(taken) == 2 and taken[1] in origin:
                    size, name = rows.get(taken[0], 0), origin[taken[1]]
                    if isinstance(size, int) and size:
                        bounds[name] = min(size, bounds.get(name, size))
            bounds = dict.fromkeys(_measured(graph, _functions(model)), 1) | bounds
    return bounds


def _functions(model: Message) -> dict[str, bool]:
    """The functions of a model by name, and whether any node in one makes an index or a size: functions may use others."""
    functions = list(_messages(model, 25))
    makes = any(_measures(node) for function in functions for outer in _messages(function, 7) for node in _nested(outer))
    return {_text(function, 1): makes for function in functions}


def _measured(graph: Message, functions: Mapping[str, bool]) -> set[str]:
    """The inputs of floats from whose values an integer is made that may be an index or a size, or a size by itself."""
    made: dict[str, set[str]] = {}
    for value in _messages(graph, 11):
        kinds = [kind for of in _messages(value, 2) for tensor in _messages(of, 1) for kind in tensor.get(1, ())]
        if _FLOATS.intersection(kinds):
            made[_text(value, 1)] = {_text(value, 1)}
    found: set[str] = set()
    users = _users(graph)
    for node in _messages(graph, 1):
        inner = list(_nested(node))
        origins = {name for each in inner for taken in _texts(each, 1) for name in made.get(taken, ())}
        if any(map(_measures, inner[1:])) or any(functions.get(_text(each, 4)) for each in inner):
            found |= origins
        elif _text(node, 4) != "Cast" or not all(map(_is_float, (user for name in _texts(node, 2) for user in users[name]))):
            found |= {name for taken in _measures(node) for name in made.get(taken, ())}
        if not _counts(node):
            given = _texts(node, 2)
            made |= dict.fromkeys(given[:1] if _text(node, 4) in _LOCATING else given, origins)
    return found


def _is_float(user: Message) -> bool:
    """Whether a node makes floats of an integer by a cast: floats that were cast to that are only rounded so, and no index."""
    return _text(user, 4) == "Cast" and _target(user) in _FLOATS


def _users(graph: Message) -> Mapping[str, list[Message]]:
    """The nodes that take each value."""
    found = defaultdict[str, list[Message]](list)
    for outer in _messages(graph, 1):
        for node in _nested(outer):
            for taken in _texts(node, 1):
                found[taken].append(node)
    return found


def _nested(node: Message) -> Iterator[Message]:
    """A node and those of the graphs in its attributes: a graph is field 6, several are 11."""
    yield node
    for attribute in _messages(node, 5):
        for number in (6, 11):
            for graph in _messages(attribute, number):
                for each in _messages(graph, 1):
                    yield from _nested(each)


def _measures(node: Message) -> list[str]:
    """Those of a node's inputs of whose values it makes an integer that may be an index or a size, or a size."""
    taken, kind = _texts(node, 1), _text(node, 4)
    if kind == "Cast":
        return taken if _target(node) in (_INT32, _INT64) else []
    return taken[_MEASURING[kind]] if kind in _MEASURING else []


def _counts(node: Message) -> bool:
    """Whether its output is as small however large its inputs are."""
    return _text(node, 4) in _COUNTING or (_text(node, 4) == "Cast" and _target(node) == _BOOL)


def _target(node: Message) -> int | memoryview:
    return next((each.get(3, [0])[0] for each in _messages(node, 5) if _text(each, 1) == "to"), 0)


def _is_structure(tensor: Message) -> bool:
    """Whether a TensorProto's data are no weights. Its dims are field 1, its data_type is field 2."""
    if tensor.get(2) not in ([_INT32], [_INT64], [_BOOL]):
        return not tensor.get(1)
    return sum(len(value) for number in _TENSOR_DATA for value in tensor.get(number, ()) if isinstance(value, memoryview)) <= (
        _MOST_SIZES
    )


def _update(digest: Any, message: Message, numbers: Iterable[int]) -> None:
    """Add these fields' values to a digest."""
    for number in numbers:
        for value in message.get(number, ()):
            data = value if isinstance(value, memoryview) else str(value).encode()
            digest.update(b"%d %d " % (number, len(data)))
            digest.update(data)


def _declared(value: Message) -> Declared:
    """ValueInfoProto: name 1, type 2; TypeProto.tensor_type 1: elem_type 1, shape 2; its dims 1: dim_value 1, dim_param 2."""
    tensor = _tensor_type(value)
    dims = [dim for shape in _messages(tensor, 2) for dim in _messages(shape, 1)]
    return Declared(_text(value, 1), tuple(map(_dimension, dims)), tensor.get(1) == [_DOUBLE])


def _tensor_type(value: Message) -> Message:
    return next((tensor for kind in _messages(value, 2) for tensor in _messages(kind, 1)), _NOTHING)


def _dimension(dim: Message) -> int | str:
    value = dim.get(1, [-1])[-1]
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else dimension_name(_text(dim, 2))


def _external(graph: Message) -> Iterator[str]:
    """Initializers 5 and, in nodes' 1 attributes 5, tensors 5 and 10 and graphs 6 and 11; external_data 13 of a tensor."""
    attributes = [a for node in _messages(graph, 1) for a in _messages(node, 5)]
    tensors = [*_messages(graph, 5), *(t for a in attributes for n in (5, 10) for t in _messages(a, n))]
    for entry in (e for tensor in tensors for e in _messages(tensor, 13)):
        if _text(entry, 1) == "location":
            yield _text(entry, 2)
    for attribute in attributes:
        for number in (6, 11):
            for inner in _messages(attribute, number):
                yield from _external(inner)


def _messages(message: Message, number: int) -> Iterator[Message]:
    return (_message(value) for value in message.get(number, ()) if isinstance(value, memoryview))


def _text(message: Message, number: int) -> str:
    return next((bytes(v).decode(errors="replace") for v in message.get(number, ()) if isinstance(v, memoryview)), "")


def _texts(message: Message, number: int) -> list[str]:
    return [bytes(v).decode(errors="replace") for v in message.get(number, ()) if isinstance(v, memoryview)]


def _message(data: memoryview) -> Message:
    """One protobuf message: the values of each field number, in order. Raises ValueError or IndexError."""
    values: dict[int, list[int | memoryview]] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if not tag >> 3:  # Or a file of zeros, which has its size and not its bytes yet, would be read to its end.
            raise ValueError("field number 0")
        value: int | memoryview
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
            case 1:
                value, at = data[at : at + 8], at + 8
            case 2:
                length, at = _varint(data, at)
                value, at = data[at : at + length], at + length
            case 5:
                value, at = data[at : at + 4], at + 4
            case kind:
                raise ValueError(f"wire type {kind}")
        if at > len(data):
            raise ValueError("a field ends after its message")
        values.setdefault(tag >> 3, []).append(value)
    return values


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")


_NOTHING: Message = MappingProxyType({})
