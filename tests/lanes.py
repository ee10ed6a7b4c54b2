"""Requests to a lane whose end a test or a benchmark awaits, and a tenant whose lane is open."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from engines import DATATYPES, Signature, TensorSpec
from server.config.tenant import TenantConfig
from server.errors import RequestError
from server.link import ring as links
from server.link.messages import Done, Extent, Failure, ModelKey, Ticket
from server.link.slots import Slot
from server.scheduling.batching import Batching
from server.scheduling.lane import Lane
from server.tenants.catalog import ServedModel
from server.tenants.service import Tenant, open_tenant, slots


def submit(
    lane: Lane,
    slot: Slot,
    model: ModelKey,
    shapes: tuple[tuple[int, ...], ...],
    priority: int = 0,
    timeout: float | None = None,
    batching: Batching | None = None,
    begun: bool = False,
) -> "asyncio.Future[Done]":
    """As `Lane.submit`; the future has the completion, or the error."""
    future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
    lane.submit(slot, model, shapes, partial(_resolve, future), priority, timeout, batching, begun=begun)
    return future


def _resolve(future: "asyncio.Future[Done]", end: Done | RequestError) -> None:
    if future.done():
        return  # The test has cancelled it.
    if isinstance(end, Done):
        future.set_result(end)
    else:
        future.set_exception(end)


FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))


class PlayedTenant:
    """A tenant with a model `m`, whose worker the test plays. `cancelled` are slots whose tickets it was asked to cancel."""

    def __init__(
        self, config: TenantConfig, descriptors: links.Descriptors, signature: Signature = SIGNATURE, **served: Any
    ) -> None:
        self.far = links.attach(descriptors)
        self.far.tickets.open()
        self.cancelled: list[int] = []
        self.tenant: Tenant = open_tenant(config, links.attach(descriptors), self)
        self.served = ServedModel("m", "1", "m/1#1", signature, "onnx", {}, **served)
        self.tenant.catalog.put("m", [self.served], [])

    def cancel(self, slot: int, serial: int) -> None:
        self.cancelled.append(slot)

    def ticket(self) -> Ticket:
        """The oldest, which is there."""
        ticket = self.far.tickets.poll()
        assert ticket
        return ticket

    async def next_ticket(self) -> Ticket:
        """The oldest, once there is one."""
        while not (ticket := self.far.tickets.poll()):
            await asyncio.sleep(0)
        return ticket

    def end(self, ticket: Ticket, *outputs: Extent, failure: Failure | None = None) -> None:
        """End a ticket with these outputs, or with a failure."""
        self.far.completions.put(Done(ticket.slot, outputs, failure, 1, 2))
        self.far.completions.ring()

    def echo(self, ticket: Ticket) -> None:
        """End a ticket with its own input."""
        self.end(ticket, Extent(ticket.shapes[0], 0, 4 * ticket.shapes[0][0]))

    def outgrow(self, ticket: Ticket, nbytes: int) -> None:
        """Report that a ticket needs so much memory."""
        self.end(ticket, failure=Failure("outgrown", str(nbytes)))

    @property
    def slots_used(self) -> int:
        return self.tenant.lane.slots.statistics().used


Bench = TypeVar("Bench", bound=PlayedTenant)


@contextmanager
def opened_tenant(make: Callable[[TenantConfig, links.Descriptors], Bench], **more: Any) -> Iterator[Bench]:
    """What `make` makes of a tenant and its link; the lane is open. On an event loop.

    It has one request in flight and room for one to wait, unless `more`, which are keys of it, says otherwise.
    """
    config = TenantConfig(**{"name": "t", "granules": 1, "models": ("*",), "queue": 1, "in_flight": 1, **more})
    descriptors = links.create(slots(config), config.memory)
    bench = make(config, descriptors)
    bench.tenant.lane.open(asyncio.get_running_loop())
    yield bench
    bench.tenant.lane.close(asyncio.get_running_loop())
    descriptors.close()
