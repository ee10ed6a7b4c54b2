"""Small ONNX models, in ONNX's textual form, for tests that build real plans."""

import onnx.parser

ADD = "add (float[2, 3] a, float[2, 3] b) => (float[2, 3] sum) { sum = Add(a, b) }"

BATCHES = "rows (float[batch, 4] x) => (float[batch, 4] y) { y = Relu(x) }"

IMAGES = "images (float[batch, 3, h, w] x) => (float[batch, 3, h, w] y) { y = Relu(x) }"


def model(text: str) -> bytes:
    """A model's bytes."""
    return bytes(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}').SerializeToString())
