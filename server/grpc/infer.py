"""ModelInfer and ModelStreamInfer: from a message to an answer."""

import asyncio
from asyncio import CancelledError
from functools import partial
from typing import Any, NamedTuple, TypeVar

from grpc.aio import EOF

from ..errors import ClientGone, QueueFull, RequestError, Unavailable
from ..inference.inference import Inference
from ..inference.refusals import refuse
from ..link.messages import Done
from ..protocol.json_document import Object
from ..protocol.request import InferRequest, Limits, decode_body
from ..protocol.response import Written, write_long
from ..protocol.time_slices import Steps, TimeSlices
from ..protocol.typed_tensors import TensorsBody
from ..tenants.service import Tenant
from .front import Front, shortened
from .messages import ModelInferResponse, ModelStreamInferResponse
from .request import Parsed, document, parse
from .response import encode

Returned = TypeVar("Returned")


class Answer(NamedTuple):
    """An encoded ModelInferResponse, and its times as in HTTP's Server-Timing."""

    message: bytes
    timing: str


class Infer:
    """Serves the inferences of one tenant's port. Belongs to the event loop."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._streams = 0
        self._idle: set[asyncio.Future[Any]] = set()
        self._stopping = False

    def __repr__(self) -> str:
        return f"<Infer of {self._front!r}, {self._streams} streams>"

    async def unary(self, context: Any) -> bytes:
        """ModelInfer. A flood is refused before its tensors have arrived."""
        tenant = self._front.tenant(context)
        tenant.lane.check_room()
        answer = await self._infer(tenant, await self._front.read(context), context)
        context.set_trailing_metadata((("server-timing", answer.timing),))
        return answer.message

    async def stream(self, context: Any) -> None:
        """ModelStreamInfer: one answer, or error message, for each request, in their order."""
        tenant = self._front.tenant(context)
        if self._streams >= self._front.readers:
            text = f"{self._streams} streams are open, in each of which a message may arrive"
            raise QueueFull(f"{text}; as many fit into tenants.{tenant.name}.memory by server.max_body")
        self._streams += 1
        try:
            while (message := await self._next(context)) is not EOF:
                await context.write(await self._stream_answer(tenant, message, context))
        finally:
            self._streams -= 1

    def stop(self) -> None:
        """End the streams that are not being answered, and the others after their answer."""
        self._stopping = True
        for each in self._idle:
            each.cancel()

    async def _next(self, context: Any) -> Any:
        """The next message of a stream, or EOF. Raises Unavailable if the server stops."""
        if not self._stopping:
            reading = asyncio.ensure_future(context.read())
            self._idle.add(reading)
            try:
                return await reading
            except CancelledError:
                if not self._stopping:
                    raise
            finally:
                self._idle.discard(reading)
        raise Unavailable("the server is stopping")

    async def _stream_answer(self, tenant: Tenant, message: bytes, context: Any) -> bytes:
        try:
            answer = ModelStreamInferResponse(infer_response=(await self._infer(tenant, message, context, final=True)).message)
        except Exception as error:
            text = shortened(refuse(error, tenant.name).text)
            answer = ModelStreamInferResponse(
                error_message=text, infer_response=_identified(message, self._front.service.limits)
            )
        data: bytes = answer.SerializeToString()
        return data

    async def _infer(self, tenant: Tenant, data: bytes, context: Any, final: bool = False) -> Answer:
        """Run one inference. Raises what it is refused or fails with; if the call is cancelled, it is stopped."""
        limits, size = self._front.service.limits, len(data)
        try:
            parsed = parse(data, limits)
        except RequestError:
            tenant.lane.count_invalid()
            raise
        del data
        long = parsed.long
        inference = Inference(tenant, parsed.message.model_name, parsed.message.model_version or None)
        ended: asyncio.Future[Done | Exception] = asyncio.get_running_loop().create_future()
        try:
            body = TensorsBody(await _document(parsed, inference, tenant, size))
            del parsed
            slot, served = inference.take_slot(), inference.served
            request = decode_body(body, served.signature, slot, limits, served.request_cache.output_reserve)
            del body  # Its tensors are in the tenant's slot now, and nothing keeps the message.
            timeout = request.timeout
            if timeout is not None and long:
                timeout = inference.time_left(timeout)
            timeout = _shorter(timeout, context.time_remaining())
            inference.submit(request.shapes, request.priority, timeout, partial(_resolve, ended))
            end = await ended
            if isinstance(end, Done):
                written = await _classified(request, inference, end) if request.classified else {}
                message = encode(served, request, inference.slot_of(end), end.outputs, written, final)
        except CancelledError:
            if not (ended.done() and not ended.cancelled() and isinstance(ended.result(), Exception)):  # Else it has ended.
                left = context.time_remaining()
                expired = left is not None and left <= 0
                inference.cancel(tenant.lane.expire(0.0) if expired else ClientGone("the client cancelled its call"))
            raise
        except Exception as error:
            raise inference.fail(error) from None
        if not isinstance(end, Done):
            raise end
        queued, executed = inference.succeed(end)
        return Answer(message, f"queue;dur={queued:.3f}, execute;dur={executed:.3f}")


async def _document(parsed: Parsed, inference: Inference, tenant: Tenant, size: int) -> Object:
    """The document of a message; many typed values are converted in time slices. Raises BadRequest, QueueFull."""
    if not parsed.long:
        return _run(document(parsed))
    tenant.uploads.reserve(size)
    try:
        return await _in_slices(inference.served.request_cache.time_slices, document(parsed))
    finally:
        tenant.uploads.release(size)


async def _classified(request: InferRequest, inference: Inference, done: Done) -> Written:
    served, slot = inference.served, inference.slot_of(done)
    steps = write_long(request, served.signature, slot, done.outputs, labels=served.labels)
    return await _in_slices(served.request_cache.time_slices, steps)


def _run(steps: Steps[Returned]) -> Returned:
    """The result of steps that are few."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            returned: Returned = end.value
            return returned


async def _in_slices(slices: TimeSlices, steps: Steps[Returned]) -> Returned:
    """The result of steps that the event loop runs between other work; they end early if the caller is cancelled."""
    future: asyncio.Future[Returned] = asyncio.get_running_loop().create_future()
    slices.add(_job(steps, future))
    return await future


def _job(steps: Steps[Returned], future: "asyncio.Future[Returned]") -> Steps[None]:
    try:
        while not future.done():
            next(steps)
            yield
    except StopIteration as end:
        future.set_result(end.value)
    except Exception as error:
        if not future.done():
            future.set_exception(error)


def _resolve(future: "asyncio.Future[Done | Exception]", end: Done | Exception) -> None:
    if not future.done():
        future.set_result(end)


def _shorter(one: float | None, other: float | None) -> float | None:
    """The shorter of two times, of which either may be None for no limit."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _identified(message: bytes, limits: Limits) -> bytes:
    """An answer with nothing but the id of a request that was refused, so that its client knows which it was."""
    try:
        data: bytes = ModelInferResponse(id=parse(message, limits).message.id).SerializeToString()
        return data
    except RequestError:
        return b""
