"""One inference of a call: from its message to the last part of its answer."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from engines import wire

from ..errors import ClientGone, RequestError
from ..inference.inference import Inference
from ..link.messages import Done, Extent
from ..link.slots import Slot
from ..protocol.classification import Classes
from ..protocol.json_document import Object
from ..protocol.request import InferRequest, Limits, decode_body
from ..protocol.response import Written, outer_shape, write_long
from ..protocol.time_slices import Steps, TimeSlices
from ..protocol.typed_tensors import TensorsBody
from ..tenants.catalog import ServedModel
from ..tenants.service import Tenant
from .messages import ModelInferResponse
from .request import Parsed, document, parse, wants_empty_end

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
