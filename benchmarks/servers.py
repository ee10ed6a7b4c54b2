"""Greenlane and the bare application, each in a process of its own under the same uvicorn."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from greenlane.load.server_process import family_of
from greenlane.load.wire import ask

from .bare import REPOSITORY
from .cases import Request
from .watched_server import READY, server_process

PYTHON = Path(".venv", "bin", "python")
"""Of a checkout, as `scripts/install` makes it."""
GRANULES = 8
"""Of a GPU: 64 SMs where a granule has 8."""
_UVICORN = ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--port", "0"]


@dataclass(frozen=True, slots=True)
class Server:
    """A server process that answers on this port of the loopback interface."""

    name: str
    pid: int
    port: int

    def cpu_seconds(self) -> float:
        """CPU time of it and the processes that it started so far, in user mode and in the kernel."""
        return sum(one.cpu_seconds for one in family_of(self.pid)) if self.pid else 0.0

    def ask(self, request: Request) -> tuple[bytes, str | None]:
        """Send one request; return the body and its Inference-Header-Content-Length. Raises RuntimeError unless it is a 200."""
        answer = ask(self.port, "POST", request.path, request.headers, request.body)
        if answer.status != 200:
            raise RuntimeError(f"{self.name}: {request.path} was answered with {answer.status}: {answer.body[:200]!r}")
        return answer.body, answer.headers.get("Inference-Header-Content-Length")


@contextmanager
def greenlane(
    root: Path,
    in_flight: int | None,
    asgi: bool = False,
    device: str = "cpu",
    models: Sequence[str] = ("*",),
    checkout: Path | None = None,
) -> Iterator[Server]:
    """Greenlane with one tenant, on a core or on GRANULES of a GPU, these models loaded.

    `in_flight` None is the server's default. `asgi` is whether it runs as `uvicorn server.app:app`, like the bare
    application, and not as `python -m server`. `checkout` is another folder whose .venv runs the server that is installed
    there; None is this one.
    """
    config = root.parent / "greenlane.toml"
    config.write_text(_config(root, in_flight, device, models))
    command = ["uvicorn", "server.app:app", *_UVICORN] if asgi else ["server", "--port", "0"]
    name = checkout.name if checkout else "greenlane"
    # -P and --app-dir: what is installed there is run, such as a wheel, and not the sources in the current folder.
    python = [str(checkout / PYTHON), "-P"] if checkout else [sys.executable]
    if asgi and checkout:
        command += ["--app-dir", str(checkout / ".venv")]
    with _serve(name, command, {"GREENLANE_CONFIG": str(config)}, python=python) as server:
        yield server


@contextmanager
def bare(root: Path) -> Iterator[Server]:
    """The bare application, every model loaded."""
    with _serve("bare", ["uvicorn", "benchmarks.bare:app", *_UVICORN], {REPOSITORY: str(root)}, ["running on"]) as server:
        yield server


@contextmanager
def launch(folder: Path, text: str, environment: Mapping[str, str]) -> Iterator[Server]:
    """Greenlane with this configuration, written to the folder, every model tried."""
    config = folder / "greenlane.toml"
    config.write_text(text)
    with _serve("greenlane", ["server", "--port", "0"], {"GREENLANE_CONFIG": str(config), **environment}) as server:
        yield server


def _config(root: Path, in_flight: int | None, device: str, models: Sequence[str]) -> str:
    """Without `mps`, which older checkouts do not know: one tenant has one device process in any case."""
    lines = ["[server]", 'default_tenant = "load"', "[models]", f'repository = "{root}"', "[device]", f'backend = "{device}"']
    names = ", ".join(f'"{model}"' for model in models)
    lines += ["[tenants.load]", f"granules = {GRANULES if device == 'cuda' else 1}", f"models = [{names}]"]
    return "\n".join([*lines, *([f"in_flight = {in_flight}"] if in_flight else [])])


@contextmanager
def _serve(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    signs: Sequence[str] = READY,
    python: Sequence[str] = (sys.executable,),
) -> Iterator[Server]:
    with server_process([*python, "-m", *command], environment, signs) as process:
        yield Server(name, process.popen.pid, process.port)
