"""Large requests, which could keep the interpreter of the process that serves them, and the models that they are for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx.parser
from onnx import numpy_helper

_HEAD = '<ir_version: 8, opset_import: ["": 17]>'
_GRAPHS = {
    "little": "little (float[n] x) => (float[n] y) { y = Neg(x) }",
    "open": "open (float[n] x) => (float[m] y) { y = Identity(x) }",
    "expand": "expand (float[1] x, int64[1] n) => (float[m] y) { y = Expand(x, n) }",
    "texts": "texts (string[n] x) => (string[n] y) { y = Identity(x) }",
    "repeat": "repeat (string[1] x, int64[1] n) => (string[m] y) { y = Expand(x, n) }",
    "heavy": "heavy (float[n, 1024] x) => (float[n, 1024] y) { a = MatMul(x, w0) y = MatMul(a, w1) }",
}


class Ask(NamedTuple):
    """A request, without its tenant."""

    path: str
    body: bytes
    headers: dict[str, str]


def asks() -> dict[str, Ask]:
    """The requests, by name."""
    mib = 1 << 18  # Floats.
    return {
        "64 MB, output of another name": infer("open", b"\0" * 62_000_000, _input("x", "FP32", 15_500_000, 62_000_000)),
        "100 bytes for 549 MiB": _expand("expand", "FP32", 549 * mib),
        "100,000 texts": _texts(100_000),
        "250,000 texts": _texts(250_000),
        "1,000,000 texts": _texts(1_000_000),
        "100 bytes for 1,000,000 texts": _expand("repeat", "BYTES", 1_000_000),
        "load of 60 MB again": Ask("/v2/repository/models/heavy/load", b"{}", {}),
    }


def _texts(count: int) -> Ask:
    return infer("texts", b"\4\0\0\0text" * count, _input("x", "BYTES", count, 8 * count))


def _expand(model: str, datatype: str, count: int) -> Ask:
    data = ["x"] if datatype == "BYTES" else [1.0]
    one = {"name": "x", "datatype": datatype, "shape": [1], "data": data}
    return infer(model, b"", one, {"name": "n", "datatype": "INT64", "shape": [1], "data": [count]})


def _input(name: str, datatype: str, count: int, nbytes: int) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": [count], "parameters": {"binary_data_size": nbytes}}


def infer(model: str, binary: bytes, *inputs: Mapping[str, object]) -> Ask:
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return Ask(f"/v2/models/{model}/infer", head + binary, {"Inference-Header-Content-Length": str(len(head))})


def build(root: Path) -> None:
    """Write every model below `root`."""
    for name, graph in _GRAPHS.items():
        model = onnx.parser.parse_model(_HEAD + graph)
        if name == "heavy":
            for index, shape in enumerate([(1024, 7680), (7680, 1024)]):
                model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), f"w{index}"))
        path = root / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(model.SerializeToString())
