"""ModelInfer and ModelStreamInfer: from messages to answers."""

import asyncio
from asyncio import CancelledError
from collections.abc import Sequence
from typing import Any, TypeVar

from grpc.aio import EOF, BaseError

from engines import wire

from ..errors import ClientGone, QueueFull, RequestError, Unavailable, refuse
from ..inference.in_parts import InferenceInParts
from ..inference.inference import Inference
from ..link.messages import Done, Extent
from ..link.slots import Slot
from ..protocol.classification import Classes
from ..protocol.json_document import Object
from ..protocol.request import InferRequest, Limits, decode_body
from ..protocol.response import Written, outer_shape, write_long
from ..protocol.time_slices import Steps, TimeSlices
from ..protocol.typed_tensors import TensorsBody
from ..tenants.auth import Tenancy
from ..tenants.catalog import ServedModel
from ..tenants.service import Tenant
from .messages import ModelInferResponse, ModelStreamInferResponse
from .request import Parsed, document, parse, wants_empty_end
from .tenant_port import TenantPort
from .unread import KeptAnswer

_FINAL = "triton_final_response"
_RAW_CONTENTS = 6 << 3 | 2
"""The byte before each element of raw_output_contents: its number, and that it has a length."""


def encode(
    served: ServedModel,
    request: InferRequest,
    slot: Slot,
    extents: Sequence[Extent],
    written: Written,
    final: bool | None = None,
) -> bytes:
    """The answer with the requested outputs, all of them in raw_output_contents, in their order. It is a copy: the slot can be
    released afterwards.

    `written` has the outputs that are classified. `final`: whether it is the last part, which Triton says in streams, or
    None. Raises Failed if the model's configuration has no reshape for the shape of one.
    """
    message = ModelInferResponse(model_name=served.name, model_version=served.version, id=request.id or "")
    if final is not None:
        message.parameters[_FINAL].bool_param = final
    tensors: list[bytes | memoryview] = []
    for position, _, classes in request.outputs:
        spec, (shape, offset, nbytes) = served.signature.outputs[position], extents[position]
        if classes:
            known = written[position]
            assert isinstance(known, Classes)
            message.outputs.add(name=spec.name, datatype="BYTES", shape=known.shape)
            data: bytes | memoryview = wire.pack(known.texts)
        else:
            outer = outer_shape(spec, shape) if spec.form else shape
            message.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=outer)
            data = slot.view[offset : offset + nbytes]
        tensors += (_prefix(len(data)), data)
    return b"".join([message.SerializeToString(), *tensors])


def empty_end(served: ServedModel, request_id: str) -> bytes:
    """The answer without outputs that follows the last part."""
    message = ModelInferResponse(model_name=served.name, model_version=served.version, id=request_id)
    message.parameters[_FINAL].bool_param = True
    data: bytes = message.SerializeToString()
    return data


def _prefix(size: int) -> bytes:
    """What is written before a tensor of so many bytes."""
    prefix = bytearray([_RAW_CONTENTS])
    while size > 127:
        prefix.append(size & 127 | 128)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)


Returned = TypeVar("Returned")


