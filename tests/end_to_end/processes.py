"""The real `python -m server` as a process of its own, and the processes it consists of."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import httpx

from benchmarks.watched_server import READY, ServerProcess, alive
from greenlane.load.server_process import terminate
from tests.forked import Forked
from tests.simulation.mps import FakeMps

from .wire import Connection, client, infer, request, tensor, until


class Running(ServerProcess):
    """A server of the tests, which look for its processes by name."""

    def pid(self, name: str) -> int:
        """The HTTP process of this name, or the dispatcher, once there is one."""
        found: list[int] = []
        until(lambda: bool(found.extend(self.pids(name)) or found))
        return found[0]

    def pids(self, name: str) -> list[int]:
        """The processes of this name that there are now."""
        return self._named(f"greenlane {name}"[:15])

    def devices(self) -> list[int]:
        """The device processes that there are now."""
        return [one.pid for one in self.family() if one.name.startswith("greenlane dev ") and one.state != "Z"]

    def kill(self, *names: str) -> None:
        """Kill the processes of these names, and wait until they are gone: what is sent to a dying process is lost."""
        killed = {self.pid(name) for name in names}
        family = [one for one in self.family() if one.pid in killed]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(family))

    def _named(self, name: str) -> list[int]:
        return [one.pid for one in self.family() if one.name == name and one.state != "Z"]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        """Its exit status."""
        return self.popen.wait(seconds)

    def close(self) -> None:
        """Kill it, and wait until every process of it has ended; one that is stopped would stay, and is killed too."""
        family = self.family()
        super().close()
        for one in family:
            if one.state == "T":
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
        until(lambda: not alive(family))


R = TypeVar("R", bound=Running)
SOON = 3.0
"""Seconds for a server to end in after its test."""


@contextmanager
def running(config: Path, *options: str, **settings: Any) -> Iterator[Running]:
    """Serve this file until left; then it may drain for a moment, and what is left of it is killed.

    With settings of `Popen` it is started with those.
    """
    with _started([sys.executable, "-m", "server", "--config", str(config), *options], **settings) as server:
        yield server


@contextmanager
def running_folder(folder: Path, signs: Sequence[str] = READY) -> Iterator[Running]:
    """Serve what there is in this folder."""
    environment = {name: value for name, value in os.environ.items() if name != "GREENLANE_CONFIG"}
    with _started([sys.executable, "-m", "server", "--port", "0"], environment, signs, folder=folder) as server:
        yield server


@contextmanager
def running_device(config: Path, *options: str) -> Iterator[Running]:
    """The same with a device process, which cores do not have otherwise."""
    with _started([sys.executable, "-m", "tests.end_to_end.device_server", "--config", str(config), *options]) as server:
        yield server


@contextmanager
def running_devices(config: Path, *options: str) -> Iterator[Running]:
    """The same with a process for each of the configuration's devices, which have four granules."""
    with _started([sys.executable, "-m", "tests.end_to_end.devices_server", "--config", str(config), *options]) as server:
        yield server


@contextmanager
def running_apart(
    config: Path,
    *options: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    signs: Sequence[str] = READY,
    **behaviour: str,
) -> Iterator[Running]:
    """The same with a process for each tenant, under a fake MPS daemon that behaves so. It has started once its log has these
    signs.
    """
    fake = FakeMps(config.parent / "fake")
    fake.behave(**behaviour)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")} | {"UUID": "GPU-0"}
    words = [sys.executable, "-m", "tests.end_to_end.devices_server", "--config", str(config), *options]
    with _started(words, {**inherited, "PATH": f"{fake.folder}:{os.environ['PATH']}", **environment}, signs) as server:
        yield server


@contextmanager
def running_module(module: str, config: Path, *options: str, signs: Sequence[str] = READY) -> Iterator[Running]:
    """The same by a module of the tests that changes something; it has started once its log has these signs."""
    with _started([sys.executable, "-m", module, "--config", str(config), *options], signs=signs) as server:
        yield server


@contextmanager
def running_plain(config: Path, *options: str, **settings: Any) -> Iterator[Running]:
    """The same with `uvicorn server.app:app`."""
    words = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", "0", "--no-access-log", *options]
    with _started(words, {**os.environ, "GREENLANE_CONFIG": str(config)}, **settings) as server:
        yield server


