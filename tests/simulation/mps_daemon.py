"""A fake of NVIDIA's command `nvidia-cuda-mps-control`, as the real one answered on an H100 with driver 580.159 (2026-11-26).

`mps.FakeMps` puts it on PATH. With `-f` it is the daemon, which forks servers; without, it asks the daemon one command. Its
clients are simulated GPUs (`mps.Client`). Standard library alone, as each command is a process.

The ways in which a daemon can fail, each of which tests/partitions/test_mps.py has. Those with a name are in a JSON file, which
is read again for each command:
- it does not start: `start` is what it prints before it ends with status 1; or there is no command
- it is never ready: `start` is "silent"; or its server is not: `server` "initializes" for ever
- it dies: `start` is "dies", which it does when a server is to be started; or it is killed, later
- its server dies: `server` "ends" before it is listed, or "dies" while it initializes; or it is killed, later
- commands are answered with nonsense: `says` has texts by their names
- commands are never answered: `hang` has their names; `terminate_client` is not where the client does not answer
- it refuses clients: after `most` of them, by default 48 (808; what is printed was not seen), and while a fault lasts (807)
- a kernel of a client fails: the fault lasts until all clients have ended
"""

import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

NAME = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
MAX_LINE = 4096


def server_address(pipes: str, server: int) -> str:
    """The socket of a server, which has no name in the folder."""
    return f"\0{pipes}/{server}"


def main(behaviour: str, *arguments: str) -> int:
    pipes = os.environ.get(PIPES) or "/tmp/nvidia-mps"
    if arguments == ("-f",):
        return Daemon(Path(pipes), Path(behaviour)).start()
    return ask(pipes, sys.stdin.readline().strip())


def ask(pipes: str, command: str) -> int:
    with socket.socket(socket.AF_UNIX) as ui:
        try:
            ui.connect(f"{pipes}/control")
        except OSError:
            print("Cannot find MPS control daemon process", file=sys.stderr)
            return 1
        ui.sendall(f"ui {command}\n".encode())
        sys.stdout.write(ui.makefile().read())
    return 0


