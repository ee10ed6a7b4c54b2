"""Pieces of work that are started together, of which one fails, or that are given up."""

import asyncio

import pytest

from server.control.together import all_or_none


class Work:
    """Begins, and goes on until it is given up, which takes it until `done`."""

    def __init__(self) -> None:
        self.begun, self.given_up, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ended = False

    async def run(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.set()
            await self.done.wait()
            self.ended = True
            raise


async def fail() -> None:
    raise OSError("no process ids are left")


async def succeed() -> None:
    """At once."""


async def test_work_beside_a_failure_is_given_up_and_waited_for() -> None:
    work = Work()
    running = asyncio.create_task(all_or_none([work.run(), fail(), succeed()]))
    await work.given_up.wait()
    assert not running.done()
    work.done.set()
    with pytest.raises(OSError, match="no process ids are left"):
        await running
    assert work.ended


async def test_all_work_is_given_up_once_and_waited_for_when_the_whole_is() -> None:
    works = Work(), Work()
    running = asyncio.create_task(all_or_none(each.run() for each in works))
    for each in works:
        await each.begun.wait()
    running.cancel()
    for each in works:
        await each.given_up.wait()
        each.done.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert all(each.ended for each in works)
