"""Requests as bytes: right ones, binary and JSON, and many kinds of wrong ones; and whether an answer is right."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from greenlane.load.jobs import Ask
from greenlane.load.wire import post

from .nets import Array
from .subjects import SUBJECTS, expected

TOLERANCE = 2e-2
"""Of the largest value: a GPU multiplies FP32 as TF32."""


def tensor(model: str, rows: int = 1) -> Array:
    """The input that is sent, the same every time."""
    return np.random.default_rng(1).random((rows, *SUBJECTS[model].row), np.float32)


def binary(model: str, tenant: str, rows: int = 1, timeout: int | None = None, outputs: Sequence[str] = ()) -> Ask:
    """An inference request with binary tensors both ways; `timeout` is its deadline in microseconds, None for none.

    It asks for these outputs, or without any for all that the model has.
    """
    return inference(model, tenant, tensor(model, rows), timeout, outputs)


def inference(model: str, tenant: str, x: Array, timeout: int | None = None, outputs: Sequence[str] = ()) -> Ask:
    """The same for this input."""
    entry = {"name": "x", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
    parameters = {"binary_data_output": True} | ({} if timeout is None else {"timeout": timeout})
    wanted = {"outputs": [{"name": name} for name in outputs]} if outputs else {}
    head = orjson.dumps({"parameters": parameters, "inputs": [entry], **wanted})
    headers = {"X-Tenant": tenant, "Inference-Header-Content-Length": str(len(head))}
    return Ask(post(f"/v2/models/{model}/infer", headers, head + x.tobytes()))


def as_json(model: str, tenant: str, rows: int = 1) -> Ask:
    """The same in JSON both ways."""
    return inference_as_json(model, tenant, tensor(model, rows))


def inference_as_json(model: str, tenant: str, x: Array) -> Ask:
    """The same for this input."""
    entry = {"name": "x", "datatype": "FP32", "shape": x.shape, "data": x.ravel()}
    body = orjson.dumps({"inputs": [entry]}, option=orjson.OPT_SERIALIZE_NUMPY)
    headers = {"X-Tenant": tenant, "Content-Type": "application/json"}
    return Ask(post(f"/v2/models/{model}/infer", headers, body))


def invalid(tenant: str) -> tuple[Ask, ...]:
    """Requests of a tenant that exists, each wrong in another way; all but the first are read to their ends."""
    path, headers = "/v2/models/identity/infer", {"X-Tenant": tenant}
    x: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}
    bodies: list[Any] = [
        {"inputs": [x | {"shape": [1, 15]}]},
        {"inputs": [x | {"datatype": "FP31"}]},
        {"inputs": [x | {"name": "z"}]},
        {"inputs": [x | {"data": [0.0] * 15}]},
        {"inputs": [x | {"data": ["a"] * 16}]},
        {"inputs": []},
        {"inputs": [x | {"parameters": {"binary_data_size": 63}}]},
        [],
    ]
    broken = [b"{", b"[" * 20_000, b'{"inputs": ' + b"\xff" * 1000 + b"}", b""]
    asks = [post(path, headers, orjson.dumps(body)) for body in bodies] + [post(path, headers, body) for body in broken]
    asks.append(post("/v2/models/unknown/infer", headers, b"{}"))
    asks.append(post(path, headers | {"Inference-Header-Content-Length": "999"}, b"{}"))
    return tuple(map(Ask, asks))


def unauthenticated() -> tuple[Ask, ...]:
    """Requests that show no valid tenant, some of them no valid HTTP: those end the connection."""
    path = "/v2/models/identity/infer"
    return (
        Ask(post(path, {"X-Tenant": "unknown"}, b"{}")),
        Ask(post(path, {"Authorization": "Bearer nothing"}, b"{}")),
        Ask(post(path, {}, b"{}")),
        Ask(post(path, {"X-Tenant": "x" * 2000}, b"{}" * 500)),
        Ask(b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: many\r\n\r\n"),
        Ask(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n"),
    )


def truth(model: str) -> Array:
    """The outputs for the row that is sent, computed by ONNX Runtime on the CPU."""
    return expected(SUBJECTS[model].network(), tensor(model))


def wrong(bodies: Sequence[bytes], form: str, wanted: Array) -> int:
    """How many of these answers are not that."""
    return sum(not _right(body, form, wanted) for body in bodies)


def _right(body: bytes, form: str, wanted: Array) -> bool:
    if form == "json":
        got = np.array(orjson.loads(body)["outputs"][0]["data"], np.float32)
    else:
        got = np.frombuffer(body[-wanted.nbytes :], np.float32) if len(body) > wanted.nbytes else np.zeros(0, np.float32)
    return got.size == wanted.size and bool(np.abs(got - wanted.ravel()).max() <= TOLERANCE * np.abs(wanted).max())
