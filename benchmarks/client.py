"""A client fast enough not to be what is measured: wrk where it is installed, and otherwise connections on uvloop."""

import asyncio
import json
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from greenlane.load.wire import post

from .cases import Request


@dataclass(frozen=True, slots=True)
class Load:
    """Result of a client: answers, the seconds they took in all, and their latency in microseconds."""

    requests: int
    seconds: float
    p50: float
    p99: float

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds


class LoadFailed(Exception):
    """An answer other than 200, a connection that ended, or a client that could not run."""


def client() -> str:
    """The name of the client, to be printed beside the figures."""
    return f"wrk ({path})" if (path := shutil.which("wrk")) else "the built-in client, as wrk is not installed"


def drive(port: int, request: Request, connections: int, seconds: float) -> Load:
    """Send one request again and again on this many connections. Blocks for so long. Raises LoadFailed."""
    return (_wrk if shutil.which("wrk") else _built_in)(port, request, connections, seconds)


_SCRIPT = """
local file = io.open(%s, "rb")
wrk.method, wrk.path, wrk.body = "POST", %s, file:read("*all")
file:close()
%s
done = function(summary, latency)
  local e = summary.errors
  io.stderr:write(string.format('{"requests": %%d, "microseconds": %%d, "errors": %%d, "p50": %%f, "p99": %%f}',
    summary.requests, summary.duration, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
"""


def _wrk(port: int, request: Request, connections: int, seconds: float) -> Load:
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder, "body"), Path(folder, "script.lua")
        body.write_bytes(request.body)
        headers = "\n".join(f"wrk.headers[{json.dumps(k)}] = {json.dumps(v)}" for k, v in request.headers.items())
        script.write_text(_SCRIPT % (json.dumps(str(body)), json.dumps(request.path), headers))
        written = _interrupted(
            ["wrk", "-t1", f"-c{connections}", "-d1h", "-s", str(script), f"http://127.0.0.1:{port}"], seconds
        )
    if not written.startswith("{"):
        raise LoadFailed(f"wrk: {written}")
    summary = json.loads(written)
    if summary["errors"] or not summary["requests"]:
        raise LoadFailed(f"wrk counted {summary['errors']} errors in {summary['requests']} requests to {request.path}")
    return Load(summary["requests"], summary["microseconds"] / 1e6, summary["p50"], summary["p99"])


def _interrupted(command: list[str], seconds: float) -> str:
    """Run a command for this long (wrk's own durations are whole seconds), and return what it wrote to stderr."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        return process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.communicate()[1]


def _built_in(port: int, request: Request, connections: int, seconds: float) -> Load:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_all(port, request, connections, seconds))


async def _all(port: int, request: Request, connections: int, seconds: float) -> Load:
    loop, data, began = asyncio.get_running_loop(), post(request.path, request.headers, request.body), time.perf_counter()
    made = [await loop.create_connection(lambda: Connection(data), "127.0.0.1", port) for _ in range(connections)]
    latencies: list[float] = []
    for latency in await asyncio.gather(*(connection.run(transport, seconds) for transport, connection in made)):
        latencies += latency
    latencies.sort()
    count = len(latencies)
    return Load(count, time.perf_counter() - began, latencies[count // 2] * 1e6, latencies[count * 99 // 100] * 1e6)


class Connection(asyncio.Protocol):
    """Sends one request, reads its answer, and sends it again.

    Not `wire.Connection` on epoll: that takes a quarter more CPU for each answer (10.5 us instead of 8.3 with 32 connections,
    2026-11-22), and this client shares a machine with the servers that it measures.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._latencies: list[float] = []
        self._received = b""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, transport: asyncio.Transport, seconds: float) -> list[float]:
        """Go on for this long; return the seconds that each answer took. Raises LoadFailed."""
        self._transport, self._until = transport, time.perf_counter() + seconds
        self._send()
        await self._ended
        transport.abort()
        return self._latencies

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(LoadFailed(f"the server closed the connection: {error}"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < _content_length(head):
            return
        self._received = b""
        now = time.perf_counter()
        self._latencies.append(now - self._sent)
        if not head.startswith(b"HTTP/1.1 200 "):
            self._ended.set_exception(LoadFailed(f"the server answered {head[:40]!r} {body[:200]!r}"))
        elif now > self._until:
            self._ended.set_result(None)
        else:
            self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._data)


def _content_length(head: bytes) -> int:
    return int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])  # Not Inference-Header-Content-Length.
