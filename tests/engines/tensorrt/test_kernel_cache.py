import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from hypothesis import given
from hypothesis import strategies as st

from engines.tensorrt.kernel_cache import CacheKey, CacheStatistics, combine, open_cache, within

ROOT = Path(__file__).parents[3]
KEY = CacheKey("5ea1", "TensorRT-RTX 1.6.1", "H100")


class Kernels:
    """A library's cache: a set of kernels. `merges` says whether taking in others keeps its own."""

    def __init__(self, *kernels: str, merges: bool = True, driver: str = "580") -> None:
        self.kernels = set(kernels)
        self._merges = merges
        self._driver = driver

    def serialize(self) -> memoryview | None:
        return memoryview(json.dumps([self._driver, sorted(self.kernels)]).encode()) if self.kernels else None

    def deserialize(self, blob: bytes) -> bool:
        driver, kernels = json.loads(blob)
        if driver == self._driver:
            self.kernels = self.kernels.union(kernels) if self._merges else set(kernels)
        return bool(driver == self._driver)


def keep(path: Path, *kernels: str, key: CacheKey = KEY) -> None:
    """Load the cache and save it with these kernels, as a process does that compiles them."""
    with open_cache(path, key) as cache:
        add(cache.materialize(Kernels), *kernels)


def kept(path: Path, key: CacheKey = KEY) -> set[str]:
    """The kernels that a process finds."""
    with open_cache(path, key) as cache:
        return kernels_of(cache.materialize(Kernels))


def kernels_of(library: object) -> set[str]:
    assert isinstance(library, Kernels)
    return library.kernels


def add(library: object, *kernels: str) -> None:
    kernels_of(library).update(kernels)


def test_kernels_are_found_by_the_next_process_in_directories_made_for_them(tmp_path: Path) -> None:
    """F48, F50."""
    path = tmp_path / "a" / "b" / "kernels"
    assert kept(path) == set()
    keep(path, "conv")
    assert kept(path) == {"conv"}
    assert sorted(file.name for file in path.parent.iterdir()) in (["kernels"], ["kernels", "kernels.lock"])


