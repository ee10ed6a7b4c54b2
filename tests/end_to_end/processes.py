"""The real `python -m server` as a process of its own, and the processes it consists of."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from .harness import PATIENCE
from .wire import Connection, infer, request, tensor, until


class Standing(NamedTuple):
    """A line of a process in /proc: its name, its state and its parent."""

    pid: int
    name: str
    state: str
    parent: int


def family_of(pid: int) -> list[Standing]:
    """This process, and those that it and its children started."""
    found, everyone = {pid}, list(_everyone())
    for _ in range(3):
        found |= {one.pid for one in everyone if one.parent in found}
    return [one for one in everyone if one.pid in found]


class Running:
    """A server: its port, its log so far, and its processes."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self.popen = popen
        self.port = 0
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Wait until it serves."""
        self._reader.start()
        self.told("ing on http://")
        self.told("ready: ")
        found = re.search(r"(?:listening|running) on http://\S+?:(\d+)", "".join(self.log))
        assert found
        self.port = int(found[1])

    def told(self, text: str, times: int = 1) -> None:
        """Wait until the log says this."""
        until(lambda: sum(text in line for line in list(self.log)) >= times or not self._reader.is_alive())
        assert sum(text in line for line in self.log) >= times, f"it never said {text!r}: {self.log}"

    def family(self) -> list[Standing]:
        """Every process that this server started, and itself."""
        return family_of(self.popen.pid)

    def pid(self, name: str) -> int:
        """The process of this front, or of the dispatcher, once there is one."""
        until(lambda: bool(self._named(f"greenlane {name}"[:15])))
        return self._named(f"greenlane {name}"[:15])[0]

    def kill(self, *names: str) -> None:
        """Kill the processes of these names, and wait until they are gone: what one that is dying is given is lost."""
        doomed = {self.pid(name) for name in names}
        family = [one for one in self.family() if one.pid in doomed]
        for pid in doomed:
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
        family = self.family()
        self.popen.kill()
        self.popen.wait()
        until(lambda: not alive(family))
        self._reader.join(PATIENCE)

    def _read(self) -> None:
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.log.append(line)


@contextmanager
def running(config: Path, *options: str) -> Iterator[Running]:
    """Serve this file until left; what is left of it then is killed."""
    with _started([sys.executable, "-m", "server", "--config", str(config), *options]) as server:
        yield server


@contextmanager
def running_plain(config: Path, *options: str) -> Iterator[Running]:
    """The same with `uvicorn server.app:app`."""
    words = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", "0", "--no-access-log", *options]
    with _started(words, {**os.environ, "GREENLANE_CONFIG": str(config)}) as server:
        yield server


@contextmanager
def _started(words: list[str], environment: dict[str, str] | None = None) -> Iterator[Running]:
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as popen:
        server = Running(popen)
        try:
            server.start()
            yield server
        finally:
            server.close()


def configure(path: Path, repository: Path, tenants: str, **server: str) -> Path:
    """Write a configuration and return its path; `tenants` is TOML, `server` its section's keys besides what all have."""
    settings = {"port": "0", "drain_grace": '"0s"', **server}
    lines = ["[server]", *(f"{key} = {value}" for key, value in settings.items())]
    path.write_text("\n".join([*lines, "[models]", f'repository = "{repository}"', tenants]))
    return path


def alive(family: list[Standing]) -> list[Standing]:
    """Which of these are still there; zombies, whose parents have not looked yet, are not, once their last thread has ended."""
    now = {one.pid: one for one in _everyone()}
    return [one for one in family if one.pid in now and (now[one.pid].state != "Z" or _others(one.pid))]


def _others(pid: int) -> int:
    """How many threads it has besides the first: they hold its sockets."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task")) - 1
    return 0


def threads(pid: int) -> set[frozenset[int]]:
    """On which cores the threads of a process may run."""
    return {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir(f"/proc/{pid}/task")}


def client(server: Running, **headers: str) -> httpx.Client:
    """Who sends these headers with every request."""
    return httpx.Client(base_url=server.url, headers=headers, timeout=30)


def holder(server: Running, connection: Connection) -> str:
    """The name of the process that has the other end of a connection."""
    ends = [f"0100007F:{port:04X}" for port in (server.port, connection._socket.getsockname()[1])]
    rows = map(str.split, Path("/proc/net/tcp").read_text().splitlines())
    inode = next(row[9] for row in rows if row[1:3] == ends and row[9] != "0")  # 0: one of before, of the same two ports.
    return next(one.name for one in server.family() if f"socket:[{inode}]" in _opened(one.pid))


def _opened(pid: int) -> set[str]:
    found = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return found


class Load(threading.Thread):
    """Asks for sums, one after another, until stopped; what came instead of a right answer is in `wrong`."""

    def __init__(self, server: Running, model: str = "identity", **headers: str) -> None:
        super().__init__(daemon=True)
        self.answered = 0
        self.wrong: list[object] = []
        self._http = client(server, **headers)
        self._model = model
        self._go_on = True

    def run(self) -> None:
        while self._go_on:
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
        self._go_on = False
        self.join()
        self._http.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _everyone() -> Iterator[Standing]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                text = Path(f"/proc/{entry}/stat").read_text()
                state, parent = text.rpartition(")")[2].split()[:2]
                name = text[text.index("(") + 1 : text.rindex(")")]
                yield Standing(int(entry), name, state, int(parent))
