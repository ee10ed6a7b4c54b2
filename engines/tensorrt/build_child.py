"""`python -m engines.tensorrt.build_child`: one build or one compilation of kernels, for the process that started this one.

See `building.builds` for why. The order comes on standard input, and messages go to standard output, one JSON object a line.
What a library prints goes to standard error.
"""

import logging
import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from threading import Lock

from partitions import PartitionError

from ..children import die_with_parent, lower_priority
from ..errors import EngineError, ModelRefused
from .api import TensorRT, find_tensorrt
from .building.builder import PlanRequest, build, find_or_build, timings_file
from .building.builds import encode
from .building.progress import Progress, Step
from .kernel_cache import KernelsRequest, cached_kernel_bytes

log = logging.getLogger("greenlane.engines")

_STEP_INTERVAL = 1.0
"""Seconds between two messages about the same per cent."""

TIMES_KERNELS = (
    "TensorRT builds it by timing kernels on the GPU, which would delay the tenants that it serves, and they the timings; "
    "build it ahead with `greenlane build` and serve the .plan, or start the server again, which builds before it is ready"
)

Send = Callable[[bytes], None]


def main() -> int:
    """Execute the order and return the exit status, 0 if it was answered."""
    order = pickle.load(sys.stdin.buffer)
    die_with_parent(order.parent)
    send = redirect_output()
    logging.getLogger("greenlane").addHandler(Relay(send))
    logging.getLogger("greenlane").setLevel(logging.INFO)
    lower_priority(order.cores)
    if isinstance(order.request, KernelsRequest):
        return answer_kernels(order.request, order.gpu, send)
    return answer_plan(order.request, order.gpu, order.is_idle, send)


def redirect_output() -> Send:
    """Keep standard output for messages, and redirect what is printed to standard error.

    Returns the function that sends a message.
    """
    messages, lock = os.dup(1), Lock()  # The library's threads log as well.
    os.dup2(2, 1)

    def send(message: bytes) -> None:
        with lock:
            while message:
                message = message[os.write(messages, message) :]

    return send


def use_idle_time() -> None:
    """Use only processor and disk time that nothing else wants: SCHED_IDLE implies the idle class of both.

    New threads inherit it.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def answer_kernels(request: KernelsRequest, gpu: int, send: Send) -> int:
    """Compile the kernels, unless another process does so now, and send that they are cached or why not.

    This thread has a low priority (`lower_priority`) but does not use idle time only, since it holds locks of the GPU's
    driver.
    """
    from filelock import FileLock  # Only installed where TensorRT is.

    file, new = Path(request.settings.cache_path or os.devnull), False
    try:
        with FileLock(f"{file}.compiling"):
            if not cached_kernel_bytes(file, request.key):
                new = True
                send(encode("begun", process=os.getpid()))
                compile_kernels(request, gpu)
    except (EngineError, PartitionError) as error:
        send(encode("refused", text=f"{request.plan_path}: its kernels were not compiled: {error}"))
    except Exception as error:
        log.exception("unexpected error while compiling kernels")
        send(encode("refused", text=f"{request.plan_path}: its kernels were not compiled: {error!r}"))
    else:
        send(encode("built", path=str(request.plan_path), new=new, **used()))
    return 0


def answer_plan(request: PlanRequest, gpu: int | None, is_idle: bool, send: Send) -> int:
    """Find or build the plan, and send where it is or why there is none: also if the GPU that it needs is not idle."""
    built = False

    def make(onnx: bytes) -> bytes:
        nonlocal built
        if gpu is not None and not is_idle:
            raise ModelRefused(f"{request.onnx_path}: {TIMES_KERNELS}")
        built = True
        use_idle_time()
        send(encode("begun", process=os.getpid()))
        library, timings = _library(request, gpu), timings_file(request)
        return build(onnx, request.options, _progress_sender(send), api=library, path=request.onnx_path, timings=timings)

    try:
        path = find_or_build(request, make)
    except EngineError as error:
        send(encode("refused", text=str(error)))
    except Exception as error:
        log.exception("unexpected error while building a plan")
        send(encode("refused", text=f"{request.onnx_path}: its builder failed: {error!r}"))
    else:
        send(encode("built", path=str(path), new=built, **used()))
    return 0


def used(root: Path = Path("/")) -> dict[str, float]:
    """The seconds of CPU time that this process has taken, and the most bytes of memory that it had; no memory where the
    system does not say.
    """
    taken, most = os.times(), 0
    with suppress(OSError):
        lines = (line.split() for line in (root / "proc/self/status").read_text().splitlines())
        most = next((int(words[1]) * 1024 for words in lines if words and words[0] == "VmHWM:"), 0)
    return {"cpu": taken.user + taken.system, "memory": most}


def _library(request: PlanRequest, gpu: int | None) -> TensorRT:
    """The library that the request names. If it measures on a GPU, that one becomes current in this thread."""
    if gpu is not None:
        from cuda.core import Device  # Not installed where no library needs a GPU to build.

        Device(gpu).set_current()
    api = find_tensorrt([request.library])
    if api.version != request.version:
        raise EngineError(f"{request.onnx_path}: {api} builds it, but {request.version} would load it; restart the server")
    return api


def _progress_sender(send: Send) -> Progress:
    """Sends every per cent, and at least one message a second."""
    last = (-1, 0.0)

    def report(step: Step) -> bool:
        nonlocal last
        per_cent, now = int(step.share * 100), time.monotonic()
        if per_cent > last[0] or now - last[1] >= _STEP_INTERVAL:
            last = per_cent, now
            send(encode("step", phase=step.phase, share=step.share))
        return True

    return report


def compile_kernels(request: KernelsRequest, gpu: int) -> None:
    """Bind the plan to a partition of this process, which compiles and caches the kernels of everything it is warmed up with.

    `gpu` is the ordinal. Blocks, perhaps for a minute. Raises ModelRefused, DeviceUnavailable, PartitionError.
    """
    from partitions import open_device  # A process that only builds does not need CUDA.

    from .load import load_tensorrt

    with (
        closing(open_device("cuda", index=gpu, granule_sms=request.granule_sms)) as device,
        closing(device.carve(range(request.granules))) as partition,
        closing(load_tensorrt(request.plan_path, device, request.settings)) as engine,  # type: ignore[arg-type]
        closing(engine.bind(partition)),
    ):
        return


class Relay(logging.Handler):
    """Sends log records to the process that serves, which logs them."""

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._say = send

    def emit(self, record: logging.LogRecord) -> None:
        self._say(encode("log", level=record.levelno, text=self.format(record)))


if __name__ == "__main__":
    sys.exit(main())
