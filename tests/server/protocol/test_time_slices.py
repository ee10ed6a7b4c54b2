"""Jobs in time slices, on an event loop."""

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


def job(name: str, steps: int, log: list[str]) -> Steps[None]:
    for _ in range(steps):
        log.append(name)
        yield
    log.append(f"{name} over")


async def ended(slices: TimeSlices) -> None:
    while len(slices):
        await asyncio.sleep(0)


def test_a_timer_that_is_due_fires_between_two_steps(runner: asyncio.Runner) -> None:
    async def main() -> list[str]:
        slices, log = TimeSlices(), list[str]()
        loop = asyncio.get_running_loop()

        def first() -> Steps[None]:
            loop.call_later(0.001, log.append, "timer")
            until = time.monotonic() + 0.005
            while time.monotonic() < until:
                pass  # A step that takes longer than the timer.
            log.append("a")
            yield

        slices.add(first())
        slices.add(job("b", 1, log))
        await ended(slices)
        return log

    log = runner.run(main())
    assert log.index("timer") < log.index("b")


def test_job_that_raises_does_not_stop_the_others(runner: asyncio.Runner) -> None:
    async def main() -> tuple[list[str], list[BaseException]]:
        slices, log, reported = TimeSlices(), list[str](), list[BaseException]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

        def wrong() -> Steps[None]:
            yield
            raise ArithmeticError

        slices.add(wrong())
        slices.add(job("b", 1, log))
        await ended(slices)
        return log, reported

    log, reported = runner.run(main())
    assert log == ["b", "b over"]
    assert [type(error) for error in reported] == [ArithmeticError]
