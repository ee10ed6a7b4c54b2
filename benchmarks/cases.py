"""The requests that both servers get, and the answers that they must give."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from .bare import session
from .models import INPUTS, model_path

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: a model, the form of its tensors both ways, and how many connections ask at a time.

    Answers may differ from ONNX Runtime's by `tolerance`, absolute and relative.
    """

    model: str
    form: Literal["json", "binary"]
    connections: int
    tolerance: float = 1e-5

    def __str__(self) -> str:
        return f"{self.model}-{self.form}-{self.connections}"


CASES = (
    *(Case(model, form, count) for model in ("identity", "mlp") for form in ("json", "binary") for count in (1, 32)),
    Case("image", "binary", 1),
    Case("image", "binary", 4),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One POST: a path, headers beside Host and Content-Length, a body."""

    path: str
    headers: dict[str, str]
    body: bytes


def tensor(model: str) -> Array:
    """The input that is sent, the same every time."""
    return np.random.default_rng(1).random(INPUTS[model], np.float32)


def request(case: Case) -> Request:
    """The inference request of a case."""
    x = tensor(case.model)
    entry: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": x.shape}
    path = f"/v2/models/{case.model}/infer"
    if case.form == "json":
        body = orjson.dumps({"inputs": [entry | {"data": x.ravel()}]}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Request(path, {"Content-Type": "application/json"}, body)
    entry["parameters"] = {"binary_data_size": x.nbytes}
    head = orjson.dumps({"parameters": {"binary_data_output": True}, "inputs": [entry]})
    return Request(path, {"Inference-Header-Content-Length": str(len(head))}, head + x.tobytes())


def check(case: Case, body: bytes, header_length: str | None, root: Path) -> None:
    """Raise ValueError unless an answer carries, in the form of the case, what the model makes of its input."""
    if (header_length is None) != (case.form == "json"):
        raise ValueError(f"{case}: Inference-Header-Content-Length is {header_length} in an answer that should be {case.form}")
    output = orjson.loads(body[: int(header_length or len(body))])["outputs"][0]
    data = output["data"] if header_length is None else np.frombuffer(body[int(header_length) :], np.float32)
    (expected,) = session(model_path(root, case.model)).run(None, {"x": tensor(case.model)})
    off = case.tolerance
    if output["shape"] != list(expected.shape) or not np.allclose(np.reshape(data, expected.shape), expected, off, off):
        raise ValueError(f"{case}: answered {data[:4]}... of shape {output['shape']}, expected {expected.ravel()[:4]}...")
