"""Clients of the soak: right and wrong requests, slow readers, and clients that leave. A thread each.

Every answer is judged: a right request's tensor is compared value by value, and a wrong one has to be refused with 4xx.
"""

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engines.model_files.onnx_writer import FLOAT, floats, model, node, value

WIDTH, LARGE = 64, 1 << 16
"""Values of a row of the small models, and of `copy`."""
ROWS = 8
WEIGHTS = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH) % 4
"""Whole numbers so small that every sum is exact, in any order and on any device."""
MODELS = {"copy": LARGE, "double": WIDTH, "product": WIDTH}
PATIENCE = 30.0
"""Seconds after which a request counts as without an answer."""
WRONG = (
    b"", b"{", b"[]", b"[" * 20_000, b'{"inputs": []}', b"\xff\xfe\0", b'{"inputs": [{"name": "x"}]}',
    b'{"inputs": [{"name": "x", "datatype": "FP31", "shape": [1, 64], "data": [1]}]}',
    b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 63], "data": [1]}]}',
    b'{"inputs": [{"name": "z", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}',
    b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": ["a"]}]}',
)  # fmt: skip
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def onnx_of(name: str) -> bytes:
    """One of MODELS as a file."""
    nodes = {"copy": node("Identity", ["x"], ["y"]), "double": node("Add", ["x", "x"], ["y"])}
    constants = [] if name in nodes else [floats("w", WEIGHTS.shape, WEIGHTS.ravel().tolist())]
    x, y = (value(tensor, FLOAT, ("batch", MODELS[name])) for tensor in "xy")
    return model(name, [nodes.get(name) or node("MatMul", ["x", "w"], ["y"])], [x], [y], constants)


def expected(name: str, x: Array) -> Array:
    """What one of MODELS makes of this."""
    return x if name == "copy" else x + x if name == "double" else x @ WEIGHTS


class Outcome(NamedTuple):
    """How one request ended: "right", "refused" as it had to be, "left", "wrong", "lost", "late", or "5xx" and the like.

    Times are of `time.monotonic`, `opened` that of the connection.
    """

    what: str
    kind: str
    opened: float
    began: float
    ended: float
    cause: str = ""