class Run:
    """One inference. Belongs to one task, which calls `begin`, then `next` and `encode` for each part, and `succeed`.

    What they raise ends it by `fail`, and a cancellation by `cancel`. `kind` is `InferenceInParts` where the answer may have
    parts. `id` is the request's, once it is known; `wants_empty_end`: an empty answer is to follow the last part.
    """

    def __init__(self, tenant: Tenant, limits: Limits, kind: type[Inference] = Inference) -> None:
        self._tenant = tenant
        self._limits = limits
        self._kind = kind
        self._inference: Any = None
        self._request: InferRequest | None = None
        self._coming: asyncio.Future[Done | Exception] = asyncio.get_running_loop().create_future()
        self._error: Exception | None = None
        self._is_over = True  # Nothing is to be counted or released.
        self.id = ""
        self.wants_empty_end = False

    @property
    def in_parts(self) -> bool:
        """Whether the model answers in parts."""
        return self.served.signature.in_parts

    @property
    def served(self) -> ServedModel:
        """The model, once the inference has begun."""
        served: ServedModel = self._inference.served
        return served

    async def begin(self, data: bytes, time_left: float | None, traceparent: str | None = None) -> None:
        """Decode a message and submit the inference; `time_left` is until the call's deadline. Raises why it is refused."""
        try:
            parsed = parse(data, self._limits)
        except RequestError:
            self._tenant.lane.admission.count_invalid()
            raise
        size, message, long = len(data), parsed.message, parsed.long
        del data
        self.id, self.wants_empty_end = message.id, wants_empty_end(message)
        inference = self._inference = self._kind(self._tenant, message.model_name, message.model_version or None, size)
        self._is_over = False
        if (sampler := self._tenant.tracing.sampler) is not None:
            inference.trace = sampler.start(traceparent, inference.arrived)
        body = TensorsBody(await self._document(parsed, size))
        del parsed, message
        slot, served = inference.take_slot(), inference.served
        request = self._request = decode_body(body, served.signature, slot, self._limits, served.request_cache.output_reserve)
        timeout = request.timeout
        if timeout is not None and long:
            timeout = inference.time_left(timeout)
        timeout = _shorter(timeout, time_left)
        inference.submit(request.shapes, request.priority, timeout, self._on_end, request.unasked)

    async def next(self) -> Done:
        """The completion, or the next part. Raises the error that the inference ends with."""
        end = self._error or await self._coming
        if isinstance(end, Exception):
            raise end
        if self._error:  # It came after the part, whose memory is not this inference's any more.
            raise self._error
        return end

    async def encode(self, done: Done, final: bool | None = None) -> bytes:
        """The ModelInferResponse with these outputs; `final` is whether it is the last one, None where that is not asked."""
        request, inference = self._request, self._inference
        assert request
        slot, served = inference.slot_of(done), inference.served
        written: Written = {}
        if request.classified:
            steps = write_long(request, served.signature, slot, done.outputs, labels=served.labels)
            written = await _in_slices(served.request_cache.time_slices, steps)
        if self._error:
            raise self._error
        answer = encode(served, request, slot, done.outputs, written, final)
        if self.in_parts:
            inference.encoded(done)
        return answer

    def proceed(self) -> None:
        """Ask for the next part; the last one's outputs are gone then. Raises the error that came since."""
        if self._error:
            raise self._error
        self._coming = asyncio.get_running_loop().create_future()
        self._inference.proceed()

    def succeed(self, done: Done) -> tuple[float, float]:
        """Count it and release its memory, at the end of the answer; the milliseconds it was queued and executed."""
        self._is_over = True
        queued, executed = self._inference.succeed(done)
        return queued, executed

    def fail(self, error: Exception) -> Exception:
        """End it for this error, unless it has ended; the error to answer with."""
        if self._is_over:
            return error
        self._is_over = True
        answered: Exception = self._inference.fail(error)
        return answered

    def cancel(self, time_left: float | None) -> None:
        """The call was cancelled, or its deadline has passed: stop the inference, unless it has ended."""
        if not self._is_over:
            self._is_over = True
            expired = time_left is not None and time_left <= 0
            gone = ClientGone("the client cancelled its call")
            self._inference.cancel(self._tenant.lane.admission.expire(0.0) if expired else gone)

    def _on_end(self, end: Done | Exception) -> None:
        """The end or a part has come. An error may also come between two parts. It is counted, and the slot is released."""
        if isinstance(end, Exception):
            self._is_over = True
        if not self._coming.done():
            self._coming.set_result(end)
        elif isinstance(end, Exception):
            self._error = end

    async def _document(self, parsed: Parsed, size: int) -> Object:
        """The document of a message; many typed values are converted in time slices. Raises BadRequest, QueueFull."""
        if not parsed.long:
            return _result(document(parsed))
        self._tenant.uploads.reserve(size)
        try:
            return await _in_slices(self._inference.served.request_cache.time_slices, document(parsed))
        finally:
            self._tenant.uploads.release(size)


def _result(steps: Steps[Returned]) -> Returned:
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


