"""ONNX files built while others are served: each build in a child process of its own.

A build in the process that serves would keep everyone waiting. TensorRT builds under a mutex of its own and calls Python
loggers and progress monitors meanwhile, which wait for the interpreter; a thread that holds the interpreter in a binding
that waits for that mutex then waits for ever (seen with TensorRT-RTX 1.6.1 at `set_optimization_profile_async`). And the
library of a builder that crashes takes its process along. So the child (`engines.build_child`, a fresh interpreter and no
fork) reads the model, waits for the lock of its plan, builds, and puts the plan into the cache; here somebody only waits.
"""

import json
import logging
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from .artifact import PORTABLE
from .builder import BuildOptions, Wanted
from .cachefolder import CacheFolder
from .errors import Cancelled, EngineError, ModelRefused

log = logging.getLogger("greenlane.engines")

COMMAND = (sys.executable, "-P", "-m", "engines.build_child")
"""Starts the child. -P: what lies in the working directory is not ours."""

TIME_LIMIT = 900.0
"""Seconds a build may take unless somebody says otherwise."""

_EVERY = 10.0
"""Seconds after which the log says again how far a build is, though it is no further by a tenth."""

_LAST_WORDS = 3
"""Lines of what a builder printed that are told when it dies."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a child is to do, pickled to its standard input.

    `gpu` is the ordinal of the GPU that it may use, None for none; `cores` are the host's cores that it may run on, empty
    for those of its parent, whose process id is `parent`.
    """

    want: Wanted
    gpu: int | None
    cores: frozenset[int]
    parent: int


