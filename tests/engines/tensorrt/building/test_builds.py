"""Builds in real child processes: the library's builder where it is installed, and children that fail."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from engines import RuntimeSettings
from engines.errors import Cancelled, ModelRefused
from engines.model_files import known_plans
from engines.model_files.cache_folder import CacheFolder
from engines.tensorrt.api import TensorRT
from engines.tensorrt.build_child import used
from engines.tensorrt.building.builder import BuildOptions, build, build_cached
from engines.tensorrt.building.builds import Builds
from engines.tensorrt.kernel_cache import CacheKey, KernelsRequest
from tests.end_to_end.wire import until

from ...small import ADD, BATCHES, model

OPTIONS = BuildOptions()
DIES = "import os, signal, sys; print('my last words', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(model(ADD))
    return path


@pytest.fixture
def endless(tmp_path: Path, rtx: TensorRT) -> Iterator[Path]:
    """A model file of which a build never ends: another process seems to make that plan, as its lock is held."""
    path = tmp_path / "endless.onnx"
    path.write_bytes(model(ADD))
    with ExitStack() as locks:
        for by in (builds(tmp_path), Builds()):
            made = plan(by, path)
            locks.enter_context(FileLock(f"{made}.lock"))
            made.unlink()
        yield path


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    before = children()
    yield
    until(lambda: children() <= before)


def children(parent: int | None = None) -> set[int]:
    """The children of a process, by default this one, zombies among them."""
    parent = os.getpid() if parent is None else parent
    tasks = Path(f"/proc/{parent}/task")
    while True:
        with suppress(FileNotFoundError, ProcessLookupError):  # A thread that ends meanwhile leaves its children to another.
            return {int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()}


def builds(folder: Path, **options: Any) -> Builds:
    return Builds(CacheFolder([folder / "cache"]), **options)


def plan(by: Builds, path: Path, options: BuildOptions = OPTIONS) -> Path:
    return by.plan(path, options, "tensorrt_rtx", "1.6.1.120")


def saying(script: str) -> tuple[str, ...]:
    """The command of a child that is this script."""
    return sys.executable, "-c", script


def starts(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The processes that began to build."""
    found = (re.search(r"building it in process (\d+)", message) for message in list(caplog.messages))
    return [int(match[1]) for match in found if match]


def test_a_model_is_built_by_another_process_into_the_cache_and_only_once(
    tmp_path: Path, source: Path, rtx: TensorRT, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "greenlane.engines")
    path = plan(builds(tmp_path), source)
    assert path.parent == tmp_path / "cache"
    assert path.read_bytes() == build(model(ADD), path=source)
    written = path.stat().st_mtime_ns
    assert plan(builds(tmp_path), source) == path
    assert path.stat().st_mtime_ns == written
    assert len(starts(caplog)) == 1
    assert os.getpid() not in starts(caplog)


def test_a_plan_that_was_found_before_needs_no_process(
    tmp_path: Path, source: Path, rtx: TensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_plans, "SETTLED", 0.0)
    path = build_cached(source, tmp_path / "cache")
    without = builds(tmp_path, command=("/nonexistent",))
    assert plan(without, source) == path
    with pytest.raises(ModelRefused, match="no process can be started"):
        plan(without, source, BuildOptions(optimization_level=1))
    source.write_bytes(model(BATCHES))
    with pytest.raises(ModelRefused, match="no process can be started"):
        plan(without, source)
    without.close()
    source.write_bytes(model(ADD))
    assert plan(builds(tmp_path), source) == path


