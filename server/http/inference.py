"""One inference from its headers to its reply, apart from how the body came and how the reply goes."""

import asyncio
import logging
import time
import uuid
from asyncio import CancelledError
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import orjson

from ..errors import (
    BadRequest,
    ClientGone,
    DeadlineExceeded,
    Failed,
    MemoryFull,
    Outgrown,
    QueueFull,
    RequestError,
    TooLarge,
    Unavailable,
    answer,
    status_of,
)
from ..link.messages import Done
from ..link.slots import SMALLEST, Slot
from ..protocol.json_document import Object
from ..protocol.json_slices import SLICE, cut, parse_slices
from ..protocol.request import Limits
from ..protocol.response import InferResponse, Written, is_long, write_long
from ..protocol.time_slices import Returned, Steps
from ..tenants.service import Tenant
from .exchange import Headers, Reply

log = logging.getLogger("greenlane.infer")

CLOSE = (b"connection", b"close")
"""The field of an answer that is the connection's last."""

_INVALID = (400, 408, 413, 415)
"""Statuses of requests that were wrong themselves, or never came whole; Triton counts none of them for the model."""
_SPARE = 8
"""What part of a tenant's memory may be left for outputs of one request whose size is not known: one in so many."""

Success = tuple[InferResponse, bytes]
"""An encoded answer, and its Server-Timing."""
Outcome = Success | Exception


class Target(NamedTuple):
    """Whose model a request is for."""

    tenant: Tenant
    name: str
    version: str | None
    limits: Limits
    max_body: int


