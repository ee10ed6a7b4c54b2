"""Requests to a lane whose end a test or a benchmark awaits."""

import asyncio
from functools import partial

from server.errors import RequestError
from server.link.messages import Done, ModelKey
from server.link.slots import Slot
from server.scheduling.batching import Batching
from server.scheduling.lane import Lane


def submit(
    lane: Lane,
    slot: Slot,
    model: ModelKey,
    shapes: tuple[tuple[int, ...], ...],
    priority: int = 0,
    timeout: float | None = None,
    batching: Batching | None = None,
) -> "asyncio.Future[Done]":
    """As `Lane.submit`; the future has the completion, or the error."""
    future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
    lane.submit(slot, model, shapes, partial(_resolve, future), priority, timeout, batching)
    return future


def _resolve(future: "asyncio.Future[Done]", end: Done | RequestError) -> None:
    if future.done():
        return  # The test has cancelled it.
    if isinstance(end, Done):
        future.set_result(end)
    else:
        future.set_exception(end)