def test_the_log_shows_the_progress_and_the_notes_of_a_build(
    tmp_path: Path, rtx: TensorRT, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "greenlane.engines")
    path = tmp_path / "rows.onnx"
    path.write_bytes(model(BATCHES))
    plan(builds(tmp_path), path, BuildOptions(max_batch=4))
    messages = [message for message in caplog.messages if message.startswith(f"{path}: ")]
    shares = [int(match[1]) for message in messages if (match := re.search(r"building it: at (\d+)% \(", message))]
    assert shares == sorted(shares)
    assert 2 <= len(shares) <= 11 + 60, "a line for every tenth, and every ten seconds"
    assert f"{path}: profile 0: no range given for input 'x': built for 1x4..4x4..4x4" in messages
    assert re.search(r"built in \d+\.\d s \(\d+\.\d s of CPU, at most [1-9]\d+ MiB\)$", messages[-1])


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_builder_that_dies_refuses_its_model_and_says_how_far_it_was(
    tmp_path: Path, source: Path, rtx: TensorRT, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    """The real builder, killed while it builds."""
    caplog.set_level(logging.INFO, "greenlane.engines")
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(plan, builds(tmp_path), source)
        until(lambda: bool(starts(caplog)))
        os.kill(starts(caplog)[0], number)
        with pytest.raises(
            ModelRefused, match=f"model.onnx: the build was killed by signal {number.value} \\({number.name}\\)"
        ):
            building.result()
    assert not list((tmp_path / "cache").glob("*.plan*.tmp"))
    assert plan(builds(tmp_path), source).exists(), "the next build is not in the way of the last"


def test_a_builder_that_crashes_is_reported_with_its_last_lines_and_advice(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ModelRefused) as refused:
        plan(builds(tmp_path, command=saying(DIES)), source)
    said = str(refused.value)
    assert said.startswith(f"{source}: the build was killed by signal 11 (SIGSEGV)")
    assert said.endswith("after printing: my last words; build it with `greenlane build`, and serve the .plan")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("raise SystemExit(3)", "ended with status 3"),
        ("raise ValueError('a surprise')", "ended with status 1 .*ValueError: a surprise"),
        ("print('no answer')", "ended with status 0 .*no answer"),
        ("import os; os.close(1); os.close(2)", "ended with status 0"),
        ('print(\'{"kind": "refused", "text": "too large"}\')', "^too large$"),
    ],
)
def test_a_child_that_ends_without_a_plan_is_a_refusal(tmp_path: Path, source: Path, script: str, why: str) -> None:
    with pytest.raises(ModelRefused, match=why):
        plan(builds(tmp_path, command=saying(script)), source)


def test_a_build_that_outlives_its_limit_is_ended(tmp_path: Path, endless: Path) -> None:
    with pytest.raises(ModelRefused, match=r"took more than 0.5 s and was killed .*allow it more \(models.build_timeout\)"):
        plan(builds(tmp_path, time_limit=0.5), endless)


def test_the_time_limit_begins_when_the_builder_says_that_it_began(tmp_path: Path, source: Path) -> None:
    begun = json.dumps({"kind": "begun", "process": 1})
    script = f"import signal; print({begun!r}, flush=True); signal.pause()"
    with pytest.raises(ModelRefused, match=r"took more than 0.5 s and was killed"):
        plan(builds(tmp_path, time_limit=0.5, command=saying(script)), source)


def test_without_a_limit_a_build_is_never_ended(tmp_path: Path, source: Path, rtx: TensorRT) -> None:
    assert plan(builds(tmp_path, time_limit=0), source).exists()


