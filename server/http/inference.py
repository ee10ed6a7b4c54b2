"""One inference request from its headers to its reply, independent of how its body arrives and how the reply is sent."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import orjson

from ..errors import BadRequest, RequestError, TooLarge, Unavailable, refuse
from ..inference.inference import Inference
from ..link.messages import Done
from ..link.slots import SMALLEST
from ..protocol.arriving_body import ArrivingBody
from ..protocol.json_document import Object
from ..protocol.json_slices import SLICE, extract_row, parse_slices
from ..protocol.request import Limits, check_json
from ..protocol.response import InferResponse, Written, is_long, write_long
from ..protocol.time_slices import Returned, Steps
from ..tenants.service import Tenant
from .compression import encoding_of
from .exchange import Headers, Reply

CLOSE = (b"connection", b"close")
"""The header of an answer after which the connection is closed."""

Success = tuple[InferResponse, bytes]
"""An encoded answer, and the value of its Server-Timing header."""
Outcome = Success | Exception


class Target(NamedTuple):
    """The tenant and model a request is for, and the limits that apply to it."""

    tenant: Tenant
    name: str
    version: str | None
    limits: Limits
    max_body: int


class HttpInference:
    """One inference request over HTTP, from its headers to its outcome. Belongs to the event loop; nothing blocks or awaits.

    It is made when the headers are there; `length` is the announced length of the body. The constructor raises as that of
    `Inference` does, so a flood of requests is refused before their bodies are read.

    Call `begin` once the body is complete. It leads to one call of `on_done`, which has to write or copy the tensors of the
    answer before it returns: then the slot is released.
    """

    __slots__ = ("_inference", "_on_done", "_request", "_target")

    def __init__(self, target: Target, length: int = 0) -> None:
        self._target = target
        self._inference = Inference(target.tenant, target.name, target.version, length)
        self._on_done: Callable[[Outcome], None] | None = None

    def expect(self, length: int, headers: Headers) -> None:
        """Check what the headers say of the body, of which `length` bytes are announced.

        Raises TooLarge, BadRequest, UnsupportedEncoding.
        """
        try:
            self._check(length, headers)
        except RequestError as error:
            self.count(error)
            raise

    def begin(
        self,
        body: bytes,
        headers: Headers,
        on_done: Callable[["Outcome"], None],
        document: Object | None = None,
        at_once: bool = False,
    ) -> None:
        """Start with the complete, decompressed body. `on_done` is called once with the outcome, possibly before this returns.

        Large JSON is parsed in time slices; after the last of them this is called again, with the `document`. `at_once` says
        that this object was made in the same iteration of the event loop.
        """
        self._on_done, inference = on_done, self._inference
        try:
            if document is None:
                if (sampler := self._target.tenant.tracing.sampler) is not None:
                    inference.trace = inference.trace or sampler.start(headers.get(b"traceparent"), inference.arrived)
                inference.arrived = time.monotonic_ns()
                if len(body) > SLICE and self._parse_in_slices(body, headers, on_done):
                    return
            slot = inference.take_slot(at_once)
            served = inference.served
            request = self._request = served.request_cache.decode(
                body, json_length(headers), served.signature, slot, self._target.limits, document
            )
            timeout = request.timeout
            if document is not None and timeout is not None:
                timeout = inference.time_left(timeout)
            inference.submit(request.shapes, request.priority, timeout, self._end, request.unasked)
        except Exception as error:
            self._fail(error)

    def receive(self, head: bytes, length: int, leave: Callable[[], None]) -> ArrivingBody | None:
        """Return a body whose tensors are received directly into a slot; call `begin_received` once it is complete.

        `head` is the whole JSON of the body, or empty for a raw body. None is returned if the body has to be buffered. That is
        so for an invalid one too, which `begin` refuses later. `leave` is called if the slot is needed for something else
        before the body is complete: it has to copy what has arrived, and then to call `return_slot`.
        """
        inference = self._inference
        try:
            if slot := inference.early_slot(leave):
                served = inference.served
                placement = served.request_cache.place(head, length, served.signature, slot, self._target.limits)
                if placement:
                    return ArrivingBody(head, length, placement, slot)
        except Exception:
            pass  # Whatever it is, `begin` meets it as well.
        inference.return_slot()
        return None

    def _check(self, length: int, headers: Headers) -> None:
        _, _, _, limits, max_body = self._target
        if length > max_body:
            raise TooLarge(f"a body of {length} bytes; the limit is {max_body} (server.max_body)")
        if (tensors := length - limits.json) > 0:  # At least so many bytes are not JSON, but tensors.
            self._target.tenant.lane.slots.blocks.check(tensors)
        size, encoding = json_length(headers), encoding_of(headers.get(b"content-encoding"))
        if length and not encoding:
            check_json(length if size is None else size, length, limits)

    def return_slot(self) -> None:
        """Give back the slot, if there is one: the answer was written, or the rest of the body is received elsewhere."""
        self._inference.return_slot()

    def begin_received(self, body: ArrivingBody, headers: Headers, on_done: Callable[["Outcome"], None]) -> None:
        """The same as `begin`, for the body that `receive` returned, which is complete now."""
        self._on_done, inference = on_done, self._inference
        if (sampler := self._target.tenant.tracing.sampler) is not None:
            inference.trace = sampler.start(headers.get(b"traceparent"), inference.arrived)
        inference.arrived = time.monotonic_ns()
        try:
            if not inference.keep_slot():
                data = bytes(body.copy())
                inference.return_slot()
                self.begin(data, headers, on_done)
                return
            body.check()
            request = self._request = body.request
            inference.submit(request.shapes, request.priority, request.timeout, self._end, request.unasked)
        except Exception as error:
            self._fail(error)

    def cancel(self, error: BaseException) -> None:
        """Stop: `on_done` will not be called any more. Counts `error` as the reason, and releases the slot."""
        self._on_done = None
        self._inference.cancel(error)

    def count(self, error: BaseException) -> None:
        """Count this refusal or failure in the model's or the tenant's statistics."""
        self._inference.count(error)

    def _parse_in_slices(self, body: bytes, headers: Headers, on_done: Callable[["Outcome"], None]) -> bool:
        """Have large JSON parsed in time slices. False if it is small, or over the limit. Raises QueueFull, Unavailable."""
        tenant, _, _, limits, _ = self._target
        length = json_length(headers)
        size = len(body) if length is None else length
        if not SLICE < size <= min(len(body), limits.json):
            return False
        tenant.lane.admission.check_room()
        slices, limit = self._inference.served.request_cache.time_slices, tenant.config.queue + tenant.config.in_flight
        if len(slices) >= limit:
            allowed = f"the limit is {limit} (tenants.{tenant.name}.queue + in_flight)"
            waiting = f"{len(slices)} large requests wait to be parsed"
            raise tenant.lane.admission.reject(f"Exceeds maximum queue size: {waiting}; {allowed}")
        row = extract_row(data := body[:size])
        tenant.uploads.reserve(len(body))
        timeout = row.timeout if row else None
        timer = asyncio.get_running_loop().call_later(timeout, self._expire, timeout) if timeout else None
        slices.add(self._parse(parse_slices(data, row), partial(self.begin, body, headers, on_done), timer, len(body)))
        return True

    def _parse(
        self, steps: Steps[Object], begin: Callable[[Object], None], timer: asyncio.TimerHandle | None, nbytes: int
    ) -> Steps[None]:
        try:
            yield from self._run_steps(steps, begin)
        finally:
            self._target.tenant.uploads.release(nbytes)
            if timer:
                timer.cancel()

    def _run_steps(self, steps: Steps[Returned], then: Callable[[Returned], None]) -> Steps[None]:
        """Run these steps and call `then` with their result, unless the request was cancelled meanwhile."""
        try:
            if self._on_done is None:
                return
            returned = yield from steps
        except Exception as error:
            if self._on_done is not None:
                self._fail(error)
        else:
            if self._on_done is not None:
                then(returned)

    def _expire(self, timeout: float) -> None:
        """The deadline passed while the JSON was parsed; a request that was cancelled before is already counted."""
        if self._on_done is not None:
            self._fail(self._target.tenant.lane.admission.expire(timeout))

    def _end(self, end: Done | Exception, written: Written | None = None) -> None:
        """Called when the inference has ended: encode the outputs, and report the outcome."""
        if not isinstance(end, Done):
            self._report(end)
            return
        try:
            inference, request, nonfinite = self._inference, self._request, self._target.limits.nonfinite
            slot, served = inference.slot_of(end), inference.served
            long = written is None and slot.capacity > SMALLEST and is_long(request, served.signature, end.outputs)
            if long or (request.classified and written is None):
                steps = write_long(request, served.signature, slot, end.outputs, nonfinite, served.labels)
                served.request_cache.time_slices.add(self._run_steps(steps, partial(self._end, end)))
                return
            response = served.request_cache.encode(
                served.name, served.version, request, served.signature, slot, end.outputs, written, nonfinite
            )
        except Exception as error:
            self._fail(error)
        else:
            self._report((response, b"queue;dur=%.3f, execute;dur=%.3f" % inference.count_success(end)))
            inference.return_slot()

    def _fail(self, error: Exception) -> None:
        self._report(self._inference.fail(error))

    def _report(self, outcome: "Outcome") -> None:
        on_done, self._on_done = self._on_done, None  # Breaks a cycle that only the garbage collector would free.
        if on_done:
            on_done(outcome)


def success(outcome: Success) -> Reply:
    """The reply to a successful request."""
    (document, tensors, length), timing = outcome
    kind = b"application/json" if length is None else b"application/octet-stream"
    fields = [(b"content-type", kind), (b"server-timing", timing)]
    if length is not None:
        fields.append((b"inference-header-content-length", b"%d" % length))
    return Reply(200, fields, document, tensors)


def refusal(error: Exception, target: Target | None) -> Reply:
    """The reply to a refused or failed request, with `target` if it was determined; logs errors of status 500."""
    reply = refuse(error, target.tenant.name if target else None)
    fields = [(b"content-type", b"application/json")]
    fields += [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    if isinstance(error, Unavailable) and target and target.tenant.lane.admission.refusing:
        fields.append(CLOSE)  # Every other request on this connection would be refused as well.
    return Reply(reply.status, fields, orjson.dumps({"error": reply.text}))


def json_length(headers: Headers) -> int | None:
    """The bytes of JSON before the binary tensors, as Inference-Header-Content-Length says, or None. Raises BadRequest."""
    value = headers.get(b"inference-header-content-length")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise BadRequest(f"Inference-Header-Content-Length: {value.decode('latin-1')[:40]!r}; expected the bytes of JSON")
    return int(value)
