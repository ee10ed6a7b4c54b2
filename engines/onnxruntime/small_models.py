"""Small ONNX models as bytes, without an ONNX library.

Field numbers are from https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

_IR_VERSION, _OPSET = 8, 17


def constant(tensor: bytes, name: str, kind: int, more: int = 0) -> bytes:
    """A model without inputs whose one output, `value`, is this TensorProto, of this name and TensorProto.DataType.

    The last so many bytes of the tensor are left out: they go behind what this returns.
    """
    node = field(1, name.encode()) + field(2, b"value") + field(4, b"Identity")
    output = field(1, b"value") + field(2, field(1, number(1, kind)))
    graph = field(1, node) + field(2, b"constant") + field(12, output) + field(5, tensor, more)
    return number(1, _IR_VERSION) + field(8, number(2, _OPSET)) + field(7, graph, more)


def field(key: int, data: bytes, more: int = 0) -> bytes:
    """A field of bytes, of which so many more come behind these."""
    return varint(key << 3 | 2) + varint(len(data) + more) + data


def number(key: int, value: int) -> bytes:
    """A field of an integer from 0."""
    return varint(key << 3) + varint(value)


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; every byte but the last has its highest bit set."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
