"""The tracer of driver calls, with a libcupti of the tests' and without a GPU."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.driver_trace.__main__ import Step, described
from benchmarks.driver_trace.library import SOURCE, DriverCall, Sample
from benchmarks.loading import Watcher
from partitions.c_library import compile_library

STUB = (Path(__file__).parents[1] / "cupti_stub.c",)
ROOT = Path(__file__).parents[2]
TRACED = """
import ctypes, sys, time
from benchmarks.driver_trace.library import Trace
stub = ctypes.CDLL(sys.argv[1])
trace = Trace()
trace.record_calls(sys.argv[1], least=20_000)
names = [ctypes.create_string_buffer(name) for name in (b"cuGraphLaunch", b"cuKernelGetFunction")]
stub.stub_call(names[0], ctypes.c_long(0))
stub.stub_call(names[1], ctypes.c_long(30_000_000))
trace.record_samples()
ends = time.process_time() + 0.2
while time.process_time() < ends: pass
trace.stop()
stub.stub_call(names[1], ctypes.c_long(30_000_000))
print([(call.name, call.ms >= 30) for call in trace.calls()])
print(any(library.startswith(("python", "libpython")) for sample in trace.samples() for library, _ in sample.stack))
"""


def test_calls_that_take_long_enough_and_stacks_of_busy_threads_are_noted() -> None:
    """In a process of its own: the tracer is used once."""
    command = [sys.executable, "-c", TRACED, str(compile_library(STUB))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[('cuKernelGetFunction', True)]", "True"]


def test_a_libcupti_that_is_none_is_refused() -> None:
    library = ctypes.CDLL(str(compile_library(SOURCE)))
    assert library.trace_calls(b"/nothing", ctypes.c_uint64(1), ctypes.c_uint64(1)) == -1


def test_a_slow_launch_is_said_to_be_beside_the_calls_that_went_on_during_it() -> None:
    watcher = Watcher(None)  # type: ignore[arg-type]  # Not started.
    watcher.rows = [(1.0, 0.1, 0.2), (1.5, 3.0, 3.1)]
    calls = [DriverCall("cuKernelGetFunction", 7, 1.4999, 1.503), DriverCall("cuMemAlloc", 8, 1.1, 1.1001)]
    samples = [Sample(1.2, 7, (("", ""), ("", ""), ("libcuda.so.1", "cuKernelGetFunction"), ("libtensorrt_rtx.so.1", "")))]
    lines = described(Step("bind", 0.9, 2.0, 0.5, 0.4), watcher, calls, samples, 7)
    assert lines[0] == "\n== bind: 1.100 s, CPU 0.500 s, of the loading thread 0.400 s"
    assert "  cuKernelGetFunction: 1 calls, 3.1 ms, longest 3.10 ms" in lines
    assert "  cuMemAlloc (another thread): 1 calls, 0.1 ms, longest 0.10 ms" in lines
    assert "  launch of 3.10 ms (3.00 in the call)" in lines
    assert "    beside cuKernelGetFunction of 3.10 ms, 3.00 ms of it" in lines
    assert lines[-1] == "  CPU: 100% libcuda < libtensorrt_rtx in cuKernelGetFunction"


@pytest.mark.parametrize("count", [0, 2])
def test_a_step_without_launches_is_described(count: int) -> None:
    watcher = Watcher(None)  # type: ignore[arg-type]
    assert len(described(Step("close", 0.9, 2.0, 0.5, 0.4), watcher, [], [], count)) == 2
