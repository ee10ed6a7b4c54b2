"""Waits for pieces of work, also if some of them fail or what waits is cancelled."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Run all of these, wait for all of them also if some fail, and return their results or raise the first error."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if not isinstance(each, BaseException)]


async def completed(work: Coroutine[Any, Any, T]) -> T:
    """The result of this work. If the caller is cancelled it goes on to its end all the same, and an error of it is dropped."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # Else asyncio logs it as never retrieved.
    return await asyncio.shield(task)


async def all_or_none(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of these. If one fails, or this is cancelled, all are cancelled, and waited for. Raises the first error."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for each in tasks:
            each.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    for error in filter(None, found):
        if not isinstance(error, asyncio.CancelledError):
            raise error
