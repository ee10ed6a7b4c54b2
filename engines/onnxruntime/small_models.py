"""Small ONNX models as bytes, without an ONNX library. Field numbers are as in onnx_writer."""

from ..model_files.onnx_writer import IR_VERSION, OPSET, field, number


def constant(tensor: bytes, name: str, kind: int, more: int = 0) -> bytes:
    """A model without inputs whose one output, `value`, is this TensorProto, of this name and TensorProto.DataType.

    The last `more` bytes of the tensor are left out: the caller appends them to the result.
    """
    node = field(1, name.encode()) + field(2, b"value") + field(4, b"Identity")
    output = field(1, b"value") + field(2, field(1, number(1, kind)))
    graph = field(1, node) + field(2, b"constant") + field(12, output) + field(5, tensor, more)
    return number(1, IR_VERSION) + field(8, number(2, OPSET)) + field(7, graph, more)
