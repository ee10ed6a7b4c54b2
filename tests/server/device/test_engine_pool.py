"""Engines are shared, outlive an unload, and are freed while no request waits."""

import logging
from collections.abc import Callable
from threading import Thread

import pytest

from engines import DATATYPES, Engine, ModelRefused, Signature, TensorSpec
from partitions import DeviceLost
from server.device.engine_pool import KEEP_SECONDS, MAX_UNUSED, EnginePool
from tests.fakes import FakeDevice, FakeEngine, Script
from tests.passing_time import Clock

SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("n",)),), ())


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def pool(clock: Clock) -> EnginePool:
    return EnginePool(clock)


def fake() -> FakeEngine:
    return FakeEngine(SIGNATURE, Script())


def load(pool: EnginePool, key: object, read: Callable[[], Engine] = fake) -> Engine:
    """Held and let go of."""
    engine = pool.hold(key, read)
    pool.let_go(engine)
    return engine


def test_an_engine_is_read_once_for_equal_keys(pool: EnginePool) -> None:
    assert load(pool, "a") is load(pool, "a")
    assert load(pool, "a") is not load(pool, "b")
    assert len(pool) == 2


def test_a_file_that_cannot_be_read_leaves_the_pool_empty(pool: EnginePool) -> None:
    def refuse() -> Engine:
        raise ModelRefused("no good")

    with pytest.raises(ModelRefused, match="no good"):
        load(pool, "a", refuse)
    assert len(pool) == 0
    assert load(pool, "a")


def test_an_unloaded_engine_is_kept_for_a_reload_then_freed_when_no_request_waits(pool: EnginePool, clock: Clock) -> None:
    engine = load(pool, "a")
    clock.now += KEEP_SECONDS - 1
    assert not pool.release([], quiet=True)
    assert load(pool, "a") is engine
    clock.now += KEEP_SECONDS
    assert not pool.release([], quiet=False)
    assert pool.release([], quiet=True)
    assert engine.closed  # type: ignore[attr-defined]
    assert len(pool) == 0


def test_an_engine_with_an_executor_is_not_freed(pool: EnginePool, clock: Clock) -> None:
    engine = load(pool, "a")
    executor = engine.bind(FakeDevice().carve([0]))
    clock.now += 10 * KEEP_SECONDS
    assert not pool.release([executor.engine], quiet=True)
    executor.close()
    assert pool.release([], quiet=True)


def test_an_engine_that_is_being_bound_is_not_freed(pool: EnginePool, clock: Clock) -> None:
    engine = pool.hold("a", fake)
    clock.now += 10 * KEEP_SECONDS
    assert not pool.release([], quiet=True)
    pool.let_go(engine)
    assert not pool.release([], quiet=True)
    clock.now += KEEP_SECONDS
    assert pool.release([], quiet=True)


def test_of_too_many_unused_engines_the_oldest_is_freed_under_load_and_logged(
    pool: EnginePool, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    engines = []
    for key in range(MAX_UNUSED + 1):
        engines.append(load(pool, key))
        clock.now += 1
    clock.now += KEEP_SECONDS
    with caplog.at_level(logging.WARNING, "greenlane.models"):
        assert pool.release([], quiet=False)
    assert [engine.closed for engine in engines] == [True] + [False] * MAX_UNUSED  # type: ignore[attr-defined]
    assert f"freed one of {MAX_UNUSED + 1} unused engines under load" in caplog.text
    assert not pool.release([], quiet=False)


def test_close_frees_all_engines(pool: EnginePool) -> None:
    engines = [load(pool, key) for key in "ab"]
    pool.close()
    assert all(engine.closed for engine in engines)  # type: ignore[attr-defined]
    assert len(pool) == 0


def test_of_two_concurrent_reads_the_first_to_finish_is_kept(pool: EnginePool) -> None:
    inner: list[Engine] = []

    def read() -> Engine:
        thread = Thread(target=lambda: inner.append(load(pool, "a")))
        thread.start()
        thread.join()
        return fake()

    assert load(pool, "a", read) is inner[0]


class Failing(FakeEngine):
    """An engine of a lost device, which cannot be closed."""

    def close(self) -> None:
        raise DeviceLost("the device is lost")


def test_an_engine_that_cannot_be_freed_is_a_warning_and_others_are_freed(
    pool: EnginePool, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    load(pool, "a", lambda: Failing(SIGNATURE, Script()))
    other = load(pool, "b")
    with caplog.at_level(logging.WARNING, "greenlane.models"):
        pool.close()
    assert other.closed  # type: ignore[attr-defined]
    assert "the device is lost" in caplog.text
    load(pool, "c", lambda: Failing(SIGNATURE, Script()))
    clock.now += KEEP_SECONDS
    assert pool.release([], quiet=True)
    assert len(pool) == 0


def test_engines_that_another_is_made_of_are_freed_after_it(pool: EnginePool, clock: Clock) -> None:
    part = pool.hold("part", fake)
    whole = pool.hold("whole", fake, [part])
    assert pool.hold("whole", fake, [part]) is whole
    for engine in (part, whole, whole):
        pool.let_go(engine)
    clock.now += KEEP_SECONDS
    assert not pool.release([whole], quiet=True), "the part is in the whole"
    assert pool.release([], quiet=True)
    assert (whole.closed, part.closed) == (True, False)  # type: ignore[attr-defined]
    assert not pool.release([], quiet=True), "it was in use until now"
    clock.now += KEEP_SECONDS
    assert pool.release([], quiet=True)
    assert part.closed  # type: ignore[attr-defined]
    assert len(pool) == 0


def test_close_frees_engines_made_of_others_first(pool: EnginePool) -> None:
    closed: list[str] = []

    class Noting(FakeEngine):
        def __init__(self, name: str) -> None:
            super().__init__(SIGNATURE, Script())
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    part = pool.hold("part", lambda: Noting("part"))
    pool.hold("whole", lambda: Noting("whole"), [part])
    pool.close()
    assert closed == ["whole", "part"]
