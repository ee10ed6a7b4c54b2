"""The least that can serve these models on the wire: the measure of what Greenlane costs beyond it.

One coroutine from body to session to answer: nothing is checked, there are no tenants and no other threads. It must stay
as fast as it can honestly be made, or the ratio flatters Greenlane.
"""

import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # As Greenlane does.
# isort: split
import onnxruntime as ort

REPOSITORY = "BARE_REPOSITORY"
"""The environment variable that names the model repository."""

Message = MutableMapping[str, Any]


class Bare:
    """Every model's session, run inline on the event loop."""

    def __init__(self, sessions: dict[str, Any]) -> None:
        self._sessions = sessions

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"ASGI {scope['type']}; only http is served")
        name = scope["path"].split("/")[3]
        message = await receive()
        parts = [message["body"]]
        while message["more_body"]:
            message = await receive()
            parts.append(message["body"])
        body = b"".join(parts)
        length = dict(scope["headers"]).get(b"inference-header-content-length")
        answer, headers = self._json(name, body) if length is None else self._binary(name, body, int(length))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _json(self, name: str, body: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        entry = orjson.loads(body)["inputs"][0]
        (y,) = self._sessions[name].run(None, {"x": np.array(entry["data"], np.float32).reshape(entry["shape"])})
        output = {"name": "y", "datatype": "FP32", "shape": y.shape, "data": y.ravel()}
        document = {"model_name": name, "model_version": "1", "outputs": [output]}
        answer = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
        return answer, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]

    def _binary(self, name: str, body: bytes, length: int) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        entry = orjson.loads(memoryview(body)[:length])["inputs"][0]
        (y,) = self._sessions[name].run(None, {"x": np.frombuffer(body, np.float32, -1, length).reshape(entry["shape"])})
        tensor = y.tobytes()
        output = {"name": "y", "datatype": "FP32", "shape": y.shape, "parameters": {"binary_data_size": len(tensor)}}
        head = orjson.dumps({"model_name": name, "model_version": "1", "outputs": [output]})
        return head + tensor, [
            (b"content-type", b"application/octet-stream"),
            (b"inference-header-content-length", b"%d" % len(head)),
            (b"content-length", b"%d" % (len(head) + len(tensor))),
        ]


def session(path: Path) -> Any:
    """A session on one thread, as Greenlane's is on a partition of one core."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _open(root: Path) -> Bare:
    return Bare({path.parts[-3]: session(path) for path in root.glob("*/1/model.onnx")})


if REPOSITORY in os.environ:
    app = _open(Path(os.environ[REPOSITORY]))