def _shorter(one: float | None, other: float | None) -> float | None:
    """The shorter of two times, of which either may be None for no limit."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


class Infer:
    """Serves the inferences of one tenant's port. Belongs to the event loop."""

    def __init__(self, tenant_port: TenantPort) -> None:
        self._tenant_port = tenant_port
        self._streams = 0
        self._idle: set[asyncio.Future[Any]] = set()
        self._stopping = False

    async def unary(self, context: Any) -> bytes:
        """ModelInfer. A flood is refused before its tensors have arrived."""
        tenant = self._tenant_port.tenant(context)
        tenant.lane.admission.check_room()
        tenant.lane.admission.check_limits()
        run = Run(tenant, self._tenant_port.service.limits)
        try:
            data = await self._tenant_port.read(context)
            await run.begin(data, context.time_remaining(), self._tenant_port.traceparent(context))
            del data
            done = await run.next()
            answer = await run.encode(done)
            self._tenant_port.kept.keep_until_done(context, len(answer))
        except CancelledError:
            run.cancel(context.time_remaining())
            raise
        except Exception as error:
            raise run.fail(error) from None
        queued, executed = run.succeed(done)
        context.set_trailing_metadata((("server-timing", f"queue;dur={queued:.3f}, execute;dur={executed:.3f}"),))
        return answer

    async def stream(self, context: Any) -> None:
        """ModelStreamInfer: the answer to each request, or an error message, in their order; it may come in parts."""
        tenant = self._tenant_port.tenant(context)
        if self._streams >= self._tenant_port.readers:
            text = f"{self._streams} streams are open, in each of which a message may arrive"
            raise QueueFull(f"{text}; as many fit into tenants.{tenant.name}.memory by server.max_body")
        self._streams += 1
        try:
            tenancy = self._tenant_port.service.tenancy
            while await self._answer_next(tenant, context, tenancy):
                pass
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

    async def _answer_next(self, tenant: Tenant, context: Any, tenancy: Tenancy) -> bool:
        """Write the answer to the next message of a stream, each part when the client has room for it; False at its end.

        `tenancy` is what admitted the stream. Raises Unauthorized where its key is valid no more.
        """
        message = await self._next(context)
        if message is EOF:
            return False
        if self._tenant_port.service.tenancy is not tenancy:  # Reloaded: the stream's key may be valid no more.
            self._tenant_port.tenant(context)
        run = Run(tenant, self._tenant_port.service.limits, InferenceInParts)
        try:
            await run.begin(message, context.time_remaining(), self._tenant_port.traceparent(context))
            del message
            while (done := await run.next()).outputs and run.in_parts:
                await _write(context, *self._keep(context, infer_response=await run.encode(done, final=False)))
                run.proceed()
            last = None
            if not run.in_parts:
                last = self._keep(context, infer_response=await run.encode(done, final=True))
            elif run.wants_empty_end:
                last = self._keep(context, infer_response=empty_end(run.served, run.id))
        except CancelledError:
            run.cancel(context.time_remaining())
            raise
        except ClientGone as error:
            raise run.fail(error) from None
        except Exception as error:
            text = refuse(run.fail(error), tenant.name).text
            unnamed = ModelInferResponse(id=run.id).SerializeToString()
            await _write(context, *self._keep(context, error_message=text, infer_response=unnamed))
            return True
        run.succeed(done)
        if last is not None:
            await _write(context, *last)
        return True

    def _keep(self, context: Any, **fields: Any) -> tuple[bytes, KeptAnswer]:
        """A message of a stream, which counts as unread from now on. Raises MemoryFull."""
        message: bytes = ModelStreamInferResponse(**fields).SerializeToString()
        return message, self._tenant_port.kept.keep(context, len(message))


async def _write(context: Any, message: bytes, kept: KeptAnswer) -> None:
    """Write a message once the client has room for it. Raises ClientGone if it is gone, also where that took too long."""
    try:
        await context.write(message)
    except BaseError as error:
        raise ClientGone("the client has disconnected") from error
    finally:
        kept.done()
