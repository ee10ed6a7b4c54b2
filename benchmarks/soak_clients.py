"""Clients of the soak: right and wrong requests, slow readers, and clients that leave. A thread each.

Every answer is judged: a right request's tensor is compared value by value, and a wrong one has to be refused with 4xx.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engines.model_files.onnx_writer import FLOAT, floats, model, node, value
from greenlane.load.jobs import Ask
from greenlane.load.wire import CHUNK, Answer, Broken, Caller, Connection, post

from .asks import inference, inference_as_json

WIDTH, LARGE = 64, 1 << 16
"""Values of a row of the small models, and of `copy`."""
ROWS = 8
WEIGHTS = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH) % 4
"""Whole numbers so small that every sum is exact, in any order and on any device."""
MODELS = {"copy": LARGE, "double": WIDTH, "product": WIDTH}
HOGS = {"reading": (1, 1), "outgoing": (1, 16)}
"""Models that move many bytes, where a tenant is fenced, with the shapes of x. Of zeros they make zeros."""
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
    _caller: Caller = field(init=False)
    _opened: float = 0.0

    def __post_init__(self) -> None:
        self._caller = Caller(self.port, PATIENCE)

    def run(self) -> None:
        """Ask until stopped."""
        others: dict[str, Callable[[], tuple[str, str]]] = {"leave": self._leave, "slow": self._slow}
        act = others.get(self.kind, self._move if self.kind in HOGS else self._ask)
        while not self.stopped.wait(self.chance.expovariate(1 / self.pace)):
            began = time.monotonic()
            if self._caller.own_port is None:
                self._opened = began
            try:
                what, cause = act()
            except Broken as broken:
                what, cause = _without(broken)
            self.outcomes.append(Outcome(what, self.kind, self._opened, began, time.monotonic(), cause))
            if what not in ("right", "refused") or self.kind == "new" or self.chance.random() < 0.01:
                self._caller.close()
        self._caller.close()

    def _request(self) -> tuple[Ask, Array]:
        """A right request at random, and what it has to answer."""
        name = self.chance.choice(list(MODELS)[1:] if self.chance.random() < 0.95 else ["copy"])
        rows = self.chance.randint(1, ROWS if name != "copy" else 2)
        x = np.random.default_rng(self.chance.getrandbits(32)).integers(0, 9, (rows, MODELS[name])).astype(np.float32)
        as_json = name != "copy" and self.chance.random() < 0.5
        return (inference_as_json if as_json else inference)(name, self.tenant, x), expected(name, x)

    def _ask(self) -> tuple[str, str]:
        if self.kind == "wrong":
            ask = self._wrong()
            answer = self._caller.ask(ask)
            if 400 <= answer.status < 500:
                return "refused", ""
            return _failed(answer) if answer.status >= 500 else ("wrong", f"{answer.status} for {ask.data[-60:]!r}")
        ask, right = self._request()
        return judge(self._caller.ask(ask), right)

    def _move(self) -> tuple[str, str]:
        """Have a hog move what it moves."""
        zeros = np.zeros(HOGS[self.kind], np.float32)
        answer = self._caller.ask(inference(self.kind, self.tenant, zeros, outputs=("y",)))
        return judge(answer, np.zeros((1, 8 if self.kind == "outgoing" else 1), np.float32))

    def _wrong(self) -> Ask:
        headers = {"X-Tenant": "unknown" if self.chance.random() < 0.1 else self.tenant}
        name = self.chance.choice([*MODELS, "nothing", "%00", "double/versions/7"])
        return Ask(post(f"/v2/models/{name}/infer", headers, self.chance.choice(WRONG)))

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A new connection with a small buffer."""
        self._opened = time.monotonic()
        connection = Connection(self.port, 1 << 15)
        connection.open()
        with closing(connection):
            yield connection

    def _leave(self) -> tuple[str, str]:
        """Send some of a request, or all of it and read some of the answer; then close the connection."""
        data = self._request()[0].data
        part = self.chance.choice([self.chance.randrange(len(data)), len(data)])
        with self._connection() as connection:
            try:
                connection.send(data[:part])
                while connection.unsent:
                    _step(connection)
                if part == len(data) and self.chance.random() < 0.5:
                    _step(connection, self.chance.choice([1, 100, 1 << 15]))
            except Broken as broken:
                if isinstance(broken.__cause__, ConnectionRefusedError | TimeoutError):
                    raise
        return "left", ""

    def _slow(self) -> tuple[str, str]:
        """Ask for 2 MB and read them slowly."""
        right = np.full((ROWS, LARGE), self.chance.randint(0, 8), np.float32)
        with self._connection() as connection:
            connection.send(inference("copy", self.tenant, right).data, keep=True)
            while not (answer := _step(connection, 1 << 16)):
                time.sleep(0.02)
        return judge(answer, right)


def _step(connection: Connection, most: int = CHUNK) -> Answer | None:
    """Send and take something; the answer, once it is whole. Raises Broken, also if nothing moves for PATIENCE seconds."""
    before = connection.sent + connection.received
    answer = connection.step(PATIENCE, most)
    if not answer and connection.sent + connection.received == before:
        raise Broken("nothing moved") from TimeoutError()
    return answer


def judge(answer: Answer, right: Array) -> tuple[str, str]:
    """What came instead of this tensor, and why: "right" if it is the tensor."""
    if answer.status != 200:
        return _failed(answer)
    document, tensor = answer.parts
    try:
        output = json.loads(document)["outputs"][0]
        values = np.frombuffer(tensor, np.float32) if "data" not in output else np.array(output["data"], np.float32)
        if np.array_equal(values.reshape(output["shape"]), right):
            return "right", ""
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    return "wrong", f"{answer.size} bytes: {document[:200]!r}"


def _failed(answer: Answer) -> tuple[str, str]:
    """By status, with the text of the error."""
    body = answer.body or b""
    try:
        return str(answer.status), str(json.loads(body)["error"])[:120]
    except (ValueError, KeyError, TypeError):
        return str(answer.status), repr(body[:80])


def _without(broken: Broken) -> tuple[str, str]:
    """How a request ended that has no answer, and its cause."""
    match why := broken.__cause__:
        case TimeoutError():
            return "late", ""
        case ConnectionRefusedError():
            return "connection refused", ""
    return "lost", type(why).__name__ if why else str(broken)