def running_asgi(config: Path, **settings: Any) -> AbstractContextManager[Running]:
    """The same with options that need ASGI for every request."""
    return running_plain(config, "--limit-concurrency", "1000", "--root-path", "/models", **settings)


@contextmanager
def running_script(folder: Path, text: str, *words: object, kind: type[R], signs: Sequence[str] = READY) -> Iterator[R]:
    """The same by a script of this text with these arguments, which may import the tests; its stdin is a pipe."""
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with _started([sys.executable, str(script), *map(str, words)], environment, signs, kind, subprocess.PIPE) as server:
        yield server


@contextmanager
def _started(
    words: list[str],
    environment: dict[str, str] | None = None,
    signs: Sequence[str] = READY,
    kind: type[R] = Running,
    stdin: int | None = None,
    folder: Path | None = None,
    **settings: Any,
) -> Iterator[R]:
    start = subprocess.Popen if settings else Forked
    with start(words, env=environment, stdin=stdin, stderr=subprocess.PIPE, text=True, cwd=folder, **settings) as popen:
        server = kind(popen)
        try:
            server.start(signs)
            yield server
            terminate(popen, SOON)  # A process that is killed leaves no coverage.
        finally:
            server.close()


def tenant(name: str = "acme", *models: str, **keys: object) -> str:
    """A tenant's table in TOML: it has a granule, may call these models or all, and has these keys besides."""
    table = {"granules": 1, "models": models or ["*"], **keys}
    return "\n".join([f"[tenants.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""])


PAIR = tenant("acme") + tenant("globex", "identity", "spin")
"""Two tenants."""


def configure(path: Path, repository: Path, tenants: str, **server: str) -> Path:
    """Write a configuration and return its path; `tenants` is TOML, `server` its section's keys besides what all have."""
    settings = {"port": "0", "drain_grace": '"0s"', **server}
    lines = ["[server]", *(f"{key} = {value}" for key, value in settings.items())]
    path.write_text("\n".join([*lines, "[models]", f'repository = "{repository}"', tenants]))
    return path


def threads(pid: int) -> set[frozenset[int]]:
    """On which cores the threads of a process may run."""
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # It has ended.
            found.add(frozenset(os.sched_getaffinity(int(thread))))
    return found


def holder(server: Running, connection: Connection) -> str:
    """The name of the process that has the other end of a connection."""
    pid = holder_pid(server, connection)
    return next(one.name for one in server.family() if one.pid == pid)


def holder_pid(server: Running, connection: Connection) -> int:
    """The id of the process that has the other end of a connection."""
    ends = [f"0100007F:{port:04X}" for port in (server.port, connection.socket.getsockname()[1])]
    rows = map(str.split, Path("/proc/net/tcp").read_text().splitlines())
    inode = next(row[9] for row in rows if row[1:3] == ends and row[9] != "0")  # 0: one of before, of the same two ports.
    return next(one.pid for one in server.family() if f"socket:[{inode}]" in _opened(one.pid))


def _opened(pid: int) -> set[str]:
    found = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return found


class Load(threading.Thread):
    """Asks a tenant for a model, one request after another, until stopped; what came instead of a right answer is in `wrong`.

    There is a pause after each: what else runs here needs the cores.
    """

    def __init__(self, server: Running, tenant: str = "", model: str = "identity", **headers: str) -> None:
        super().__init__(daemon=True)
        self.answered = 0
        self.wrong: list[object] = []
        self._http = client(server, tenant, **headers)
        self._model = model
        self._stop_asking = threading.Event()

    def run(self) -> None:
        while not self._stop_asking.wait(0.005):
            value = self.answered % 1000
            try:
                answer = infer(self._http, self._model, request(tensor("x", "FP32", [1, 1], [value])))
                right = answer.status_code == 200 and answer.json()["outputs"][0]["data"] == [value]
            except (httpx.TransportError, ValueError) as error:
                self.wrong.append(repr(error))
                continue
            self.answered += 1
            if not right:
                self.wrong.append((answer.status_code, answer.text))

    def more(self, count: int = 20) -> None:
        """Wait until so many more were answered."""
        enough = self.answered + count
        until(lambda: self.answered >= enough)

    def __enter__(self) -> "Load":
        self.start()
        self.more(3)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_asking.set()
        self.join()
        self._http.close()
