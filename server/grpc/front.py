"""What every call on a tenant's gRPC port passes: whose it is, its message, and how it is refused."""

import asyncio
from math import ceil
from typing import Any, NoReturn

import grpc
from grpc.aio import EOF

from ..errors import Ambiguous, BadRequest, LimitExceeded, Misdirected, TooSlow
from ..inference.refusals import refuse
from ..tenants import audit
from ..tenants.service import Service, Tenant

MIN_READERS = 8
"""Messages that may arrive at a time at least, however large they may be."""
READ_SECONDS = 60.0
"""How long a message may take to arrive. gRPC does not say how much of it has arrived, so this cannot be a rate."""
CONTESTED_SECONDS = 5.0
"""The same for the oldest one while another waits for its place: silent clients must not lock others out."""
_MAX_TEXT = 2000
"""Characters of an error; clients refuse longer ones, with which their trailers would exceed 8 KiB."""


class Front:
    """The gRPC port of one tenant. Belongs to the event loop.

    A message has no announced length, so its memory cannot be reserved: `readers` messages may arrive at a time, as many of the
    largest as the tenant's memory holds. gRPC lets a client send only 64 KiB of those that are not read yet.
    """

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self.name = name
        self.readers = max(MIN_READERS, service.config.tenants[name].memory // service.config.server.max_body)
        self._reading = asyncio.Semaphore(self.readers)
        self._limits: dict[asyncio.Timeout, float] = {}  # Of the messages that arrive and may take their time, oldest first.

    def __repr__(self) -> str:
        return f"<Front of {self.name}>"

    def tenant(self, context: Any) -> Tenant:
        """The tenant of a call. Raises Unauthorized, Misdirected for another tenant than the port's, Ambiguous."""
        metadata = context.invocation_metadata() or ()
        config = self.service.tenancy.identify(_single(metadata, "authorization"), _single(metadata, "x-tenant"))
        if config.name != self.name:
            where = f"on {config.grpc_port}, its own port" if config.grpc_port else "over HTTP; it has no grpc_port"
            raise Misdirected(f"this port belongs to tenant {self.name!r}; send requests of {config.name!r} {where}")
        return self.service.tenants[self.name]

    def traceparent(self, context: Any) -> str | None:
        """The header of this name of a call, if the tenant is traced."""
        if self.service.tenants[self.name].tracing.sampler is None:
            return None
        return next((value for name, value in context.invocation_metadata() or () if name == "traceparent"), None)

    async def read(self, context: Any) -> bytes:
        """The message of a call that has one. Raises TooSlow, BadRequest."""
        if self._reading.locked():
            self._hurry_oldest()
        async with self._reading:
            begun = asyncio.get_running_loop().time()
            limit = asyncio.timeout(READ_SECONDS)
            self._limits[limit] = begun
            try:
                async with limit:
                    message = await context.read()
            except TimeoutError:
                waited = asyncio.get_running_loop().time() - begun
                raise TooSlow(f"the message did not come within {waited:.3g} s") from None
            finally:
                self._limits.pop(limit, None)
        if message is EOF:
            raise BadRequest("there is no message; expected one")
        data: bytes = message
        return data

    def _hurry_oldest(self) -> None:
        """Give the oldest of the messages that arrive less time, as another waits for its place."""
        if self._limits:
            limit = next(iter(self._limits))
            due = self._limits.pop(limit) + CONTESTED_SECONDS
            limit.reschedule(max(due, asyncio.get_running_loop().time()))

    async def refuse(self, context: Any, error: Exception) -> NoReturn:
        """End a call with an error."""
        given = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        audit.refused(error, "gRPC", self.name, context.peer(), given[0] if given else None)
        answer = refuse(error, self.name)
        if isinstance(error, LimitExceeded):  # Clients with a retry policy wait for so many milliseconds.
            context.set_trailing_metadata((("grpc-retry-pushback-ms", str(ceil(1000 * error.retry_after))),))
        await context.abort(grpc.StatusCode[answer.code], shortened(answer.text))
        raise error


def shortened(text: str) -> str:
    """The text of an error, short enough for every client."""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _single(metadata: Any, key: str) -> str | None:
    values = [value for name, value in metadata if name == key]
    if len(values) > 1:
        raise Ambiguous(f"{key.title()}: given {len(values)} times; expected once")
    return values[0] if values else None
