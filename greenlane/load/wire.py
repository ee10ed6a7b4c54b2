"""One client connection without a framework: bytes out, a status and a size back. Some methods block, and say so.

It reads no more of HTTP than it needs: a status line and Content-Length. A connection is used for one request at a time.
"""

import errno
import http.client
import os
import re
import select
import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from email.message import Message
from threading import Timer
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

from .jobs import Ask

CHUNK = 1 << 18
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:\s*close", re.IGNORECASE)
_JSON = re.compile(rb"\r\ninference-header-content-length:\s*(\d+)", re.IGNORECASE)
_TIMES = re.compile(rb"\r\nserver-timing: queue;dur=([0-9.]+), execute;dur=([0-9.]+)", re.IGNORECASE)


class Broken(Exception):
    """The connection ended, or what came was no HTTP answer. Its cause is an OSError if there was one, and a TimeoutError if no
    answer came in time.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; `last` is whether the server closes the connection after it.

    `body` is None unless it was asked for or the status is not 200. `head` ends with the last header's line.
    """

    status: int
    size: int
    body: bytes | None
    last: bool
    head: bytes = b""

    @property
    def parts(self) -> tuple[bytes, bytes]:
        """The body's JSON, and the binary tensors that follow it."""
        body, found = self.body or b"", _JSON.search(self.head)
        length = int(found[1]) if found else len(body)
        return body[:length], body[length:]

    @property
    def times(self) -> tuple[float, float]:
        """Milliseconds for which the request was in the queue and executed, as the server says; zeros if it does not."""
        found = _TIMES.search(self.head)
        return (float(found[1]), float(found[2])) if found else (0.0, 0.0)


