"""The models that the overhead experiment serves, built on the spot: so cheap that what remains is the server."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

INPUTS = {"identity": (1, 16), "mlp": (1, 784), "image": (1, 3, 224, 224)}
"""The shape of the one FP32 input, by model."""

# ONNX's textual form: https://onnx.ai/onnx/repo-docs/Syntax.html
_HEAD = '<ir_version: 8, opset_import: ["": 17], producer_name: "greenlane">'
_GRAPHS = {
    "identity": "identity (float[rows, 16] x) => (float[rows, 16] y) { y = Identity(x) }",
    "mlp": """mlp (float[rows, 784] x) => (float[rows, 10] y) {
        a = MatMul(x, w0)  b = Relu(a)  c = MatMul(b, w1)  d = Relu(c)  y = MatMul(d, w2)
    }""",
    "image": """image (float[rows, 3, 224, 224] x) => (float[rows, 3] y) {
        means = GlobalAveragePool(x)  y = Flatten(means)
    }""",
}
_LAYERS = {"mlp": ((784, 512), (512, 512), (512, 10))}


def build(root: Path) -> None:
    """Write every model as version 1 in a repository below `root`."""
    for name in _GRAPHS:
        path = model_path(root, name)
        path.parent.mkdir(parents=True)
        path.write_bytes(_model(name).SerializeToString())


def model_path(root: Path, name: str) -> Path:
    """Where `build` puts a model."""
    return root / name / "1" / "model.onnx"


def _model(name: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"{_HEAD} {_GRAPHS[name]}")
    for index, shape in enumerate(_LAYERS.get(name, ())):
        model.graph.initializer.append(numpy_helper.from_array(_weights(shape), f"w{index}"))
    return model


def _weights(shape: tuple[int, int]) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    return np.random.default_rng(0).normal(0, shape[0] ** -0.5, shape).astype(np.float32)