def test_a_file_that_is_asked_for_twice_at_once_is_built_once(
    tmp_path: Path, source: Path, rtx: TensorRT, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for twice by one process, and by two processes."""
    caplog.set_level(logging.INFO, "greenlane.engines")
    one, other = builds(tmp_path), builds(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda by: plan(by, source), [one, one, other, other]))
    assert len(paths) == 1
    assert len(starts(caplog)) == 1


def test_concurrent_requests_for_a_build_that_fails_share_its_error(tmp_path: Path, endless: Path) -> None:
    by, before = builds(tmp_path, time_limit=1.0), children()
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(plan, by, endless) for _ in range(3)]
        until(lambda: len(children() - before) == 1)
        errors = [asked.exception() for asked in asking]
    assert len({str(error) for error in errors}) == 1
    assert len({id(error) for error in errors}) == 3, "threads that raise one object add to one traceback"
    assert all(isinstance(error, ModelRefused) for error in errors)


def test_kernels_are_compiled_for_each_gpu_that_needs_them(tmp_path: Path) -> None:
    """Two GPUs refuse each other's, so the second one must not wait for the first one's and then find none."""
    by, before = Builds(command=(sys.executable, "-c", "import time; time.sleep(600)")), children()
    request = KernelsRequest(tmp_path / "m.plan", RuntimeSettings(), 1, 8, CacheKey("m", "x"))
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(by.compile_kernels, request, gpu) for gpu in (0, 1, 1)]
        until(lambda: len(children() - before) == 2)
        by.close()
        assert all(isinstance(asked.exception(), Cancelled) for asked in asking)


def test_closing_ends_builds_and_refuses_new_ones(tmp_path: Path, endless: Path, source: Path) -> None:
    by, before = builds(tmp_path), children()
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(plan, by, endless) for _ in range(2)]
        until(lambda: len(children() - before) == 1)
        by.close()
        for asked in asking:
            with pytest.raises(Cancelled, match=r"endless.onnx: the build was cancelled, as this process is ending"):
                asked.result()
    with pytest.raises(Cancelled, match=r"model.onnx: the build was cancelled"):
        plan(by, source)
    by.close()


SERVES = """
import sys
import threading
from pathlib import Path
from engines.tensorrt.building.builds import Builds
from engines.tensorrt.kernel_cache import KernelsRequest
from engines.tensorrt.kernel_cache import CacheKey
from engines.tensorrt.building.builder import BuildOptions
Builds().plan(Path(sys.argv[1]), BuildOptions(), "tensorrt_rtx", "1.6.1.120")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_child_ends_with_the_process_that_started_it(endless: Path, number: signal.Signals) -> None:
    """The parent is killed, or interrupted at a terminal."""
    with subprocess.Popen([sys.executable, "-c", SERVES, str(endless)], stderr=subprocess.DEVNULL) as serving:
        until(lambda: bool(children(serving.pid)))
        (child,) = children(serving.pid)
        serving.send_signal(number)
        serving.wait()
        until(lambda: not Path(f"/proc/{child}/stat").exists() or _state(child) == "Z")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


HUMBLE = """
import json, os, pickle, sys
from engines.children import die_with_parent, lower_priority
from engines.tensorrt.build_child import use_idle_time
order = pickle.load(sys.stdin.buffer)
die_with_parent(order.parent)
lower_priority(order.cores)
use_idle_time()
found = [os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE, sorted(os.sched_getaffinity(0)),
         os.environ.get("CUDA_VISIBLE_DEVICES"), order.gpu]
print(json.dumps({"kind": "refused", "text": json.dumps(found)}))
"""


def asked_of(by: Builds, path: Path, library: str) -> list[Any]:
    """What the script HUMBLE reports: niceness, whether its scheduling class is idle, cores, the GPUs it sees, and the one
    it may use.
    """
    with pytest.raises(ModelRefused) as refused:
        by.plan(path, OPTIONS, library, "1", "", 3)
    return json.loads(str(refused.value))


def test_builds_run_at_idle_priority_on_their_cores(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    by, ours = builds(tmp_path, command=saying(HUMBLE)), sorted(os.sched_getaffinity(0))
    assert asked_of(by, source, "tensorrt_rtx") == [19, True, ours, "", None], "plans of this library need no GPU"
    by.set_affinity({ours[-1]})
    assert asked_of(by, source, "tensorrt") == [19, True, ours[-1:], "5,6", 3], "this one measures on the GPU it builds for"
    by.set_affinity({100_000})
    assert asked_of(by, source, "tensorrt")[:3] == [19, True, ours], "cores that are gone are no reason to fail"


def test_builds_have_more_cores_while_nothing_is_served(tmp_path: Path, source: Path) -> None:
    """At a start they are what the server waits for; later their cores are few, as others serve."""
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < 2:
        pytest.skip("needs two cores")
    serving = threading.Event()
    by = builds(tmp_path, command=saying(HUMBLE), is_idle=lambda: not serving.is_set())
    by.set_affinity(ours[:1], if_idle=ours[1:])
    assert (asked_of(by, source, "tensorrt_rtx")[2], by.cores()) == (ours, len(ours))
    serving.set()
    assert (asked_of(by, source, "tensorrt_rtx")[2], by.cores()) == (ours[:1], 1)
    serving.clear()
    by.set_affinity((), if_idle=ours[1:])
    assert asked_of(by, source, "tensorrt_rtx")[2] == ours, "those of this process, as none are set aside"
    assert by.cores() == len(ours)


def test_a_library_of_another_version_does_not_build(tmp_path: Path, source: Path, rtx: TensorRT) -> None:
    with pytest.raises(ModelRefused, match=r"builds it, but 0\.1 would load it; restart the server"):
        builds(tmp_path).plan(source, OPTIONS, "tensorrt_rtx", "0.1")


def test_a_file_that_is_no_model_is_refused_with_the_builder_s_error(tmp_path: Path, rtx: TensorRT) -> None:
    path = tmp_path / "junk.onnx"
    path.write_bytes(b"junk")
    with pytest.raises(ModelRefused, match=r"junk.onnx: not an ONNX file, or a truncated one"):
        plan(builds(tmp_path), path)
    with pytest.raises(ModelRefused, match=r"nothing.onnx: No such file or directory"):
        plan(builds(tmp_path), tmp_path / "nothing.onnx")


def test_a_cache_that_cannot_be_written_refuses_builds(
    tmp_path: Path, source: Path, rtx: TensorRT, caplog: pytest.LogCaptureFixture
) -> None:
    """A file where the directory should be stops root as well."""
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelRefused) as refused:
        plan(builds(tmp_path), source)
    why = "its plan cannot be kept in the cache directory: Not a directory; name a directory that can be written"
    assert str(refused.value).startswith(f"{source}: {why} (models.cache)")
    assert str(tmp_path / "cache") not in str(refused.value), "clients read it"
    assert any(f"nothing can be kept in {tmp_path / 'cache'} (Not a directory)" in message for message in caplog.messages)


def test_a_plan_that_is_there_is_found_without_writing_anything(tmp_path: Path, source: Path, rtx: TensorRT) -> None:
    path = plan(builds(tmp_path), source)
    lock = path.with_name(f"{path.name}.lock")
    lock.unlink(missing_ok=True)
    lock.mkdir()
    assert plan(builds(tmp_path), source) == path
    path.unlink()
    with pytest.raises(ModelRefused, match="its plan cannot be kept in the cache directory: "):
        plan(builds(tmp_path), source)


# The directory itself.


def test_the_first_writable_cache_directory_is_chosen_once_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "greenlane.engines")
    (tmp_path / "file").touch()
    candidates = [tmp_path / "file" / "cache", tmp_path / "a" / "b", tmp_path / "c"]
    folder = CacheFolder(candidates)
    assert not (tmp_path / "a").exists()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: folder.path(), range(4))) == {tmp_path / "a" / "b"}
    assert not list((tmp_path / "a" / "b").iterdir())
    assert not (tmp_path / "c").exists()
    said = f"built plans and compiled kernels are kept in {tmp_path}/a/b; not in {tmp_path}/file/cache (Not a directory)"
    assert caplog.messages == [said]


def test_without_a_writable_cache_directory_the_last_one_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    folder = CacheFolder([tmp_path / "file" / "one", tmp_path / "file"])
    assert folder.path() == tmp_path / "file"
    (message,) = caplog.messages
    assert message.startswith(
        f"nothing can be kept in {tmp_path}/file/one (Not a directory) or {tmp_path}/file (Not a directory)"
    )


def test_a_cache_folder_needs_at_least_one_directory() -> None:
    with pytest.raises(ValueError, match="at least one directory"):
        CacheFolder([])


def test_what_a_child_took_is_said_as_far_as_it_is_known(tmp_path: Path) -> None:
    assert used()["memory"] > 1 << 20
    assert set(used(tmp_path)) == {"cpu", "memory"}
    assert used(tmp_path)["memory"] == 0
