"""A lock that many threads share, or one holds exclusively. Tests look at the lock's list of waiters instead of sleeping."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Barrier, Event

import pytest

from engines.cuda.locks import SharedLock
from engines.tensorrt.api import LIBRARY_LOCK
from tests.contract import in_a_thread
from tests.engines.simulated import AFFINE, ROWS, Bench


def wait_in_vain(lock: SharedLock, *asked: "Future[None]") -> bool:
    """Wait until all of these threads wait for the lock; False if one of them got it."""
    while not any(each.done() for each in asked):
        if len(lock._changed._waiters) == len(asked):  # type: ignore[attr-defined]
            return True
    return False


def note(lock: SharedLock, how: str, order: list[str]) -> Callable[[], None]:
    def body() -> None:
        with getattr(lock, how)():
            order.append(how)

    return body


def test_threads_share_the_lock_at_the_same_time() -> None:
    lock, together = SharedLock(), Barrier(3)

    def share() -> None:
        with lock.shared():
            together.wait(30)

    asked = [in_a_thread(share)[1] for _ in range(2)]
    with lock.shared():
        together.wait(30)
    for each in asked:
        each.result(30)


@pytest.mark.parametrize("how", ["shared", "exclusive"])
def test_an_exclusive_holder_blocks_others(how: str) -> None:
    lock, order = SharedLock(), list[str]()
    with lock.exclusive():
        assert repr(lock) == "<SharedLock held exclusively>"
        _, asked = in_a_thread(note(lock, how, order))
        assert wait_in_vain(lock, asked)
        order.append("let go")
    asked.result(30)
    assert order == ["let go", how]


def test_exclusive_waits_for_all_sharers() -> None:
    lock, order, leave = SharedLock(), list[str](), Event()

    def share() -> None:
        with lock.shared():
            order.append("shared")
            assert leave.wait(30)
            order.append("left")

    _, sharing = in_a_thread(share)
    with lock.shared():
        _, asked = in_a_thread(note(lock, "exclusive", order))
        assert wait_in_vain(lock, asked)
    assert wait_in_vain(lock, asked)
    leave.set()
    for each in (sharing, asked):
        each.result(30)
    assert order == ["shared", "left", "exclusive"]


def test_an_exclusive_waiter_goes_before_later_sharers() -> None:
    lock, order = SharedLock(), list[str]()
    with lock.shared():
        assert repr(lock) == "<SharedLock shared by 1>"
        _, first = in_a_thread(note(lock, "exclusive", order))
        assert wait_in_vain(lock, first)
        _, later = in_a_thread(note(lock, "shared", order))
        assert wait_in_vain(lock, first, later)
        assert order == []
    for each in (first, later):
        each.result(30)
    assert order == ["exclusive", "shared"]


@pytest.mark.parametrize("how", ["shared", "exclusive"])
def test_an_exception_releases_the_lock(how: str) -> None:
    lock, order = SharedLock(), list[str]()
    with pytest.raises(KeyError), getattr(lock, how)():
        raise KeyError
    for again in ("exclusive", "shared", "exclusive"):
        in_a_thread(note(lock, again, order))[1].result(30)
    assert order == ["exclusive", "shared", "exclusive"]
    assert repr(lock) == "<SharedLock shared by 0>"


@pytest.mark.parametrize(
    ("call", "held"),
    [
        ("Runtime.deserialize_cuda_engine", "shared by 1"),
        ("ICudaEngine.create_execution_context", "shared by 1"),
        ("IExecutionContext.set_optimization_profile_async", "held exclusively"),
        ("IExecutionContext.execute_async_v3", "shared by 1"),
    ],
)
def test_library_calls_hold_its_lock_and_setting_a_profile_holds_it_alone(bench: Bench, call: str, held: str) -> None:
    """Otherwise two threads could wait for each other forever: see `LIBRARY_LOCK`. The last is that of a new shape."""
    seen: list[str] = []
    path = bench.plan(AFFINE, ROWS, {"x": [(1, 3), (9, 3), (20, 3)]})
    bench.gpu.meanwhile(call, lambda: seen.append(repr(LIBRARY_LOCK)))
    bench.load(path, profile=1).bind(bench.partition).close()
    assert seen == [f"<SharedLock {held}>"]
    assert repr(LIBRARY_LOCK) == "<SharedLock shared by 0>"
