"""Programs of the tests that are forked from a process which has imported the server, as that takes a second of a core each.

They are children of the tests' process, as if it had started them with Python: with their own environment, folder, arguments,
descriptors and default signals. Their command line and environment in /proc are those of the process they are forked from.
"""

import ctypes
import gc
import json
import os
import posix
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_Popen = subprocess.Popen
_SET_CHILD_SUBREAPER = 36
_REQUEST = 1 << 18


class _Program(NamedTuple):
    """What Python is asked to run: its words after `python`, where, and whether in a session of its own."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    session: bool


class Forked(subprocess.Popen[Any]):
    """`Popen`, which forks `[sys.executable, "-m", module, ...]` and `[sys.executable, script, ...]` and starts other programs.

    Those too that are given descriptors, a group of processes or something to call before.
    """

    def _execute_child(self, args: Any, *given: Any) -> None:
        """In place of Popen's own, with its arguments."""
        (_, before, _, passed, folder, environment, _, _, _), pipes, (*_, session, group) = given[:9], given[9:15], given[15:]
        words = [str(word) for word in args] if isinstance(args, list) else []
        python = words[:1] == [sys.executable] and (words[1] in ("-m", "-P") or not words[1].startswith("-"))
        if not python or (before, list(passed), group) != (None, [], -1):
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        program = _Program(
            words[1:], dict(os.environ if environment is None else environment), str(folder or os.getcwd()), session
        )
        standard = [own if pipe == -1 else pipe for own, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        try:
            self.pid = _forks.start(program, standard)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Forks:
    """The process that programs are forked from. It is started for the first one, and ends with the tests' process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, program: _Program, standard: list[int]) -> int:
        """The number of a new child of this process."""
        with self._lock:
            control = self._control or self._open()
            # It is forked twice, so that its parent ends: then this process is its parent.
            _adopt_orphans(True)
            try:
                socket.send_fds(control, [json.dumps(program).encode()], standard)
                return int(control.recv(32))
            finally:
                _adopt_orphans(False)

    def close(self) -> None:
        """End it, and wait until it has."""
        with self._lock:
            if self._control and self._process:
                self._control.close()
                self._process.wait()
                self._control = self._process = None

    def _open(self) -> socket.socket:
        self._control, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end:
            words = [sys.executable, "-m", "tests.forked", str(end.fileno())]
            self._process = _Popen(words, pass_fds=[end.fileno()], cwd=Path(__file__).parents[1])
        return self._control


_forks = _Forks()
close = _forks.close


@contextmanager
def instead() -> Iterator[None]:
    """While the block runs, what this process starts by `subprocess` is started by `Forked`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Forked)
        yield


def _adopt_orphans(whether: bool) -> None:
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0)


def _serve(control: socket.socket) -> _Program | None:
    """Fork for each request. In the fork: its program; at the end of the requests: None."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _REQUEST, 3)
        if not data:
            return None
        reading, writing = os.pipe()
        if not (middle := os.fork()):
            middle = os.getpid()
            if number := os.fork():
                os.write(writing, str(number).encode())
                posix._exit(0)  # type: ignore[attr-defined]  # Not coverage's, which would save something.
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target)
            for each in (reading, writing, *descriptors):
                os.close(each)
            while os.getppid() == middle:  # It ends now, and leaves this one to the process that asked.
                time.sleep(0.001)
            return _Program(*json.loads(data))
        os.waitpid(middle, 0)
        control.send(os.read(reading, 32))
        for each in (reading, writing, *descriptors):
            os.close(each)


def _become(program: _Program) -> None:
    """Do in this process what Python does with these words, and return at the program's end. Raises what it raises."""
    if program.session:
        os.setsid()
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    tempfile.tempdir = None  # It is TMPDIR's.
    util.spawnv_passfds = _spawn
    words = program.words
    sys.orig_argv = [sys.executable, *words]
    if safe := words[0] == "-P":
        words = words[1:]
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    also = filter(None, program.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [*[program.folder if module else str(Path(words[0]).parent)] * (not safe), *also]
    if module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _spawn(path: bytes, words: list[str], descriptors: list[int], really: Any = util.spawnv_passfds) -> int:
    """In place of multiprocessing's own: fork the forkserver too, which imports the same, while there is just one thread."""
    if "multiprocessing.forkserver" not in words[-1] or len(os.listdir("/proc/self/task")) > 1:
        return int(really(path, words, descriptors))
    if number := os.fork():
        return number
    from server.host.leaving import leave

    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in descriptors:
                with suppress(OSError):
                    os.close(int(name))
        with suppress(SystemExit):
            exec(words[-1], {"__name__": "__main__"})
        status = 0
    except Exception as error:
        sys.last_value = error  # As Python does at its end.
        raise
    finally:
        leave(status)


if __name__ == "__main__":
    from server.api import docs

    for name in ("server.__main__", "server.processes.dispatching.dispatcher", "server.processes.http_side.http_process"):
        import_module(name)
    docs.document()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        program = _serve(control)
    if not program:
        posix._exit(0)  # What coverage would save here came too late.
    _become(program)
