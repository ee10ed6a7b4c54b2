"""Builds ONNX files, and compiles kernels, in child processes, while this process serves.

Problem: a build in the serving process would block every tenant. TensorRT builds under an internal mutex and meanwhile calls
Python loggers and progress monitors, which need the GIL; a thread that holds the GIL in a binding that waits for that mutex
then waits forever (seen with TensorRT-RTX 1.6.1 at `set_optimization_profile_async`). A crash in the builder would end the
process.

Solution: a child process (`build_child`, a fresh interpreter rather than a fork) reads the model, takes the lock of its plan,
builds, and writes the plan to the cache. A thread of this process waits for it without the GIL.
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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from partitions.mps import stay_outside

from ...children import search_path
from ...errors import Cancelled, EngineError, ModelRefused
from ...model_files.artifact import PORTABLE
from ...model_files.cache_folder import CacheFolder
from ...verification.order import Reference, ReferenceRequest
from ..kernel_cache import KernelsRequest
from ..shared_kernels import KernelCaches
from .builder import BuildOptions, PlanRequest, find

log = logging.getLogger("greenlane.engines")

COMMAND = (sys.executable, "-P", "-m", "engines.tensorrt.build_child")
"""Starts a child. -P: do not import from the working directory."""

REFERENCE = (sys.executable, "-P", "-m", "engines.onnxruntime.reference_child")
"""Starts a child that computes a reference."""

REFERENCE_LIMIT = 60.0
"""Seconds that a reference may take: the first request of new shapes waits for it."""

TIME_LIMIT = 900.0
"""Seconds that a build may take by default."""

_LOG_INTERVAL = 10.0
"""Seconds after which the progress is logged again, even without another 10 %."""

_LAST_LINES = 3
"""Lines of the child's output that an error quotes when it dies."""


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """The order to a child, pickled to its standard input.

    `gpu` is the ordinal of the GPU that it may use, None for none. `cores` are the host's cores that it may run on, empty for
    those of its parent. `parent` is the parent's process id. `is_idle`: nothing is served from that GPU.
    """

    request: PlanRequest | KernelsRequest | ReferenceRequest
    gpu: int | None
    cores: frozenset[int]
    parent: int
    is_idle: bool = True

    @property
    def path(self) -> Path:
        """The file that is being worked on."""
        return self.request.plan_path if isinstance(self.request, KernelsRequest) else self.request.onnx_path

    def pickled(self) -> bytes:
        """What the child reads. One that computes a reference has nothing of this package to import."""
        if isinstance(self.request, ReferenceRequest):
            return pickle.dumps((self.request, self.cores, self.parent))
        return pickle.dumps(self)


