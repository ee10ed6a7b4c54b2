"""Deadlines fire in order, at their times and once, by the event loop's timer or by `fire_due`."""

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from server.scheduling.pending import EARLY, Deadlines

FAR = 3600.0


@pytest.fixture
def fired() -> list[str]:
    return []


def past(deadlines: Deadlines, number: int, fired: list[str], name: str) -> None:
    """Add a deadline that has passed already, before the event loop's timer could fire it."""
    deadlines.add(time.monotonic() - FAR + number, number, partial(fired.append, name))


async def test_fire_due_fires_passed_deadlines_in_order(fired: list[str]) -> None:
    deadlines = Deadlines()
    past(deadlines, 2, fired, "second")
    past(deadlines, 1, fired, "first")
    deadlines.add(time.monotonic() + FAR, 3, partial(fired.append, "third"))
    deadlines.fire_due()
    assert fired == ["first", "second"]
    deadlines.fire_due()
    assert fired == ["first", "second"]
    deadlines.close()


def test_a_timer_that_fires_a_little_early_fires_its_deadline() -> None:
    """As those of uvloop do, which count in whole milliseconds."""

    class Hasty(asyncio.SelectorEventLoop):
        timers = 0

        def call_later(self, delay: float, *what: Any, **more: Any) -> asyncio.TimerHandle:
            self.timers += 1
            ends = time.monotonic() + delay - EARLY / 2
            while time.monotonic() < ends:
                pass
            return super().call_later(0, *what, **more)

    async def wait() -> None:
        fired = asyncio.Event()
        Deadlines().add(time.monotonic() + 0.02, 1, fired.set)
        await fired.wait()

    loop = Hasty()
    loop.run_until_complete(wait())
    loop.close()
    assert loop.timers == 1


async def test_a_callback_may_call_fire_due_and_add_a_deadline_that_fires_in_order(fired: list[str]) -> None:
    deadlines = Deadlines()

    def busy() -> None:
        past(deadlines, 3, fired, "brought")
        deadlines.fire_due()
        fired.append("busy")

    deadlines.add(time.monotonic() - FAR, 1, busy)
    past(deadlines, 2, fired, "next")
    deadlines.fire_due()
    assert fired == ["busy", "next", "brought"]


async def test_a_callback_that_raises_does_not_keep_others_from_firing(fired: list[str]) -> None:
    deadlines, came = Deadlines(), asyncio.Event()

    def fail() -> None:
        raise RuntimeError("fired")

    deadlines.add(time.monotonic() - FAR, 1, fail)
    deadlines.add(time.monotonic() - 1, 2, came.set)
    with pytest.raises(RuntimeError, match="fired"):
        deadlines.fire_due()
    await came.wait()