class Builds:
    """Builds for loads, side by side; those of the same file and options once, for all that ask. Any thread may call.

    `cache` is where plans and compiled kernels are kept; without one, beside each model. `time_limit` is in seconds, 0 for
    none. `command` starts the child. Children end with this process, however that ends.
    """

    def __init__(
        self, cache: CacheFolder | None = None, time_limit: float = TIME_LIMIT, command: Sequence[str] = COMMAND
    ) -> None:
        self.cache = cache
        self._time_limit = time_limit
        self._command = tuple(command)
        self._cores: frozenset[int] = frozenset()
        self._changing = Lock()
        self._asked: dict[bytes, Future[Path]] = {}
        self._children: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Builds {len(self._asked)} at work{', closed' if self._closed else ''}, {self.cache!r}>"

    def place(self, cores: Iterable[int]) -> None:
        """Builds that begin from now on run on these of the host's cores only: some that no tenant's work waits for."""
        self._cores = frozenset(cores)

    def plan(self, path: Path, options: BuildOptions, library: str, version: str, device: str = "", gpu: int = 0) -> Path:
        """The engine file of a model's file, built unless the cache has it. Blocks, without the interpreter.

        `library` and `version` are of the one that will load it, `device` is the GPU where the plan depends on it, and
        `gpu` its ordinal. Raises ModelRefused with the reason, where the builder died or took too long with its last words,
        and Cancelled once this is closed.
        """
        folder = self.cache.path() if self.cache else path.parent / ".greenlane"
        want = Wanted(path, folder, options, library, version, device)
        future, is_first = self._ask(pickle.dumps((want, _stamp(path))))
        if is_first:
            self._settle(future, Order(want, None if library in PORTABLE else gpu, self._cores, os.getpid()))
        try:
            return future.result()
        except EngineError as error:  # Several threads must not raise one object.
            raise type(error)(*error.args) from None

    def close(self) -> None:
        """Abandon every build and refuse new ones. Does not wait for the threads that ask for them."""
        with self._changing:
            self._closed = True
            for child in self._children:
                _kill(child)

    def _ask(self, key: bytes) -> tuple[Future[Path], bool]:
        """The answer to come, and whether it is for the caller to find."""
        with self._changing:
            is_first = key not in self._asked
            future = self._asked.setdefault(key, Future())
            if is_first:
                future.add_done_callback(lambda _: self._asked.pop(key))
            return future, is_first

    def _settle(self, future: "Future[Path]", order: Order) -> None:
        """Find the answer. Others wait for it, so it has to come whatever happens here."""
        path = order.want.onnx_path
        try:
            found = self._build(order)
        except EngineError as error:
            future.set_exception(Cancelled(f"{path}: {_ABANDONED}") if self._closed else error)
        except BaseException as error:
            future.set_exception(Cancelled(f"{path}: the build was abandoned: {error!r}"))
            raise
        else:
            future.set_result(found)

    def _build(self, order: Order) -> Path:
        with self._child(order) as child:
            watched = _Watched(order.want.onnx_path, self._time_limit)
            watched.follow(child, pickle.dumps(order))
            return watched.verdict(child)

    @contextmanager
    def _child(self, order: Order) -> Iterator["subprocess.Popen[bytes]"]:
        """A child that has just been started; in the end there is none. Raises ModelRefused, Cancelled."""
        path = order.want.onnx_path
        with self._changing:
            if self._closed:
                raise Cancelled(f"{path}: {_ABANDONED}")
            try:
                child = subprocess.Popen(
                    [*self._command, str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=_environment(order.gpu),
                    start_new_session=True,  # Ctrl-C at the terminal is for this process, which then ends the child.
                )
            except OSError as error:
                raise ModelRefused(f"{path}: no process can be started to build it: {error.strerror}") from error
            self._children.add(child)
        try:
            with child:
                try:
                    yield child
                finally:
                    _kill(child)
        finally:
            with self._changing:
                self._children.discard(child)


_ABANDONED = "the build was abandoned, as this process is ending"


class _Watched:
    """One build as its messages tell it: JSON, a line each. What else the child prints is kept as its last words."""

    def __init__(self, path: Path, time_limit: float) -> None:
        self._path = path
        self._limit = time_limit or float("inf")
        self._begun = time.monotonic()
        self._said = (-1, 0.0)
        self._where = "before it began, as it read the model or waited for another process that builds the same"
        self._words: deque[str] = deque(maxlen=50)
        self._built: Path | None = None
        self._refused: str | None = None
        self._rest = self._torn = b""

    def follow(self, child: "subprocess.Popen[bytes]", order: bytes) -> None:
        """Hand the child its order and hear it until it hangs up. Raises ModelRefused where that takes too long."""
        assert child.stdin
        assert child.stdout
        assert child.stderr
        with suppress(BrokenPipeError), child.stdin:
            child.stdin.write(order)
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ, self._hear)
            selector.register(child.stderr, selectors.EVENT_READ, self._overhear)
            while selector.get_map():
                for key, _ in selector.select(min(self._left(), _EVERY)):
                    data = os.read(key.fd, 1 << 16)
                    key.data(data)
                    if not data:
                        selector.unregister(key.fileobj)
        with suppress(subprocess.TimeoutExpired):
            child.wait(min(self._left(), _EVERY))

    def verdict(self, child: "subprocess.Popen[bytes]") -> Path:
        """What became of it. Raises ModelRefused."""
        if self._refused is not None:
            raise ModelRefused(self._refused)
        if self._built is None or child.returncode:
            for line in self._words:
                log.warning("%s: the builder: %s", self._path, line)
            raise ModelRefused(f"{self._path}: the build {_manner(child.returncode)} {self._where}{self._last()}; {_APART}")
        return self._built

    def _left(self) -> float:
        """Seconds; selectors take no infinity, which `min` keeps from them."""
        left = self._begun + self._limit - time.monotonic()
        if left <= 0:
            raise ModelRefused(
                f"{self._path}: the build took more than {self._limit:g} s and was ended {self._where}{self._last()}; "
                f"allow it more (models.build_timeout), or {_APART}"
            )
        return left

    def _hear(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                self._words.append(line.decode(errors="replace"))

    def _overhear(self, data: bytes) -> None:
        *lines, self._torn = (self._torn + data).split(b"\n")
        if not data:
            lines.append(self._torn)
        self._words.extend(line.decode(errors="replace") for line in lines if line.strip())

    def _take(self, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "begun":  # What came before was waiting for others that build the same.
                self._begun = time.monotonic()
                log.info("%s: building it in process %s", self._path, message["process"])
            case "step":
                self._where = f"at {message['share']:.0%} ({message['phase']})"
                self._tell(message["share"])
            case "log":
                about = "" if str(self._path) in message["text"] else f"{self._path}: "
                log.log(message["level"], "%s%s", about, message["text"])
                if message["level"] >= logging.WARNING:
                    self._words.append(message["text"])
            case "built":
                self._built = Path(message["path"])
                if message["anew"]:
                    log.info("%s: built in %.1f s", self._path, time.monotonic() - self._begun)
            case "refused":
                self._refused = message["text"]

    def _tell(self, share: float) -> None:
        tenth, now = int(share * 10), time.monotonic()
        if tenth > self._said[0] or now - self._said[1] >= _EVERY:
            self._said = tenth, now
            log.info("%s: building it: %s", self._path, self._where)

    def _last(self) -> str:
        words = " / ".join(map(str.strip, list(self._words)[-_LAST_WORDS:]))
        return f", with the words: {words}" if words else ""


_APART = "build it apart, with python -m engines.build, and serve the .plan"


def encode(kind: str, **content: Any) -> bytes:
    """A message of the child's, as `_Watched` reads it."""
    return json.dumps({"kind": kind, **content}).encode() + b"\n"


def search_path() -> str:
    """A PYTHONPATH with which another interpreter finds the modules that this one does."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def _environment(gpu: int | None) -> dict[str, str]:
    """Ours, with the modules that are found here found there, and no GPU where none is needed."""
    found = {**os.environ, "PYTHONPATH": search_path()}
    return found if gpu is not None else {**found, "CUDA_VISIBLE_DEVICES": ""}


def _manner(status: int | None) -> str:
    """How a child ended."""
    if status is None:
        return "hung up without an answer"
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else "unknown"
    memory = ", perhaps for want of memory," if -status == signal.SIGKILL else ""
    return f"was ended by signal {-status} ({name}){memory}"


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """It and what it started, if it is not gone already."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _stamp(path: Path) -> tuple[int, ...]:
    """Which file this is and as of when; empty where there is none, which the child will say."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
