"""ONNX files built, and kernels compiled, while others are served: each in a child process of its own.

A build in the process that serves would keep everyone waiting. TensorRT builds under a mutex of its own and calls Python
loggers and progress monitors meanwhile, which wait for the interpreter; a thread that holds the interpreter in a binding
that waits for that mutex then waits for ever (seen with TensorRT-RTX 1.6.1 at `set_optimization_profile_async`). And the
library of a builder that crashes takes its process along. So the child (`child`, a fresh interpreter and no
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
from typing import Any, NamedTuple

from ...errors import Cancelled, EngineError, ModelRefused
from ...model_files.artifact import PORTABLE
from ...model_files.cache_folder import CacheFolder
from .builder import BuildOptions, Wanted
from .kernels import Kernels

log = logging.getLogger("greenlane.engines")

COMMAND = (sys.executable, "-P", "-m", "engines.tensorrt.building.child")
"""Starts a child. -P: what lies in the working directory is not ours."""

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

    want: Wanted | Kernels
    gpu: int | None
    cores: frozenset[int]
    parent: int

    @property
    def path(self) -> Path:
        """The file that is worked on."""
        return self.want.onnx_path if isinstance(self.want, Wanted) else self.want.plan_path


class Builds:
    """Builds for loads, side by side; those of the same file and options once, for all that ask. Any thread may call.

    `cache` is where plans and compiled kernels are kept; without one, beside each model. `time_limit` is in seconds, 0 for
    none. `command` starts the child. Children end with this process, however that ends. `compiles` is whether kernels are
    compiled in children, too, where the library compiles at run time; else the process that binds an engine does.
    """

    def __init__(
        self,
        cache: CacheFolder | None = None,
        time_limit: float = TIME_LIMIT,
        command: Sequence[str] = COMMAND,
        compiles: bool = False,
    ) -> None:
        self.cache = cache
        self.compiles = compiles
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
        return self._done(Order(want, None if library in PORTABLE else gpu, self._cores, os.getpid()))

    def kernels(self, wanted: Kernels, gpu: int) -> None:
        """Have kernels compiled and kept. Blocks, without the interpreter. Raises ModelRefused and Cancelled as `plan` does.

        The child has a context of its own on the GPU, and the model's memory once more, until it has ended.
        """
        self._done(Order(wanted, gpu, self._cores, os.getpid()))

    def close(self) -> None:
        """Abandon every build and refuse new ones. Does not wait for the threads that ask for them."""
        with self._changing:
            self._closed = True
            for child in self._children:
                _kill(child)

    def _done(self, order: Order) -> Path:
        future, is_first = self._ask(pickle.dumps((order.want, _stamp(order.path))))
        if is_first:
            self._settle(future, order)
        try:
            return future.result()
        except EngineError as error:  # Several threads must not raise one object.
            raise type(error)(*error.args) from None

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
        path = order.path
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
            watched = _Watched(order.path, self._time_limit, _BUILD if isinstance(order.want, Wanted) else _COMPILATION)
            watched.follow(child, pickle.dumps(order))
            return watched.verdict(child)

    @contextmanager
    def _child(self, order: Order) -> Iterator["subprocess.Popen[bytes]"]:
        """A child that has just been started; in the end there is none. Raises ModelRefused, Cancelled."""
        path = order.path
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


class _Kind(NamedTuple):
    """What is done, in the words of the log and of errors; `advice` is what to do where it fails."""

    noun: str
    doing: str
    done: str
    advice: str


_APART = "build it apart, with python -m engines.build, and serve the .plan"
_BUILD = _Kind("build", "building it", "built", _APART)
_COMPILATION = _Kind("compilation", "compiling its kernels", "compiled its kernels", "they are compiled where it is served")


class _Watched:
    """One build as its messages tell it: JSON, a line each. What else the child prints is kept as its last words."""

    def __init__(self, path: Path, time_limit: float, kind: _Kind) -> None:
        self._path = path
        self._kind = kind
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
                log.warning("%s: the %s: %s", self._path, self._kind.noun, line)
            manner = f"the {self._kind.noun} {_manner(child.returncode)} {self._where}"
            raise ModelRefused(f"{self._path}: {manner}{self._last()}; {self._kind.advice}")
        return self._built

    def _left(self) -> float:
        """Seconds; selectors take no infinity, which `min` keeps from them."""
        left = self._begun + self._limit - time.monotonic()
        if left <= 0:
            raise ModelRefused(
                f"{self._path}: the {self._kind.noun} took more than {self._limit:g} s and was ended "
                f"{self._where}{self._last()}; allow it more (models.build_timeout), or {self._kind.advice}"
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
                log.info("%s: %s in process %s", self._path, self._kind.doing, message["process"])
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
                    log.info("%s: %s in %.1f s", self._path, self._kind.done, time.monotonic() - self._begun)
            case "refused":
                self._refused = message["text"]

    def _tell(self, share: float) -> None:
        tenth, now = int(share * 10), time.monotonic()
        if tenth > self._said[0] or now - self._said[1] >= _EVERY:
            self._said = tenth, now
            log.info("%s: %s: %s", self._path, self._kind.doing, self._where)

    def _last(self) -> str:
        words = " / ".join(map(str.strip, list(self._words)[-_LAST_WORDS:]))
        return f", with the words: {words}" if words else ""


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
