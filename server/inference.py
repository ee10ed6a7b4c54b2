"""One inference from its headers to its reply, apart from how the body came and how the reply goes."""

import logging
import time
import uuid
from asyncio import CancelledError
from collections.abc import Callable
from typing import NamedTuple

import orjson

from .call import Headers, Reply
from .errors import (
    BadRequest,
    ClientGone,
    DeadlineExceeded,
    Failed,
    QueueFull,
    RequestError,
    TooLarge,
    Unavailable,
    answer,
    status_of,
)
from .protocol.request import Limits
from .protocol.response import InferResponse
from .service import Tenant
from .slots import Slot
from .ticket import Done

log = logging.getLogger("greenlane.infer")

Success = tuple[InferResponse, bytes]
"""An encoded answer, and its Server-Timing."""
Outcome = Success | Exception

_UNTIMED = b"queue;dur=0, execute;dur=0"


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

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._target.tenant.name

    def expect(self, length: int) -> None:
        """A body of so many bytes is on its way. Raises TooLarge."""
        if length > self._target.max_body:
            error = TooLarge(f"a body of {length} bytes; the limit is {self._target.max_body}")
            self.count(error)
            raise error

    def begin(self, body: bytes, headers: Headers, heard: Callable[["Outcome"], None]) -> None:
        """The body has come, unpacked; `heard` is told the outcome, once, before or after this returns."""
        self._heard = heard
        try:
            tenant, name, version, limits, _ = self._target
            self._arrived = time.monotonic_ns()
            served = self._served = tenant.catalog.find(name, version)  # It may be another by now.
            slot = self._slot = tenant.lane.admit()
            request = self._request = served.plans.decode(body, _header_length(headers), served.signature, slot, limits)
            self._decoded = time.monotonic_ns()
            lane, priority, timeout = tenant.lane, request.priority, request.timeout
            lane.begin(slot, served.key, request.shapes, self._end, priority, timeout, served.batching)
        except Exception as error:
            self._fail(error)

    def cancel(self, error: BaseException) -> None:
        """Nobody waits for the outcome any more, and nobody will be told."""
        self.count(error)
        self._release()

    def count(self, error: BaseException) -> None:
        """It was refused, or failed, for this reason."""
        self._served.statistics.failed(time.monotonic_ns() - self._arrived, _reason(error))

    def _end(self, end: Done | RequestError) -> None:
        """The lane says how it ended."""
        if not isinstance(end, Done):
            self._fail(end)
            return
        try:
            slot = self._target.tenant.lane.slots.at(end.slot) if end.rows else self._slot
            assert slot
            served, request = self._served, self._request
            response = served.plans.encode(served.name, served.version, request, served.signature, slot, end.outputs)
        except Exception as error:
            self._fail(error)
        else:
            self._release()
            encoded, rows = time.monotonic_ns(), served.signature.rows(request.shapes)
            served.statistics.succeeded(self._arrived, self._decoded, end, encoded, rows)
            queued, executed = (end.began - self._decoded) / 1e6, (end.ended - end.began) / 1e6
            self._tell((response, b"queue;dur=%.3f, execute;dur=%.3f" % (queued, executed)))

    def _fail(self, error: Exception) -> None:
        self.cancel(error)
        self._tell(error)

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


def refusal(error: Exception, inference: Inference | None) -> Reply:
    """The reply to a request that went wrong."""
    tenant = inference.tenant if inference else "-"
    request_id = uuid.uuid4().hex
    told = answer(error, request_id)
    if told.status == 500:
        unexpected = error if not isinstance(error, Failed) else None
        log.error("%s", error, exc_info=unexpected, extra={"tenant": tenant, "request_id": request_id})
    fields = [(b"content-type", b"application/json"), (b"server-timing", _UNTIMED)]
    fields += [(name.encode(), value.encode()) for name, value in told.headers.items()]
    return Reply(told.status, fields, orjson.dumps({"error": told.text}))


def _header_length(headers: Headers) -> int | None:
    """The value of Inference-Header-Content-Length, if there is one. Raises BadRequest."""
    value = headers.get(b"inference-header-content-length")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise BadRequest(f"Inference-Header-Content-Length: {value.decode('latin-1')[:40]!r}; expected the bytes of JSON")
    return int(value)


def _reason(error: BaseException) -> str:
    """Triton's reason for a failure, as in its metric nv_inference_request_failure."""
    if isinstance(error, QueueFull | DeadlineExceeded | Unavailable):
        return "REJECTED"
    if isinstance(error, ClientGone | CancelledError):
        return "CANCELED"
    return "BACKEND" if status_of(error) == 500 else "OTHER"