@dataclass(slots=True)
class Client:
    """One client of a tenant's, which does one kind of thing at random intervals until it is stopped."""

    port: int
    tenant: str
    kind: str
    pace: float
    chance: random.Random
    stopped: threading.Event
    outcomes: list[Outcome] = field(default_factory=list)
    _kept: http.client.HTTPConnection | None = None
    _opened: float = 0.0

    def run(self) -> None:
        """Ask until stopped."""
        act: Callable[[], tuple[str, str]] = {"leave": self._leave, "slow": self._slow}.get(self.kind, self._ask)
        while not self.stopped.wait(self.chance.expovariate(1 / self.pace)):
            began, cause = time.monotonic(), ""
            if self._kept is None:
                self._opened = began
            try:
                what, cause = act()
            except TimeoutError:
                what = "late"
            except ConnectionRefusedError:
                what = "connection refused"
            except (OSError, http.client.HTTPException) as error:
                what, cause = "lost", type(error).__name__
            self.outcomes.append(Outcome(what, self.kind, self._opened, began, time.monotonic(), cause))
            if what not in ("right", "refused") or self.kind == "new" or self.chance.random() < 0.01:
                self._close()
        self._close()

    def _close(self) -> None:
        if self._kept:
            self._kept.close()
        self._kept = None

    def _request(self) -> tuple[str, Array, bytes, dict[str, str]]:
        """A right request at random: the model, what it has to answer, the body, and headers."""
        name = self.chance.choice(list(MODELS)[1:] if self.chance.random() < 0.95 else ["copy"])
        rows = self.chance.randint(1, ROWS if name != "copy" else 2)
        x = np.random.default_rng(self.chance.getrandbits(32)).integers(0, 9, (rows, MODELS[name])).astype(np.float32)
        tensor: dict[str, object] = {"name": "x", "datatype": "FP32", "shape": x.shape}
        headers = {"X-Tenant": self.tenant}
        if name != "copy" and self.chance.random() < 0.5:
            body = json.dumps({"inputs": [tensor | {"data": x.ravel().tolist()}]}).encode()
        else:
            wanted = {"binary_data_output": True}
            head = json.dumps(
                {"inputs": [tensor | {"parameters": {"binary_data_size": x.nbytes}}], "parameters": wanted}
            ).encode()
            body, headers["Inference-Header-Content-Length"] = head + x.tobytes(), str(len(head))
        return name, expected(name, x), body, headers

    def _ask(self) -> tuple[str, str]:
        self._kept = self._kept or http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        if self.kind == "wrong":
            path, body, headers = self._wrong()
            self._kept.request("POST", path, body, headers)
            answer = self._kept.getresponse()
            text = answer.read()
            if 400 <= answer.status < 500:
                return "refused", ""
            return _failed(answer.status, text) if answer.status >= 500 else ("wrong", f"{answer.status} for {body[:60]!r}")
        name, right, body, headers = self._request()
        self._kept.request("POST", f"/v2/models/{name}/infer", body, headers)
        answer = self._kept.getresponse()
        return judge(answer, answer.read(), right)

    def _wrong(self) -> tuple[str, bytes, dict[str, str]]:
        headers = {"X-Tenant": "unknown" if self.chance.random() < 0.1 else self.tenant}
        name = self.chance.choice([*MODELS, "nothing", "%00", "double/versions/7"])
        return f"/v2/models/{name}/infer", self.chance.choice(WRONG), headers

    def _raw(self) -> tuple[socket.socket, Array, bytes]:
        """A new connection with a small buffer, a right answer, and a whole request for it."""
        name, right, body, headers = self._request()
        if self.kind == "slow":
            name, (rows, seed) = "copy", (ROWS, self.chance.randint(0, 8))
            right = np.full((rows, LARGE), seed, np.float32)
            tensor = {"name": "x", "datatype": "FP32", "shape": right.shape, "parameters": {"binary_data_size": right.nbytes}}
            head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
            body, headers["Inference-Header-Content-Length"] = head + right.tobytes(), str(len(head))
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        connection.settimeout(PATIENCE)
        self._opened = time.monotonic()
        try:
            connection.connect(("127.0.0.1", self.port))
        except OSError:
            connection.close()
            raise
        lines = [f"POST /v2/models/{name}/infer HTTP/1.1", "Host: soak", f"Content-Length: {len(body)}"]
        lines += [f"{key}: {text}" for key, text in headers.items()]
        return connection, right, "\r\n".join([*lines, "", ""]).encode() + body

    def _leave(self) -> tuple[str, str]:
        """Send some of a request, or all of it and read some of the answer; then close the connection."""
        connection, _, request = self._raw()
        with connection, suppress(ConnectionResetError, BrokenPipeError):
            part = self.chance.choice([self.chance.randrange(len(request)), len(request)])
            connection.sendall(request[:part])
            if part == len(request) and self.chance.random() < 0.5:
                connection.recv(self.chance.choice([1, 100, 1 << 15]))
        return "left", ""

    def _slow(self) -> tuple[str, str]:
        """Ask for 2 MB and read them slowly."""
        connection, right, request = self._raw()
        with connection:
            connection.sendall(request)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            body = b""
            while piece := answer.read(1 << 16):
                body += piece
                time.sleep(0.02)
            if answer.status == 200 and len(body) < right.nbytes:
                return "lost", f"{len(body)} bytes of the answer"
            found = judge(answer, body, right)
            answer.close()
            return found


def judge(answer: http.client.HTTPResponse, body: bytes, right: Array) -> tuple[str, str]:
    """What came instead of this tensor, and why: "right" if it is the tensor."""
    if answer.status != 200:
        return _failed(answer.status, body)
    try:
        head = int(answer.headers.get("Inference-Header-Content-Length", len(body)))
        output = json.loads(body[:head])["outputs"][0]
        values = np.frombuffer(body[head:], np.float32) if "data" not in output else np.array(output["data"], np.float32)
        if np.array_equal(values.reshape(output["shape"]), right):
            return "right", ""
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    return "wrong", f"{len(body)} bytes: {body[:200]!r}"


def _failed(status: int, body: bytes) -> tuple[str, str]:
    """By status, with the text of the error."""
    try:
        return str(status), str(json.loads(body)["error"])[:120]
    except (ValueError, KeyError, TypeError):
        return str(status), repr(body[:80])
