"""Works that take turns, on the event loop that serves."""

import asyncio
import time
from collections.abc import Iterator

import pytest
import uvloop

from server.protocol.time_slices import Steps, TimeSlices


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


def work(name: str, steps: int, told: list[str]) -> Steps[None]:
    for _ in range(steps):
        told.append(name)
        yield
    told.append(f"{name} over")


async def ended(turns: TimeSlices) -> None:
    while len(turns):
        await asyncio.sleep(0)


def test_works_are_done_one_after_another_in_order(runner: asyncio.Runner) -> None:
    async def main() -> list[str]:
        turns, told = TimeSlices(), list[str]()
        turns.add(work("a", 2, told))
        turns.add(work("b", 1, told))
        assert (told, repr(turns)) == ([], "<TimeSlices 2 waiting>")
        await ended(turns)
        return told

    assert runner.run(main()) == ["a", "a", "a over", "b", "b over"]


def test_a_timer_that_is_due_fires_between_two_steps(runner: asyncio.Runner) -> None:
    async def main() -> list[str]:
        turns, told = TimeSlices(), list[str]()
        loop = asyncio.get_running_loop()

        def first() -> Steps[None]:
            loop.call_later(0.001, told.append, "timer")
            until = time.monotonic() + 0.005
            while time.monotonic() < until:
                pass  # A step that takes longer than the timer.
            told.append("a")
            yield

        turns.add(first())
        turns.add(work("b", 1, told))
        await ended(turns)
        return told

    told = runner.run(main())
    assert told.index("timer") < told.index("b")


def test_a_work_that_raises_holds_up_nobody(runner: asyncio.Runner) -> None:
    async def main() -> tuple[list[str], list[BaseException]]:
        turns, told, reported = TimeSlices(), list[str](), list[BaseException]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

        def wrong() -> Steps[None]:
            yield
            raise ArithmeticError

        turns.add(wrong())
        turns.add(work("b", 1, told))
        await ended(turns)
        return told, reported

    told, reported = runner.run(main())
    assert told == ["b", "b over"]
    assert [type(error) for error in reported] == [ArithmeticError]
