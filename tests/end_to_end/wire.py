"""A client on plain sockets, and ways to wait for what a server does."""

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.message import Message
from http.client import parse_headers
from typing import Any, NamedTuple, Protocol

import httpx

from .harness import PATIENCE, Served

Document = dict[str, Any]

PAUSE = 0.01
"""Seconds between two looks at what is waited for."""
FOREVER = 10**12
"""Iterations of `spin` that are never awaited: the work ends when its client disconnects."""


def tensor(name: str, datatype: str, shape: list[int], data: Any = None, **parameters: Any) -> Document:
    """A tensor of a request: with its data, or with the parameters that stand for it."""
    body = {"data": data} if data is not None else {}
    return {"name": name, "datatype": datatype, "shape": shape, **body} | ({"parameters": parameters} if parameters else {})


def request(*inputs: Document, **fields: Any) -> Document:
    """An inference request."""
    return {"inputs": list(inputs), **fields}


PATH = "/v2/models/identity/infer"
SMALL = request(tensor("x", "FP32", [1, 2], [1, 2]))
"""For `identity`, whose path that is."""
BODY = json.dumps(SMALL).encode()


def spin(turns: int, **fields: Any) -> Document:
    """For `spin`: about 5 microseconds per iteration, and an answer of 64 x 64 numbers."""
    x = tensor("x", "FP32", [64, 64], [0.1] * 64 * 64)
    return request(tensor("turns", "INT64", [], [turns]), x, **fields)


def binary(document: Document, *tensors: bytes) -> dict[str, Any]:
    """The `content` and `headers` of a request whose binary tensors follow its JSON."""
    head = json.dumps(document).encode()
    return {"content": b"".join([head, *tensors]), "headers": {"Inference-Header-Content-Length": str(len(head))}}


def parts(answer: httpx.Response) -> tuple[Document, list[bytes]]:
    """An answer with binary tensors taken apart."""
    size = int(answer.headers["Inference-Header-Content-Length"])
    document, rest = json.loads(answer.content[:size]), answer.content[size:]
    tensors = []
    for output in document["outputs"]:
        nbytes = output.get("parameters", {}).get("binary_data_size", 0)
        tensors.append(rest[:nbytes])
        rest = rest[nbytes:]
    assert rest == b""
    return document, tensors


def infer(http: httpx.Client, model: str, document: Any, **options: Any) -> httpx.Response:
    """Post a request in JSON; a document may also be the text itself."""
    content = document if isinstance(document, str | bytes) else json.dumps(document)
    return http.post(f"/v2/models/{model}/infer", content=content, **options)


def data(answer: httpx.Response, output: int = 0) -> Any:
    """The numbers or texts of an output in JSON."""
    assert answer.status_code == 200, answer.text
    return answer.json()["outputs"][output]["data"]


def index(http: httpx.Client, body: str = "") -> list[dict[str, str]]:
    """What the server says of every model."""
    answer = http.post("/v2/repository/index", content=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def answered(http: httpx.Client, model: str = "identity") -> int:
    """The status of one inference; 0 if the connection was lost."""
    try:
        return infer(http, model, SMALL).status_code
    except httpx.TransportError:
        return 0


def as_before(http: httpx.Client) -> bool:
    """Whether a model is served, and a process that was replaced has loaded all others too."""
    return answered(http) == 200 and {each["state"] for each in http.get("/admin/device").json()["devices"]} == {"serving"}


def statistics(http: httpx.Client, model: str, version: str = "1") -> Document:
    """What the server counted for a model."""
    answer = http.get(f"/v2/models/{model}/versions/{version}/stats")
    assert answer.status_code == 200, answer.text
    return answer.json()["model_stats"][0]


def lane(http: httpx.Client, tenant: str = "acme") -> Document:
    """A tenant as the administration sees it: requests `waiting` and `in_flight`."""
    return next(entry for entry in http.get("/admin/tenants").json()["tenants"] if entry["name"] == tenant)


def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds, with pauses: what is waited for needs the core, and in this process the interpreter."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(PAUSE)


class Answer(NamedTuple):
    """A response as it came over a socket."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Listening(Protocol):
    """A server that can be connected to."""

    port: int


def client(served: Listening, tenant: str = "", **headers: str) -> httpx.Client:
    """A client that names this tenant and sends these headers with every request.

    It verifies no certificates, of which there are none: httpx would take 24 ms to read whom to trust.
    """
    headers |= {"X-Tenant": tenant} if tenant else {}
    return httpx.Client(base_url=f"http://127.0.0.1:{served.port}", headers=headers, timeout=PATIENCE, verify=False)


class Connection:
    """One TCP connection, without Nagle's delay: for tests of bytes."""

    def __init__(self, served: Listening) -> None:
        self.socket = socket.create_connection(("127.0.0.1", served.port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def patience(self, seconds: float) -> None:
        """Raise TimeoutError where an answer takes longer than this."""
        self.socket.settimeout(seconds)

    def shut(self) -> None:
        """Half-close the connection."""
        self.socket.shutdown(socket.SHUT_WR)

    def answer(self, bare: bool = False) -> Answer:
        """The next response, whole; `bare` is whether it has no body, whatever its length says, as that to a HEAD."""
        if not (line := self.file.readline()):
            raise ConnectionResetError("the connection was closed instead of an answer")
        _, status, *_ = line.split()
        headers = parse_headers(self.file)
        return Answer(int(status), headers, b"" if bare else self.file.read(int(headers.get("content-length", 0))))

    def line(self) -> bytes:
        """The next line, of an answer in chunks."""
        return self.file.readline()

    def ended(self) -> bool:
        """Whether the server closed the connection without sending anything more."""
        return self.file.read(1) == b""

    def close(self) -> None:
        self.file.close()
        self.socket.close()


def post(path: str, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    """The bytes of a POST; `length` is what Content-Length claims, if not the truth."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def post_binary(path: str, sent: dict[str, Any], *headers: str) -> bytes:
    """The bytes of a POST of what `binary` gives."""
    return post(path, sent["content"], *(f"{name}: {value}" for name, value in sent["headers"].items()), *headers)


def get(path: str, *headers: str) -> bytes:
    """The bytes of a GET."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def chunked(*chunks: bytes, path: str = PATH, headers: Sequence[str] = (), end: bytes = b"0\r\n\r\n") -> bytes:
    """The bytes of a POST whose body comes in these chunks."""
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *headers, "Transfer-Encoding: chunked", "", ""])
    return head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


def posted(model: str, document: Document, *headers: str) -> bytes:
    """The bytes of an inference request in JSON."""
    return post(f"/v2/models/{model}/infer", json.dumps(document).encode(), *headers)


@contextmanager
def busy(served: Served, http: httpx.Client) -> Iterator[None]:
    """Keep one more inference in flight, which ends only when its client disconnects."""
    taken, ended = lane(http)["in_flight"], failures(http, "spin")
    with Connection(served) as connection:
        connection.send(posted("spin", spin(FOREVER)))
        until(lambda: lane(http)["in_flight"] == taken + 1)
        yield
    until(lambda: failures(http, "spin") > ended and lane(http)["abandoned"] == 0)


def failures(http: httpx.Client, model: str = "identity") -> int:
    """How many requests for a model failed."""
    return statistics(http, model)["inference_stats"]["fail"]["count"]