class Builds:
    """Runs builds in parallel; requests for the same file and options share one build, and those for the same kernels one
    compilation, whatever partitions they are for. Any thread may call.

    `cache` is where plans and compiled kernels are kept; by default, in each model's folder. `time_limit` is in seconds, 0 for
    none. `command` starts the child. Children are killed when this process ends, however it does. `compiles`: compile kernels
    in children too, where the library compiles at run time; otherwise the process that binds an engine compiles. `is_idle`:
    whether nothing is served from the GPU yet; a library that times kernels on it builds only then.
    """

    def __init__(
        self,
        cache: CacheFolder | None = None,
        time_limit: float = TIME_LIMIT,
        command: Sequence[str] = COMMAND,
        compiles: bool = False,
        is_idle: Callable[[], bool] = lambda: True,
    ) -> None:
        self.cache = cache
        self.compiles = compiles
        self.kernels = KernelCaches()
        """Those of the engines that were built here or are kept in its cache."""
        self._time_limit = time_limit
        self._command = tuple(command)
        self._is_idle = is_idle
        self._cores: frozenset[int] = frozenset()
        self._cores_if_idle: frozenset[int] = frozenset()
        self._changing = Lock()
        self._running: dict[bytes, Future[Path]] = {}
        self._failed: dict[bytes, EngineError] | None = None
        self._expected: WeakValueDictionary[Hashable, Future[Reference]] = WeakValueDictionary()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def set_affinity(self, cores: Iterable[int], if_idle: Iterable[int] = ()) -> None:
        """Run builds only on these cores of the host, from the next one on; while nothing is served from the GPU, also on those
        of `if_idle`.
        """
        self._cores, self._cores_if_idle = frozenset(cores), frozenset(if_idle)

    def cores(self) -> int:
        """How many cores a build may run on now."""
        return len(self._cores_now(self._is_idle()) or os.sched_getaffinity(0))

    def plan(
        self,
        path: Path,
        options: BuildOptions,
        library: str,
        version: str,
        device: str = "",
        gpu: int = 0,
        trusting: bool = True,
    ) -> Path:
        """The engine file for a model's file, built unless the cache has it. Blocks, without the GIL.

        A child process is started unless it was found before and nothing has changed since; not `trusting`, in any case: it
        reads the whole file, and builds it again if it is damaged.

        `library` and `version` are those that will load it, `device` is the GPU where the plan depends on it, and `gpu` its
        ordinal. Raises ModelRefused with the reason; if the child died or took too long, with its last lines. Raises Cancelled
        once this is closed.
        """
        folder = self.cache.path() if self.cache else path.parent / ".greenlane"
        request = PlanRequest(path, folder, options, library, version, device)
        if trusting and (known := find(request)):
            return known
        needed = None if library in PORTABLE else gpu
        return self._result_of(self._order(request, needed))

    def compile_kernels(self, request: KernelsRequest, gpu: int) -> None:
        """Have kernels compiled and cached. Blocks, without the GIL. Raises ModelRefused and Cancelled as `plan` does.

        Until it has ended, the child has a context of its own on the GPU, and a second copy of the model in its memory.
        """
        self._result_of(self._order(request, gpu))

    @contextmanager
    def once(self) -> Iterator[None]:
        """In the block, what has failed is not tried again: the next request for it raises the same at once."""
        self._failed = {}
        try:
            yield
        finally:
            self._failed = None

    def expected(self, what: Hashable, future: "Future[Reference]") -> "Future[Reference]":
        """The reference of an ONNX file and shapes that is awaited somewhere, or else this one from now on."""
        with self._changing:
            return self._expected.setdefault(what, future)

    def compute_reference(self, request: ReferenceRequest) -> None:
        """Have ONNX Runtime answer random inputs. Blocks, without the GIL, for seconds, at most REFERENCE_LIMIT.

        Raises ModelRefused and Cancelled as `plan` does.
        """
        self._result_of(self._order(request, None))

    def close(self) -> None:
        """Kill every build and refuse new ones. Does not wait for the threads that requested them."""
        with self._changing:
            self._closed = True
            for child in self._children:
                _kill(child)

    def _order(self, request: PlanRequest | KernelsRequest | ReferenceRequest, gpu: int | None) -> BuildOrder:
        is_idle = self._is_idle()
        return BuildOrder(request, gpu, self._cores_now(is_idle), os.getpid(), is_idle)

    def _cores_now(self, is_idle: bool) -> frozenset[int]:
        return self._cores | self._cores_if_idle if is_idle and self._cores else self._cores

    def _result_of(self, order: BuildOrder) -> Path:
        key = pickle.dumps((_identity(order.request), order.gpu))
        if error := (self._failed or {}).get(key):
            raise type(error)(*error.args)
        future, is_first = self._join(key)
        if is_first:
            self._run_and_publish(future, order)
        try:
            return future.result()
        except EngineError as error:  # Several threads must not raise the same object.
            if (failed := self._failed) is not None:
                failed[key] = error
            raise type(error)(*error.args) from None

    def _join(self, key: bytes) -> tuple[Future[Path], bool]:
        """The result of the build with this key, and whether the caller has to run the build."""
        with self._changing:
            is_first = key not in self._running
            future = self._running.setdefault(key, Future())
            if is_first:
                future.add_done_callback(lambda _: self._running.pop(key))
            return future, is_first

    def _run_and_publish(self, future: "Future[Path]", order: BuildOrder) -> None:
        """Run the build and set the future's result. Other threads wait for it, so it is set even if this is interrupted."""
        path = order.path
        try:
            found = self._build(order)
        except EngineError as error:
            future.set_exception(Cancelled(f"{path}: {_CLOSING}") if self._closed else error)
        except BaseException as error:
            future.set_exception(Cancelled(f"{path}: the build was cancelled: {error!r}"))
            raise
        else:
            future.set_result(found)

    def _build(self, order: BuildOrder) -> Path:
        with self._child(order) as child:
            kind = _KINDS[type(order.request)]
            limit = REFERENCE_LIMIT if isinstance(order.request, ReferenceRequest) else self._time_limit
            monitor = _ChildMonitor(order.path, limit, kind)
            monitor.follow(child, order.pickled())
            return monitor.verdict(child)

    @contextmanager
    def _child(self, order: BuildOrder) -> Iterator["subprocess.Popen[bytes]"]:
        """A child that has just been started; it is killed when the block ends. Raises ModelRefused, Cancelled."""
        path = order.path
        with self._changing:
            if self._closed:
                raise Cancelled(f"{path}: {_CLOSING}")
            try:
                child = subprocess.Popen(
                    [*(REFERENCE if isinstance(order.request, ReferenceRequest) else self._command), str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=_environment(order.gpu),
                    start_new_session=True,  # Ctrl-C at the terminal is sent to this process only, which ends the child.
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


_CLOSING = "the build was cancelled, as this process is ending"


class _Kind(NamedTuple):
    """The words for one kind of work in logs and errors; `advice` is what to do if it fails."""

    noun: str
    doing: str
    done: str
    advice: str
    allow: str = "allow it more (models.build_timeout), or "


_SEPARATELY = "build it with `greenlane build`, and serve the .plan"
_BUILD = _Kind("build", "building it", "built", _SEPARATELY)
_COMPILATION = _Kind(
    "compilation", "compiling its kernels", "compiled its kernels", "they are compiled when the model is bound"
)


_REFERENCE = _Kind("reference", "computing a reference", "computed a reference", "its shapes are not verified", "")
_KINDS: Mapping[type, _Kind] = MappingProxyType(
    {PlanRequest: _BUILD, KernelsRequest: _COMPILATION, ReferenceRequest: _REFERENCE}
)


class _ChildMonitor:
    """Reads a child's messages, one JSON object a line. Other output is kept to be quoted in errors."""

    def __init__(self, path: Path, time_limit: float, kind: _Kind) -> None:
        self._path = path
        self._kind = kind
        self._limit = time_limit or float("inf")
        self._begun = time.monotonic()
        self._logged = (-1, 0.0)
        self._progress = "before it began, while it read the model or waited for another process that builds the same"
        self._lines: deque[str] = deque(maxlen=50)
        self._built: Path | None = None
        self._refused: str | None = None
        self._stdout_rest = self._stderr_rest = b""

    def follow(self, child: "subprocess.Popen[bytes]", order: bytes) -> None:
        """Send the child its order and read its output until it closes it. Raises ModelRefused at the time limit."""
        assert child.stdin
        assert child.stdout
        assert child.stderr
        with suppress(BrokenPipeError), child.stdin:
            child.stdin.write(order)
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ, self._read_stdout)
            selector.register(child.stderr, selectors.EVENT_READ, self._read_stderr)
            while selector.get_map():
                for key, _ in selector.select(min(self._time_left(), _LOG_INTERVAL)):
                    data = os.read(key.fd, 1 << 16)
                    key.data(data)
                    if not data:
                        selector.unregister(key.fileobj)
        with suppress(subprocess.TimeoutExpired):
            child.wait(min(self._time_left(), _LOG_INTERVAL))

    def verdict(self, child: "subprocess.Popen[bytes]") -> Path:
        """The plan's path. Raises ModelRefused."""
        if self._refused is not None:
            raise ModelRefused(self._refused)
        if self._built is None or child.returncode:
            for line in self._lines:
                log.warning("%s: the %s: %s", self._path, self._kind.noun, line)
            exit_text = f"the {self._kind.noun} {_exit_text(child.returncode)} {self._progress}"
            raise ModelRefused(f"{self._path}: {exit_text}{self._last_lines()}; {self._kind.advice}")
        return self._built

    def _time_left(self) -> float:
        """Seconds until the time limit. Raises ModelRefused if it has passed."""
        left = self._begun + self._limit - time.monotonic()
        if left <= 0:
            raise ModelRefused(
                f"{self._path}: the {self._kind.noun} took more than {self._limit:g} s and was killed "
                f"{self._progress}{self._last_lines()}; {self._kind.allow}{self._kind.advice}"
            )
        return left

    def _read_stdout(self, data: bytes) -> None:
        *lines, self._stdout_rest = (self._stdout_rest + data).split(b"\n")
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                self._lines.append(line.decode(errors="replace"))

    def _read_stderr(self, data: bytes) -> None:
        *lines, self._stderr_rest = (self._stderr_rest + data).split(b"\n")
        if not data:
            lines.append(self._stderr_rest)
        self._lines.extend(line.decode(errors="replace") for line in lines if line.strip())

    def _take(self, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "begun":  # Waiting for another process that builds the same does not count.
                self._begun = time.monotonic()
                log.info("%s: %s in process %s", self._path, self._kind.doing, message["process"])
            case "step":
                self._progress = f"at {message['share']:.0%} ({message['phase']})"
                self._log_progress(message["share"])
            case "log":
                about = "" if str(self._path) in message["text"] else f"{self._path}: "
                log.log(message["level"], "%s%s", about, message["text"])
                if message["level"] >= logging.WARNING:
                    self._lines.append(message["text"])
            case "built":
                self._built = Path(message["path"])
                if message["new"]:
                    took = f"{time.monotonic() - self._begun:.1f} s{_used(message.get('cpu', 0), message.get('memory', 0))}"
                    log.info("%s: %s in %s", self._path, self._kind.done, took)
            case "refused":
                self._refused = message["text"]

    def _log_progress(self, share: float) -> None:
        tenth, now = int(share * 10), time.monotonic()
        if tenth > self._logged[0] or now - self._logged[1] >= _LOG_INTERVAL:
            self._logged = tenth, now
            log.info("%s: %s: %s", self._path, self._kind.doing, self._progress)

    def _last_lines(self) -> str:
        lines = " / ".join(map(str.strip, list(self._lines)[-_LAST_LINES:]))
        return f", after printing: {lines}" if lines else ""


def _used(cpu: float, memory: float) -> str:
    """What a child took, for the log: "" where it did not say."""
    return f" ({cpu:.1f} s of CPU, at most {memory / 2**20:.0f} MiB)" if cpu else ""


def encode(kind: str, **content: Any) -> bytes:
    """A message from the child, as `_ChildMonitor` reads it."""
    return json.dumps({"kind": kind, **content}).encode() + b"\n"


def _environment(gpu: int | None) -> dict[str, str]:
    """This process's environment with its module search path, and with the GPU hidden where none is needed.

    A child is no client of an MPS daemon: there it would count, and what it breaks would end all others.
    """
    found = {**os.environ, "PYTHONPATH": search_path()}
    stay_outside(found)
    return found if gpu is not None else {**found, "CUDA_VISIBLE_DEVICES": ""}


def _exit_text(status: int | None) -> str:
    """How a child ended."""
    if status is None:
        return "closed its output without an answer"
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else "unknown"
    memory = ", perhaps for lack of memory," if -status == signal.SIGKILL else ""
    return f"was killed by signal {-status} ({name}){memory}"


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """Kill the child and its descendants, unless it has ended."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _identity(request: PlanRequest | KernelsRequest | ReferenceRequest) -> object:
    """Equal for requests that share one child."""
    if isinstance(request, KernelsRequest):
        return request.settings.cache_path, request.key
    return request, _stamp(request.onnx_path)


def _stamp(path: Path) -> tuple[int, ...]:
    """Identifies this version of a file; empty where it does not exist, which the child will report."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