def test_a_missing_cache_file_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F48."""
    assert kept(tmp_path / "kernels") == set()
    assert not caplog.records


def test_an_empty_cache_is_not_saved(tmp_path: Path) -> None:
    keep(tmp_path / "kernels")
    with open_cache(tmp_path / "kernels", KEY):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def test_an_empty_blob_does_not_replace_what_is_there(path: Path) -> None:
    """F50."""
    keep(path, "conv")
    with open_cache(path, KEY) as cache:
        kernels_of(cache.materialize(Kernels)).clear()
    assert kept(path) == {"conv"}


def test_a_file_is_not_written_again_where_nothing_is_new(path: Path) -> None:
    keep(path, "conv")
    before = path.stat().st_ino
    assert kept(path) == {"conv"}
    assert path.stat().st_ino == before


@pytest.mark.parametrize("other", [KEY._replace(**{name: "other"}) for name in CacheKey._fields])
def test_engines_libraries_devices_and_namespaces_keep_apart_in_one_file(path: Path, other: CacheKey) -> None:
    """F56."""
    keep(path, "conv")
    keep(path, "gemm", key=other)
    assert (kept(path), kept(path, other)) == ({"conv"}, {"gemm"})


def test_two_processes_that_save_one_key_lose_nothing_over_several_saves(path: Path) -> None:
    """F56."""
    with open_cache(path, KEY) as first, open_cache(path, KEY) as second:
        add(first.materialize(Kernels), "one")
        add(second.materialize(Kernels), "two")
        first.save()
        second.save()
        assert kernels_of(second.materialize(Kernels)) == {"two"}  # The cache in use is left alone.
        add(first.materialize(Kernels), "three")
        first.save()
        add(second.materialize(Kernels), "four")
        second.save()
        add(second.materialize(Kernels), "five")
        second.save()
        assert kept(path) == {"one", "two", "three", "four", "five"}


SAVE = """
import sys
from pathlib import Path
from tests.engines.tensorrt.test_kernel_cache import KEY, keep
path, engine, kernel = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
keep(Path(path), kernel, key=KEY._replace(engine=engine))
"""


def test_many_processes_at_once_lose_nothing(path: Path) -> None:
    """F56."""
    jobs = [("a", "k0"), ("b", "k1"), ("a", "k2"), ("b", "k3")]
    commands = [[sys.executable, "-c", SAVE, str(path), *job] for job in jobs]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for command in commands
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    assert [process.returncode for process in processes] == [0] * len(jobs)
    assert kept(path, KEY._replace(engine="a")) == {"k0", "k2"}
    assert kept(path, KEY._replace(engine="b")) == {"k1", "k3"}


@pytest.mark.parametrize("merges", [True, False])
def test_combine_keeps_our_kernels_and_adds_the_stored_ones_if_it_can(merges: bool) -> None:
    theirs, ours = ('["580", ["a", "b"]]', '["580", ["c"]]')
    both = combine(lambda: Kernels(merges=merges), theirs.encode(), ours.encode())
    assert json.loads(both)[1] == (["a", "b", "c"] if merges else ["c"])


def test_combining_gives_ours_where_the_library_makes_less_of_both() -> None:
    class Forgetful(Kernels):
        def serialize(self) -> memoryview | None:
            return memoryview(b'["580", []]')

    assert combine(Forgetful, b'["580", ["a"]]', b'["580", ["b"]]') == b'["580", ["b"]]'


def test_stored_kernels_that_the_library_refuses_are_replaced() -> None:
    assert combine(Kernels, b'["570", ["a", "b"]]', b'["580", ["c"]]') == b'["580", ["c"]]'


def test_kernels_that_do_not_fit_are_a_warning_and_replaced_by_the_next_save(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F51."""
    keep(path, "conv", "gemm")
    with open_cache(path, KEY) as cache:
        library = cache.materialize(lambda: Kernels(driver="590"))
        assert kernels_of(library) == set()
        add(library, "new")
        assert cache.statistics().refused
    assert f"{path}: the kernels kept there do not fit" in caplog.text
    with open_cache(path, KEY) as cache:
        assert kernels_of(cache.materialize(lambda: Kernels(driver="590"))) == {"new"}


def test_a_damaged_file_is_a_warning_and_replaced_by_the_next_save(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F51."""
    keep(path, "conv")
    path.write_bytes(path.read_bytes()[:-1])
    keep(path, "gemm")
    assert f"{path}: the kernel cache cannot be read" in caplog.text
    assert "truncated" in caplog.text
    caplog.clear()
    assert kept(path) == {"gemm"}
    assert not caplog.records


def test_a_lock_that_another_process_holds_is_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F49."""
    cache = open_cache(path, KEY, timeout=0)
    add(cache.materialize(Kernels), "conv")
    with FileLock(f"{path}.lock"):
        cache.close()
    assert f"{path}: the kernel cache was not saved" in caplog.text
    assert not path.exists()


def test_a_lock_is_waited_for_ten_seconds_and_no_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F49: by default, so also where an engine opens its cache. The lock gives up at once, and says how long it would wait."""
    asked = []

    class Held:
        def __init__(self, path: str, timeout: float = -1) -> None:  # As FileLock: for ever.
            self._path = path
            asked.append(timeout)

        def __enter__(self) -> None:
            raise Timeout(self._path)

        def __exit__(self, *_: object) -> None:
            """A lock that is never acquired."""

    monkeypatch.setattr("filelock.FileLock", Held)
    cache = open_cache(tmp_path / "kernels", KEY)
    add(cache.materialize(Kernels), "conv")
    cache.close()
    assert asked == [10]
    assert "the kernel cache was not saved" in caplog.text


def test_a_place_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F55."""
    (tmp_path / "file").touch()
    keep(tmp_path / "file" / "kernels", "conv")
    assert "cannot be read" in caplog.text
    assert "was not saved" in caplog.text


def test_a_library_that_fails_to_serialize_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Kernels):
        def serialize(self) -> memoryview | None:
            raise RuntimeError("out of memory")

    with open_cache(tmp_path / "kernels", KEY) as cache:
        cache.materialize(Broken)
    assert "was not saved: out of memory" in caplog.text