class Connection:
    """A socket to a port, by default of the loopback interface; `host` is an address, not a name. One thread.

    `sent` and `received` count bytes, `status` is that of the last answer whose head has come.
    """

    def __init__(self, port: int, receive_buffer: int | None = None, host: str = "127.0.0.1") -> None:
        self.port = port
        self.host = host
        self._buffer = receive_buffer
        self.socket: socket.socket
        self.sent = self.received = self.status = 0
        self.unsent: memoryview = memoryview(b"")
        self._head = b""
        self._left = self._size = 0
        self._last = False
        self._keep: list[bytes] | None = None
        self._refusal: OSError | None = None

    def open(self) -> None:
        """Begin to connect; `flush` says when that worked. Raises OSError if there is no descriptor for a socket."""
        self.socket = socket.socket()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
        self.socket.setblocking(False)
        number = self.socket.connect_ex((self.host, self.port))
        self._refusal = None if number in (0, errno.EINPROGRESS) else OSError(number, os.strerror(number))

    def close(self) -> None:
        """End it; calling it again does nothing."""
        self.socket.close()

    def send(self, data: bytes, keep: bool = False) -> None:
        """Begin a request; `keep` is whether the answer is to hold its body. Raises Broken."""
        self.unsent, self._head, self._left, self._size = memoryview(data), b"", -1, 0
        self._keep = [] if keep else None
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes. Raises Broken."""
        while self.unsent:
            try:
                count = self.socket.send(self.unsent)
            except BlockingIOError:
                return
            except OSError as error:
                why = self._refusal or error
                raise Broken(str(why)) from why
            self.sent += count
            self.unsent = self.unsent[count:]

    def receive(self, most: int = CHUNK) -> Answer | None:
        """Take what has come; the answer, once it is whole. Raises Broken."""
        while True:
            try:
                data = self.socket.recv(most)
            except BlockingIOError:
                return None
            except OSError as error:
                raise Broken(str(error)) from error
            if not data:
                raise Broken("the server closed the connection")
            self.received += len(data)
            if answer := self._take(data):
                return answer
            if most < CHUNK:
                return None

    def step(self, seconds: float, most: int = CHUNK) -> Answer | None:
        """Wait, send what is unsent and take what has come, or the first `most` bytes of it; the answer, once it is whole.

        Blocks for so many seconds at most, rounded up to milliseconds. Raises Broken.
        """
        ready = select.poll()  # Descriptors may have any number, which `select.select` does not take.
        ready.register(self.socket, select.POLLIN | (select.POLLOUT if self.unsent else 0))
        if not ready.poll(seconds * 1000):
            return None
        self.flush()
        return self.receive(most)

    def exchange(self, data: bytes, keep: bool, seconds: float) -> Answer:
        """Send a request and wait for its answer. Blocks for so many seconds at most. Raises Broken."""
        self.send(data, keep)
        end = perf_counter() + seconds
        while (left := end - perf_counter()) > 0:
            if answer := self.step(left):
                return answer
        raise Broken(f"no answer within {seconds:g} s") from TimeoutError()

    def _take(self, data: bytes) -> Answer | None:
        if self._left < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return None
            data, self._head = self._head[end + 4 :], self._head[: end + 2]
            self._begin(self._head)
        self._left -= len(data)
        if self._keep is not None:
            self._keep.append(data)
        if self._left > 0:
            return None
        return Answer(self.status, self._size, None if self._keep is None else b"".join(self._keep), self._last, self._head)

    def _begin(self, head: bytes) -> None:
        length = _LENGTH.search(head)
        if not length or not head.startswith(b"HTTP/1.1 "):
            raise Broken(f"an answer without Content-Length: {head[:100]!r}")
        self.status, self._last = int(head[9:12]), _CLOSE.search(head) is not None
        if self.status != 200 and self._keep is None:
            self._keep = []  # For people.
        self._size = self._left = int(length[1])


class Response(NamedTuple):
    """A whole answer, with its headers: for questions that are not part of a load."""

    status: int
    headers: Message
    body: bytes


def ask(
    port: int,
    method: str,
    path: str,
    headers: Mapping[str, str] = MappingProxyType({}),
    body: bytes = b"",
    timeout: float = 120.0,
    host: str = "127.0.0.1",
) -> Response:
    """Send one request on a connection of its own; it may be answered in chunks, as `Connection` does not understand.

    Blocks. Raises OSError, HTTPException for what is not HTTP, and TimeoutError, however many bytes came until then.
    """
    end = perf_counter() + timeout
    with closing(http.client.HTTPConnection(host, port, timeout=timeout)) as connection:
        connection.connect()
        cut = Timer(timeout, _shut, (connection.sock,))
        cut.start()
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            answer = Response(response.status, response.headers, response.read())
            if perf_counter() < end:  # Else its end may be ours.
                return answer
        except (OSError, http.client.HTTPException):
            if perf_counter() < end:
                raise
        finally:
            cut.cancel()
    raise TimeoutError(f"no answer within {timeout:g} s")


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # It may have ended meanwhile.
        connection.shutdown(socket.SHUT_RDWR)


def bearer(key: str) -> dict[str, str]:
    """The header that has this key, as UTF-8. Raises ValueError for a key that no header has."""
    if not key.isprintable():
        raise ValueError("a key in one line, without control characters, is expected")
    return {"Authorization": f"Bearer {key}".encode().decode("latin-1")}


def post(path: str, headers: Mapping[str, str], body: bytes, host: str = "127.0.0.1", method: str = "POST") -> bytes:
    """A request as it goes over the wire, a POST by default. `headers` may state another Content-Length than the body's."""
    fields = {"Host": host, "Content-Length": str(len(body)), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Caller:
    """One request after another on a kept connection, each waited for: for questions, and for the time of a single request.

    The connection, to a port of the loopback interface, is made when it is first needed and again after it ended. One thread.
    """

    def __init__(self, port: int, timeout: float = 30.0) -> None:
        self._port = port
        self._timeout = timeout
        self._connection: Connection | None = None

    @property
    def own_port(self) -> int | None:
        """The port at this end of the connection; None while there is none."""
        return int(self._connection.socket.getsockname()[1]) if self._connection else None

    def ask(self, ask: Ask, keep: bool = True) -> Answer:
        """Send one request; the answer, with its body if that is kept. Blocks. Raises Broken, also where the timeout passes."""
        if self._connection is None:
            self._connection = Connection(self._port)
            self._connection.open()
        try:
            answer = self._connection.exchange(ask.data, keep, self._timeout)
        except Broken:
            self.close()
            raise
        if answer.last:
            self.close()
        return answer

    def timed(self, ask: Ask) -> tuple[Answer, float]:
        """The same, and the seconds that it took. Blocks. Raises Broken."""
        began = perf_counter()
        answer = self.ask(ask)
        return answer, perf_counter() - began

    def close(self) -> None:
        """End the connection, if there is one."""
        if self._connection:
            self._connection.close()
        self._connection = None
