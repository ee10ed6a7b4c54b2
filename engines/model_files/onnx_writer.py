"""Writes ONNX models as bytes, without an ONNX library: protobuf's wire format is three short functions.

Field numbers are from https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from collections.abc import Iterable, Sequence
from struct import pack

FLOAT, INT64, STRING = 1, 7, 8
"""Members of TensorProto.DataType."""

IR_VERSION, OPSET = 8, 17
"""Those of ONNX 1.12 (2022): every ONNX Runtime that pyproject.toml allows reads them."""

_INT, _STRING = 2, 3  # of AttributeProto.AttributeType


def model(
    name: str, nodes: Iterable[bytes], inputs: Iterable[bytes], outputs: Iterable[bytes], constants: Iterable[bytes]
) -> bytes:
    """A ModelProto of one graph; its `nodes`, `inputs`, `outputs` and `constants` are made by the functions below."""
    fields = {1: nodes, 5: constants, 11: inputs, 12: outputs}
    graph = field(2, name.encode()) + b"".join(field(key, item) for key, items in fields.items() for item in items)
    return number(1, IR_VERSION) + field(2, b"greenlane") + field(8, number(2, OPSET)) + field(7, graph)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: int | str) -> bytes:
    """A NodeProto: `op` is the operator's name, `attributes` are integers from 0 or texts."""
    names = [field(key, name.encode()) for key, group in ((1, inputs), (2, outputs)) for name in group]
    return b"".join(names) + field(4, op.encode()) + b"".join(field(5, _attribute(*each)) for each in attributes.items())


def value(name: str, kind: int, dims: Iterable[int | str]) -> bytes:
    """A ValueInfoProto, an input or output of the graph; a dimension is a size from 0 or the name of an unknown one."""
    shape = b"".join(field(1, number(1, dim) if isinstance(dim, int) else field(2, dim.encode())) for dim in dims)
    return field(1, name.encode()) + field(2, field(1, number(1, kind) + field(2, shape)))


def floats(name: str, dims: Iterable[int], data: Sequence[float]) -> bytes:
    """A TensorProto of float32."""
    return _tensor(name, FLOAT, dims) + field(9, pack(f"<{len(data)}f", *data))


def int64s(name: str, data: Sequence[int]) -> bytes:
    """A TensorProto of one dimension of int64."""
    return _tensor(name, INT64, [len(data)]) + field(9, pack(f"<{len(data)}q", *data))


def strings(name: str, data: Sequence[str]) -> bytes:
    """A TensorProto of one dimension of texts."""
    return _tensor(name, STRING, [len(data)]) + b"".join(field(6, text.encode()) for text in data)


def field(key: int, data: bytes, more: int = 0) -> bytes:
    """A length-delimited protobuf field; the caller appends the last `more` bytes of its content."""
    return varint(key << 3 | 2) + varint(len(data) + more) + data


def number(key: int, value: int) -> bytes:
    """A protobuf field of an integer from 0."""
    return varint(key << 3) + varint(value)


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; every byte but the last has its highest bit set."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _attribute(name: str, value: int | str) -> bytes:
    """An AttributeProto."""
    kind, content = (_INT, number(3, value)) if isinstance(value, int) else (_STRING, field(4, value.encode()))
    return field(1, name.encode()) + content + number(20, kind)


def _tensor(name: str, kind: int, dims: Iterable[int]) -> bytes:
    return b"".join(number(1, dim) for dim in dims) + number(2, kind) + field(8, name.encode())