def test_in_memory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F53."""
    monkeypatch.chdir(tmp_path)
    with open_cache("", KEY) as cache:
        add(cache.materialize(Kernels), "conv")
    assert list(tmp_path.iterdir()) == []


def test_open_cache_calls_warn_instead_of_logging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warnings: list[str] = []
    path = tmp_path / "kernels"
    keep(path, "conv")
    path.write_bytes(path.read_bytes()[:-1])
    cache = open_cache(path, KEY, timeout=0, warn=warnings.append)
    add(cache.materialize(Kernels), "gemm")
    with FileLock(f"{path}.lock"):
        cache.close()
    path.unlink()
    keep(path, "conv")
    with open_cache(path, KEY, warn=warnings.append) as cache:
        cache.materialize(lambda: Kernels(driver="590"))
    assert [text.partition(": the kernel")[0] for text in warnings] == [str(path)] * 3
    for text, part in zip(warnings, ("cannot be read", "was not saved", "do not fit"), strict=True):
        assert part in text
    assert not caplog.records


def test_engines_that_ask_at_once_share_one_cache_filled_once(path: Path) -> None:
    """F52, F53."""
    keep(path, "conv")
    made: list[Kernels] = []
    both = threading.Barrier(8)

    def make() -> Kernels:
        made.append(Kernels())
        return made[-1]

    def ask(cache_of: Callable[[Callable[[], Kernels]], object]) -> object:
        both.wait()
        return cache_of(make)

    with open_cache(path, KEY) as cache, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [cache.materialize] * 8))  # type: ignore[list-item]
    assert made == [answers[0]]
    assert all(answer is made[0] for answer in answers)
    assert made[0].kernels == {"conv"}


def test_the_owner_and_the_librarys_objects_are_held_until_it_is_closed(tmp_path: Path) -> None:
    gone: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __del__(self) -> None:
            gone.append(self.name)

    class Cache(Kernels, Noted):
        def __init__(self) -> None:
            Kernels.__init__(self)
            Noted.__init__(self, "cache")

    class Configuration(Noted):
        def make(self) -> Cache:
            return Cache()

    cache = open_cache(tmp_path / "kernels", KEY)
    cache.materialize(Configuration("configuration").make, Noted("engine"))
    gc.collect()
    assert gone == []
    cache.close()
    assert gone == ["configuration", "cache", "engine"]


def test_a_closed_cache_is_not_saved_again_and_gives_nothing(path: Path) -> None:
    """F54."""
    cache = open_cache(path, KEY)
    library = cache.materialize(Kernels)
    add(library, "conv")
    cache.close()
    add(library, "gemm")
    cache.close()
    cache.save()
    assert kept(path) == {"conv"}
    with pytest.raises(RuntimeError, match="closed"):
        cache.materialize(Kernels)


def test_statistics_count_bytes_found_and_saved(path: Path) -> None:
    keep(path, "a")
    with open_cache(path, KEY) as cache:
        found = len(b'["580", ["a"]]')
        assert cache.statistics() == CacheStatistics(found, 0, False)
        add(cache.materialize(Kernels), "b")
        cache.save()
        assert cache.statistics() == CacheStatistics(found, found + len(', "b"'), False)


def test_entries_longest_unsaved_go_first_and_the_last_one_never() -> None:
    entries = {"old": b"123", "older": b"4", "new": b"56"}
    assert within(dict(entries), 6) == entries
    assert within(dict(entries), 5) == {"older": b"4", "new": b"56"}
    assert within(dict(entries), 0) == {"new": b"56"}


@given(st.dictionaries(st.text(), st.binary(), min_size=1), st.integers(0, 50))
def test_eviction_keeps_entries_within_the_limit_or_one_entry(entries: dict[str, bytes], limit: int) -> None:
    left = within(dict(entries), limit)
    assert sum(map(len, left.values())) <= limit or len(left) == 1
    assert list(left.items()) == list(entries.items())[len(entries) - len(left) :]