class Lines:
    """The lines that come on a socket, one by one."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._rest = b""
        self._lines: deque[str] = deque()

    def fileno(self) -> int:
        return self.end.fileno()

    def read(self) -> list[str] | None:
        """Those there are; None at the end. Blocks until there is one."""
        while not self._lines:
            try:
                data = self.end.recv(MAX_LINE)
            except OSError:
                data = b""
            if not data:
                return None
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._lines.extend(line.decode() for line in lines)
        found, self._lines = list(self._lines), deque()
        return found

    def next(self) -> str | None:
        """The next one; None at the end. Blocks."""
        if (found := self.read()) is None:
            return None
        self._lines.extend(found[1:])
        return found[0]

    def send(self, line: str) -> None:
        with suppress(OSError):  # It has ended.
            self.end.sendall(f"{line}\n".encode())


def log(source: str, text: str) -> None:
    print(f"[{datetime.now():%Y-%m-%d %H:%M:%S.%f}"[:-3] + f" {source:>7} {os.getpid():>5}] {text}", flush=True)


class Daemon:
    """One thread. It asks its server and waits for the answer, so it answers to none while the server waits for a client."""

    def __init__(self, pipes: Path, behaviour: Path) -> None:
        self._pipes = pipes
        self._behaviour = behaviour
        self._server = 0
        self._to_server: Lines | None = None
        self._server_end = -1
        self._waiting: list[socket.socket] = []
        """Those that asked it to quit, until it does."""
        self._quit_at: float | None = None

    def behaviour(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._behaviour.read_text())
        except FileNotFoundError:
            return {}
        return found

    def start(self) -> int:
        start = self.behaviour().get("start", "")
        if start == "silent":
            signal.pause()
        if (start and start != "dies") or self._is_running():
            print(start or "An instance of this daemon is already running", flush=True)
            return 1
        log("Control", f"Starting control daemon using socket {self._pipes}/control")
        log("Control", f"To connect CUDA applications to this daemon, set env {PIPES}={self._pipes}")
        log("Control", "CUDA MPS Control binary version: 13000")
        (self._pipes / "control").unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._pipes}/control")
        self._listener.listen(64)
        for name in ("control_lock", "control_privileged", "log"):
            (self._pipes / name).touch()
        self._pid_file.write_text(str(os.getpid()))
        while self._quit_at is None or not self._may_quit():
            self._serve_one()
        for name in ("log", self._pid_file.name):
            (self._pipes / name).unlink()
        for ui in self._waiting:
            ui.close()
        return 0

    @property
    def _pid_file(self) -> Path:
        return self._pipes / f"{NAME}.pid"

    def _is_running(self) -> bool:
        try:
            os.kill(int(self._pid_file.read_text()), 0)
        except (OSError, ValueError):
            return False
        return True

    def _may_quit(self) -> bool:
        """Whether it has been asked to quit and has no clients, or is out of patience with them: then its server is ended."""
        assert self._quit_at is not None
        if self._server and self._ask("clients") and time.monotonic() < self._quit_at:
            return False
        if self._server:
            os.kill(self._server, signal.SIGKILL)
            os.waitpid(self._server, 0)
        return True

    def _serve_one(self) -> None:
        watched = [self._listener, *([self._server_end] if self._server else [])]
        limit = None if self._quit_at is None else 0.01
        ready, _, _ = select.select(watched, [], [], limit)
        if self._server_end in ready:
            self._on_server_end()
        if self._listener in ready:
            end, _ = self._listener.accept()
            log("Control", "Accepting connection...")
            asked = Lines(end).next() or ""
            kind, _, rest = asked.partition(" ")
            if kind == "client":
                self._on_client(Lines(end), rest)
            elif kind == "ui":
                self._on_command(end, rest)

    def _on_client(self, client: Lines, pid: str) -> None:
        log("Control", f"NEW CLIENT {pid} from user {os.geteuid()}: Server already exists")
        if not self._server:
            self._start_server()
        client.send(str(self._server))
        client.end.close()

    def _on_command(self, ui: socket.socket, command: str) -> None:
        name, *arguments = command.split()
        log("Control", "NEW UI")
        log("Control", f"Cmd:{command}")
        if name == "start_server" and self.behaviour().get("start") == "dies":
            log("Control", "Assertion failed (as scripted)")
            os.kill(os.getpid(), signal.SIGKILL)
        if name in self.behaviour().get("hang", ()):
            self._waiting.append(ui)
            return
        if name == "quit":
            limit = float(arguments[1]) if arguments[:1] == ["-t"] else float("inf")
            self._quit_at = min(time.monotonic() + limit, self._quit_at or float("inf"))
            self._waiting.append(ui)
            return
        answer = self._answer(command, name, arguments)
        for line in answer:
            log("Control", line)
        Lines(ui).send("\n".join(answer)) if answer else None
        log("Control", "UI closed")
        ui.close()

    def _answer(self, command: str, name: str, arguments: list[str]) -> list[str]:
        if said := self.behaviour().get("says", {}).get(name):
            return [said]
        if name == "get_server_list":
            return [str(self._server)] if self._server else []
        if name == "start_server":
            if not self._server:
                self._start_server()
            return []
        if name == "get_default_active_thread_percentage":
            return ["100.0"]
        if name in ("get_server_status", "get_client_list", "terminate_client"):
            if not self._server or arguments[0] != str(self._server):
                missing = f"Server {arguments[0]} not found"
                return [missing, f"{missing}!", "1"] if name == "terminate_client" else [missing]
            return self._ask({"get_server_status": "status", "get_client_list": "clients"}.get(name, f"end {arguments[-1]}"))
        return [f'Unknown command "{command}"']

    def _ask(self, question: str) -> list[str]:
        assert self._to_server
        self._to_server.send(question)
        return (self._to_server.next() or "").split()

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair()
        ready, started = os.pipe()
        if not (server := os.fork()):
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in (theirs.fileno(), started):
                    with suppress(OSError):
                        os.close(int(name))
            behaviour = self.behaviour()
            Server(str(self._pipes), Lines(theirs), behaviour.get("server", ""), behaviour.get("most", 48)).run(started)
        theirs.close()
        os.close(started)
        is_ready = os.read(ready, 1)
        os.close(ready)
        self._server, self._to_server, self._server_end = server, Lines(ours), os.pidfd_open(server)
        if is_ready:
            log("Control", f"NEW SERVER {server}: Ready")
        else:
            self._on_server_end()

    def _on_server_end(self) -> None:
        _, status = os.waitpid(self._server, 0)
        os.close(self._server_end)
        log("Control", f"Server {self._server} exited with status {os.WEXITSTATUS(status)}")
        self._server, self._to_server = 0, None


class Server:
    """A server: one thread, in a process that goes on without its daemon."""

    def __init__(self, pipes: str, daemon: Lines, behaviour: str, most: int) -> None:
        self._pipes = pipes
        self._daemon: Lines | None = daemon
        self._behaviour = behaviour
        self._most = most
        self._clients: dict[int, Lines] = {}
        self._fault = False

    def run(self, started: int) -> None:
        """Never returns; writes to `started` when it takes clients."""
        log("Control", f"Starting new server {os.getpid()} for user {os.geteuid()}")
        if self._behaviour == "ends":
            log("Server", "Failed to initialize: the GPU cannot be used (as scripted)")
            os._exit(1)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(server_address(self._pipes, os.getpid()))
        listener.listen(64)
        os.write(started, b".")
        os.close(started)
        log("Server", "Server has started")
        while True:
            watched = [listener, *([self._daemon] if self._daemon else []), *self._clients.values()]
            ready, _, _ = select.select(watched, [], [])
            for each in ready:
                if each is listener:
                    self._on_client(Lines(listener.accept()[0]))
                elif each is self._daemon:
                    self._on_daemon(each.read())
                elif each in self._clients.values():
                    self._on_said(each)

    def _on_client(self, client: Lines) -> None:
        pid = int(client.next() or 0)
        if self._fault:
            log("Server", f"Server teardown in progress. Refusing to accept new client {{PID: {pid}, Context ID: 0}}")
        if error := 807 if self._fault else 808 if len(self._clients) >= self._most else 0:
            log("Server", f"Failed to accept client {{PID: {pid}, Context ID: 0}} with status {error}")
            client.send(str(error))
            client.end.close()
            return
        log("Server", f"Client {{PID: {pid}, Context ID: 0}} connected")
        self._clients[pid] = client
        client.send("0")

    def _on_said(self, client: Lines) -> None:
        (pid,) = [each for each, known in self._clients.items() if known is client]
        said = client.read()
        if said is None:
            self._remove(pid)
        elif "fault" in said:
            self._on_fault(pid)

    def _on_fault(self, pid: int) -> None:
        self._fault = True
        log("Server", f"Client {{PID: {pid}, Context: 1}} encountered a fatal GPU error.")
        log("Server", "Server is handling a fatal GPU error.")
        for other, client in self._clients.items():
            log("Server", f"Client {{PID: {other}, Context ID: 1}} on device 0 to be torn down")
            if other != pid:
                client.send("fault")
        self._clients[pid].send("go")

    def _remove(self, pid: int) -> None:
        self._clients.pop(pid).end.close()
        log("Server", f"Client process {pid} disconnected")
        self._fault = self._fault and bool(self._clients)

    def _on_daemon(self, questions: list[str] | None) -> None:
        if questions is None:
            self._daemon = None
            return
        assert self._daemon
        for question in questions:
            if question == "status" and self._behaviour == "dies":
                log("Server", "Failed to initialize: the GPU is lost (as scripted)")
                os._exit(1)
            if question == "status":
                initializes = self._behaviour == "initializes"
                self._daemon.send("INITIALIZING" if initializes else "FAULT" if self._fault else "ACTIVE")
            elif question == "clients":
                self._daemon.send(" ".join(map(str, self._clients)))
            else:
                self._daemon.send(self._end(int(question.split()[1])))

    def _end(self, pid: int) -> str:
        """Ask a client to end, and wait for that; until then the others stand still."""
        if not (client := self._clients.get(pid)):
            log("Server", f"Client termination request failed: There is no active client context found for process {pid}.")
            log("Server", "Client termination failed with invalid device context.")
            return "201"
        log("Server", f"MPS server requesting client {{PID: {pid}, Context ID: 1}} to exit")
        others = [other for other in self._clients.values() if other is not client]
        for other in others:
            other.send("hold")
        client.send("end")
        client.next()
        log("Server", "Client termination succeeded.")
        for other in others:
            other.send("go")
        self._remove(pid)
        return "0"
