"""Requests to a lane whose end a test or a benchmark awaits, and a tenant whose lane is open."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from server.config.tenant import TenantConfig
from server.errors import RequestError
from server.link import ring as links
from server.link.messages import Done, ModelKey
from server.link.slots import Slot
from server.scheduling.batching import Batching
from server.scheduling.lane import Lane
from server.tenants.service import Tenant, slots


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


class HasTenant(Protocol):
    """What a test of one tenant's requests works with."""

    @property
    def tenant(self) -> Tenant: ...


Bench = TypeVar("Bench", bound=HasTenant)


@contextmanager
def opened_tenant(make: Callable[[TenantConfig, links.Descriptors], Bench]) -> Iterator[Bench]:
    """What `make` makes of a tenant with one request in flight and room for one to wait; its lane is open. On an event loop."""
    config = TenantConfig(name="t", granules=1, models=("*",), queue=1, in_flight=1)
    descriptors = links.create(slots(config), config.memory)
    bench = make(config, descriptors)
    bench.tenant.lane.open(asyncio.get_running_loop())
    yield bench
    bench.tenant.lane.close(asyncio.get_running_loop())
    descriptors.close()
