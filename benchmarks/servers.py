"""Greenlane and the bare application, each in a process of its own under the same uvicorn."""

import http.client
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, Timer

from .bare import REPOSITORY
from .cases import Request

GRANULES = 8
"""Of a GPU: 64 SMs where a granule has 8."""
_UVICORN = ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--port", "0"]
_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE = 120.0
"""Seconds: a GPU's engines are built and compiled meanwhile."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server process that answers on this port of the loopback interface."""

    name: str
    pid: int
    port: int

    def cpu_seconds(self) -> float:
        """CPU time of it and the processes that it started so far, in user mode and in the kernel."""
        return sum(_ticks(pid) for pid in _family(self.pid)) / _TICKS if self.pid else 0.0

    def ask(self, request: Request) -> tuple[bytes, str | None]:
        """Send one request; return the body and its Inference-Header-Content-Length. Raises RuntimeError unless it is a 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        try:
            connection.request("POST", request.path, request.body, request.headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{self.name}: {request.path} was answered with {response.status}: {body[:200]!r}")
        return body, response.getheader("Inference-Header-Content-Length")


@contextmanager
def greenlane(
    root: Path, in_flight: int | None, asgi: bool = False, device: str = "cpu", models: Sequence[str] = ("*",)
) -> Iterator[Server]:
    """Greenlane with one tenant, on a core or on GRANULES of a GPU, these models loaded.

    `in_flight` None is the server's default. `asgi` is whether it runs as `uvicorn server.app:app`, like the bare
    application, and not as `python -m server`.
    """
    config = root.parent / "greenlane.toml"
    config.write_text(_config(root, in_flight, device, models))
    command = ["uvicorn", "server.app:app", *_UVICORN] if asgi else ["server", "--port", "0"]
    with _serve("greenlane", command, {"GREENLANE_CONFIG": str(config)}, [" on http://", " ready: "]) as server:
        yield server


@contextmanager
def bare(root: Path) -> Iterator[Server]:
    """The bare application, every model loaded."""
    with _serve("bare", ["uvicorn", "benchmarks.bare:app", *_UVICORN], {REPOSITORY: str(root)}, ["running on"]) as server:
        yield server


@contextmanager
def launch(folder: Path, text: str) -> Iterator[Server]:
    """Greenlane with this configuration, which is written to the folder, every model tried."""
    config = folder / "greenlane.toml"
    config.write_text(text)
    signs = [" on http://", " ready: "]
    with _serve("greenlane", ["server", "--port", "0"], {"GREENLANE_CONFIG": str(config)}, signs) as server:
        yield server


def _config(root: Path, in_flight: int | None, device: str, models: Sequence[str]) -> str:
    lines = ["[server]", 'default_tenant = "load"', "[models]", f'repository = "{root}"', "[device]", f'backend = "{device}"']
    names = ", ".join(f'"{model}"' for model in models)
    lines += ["[tenants.load]", f"granules = {GRANULES if device == 'cuda' else 1}", f"models = [{names}]"]
    return "\n".join([*lines, *([f"in_flight = {in_flight}"] if in_flight else [])])


@contextmanager
def _serve(name: str, command: Sequence[str], environment: Mapping[str, str], signs: Sequence[str]) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        port = _wait_for(process, signs)
        drain = Thread(target=process.stderr.read)  # So that the server never waits for somebody to read its log.
        drain.start()
        yield Server(name, process.pid, port)
        process.terminate()
        drain.join()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # It ended since it was named.
        return 0
    return int(fields[11]) + int(fields[12])  # utime and stime: 14 and 15 in proc(5), 12 and 13 after the name


def _family(pid: int) -> list[int]:
    """This process and all that descend from it."""
    found = [pid]
    for member in found:
        for thread in Path(f"/proc/{member}/task").glob("*/children"):
            found += map(int, thread.read_text().split())
    return found


def _wait_for(process: "subprocess.Popen[str]", signs: Sequence[str]) -> int:
    """Read the log until every sign was in it; return the port it names. Raises RuntimeError with the log if it ends before."""
    assert process.stderr is not None
    log, patience = "", Timer(_PATIENCE, process.kill)
    patience.start()
    try:
        for line in process.stderr:
            log += line
            if all(sign in log for sign in signs):
                return int(re.findall(r"(?:running|listening) on http://127\.0\.0\.1:(\d+)", log)[0])
    finally:
        patience.cancel()
    raise RuntimeError(f"the server did not start:\n{log}")
