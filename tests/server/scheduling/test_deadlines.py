"""Deadlines on an event loop that the test holds up, or lets go on: who is told, when, and that nobody is told twice."""

import asyncio
import time
from functools import partial

import pytest

from server.scheduling.deadlines import EARLY, Deadlines

FAR = 3600.0


@pytest.fixture
def told() -> list[str]:
    return []


def past(deadlines: Deadlines, number: int, told: list[str], name: str) -> None:
    """One whose time has come already, and which the loop had no turn to tell of."""
    deadlines.add(time.monotonic() - FAR + number, number, partial(told.append, name))


async def test_whoever_looks_tells_those_whose_time_has_come_in_the_order_of_their_deadlines(told: list[str]) -> None:
    deadlines = Deadlines()
    past(deadlines, 2, told, "second")
    past(deadlines, 1, told, "first")
    deadlines.add(time.monotonic() + FAR, 3, partial(told.append, "third"))
    deadlines.fire_due()
    assert told == ["first", "second"]
    assert repr(deadlines) == "<Deadlines 1 waiting>"
    deadlines.fire_due()
    assert told == ["first", "second"]
    deadlines.close()


async def test_nobody_is_told_where_nobody_waits(told: list[str]) -> None:
    deadlines = Deadlines()
    deadlines.fire_due()
    assert len(deadlines) == 0


async def test_one_that_nobody_looks_for_is_told_by_the_loop_at_its_time(told: list[str]) -> None:
    deadlines, came = Deadlines(), asyncio.Event()
    due = time.monotonic() + 0.01
    deadlines.add(due, 1, came.set)
    await came.wait()
    assert time.monotonic() >= due - EARLY
    assert len(deadlines) == 0


async def test_an_earlier_one_that_comes_later_is_told_before(told: list[str]) -> None:
    deadlines, came, now = Deadlines(), asyncio.Event(), time.monotonic()
    deadlines.add(now + FAR, 1, partial(told.append, "far"))
    deadlines.add(now + 0.005, 2, partial(told.append, "near"))
    deadlines.add(now + 0.01, 3, came.set)
    await came.wait()
    assert told == ["near"]
    deadlines.close()


async def test_one_that_was_removed_is_not_told_and_the_next_is_on_time(told: list[str]) -> None:
    deadlines, came, now = Deadlines(), asyncio.Event(), time.monotonic()
    deadlines.add(now + 0.005, 1, partial(told.append, "removed"))
    deadlines.add(now + 0.01, 2, came.set)
    deadlines.remove(now + 0.005, 1)
    deadlines.remove(now + 0.005, 1)
    deadlines.remove(now + FAR, 3)
    await came.wait()
    deadlines.fire_due()
    assert told == []


async def test_of_two_at_the_same_time_the_one_is_removed_that_was_meant(told: list[str]) -> None:
    deadlines, due = Deadlines(), time.monotonic() - 1
    deadlines.add(due, 1, partial(told.append, "one"))
    deadlines.add(due, 3, partial(told.append, "three"))
    deadlines.remove(due, 2)
    deadlines.remove(due, 1)
    deadlines.fire_due()
    assert told == ["three"]


async def test_whoever_is_told_may_look_and_bring_another_which_is_told_in_its_turn(told: list[str]) -> None:
    deadlines = Deadlines()

    def busy() -> None:
        past(deadlines, 3, told, "brought")
        deadlines.fire_due()
        told.append("busy")

    deadlines.add(time.monotonic() - FAR, 1, busy)
    past(deadlines, 2, told, "next")
    deadlines.fire_due()
    assert told == ["busy", "next", "brought"]


async def test_one_that_fails_keeps_nobody_else_from_being_told(told: list[str]) -> None:
    deadlines, came = Deadlines(), asyncio.Event()

    def fail() -> None:
        raise RuntimeError("told")

    deadlines.add(time.monotonic() - FAR, 1, fail)
    deadlines.add(time.monotonic() - 1, 2, came.set)
    with pytest.raises(RuntimeError, match="told"):
        deadlines.fire_due()
    await came.wait()


async def test_after_the_end_nobody_is_told(told: list[str]) -> None:
    deadlines = Deadlines()
    past(deadlines, 1, told, "late")
    deadlines.close()
    deadlines.fire_due()
    await asyncio.sleep(0)
    assert told == []
    deadlines.close()
