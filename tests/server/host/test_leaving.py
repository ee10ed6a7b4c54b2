"""How a process ends: what still runs at its exit, what no longer does, and with which status."""

import os
import signal
import subprocess
import sys
from pathlib import Path

FREED = """
class Freed:
    def __del__(self, kill=os.kill, own=os.getpid(), number=signal.SIGSEGV):
        kill(own, number)
"""
"""What an object of a library in C may do that is freed after the globals of its module: crash the process."""


def ended(code: str, out: int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    """A new interpreter that ran this code, with buffered output. `out` is its standard output, by default a pipe."""
    begin = "import atexit, logging, os, signal, sys, threading\nfrom server.host.leaving import end_now, leave\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", begin + code],
        stdout=out, stderr=subprocess.PIPE, env=environment, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_nothing_is_freed_by_the_interpreter_that_ends() -> None:
    plant = f"{FREED}\nfreed = Freed()\n"
    assert ended(plant + "sys.exit(3)").returncode == -signal.SIGSEGV
    assert ended(plant + "leave(3)").returncode == 3


def test_what_was_printed_arrives_in_a_pipe() -> None:
    found = ended("sys.stdout.write('out'); sys.stderr.write('err'); leave(0)")
    assert (found.returncode, found.stdout, found.stderr) == (0, "out", "err")


def test_threads_are_waited_for_before_what_is_registered_at_exit_runs_the_last_first() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
def when_main_ends():
    threading.main_thread().join()
    print("thread")
atexit.register(print, "first registered")
atexit.register(print, "last registered")
threading.Thread(target=when_main_ends).start()
ThreadPoolExecutor().submit(print, "executor")
leave(0)
"""
    assert ended(code).stdout.splitlines() == ["executor", "thread", "last registered", "first registered"]


def test_log_handlers_are_flushed_and_finalizers_of_objects_run_once() -> None:
    code = """
import weakref
from logging.handlers import MemoryHandler
logging.getLogger().addHandler(MemoryHandler(100, target=logging.StreamHandler(sys.stdout)))
logging.getLogger().warning("kept until the end")
class Cache: pass
cache = Cache()
weakref.finalize(cache, print, "saved")
leave(0)
"""
    assert ended(code).stdout.splitlines() == ["saved", "kept until the end"]


def test_a_function_at_exit_that_fails_is_reported_and_the_status_stays() -> None:
    found = ended("atexit.register(print, 'next'); atexit.register(lambda: 1 / 0); leave(70)")
    assert (found.returncode, found.stdout) == (70, "next\n")
    assert "ZeroDivisionError" in found.stderr


def test_lost_output_leads_to_the_status_that_python_has_for_it() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended("print('lost'); leave(0)", writer).returncode == 120
    finally:
        os.close(writer)


def test_without_standard_streams_the_status_stays() -> None:
    assert ended("sys.stdout = None; sys.stderr.close(); leave(4)").returncode == 4


def test_ctrl_c_while_a_thread_is_waited_for_ends_the_process_at_once() -> None:
    code = """
threading.Thread(target=threading.Event().wait).start()
def when_main_ends():
    threading.main_thread().join()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=when_main_ends).start()
leave(5)
"""
    assert ended(code).returncode == 5


def test_a_timer_that_fires_while_the_process_leaves_lets_it_finish() -> None:
    code = """
def at_exit():
    timer = threading.Thread(target=end_now, args=[9], daemon=True)
    timer.start()
    timer.join(0.3)  # Long enough for it to end the process.
    print("saved", flush=True)
atexit.register(at_exit)
leave(0)
"""
    found = ended(code)
    assert (found.returncode, found.stdout) == (0, "saved\n")


def test_a_process_that_hangs_while_it_leaves_is_ended() -> None:
    code = """
from server.host import leaving
leaving._PATIENCE = 0.1
def at_exit():
    threading.Thread(target=end_now, args=[9], daemon=True).start()
    threading.Event().wait()
atexit.register(at_exit)
leave(0)
"""
    assert ended(code).returncode == 9


def test_a_process_is_ended_at_once_from_any_thread() -> None:
    code = """
atexit.register(print, "never")
threading.Thread(target=end_now, args=[9]).start()
threading.Event().wait()
"""
    found = ended(code)
    assert (found.returncode, found.stdout) == (9, "")


def test_coverage_of_a_process_that_leaves_is_kept(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from server.host.leaving import leave\nleave(0)\n")
    (tmp_path / "coverage").write_text("[run]\npatch = _exit\ndata_file = data\n")
    words = [sys.executable, "-m", "coverage", "run", "--rcfile", "coverage", str(program)]
    subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()}, timeout=60, check=True)
    shown = subprocess.run(
        [sys.executable, "-m", "coverage", "report", "--rcfile", "coverage", "--include", str(program)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "100%" in shown.stdout
