"""The thread of a model's functions: order, what is refused, and what becomes of calls that do not end."""

import asyncio
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from server.errors import BadRequest, DeadlineExceeded, Failed, QueueFull, Unavailable
from server.functions import thread as threads
from server.functions.thread import FunctionThread


@pytest.fixture
async def functions() -> "Iterator[FunctionThread]":
    made = FunctionThread("m", 2, "tenants.acme.queue", 0.05, "server.max_execution")
    yield made
    made.close()


@pytest.fixture
def untraced() -> Iterator[None]:
    """No coverage on this thread: Python 3.11 comes to no next step in a thread that is traced while an exception that was
    raised in another one cannot be delivered.
    """
    before = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(before)


async def ended(functions: FunctionThread, work: Callable[[], object]) -> object:
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    functions.call("model 'm': f", work, future.set_result)
    return await future


def refuse() -> None:
    raise ValueError("x: wrong")


def leave() -> None:
    raise SystemExit


async def test_calls_end_with_what_they_return_or_raise(functions: FunctionThread) -> None:
    assert await ended(functions, lambda: 3) == 3
    refused, failed = await ended(functions, refuse), await ended(functions, leave)
    assert (type(refused), str(refused)) == (BadRequest, "x: wrong")
    assert (type(failed), str(failed)) == (Failed, "model 'm': f raised SystemExit")


async def test_more_calls_than_may_wait_are_refused(functions: FunctionThread) -> None:
    gate = threading.Event()
    ends = [asyncio.ensure_future(ended(functions, gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=r"2 requests may wait for its functions, and as many do \(tenants.acme.queue\)"):
        functions.check_room()
    gate.set()
    assert await asyncio.gather(*ends) == [True] * 3
    functions.check_room()


async def test_a_call_that_was_cancelled_while_it_waited_does_not_run(functions: FunctionThread) -> None:
    gate, ran = threading.Event(), list[int]()
    first = asyncio.ensure_future(ended(functions, gate.wait))
    await asyncio.sleep(0)
    waiting = functions.call("f", lambda: ran.append(1), lambda _: ran.append(2))
    functions.cancel(waiting)
    gate.set()
    await first
    assert await ended(functions, lambda: list(ran)) == []


async def test_a_call_that_spins_is_stopped_and_the_next_one_runs(functions: FunctionThread) -> None:
    def spin() -> None:
        while True:
            pass

    end, after = await asyncio.gather(ended(functions, spin), ended(functions, lambda: "next"))
    assert isinstance(end, DeadlineExceeded)
    assert str(end) == "model 'm': f ran for 0.05 s and was stopped (server.max_execution)"
    assert after == "next"


async def test_a_call_with_a_limit_of_its_own_does_not_name_the_key_of_another(functions: FunctionThread) -> None:
    def spin() -> None:
        while True:
            pass

    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    functions.call("model 'm': model.py", spin, future.set_result, 0.01)
    assert str(await future) == "model 'm': model.py ran for 0.01 s and was stopped"


async def test_a_call_that_cannot_be_stopped_makes_the_model_unavailable(
    functions: FunctionThread, untraced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "GRACE", 0.05)
    gate, ran = threading.Event(), list[int]()
    stuck = ended(functions, gate.wait)  # A wait for a lock is code in C, which no exception ends.
    waiting = ended(functions, lambda: ran.append(1))
    ends = await asyncio.gather(stuck, waiting)
    assert [type(end) for end in ends] == [DeadlineExceeded, Unavailable]
    with pytest.raises(Unavailable, match="cannot be stopped"):
        functions.call("f", lambda: None, lambda _: None)
    gate.set()
    while "stuck" in repr(functions):
        await asyncio.sleep(0)
    assert await ended(functions, lambda: "again") == "again"
    assert ran == []


class Rude(ValueError):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError


def raises(error: BaseException) -> Callable[[], object]:
    def work() -> object:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Rude(), "model 'm': f raised Rude"),
        (ValueError(), "model 'm': f raised ValueError"),
        (ValueError("a name: \udc80"), "a name: ?"),
        (ValueError("x" * 1_000_000), "x" * 2000 + "..."),
    ],
)
async def test_whatever_a_refusal_says_is_a_text_that_can_be_sent(
    functions: FunctionThread, error: ValueError, text: str
) -> None:
    refused = await ended(functions, raises(error))
    assert (type(refused), str(refused)) == (BadRequest, text)
    assert await ended(functions, lambda: "next") == "next"


async def test_a_cancelled_call_is_stopped_also_after_the_end() -> None:
    before = threading.enumerate()
    functions = FunctionThread("m", 2, "tenants.acme.queue", 0.05, "server.max_execution")
    (thread,) = {*threading.enumerate()} - {*before}
    began = threading.Event()

    def spin() -> None:
        began.set()
        while True:
            pass

    call = functions.call("model 'm': f", spin, lambda _: None)
    await asyncio.to_thread(began.wait)
    functions.cancel(call)
    functions.close()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


async def test_a_call_is_not_stopped_while_it_logs(functions: FunctionThread, untraced: None) -> None:
    """An exception between two steps of Python's logging may leave the lock of a handler locked for ever."""
    gate, written = threading.Event(), list[logging.LogRecord]()
    log = logging.getLogger("tests.functions")

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            gate.wait()
            written.append(record)

    def spin() -> None:
        while True:
            log.warning("a line")

    log.addHandler(handler := Slow())
    try:
        end = await ended(functions, spin)
        assert isinstance(end, DeadlineExceeded), "the client does not wait for it"
        assert written == []
        gate.set()
        assert await ended(functions, lambda: "next") == "next"
        assert written
    finally:
        log.removeHandler(handler)


class Tensors:
    """What a call works on, megabytes of it."""

    def use(self) -> None:
        """The call's work."""


async def test_a_call_that_was_cancelled_while_it_waited_keeps_nothing(functions: FunctionThread) -> None:
    """Clients that ask and disconnect would fill the memory while another call runs."""
    gate, tensors = threading.Event(), Tensors()
    first = asyncio.ensure_future(ended(functions, gate.wait))
    await asyncio.sleep(0)
    kept = weakref.ref(tensors)
    functions.cancel(functions.call("f", tensors.use, lambda _: None))
    del tensors
    assert kept() is None
    gate.set()
    await first