class Inference:
    """One request from its headers to its reply. Nothing here waits: whoever has the body says so, and is called back.

    Raises NotFound, and what the tenant's queue says: a flood is turned away before its bodies come.
    """

    __slots__ = ("_arrived", "_decoded", "_heard", "_request", "_served", "_slot", "_target")

    def __init__(self, target: Target) -> None:
        self._target = target
        self._arrived = time.monotonic_ns()
        self._served = target.tenant.catalog.find(target.name, target.version)
        self._slot: Slot | None = None
        self._heard: Callable[[Outcome], None] | None = None
        try:
            target.tenant.lane.check()
        except RequestError as error:
            self.count(error)
            raise

    def expect(self, length: int) -> None:
        """A body of so many bytes is on its way. Raises TooLarge."""
        if length > self._target.max_body:
            error = TooLarge(f"a body of {length} bytes; the limit is {self._target.max_body} (server.max_body)")
            self.count(error)
            raise error
        try:  # All but its JSON are tensors, which need as much memory.
            self._target.tenant.lane.slots.blocks.check(length - self._target.limits.json)
        except TooLarge as error:
            self.count(error)
            raise

    def begin(self, body: bytes, headers: Headers, heard: Callable[["Outcome"], None], document: Object | None = None) -> None:
        """The body has come, unpacked; `heard` is told the outcome, once, before or after this returns.

        Large JSON waits for its turns, to come back as a `document`.
        """
        self._heard = heard
        try:
            tenant, name, version, limits, _ = self._target
            if document is None:
                self._arrived = time.monotonic_ns()
                if len(body) > SLICE and self._take_turns(body, headers, heard):
                    return
            served = self._served = tenant.catalog.find(name, version)  # It may be another by now.
            slot = self._slot = tenant.lane.admit()
            request = self._request = served.plans.decode(
                body, _header_length(headers), served.signature, slot, limits, document
            )
            self._decoded = time.monotonic_ns()
            lane, priority, timeout = tenant.lane, request.priority, request.timeout
            if document is not None and timeout is not None:
                timeout = self._left(timeout)
            lane.begin(slot, served.key, request.shapes, self._end, priority, timeout, served.batching, served.queues)
        except MemoryFull as error:
            self._fail(self._target.tenant.lane.reject(str(error)))
        except Exception as error:
            self._fail(error)

    def cancel(self, error: BaseException) -> None:
        """Nobody waits for the outcome any more, and nobody will be told."""
        self._heard = None
        self.count(error)
        self._release()

    def count(self, error: BaseException) -> None:
        """It was refused, or failed, for this reason."""
        if reason := _reason(error):
            self._served.statistics.failed(time.monotonic_ns() - self._arrived, reason)
        else:
            self._target.tenant.lane.count_invalid()

    def _take_turns(self, body: bytes, headers: Headers, heard: Callable[["Outcome"], None]) -> bool:
        """Let large JSON wait for its turns; False if it is not large, or too large. Raises as `Lane.check` does."""
        tenant, _, _, limits, _ = self._target
        length = _header_length(headers)
        size = len(body) if length is None else length
        if not SLICE < size <= min(len(body), limits.json):
            return False
        tenant.lane.check()
        turns, most = self._served.plans.turns, tenant.config.queue + tenant.config.in_flight
        if len(turns) >= most:
            may = f"{most} may (tenants.{tenant.name}.queue + in_flight)"
            raise tenant.lane.reject(f"Exceeds maximum queue size: {len(turns)} large requests wait for their turns, and {may}")
        row = cut(data := body[:size])
        tenant.uploads.take(len(body))
        timeout = row.timeout if row else None
        timer = asyncio.get_running_loop().call_later(timeout, self._expire, timeout) if timeout else None
        turns.add(self._parse(parse_slices(data, row), partial(self.begin, body, headers, heard), timer, len(body)))
        return True

    def _parse(
        self, steps: Steps[Object], begin: Callable[[Object], None], timer: asyncio.TimerHandle | None, nbytes: int
    ) -> Steps[None]:
        try:
            yield from self._go_on(steps, begin)
        finally:
            self._target.tenant.uploads.give(nbytes)
            if timer:
                timer.cancel()

    def _go_on(self, steps: Steps[Returned], then: Callable[[Returned], None]) -> Steps[None]:
        """Take these steps, and do that with what comes of them, if anybody still waits for it."""
        try:
            if self._heard is None:
                return
            returned = yield from steps
        except Exception as error:
            if self._heard is not None:
                self._fail(error)
        else:
            if self._heard is not None:
                then(returned)

    def _left(self, timeout: float) -> float:
        """Seconds until the deadline. Raises DeadlineExceeded."""
        left = timeout - (time.monotonic_ns() - self._arrived) / 1e9
        if left <= 0:
            raise self._target.tenant.lane.expire(timeout)
        return left

    def _expire(self, timeout: float) -> None:
        """The deadline has passed; a client that left meanwhile was counted already."""
        if self._heard is not None:
            self._fail(self._target.tenant.lane.expire(timeout))

    def _end(self, end: Done | RequestError, written: Written | None = None) -> None:
        """The lane says how it ended."""
        if not isinstance(end, Done):
            if isinstance(end, Outgrown):
                self._begin_again(end)
            else:
                self._fail(end)
            return
        try:
            slot = self._target.tenant.lane.slots.at(end.slot) if end.rows else self._slot
            assert slot
            served, request, nonfinite = self._served, self._request, self._target.limits.nonfinite
            long = written is None and slot.capacity > SMALLEST and is_long(request, served.signature, end.outputs)
            if long or (request.classified and written is None):
                steps = write_long(request, served.signature, slot, end.outputs, nonfinite, served.labels)
                served.plans.turns.add(self._go_on(steps, partial(self._end, end)))
                return
            response = served.plans.encode(
                served.name, served.version, request, served.signature, slot, end.outputs, written, nonfinite
            )
        except Exception as error:
            self._fail(error)
        else:
            self._release()
            encoded, rows = time.monotonic_ns(), served.signature.rows(request.shapes)
            served.statistics.succeeded(self._arrived, self._decoded, end, encoded, rows)
            queued, executed = (end.began - self._decoded) / 1e6, (end.ended - end.began) / 1e6
            self._tell((response, b"queue;dur=%.3f, execute;dur=%.3f" % (queued, executed)))

    def _begin_again(self, outgrown: Outgrown) -> None:
        """Have it run once more with memory for its outputs, alone; the model's next requests leave as much for theirs.

        What ran is lost: only the HTTP side can take memory, and the worker does not wait for it.
        """
        try:
            slot, served, request, lane = self._slot, self._served, self._request, self._target.tenant.lane
            assert slot
            _, room = slot.inputs(served.signature, request.shapes, slot.capacity)
            wanted = outgrown.nbytes - (room.address - slot.address)
            served.plans.leave(min(wanted, lane.slots.blocks.nbytes // _SPARE))
            slot.reserve(outgrown.nbytes)
            timeout = None if request.timeout is None else self._left(request.timeout)
            lane.begin(slot, served.key, request.shapes, self._end, request.priority, timeout)
        except MemoryFull as error:
            self._fail(self._target.tenant.lane.reject(str(error)))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        heard = self._heard
        self.cancel(error)
        if heard:
            heard(error)

    def _tell(self, outcome: "Outcome") -> None:
        heard, self._heard = self._heard, None  # Whoever hears knows this one, and the two would be left to the collector.
        if heard:
            heard(outcome)

    def _release(self) -> None:
        slot, self._slot = self._slot, None
        if slot:
            self._target.tenant.lane.release(slot)


def success(outcome: Success) -> Reply:
    """The reply to a request that went well."""
    (body, length), timing = outcome
    kind = b"application/json" if length is None else b"application/octet-stream"
    fields = [(b"content-type", kind), (b"server-timing", timing)]
    if length is not None:
        fields.append((b"inference-header-content-length", b"%d" % length))
    return Reply(200, fields, body)


def refusal(error: Exception, target: Target | None) -> Reply:
    """The reply to a request that went wrong, and to whom it was if that was found out."""
    request_id = uuid.uuid4().hex
    told = answer(error, request_id)
    if told.status == 500:
        unexpected = error if not isinstance(error, Failed) else None
        tenant = target.tenant.name if target else "-"
        log.error("%s", error, exc_info=unexpected, extra={"tenant": tenant, "request_id": request_id})
    fields = [(b"content-type", b"application/json")]
    fields += [(name.encode(), value.encode()) for name, value in told.headers.items()]
    if isinstance(error, Unavailable) and target and target.tenant.lane.refusing:
        fields.append(CLOSE)  # No other request on this connection would fare better.
    return Reply(told.status, fields, orjson.dumps({"error": told.text}))


def _header_length(headers: Headers) -> int | None:
    """The value of Inference-Header-Content-Length, if there is one. Raises BadRequest."""
    value = headers.get(b"inference-header-content-length")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise BadRequest(f"Inference-Header-Content-Length: {value.decode('latin-1')[:40]!r}; expected the bytes of JSON")
    return int(value)


def _reason(error: BaseException) -> str | None:
    """Triton's reason for a failure, as in its metric nv_inference_request_failure; None where the request itself was wrong."""
    if isinstance(error, QueueFull | DeadlineExceeded | Unavailable):
        return "REJECTED"
    if isinstance(error, ClientGone | CancelledError):
        return "CANCELED"
    status = status_of(error)
    if status in _INVALID:
        return None
    return "BACKEND" if status == 500 else "OTHER"
