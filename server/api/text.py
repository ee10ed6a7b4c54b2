"""`/v1/embeddings`, `/v1/rerank` and `/v1/models`: encoder models, for clients of OpenAI's, Cohere's and Jina's APIs."""

import asyncio
import time
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Request, Response

from ..config.schema import ModelOptions
from ..config.text import DEFAULTS, TextOptions
from ..errors import BadRequest, DeadlineExceeded, MemoryFull, NotFound, QueueFull, Unavailable
from ..inference.inference import Inference
from ..link.messages import Done
from ..protocol.json_document import parse
from ..protocol.request import Input, write_inputs
from ..scheduling.admission import expired
from ..tenants.service import Service, Tenant
from ..text.folder import NoEncoder
from . import text_messages, text_schemas
from .body import read_body
from .dependencies import ServiceDep, TenantDep
from .framework import cancel_on_disconnect, json_response
from .metadata import ModelName
from .openapi import errors, operation_id, request_body

if TYPE_CHECKING:
    from ..tenants.running_text import RunningText
    from ..text.encoder import Encoder
    from ..text.tokenizer import Tokens

router = APIRouter(generate_unique_id_function=operation_id)
_TEXTS: list[str | Enum] = ["Texts"]
_ERRORS = errors(400, 401, 404, 421, 503, model=text_schemas.OpenAIError)
_INFERENCE_ERRORS = errors(400, 401, 404, 408, 413, 421, 429, 500, 503, 504, model=text_schemas.OpenAIError)
_EMBED = request_body(text_schemas.EmbeddingsRequest, {"model": "minilm", "input": ["a cat", "a dog"]}, required=True)
_RERANK = request_body(
    text_schemas.RerankRequest,
    {"model": "minilm", "query": "what is a cat?", "documents": ["a small animal", "a car"], "top_n": 1},
    required=True,
)


@router.get("/v1/models", tags=_TEXTS, response_model=text_schemas.TextModels, responses=_ERRORS)
async def models(tenant: TenantDep, service: ServiceDep) -> Response:
    """The models that take texts."""
    return json_response(text_schemas.TextModels("list", [_shown(name, tenant) for name in _names(tenant, service)]))


@router.get("/v1/models/{name}", tags=_TEXTS, response_model=text_schemas.TextModel, responses=_ERRORS)
async def model(name: ModelName, tenant: TenantDep, service: ServiceDep) -> Response:
    """One of the models that take texts."""
    encoder_of(tenant.catalog.find(name), _options(service, name))
    return json_response(_shown(name, tenant))


@router.post(
    "/v1/embeddings", tags=_TEXTS, response_model=text_schemas.Embeddings, responses=_INFERENCE_ERRORS, openapi_extra=_EMBED
)
async def embeddings(request: Request, tenant: TenantDep, service: ServiceDep) -> Response:
    """The embeddings of texts, as OpenAI's API has it."""
    body = await _body(request, tenant)
    return await cancel_on_disconnect(request, _embed(body, tenant, service))


@router.post("/rerank", include_in_schema=False)
@router.post("/v1/rerank", tags=_TEXTS, response_model=text_schemas.Ranking, responses=_INFERENCE_ERRORS, openapi_extra=_RERANK)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(request: Request, tenant: TenantDep, service: ServiceDep) -> Response:
    """Texts in the order in which they answer a query, as Cohere's and Jina's APIs have it.

    Also at `/rerank` and `/v2/rerank`.
    """
    body = await _body(request, tenant)
    return await cancel_on_disconnect(request, _rerank(body, tenant, service))


async def _body(request: Request, tenant: Tenant) -> bytes:
    """The body, unless there is no room for the request. It is charged later, when its model is known."""
    tenant.lane.admission.check_room()
    tenant.lane.admission.check_limits()
    return await read_body(request, tenant.uploads)


async def _embed(body: bytes, tenant: Tenant, service: Service) -> Response:
    asked = text_messages.read_embeddings(parse(body, tensors=False))
    options = _options(service, asked.model)
    if options.task != "embed":
        raise NotFound(f"model {asked.model!r} gives scores, not embeddings; use /v1/rerank")
    texts = Texts(tenant, asked.model, options, len(body), asked.priority, asked.timeout)
    try:
        _check_tokens(asked.texts, options)
        tokens, rows = await texts.run(asked.texts, "input")
    except BaseException as error:
        texts.close(error)
        raise
    texts.close()
    used = sum(len(each.ids) for each in tokens)
    return Response(text_messages.embeddings(asked, rows, used, texts.encoder.normalize), media_type="application/json")


async def _rerank(body: bytes, tenant: Tenant, service: Service) -> Response:
    asked = text_messages.read_rerank(parse(body, tensors=False))
    options = _options(service, asked.model)
    pairs = options.task == "rerank"
    given: list[Any] = [(asked.query, each) for each in asked.documents] if pairs else [asked.query, *asked.documents]
    texts = Texts(tenant, asked.model, options, len(body), asked.priority, asked.timeout)
    try:
        tokens, rows = await texts.run(given, "documents" if pairs else "[query, *documents]")
    except BaseException as error:
        texts.close(error)
        raise
    texts.close()
    from ..text.encoder import cosines  # As what runs the tokenizer, only where a model takes texts.

    scores: list[float] = rows[:, 0].tolist() if pairs else cosines(rows[0], rows[1:])
    return json_response(text_messages.ranking(asked, scores, sum(len(each.ids) for each in tokens)))


def _check_tokens(texts: list[Any], options: TextOptions) -> None:
    """Raise BadRequest for tokens where only texts are taken."""
    for index, each in enumerate(texts):
        if isinstance(each, list) and not options.token_ids:
            raise BadRequest(
                f"input[{index}]: tokens; expected text, as tokens of another tokenizer would give a wrong embedding. With "
                "LangChain set check_embedding_ctx_length=False; tokens of this model's own need models.NAME.text.token_ids"
            )


def _options(service: Service, name: str) -> TextOptions:
    return service.config.models.options.get(name, ModelOptions()).text or DEFAULTS


def _shown(name: str, tenant: Tenant) -> text_schemas.TextModel:
    return text_schemas.TextModel(name, "model", 0, tenant.name)


def _names(tenant: Tenant, service: Service) -> list[str]:
    found = []
    for name in dict.fromkeys(each.name for each in tenant.catalog.served()):
        try:
            encoder_of(tenant.catalog.find(name), _options(service, name))
        except NotFound:
            continue
        found.append(name)
    return sorted(found)


_AT_A_TIME = 2
"""Runs of one request that are queued or in flight: one is ready when another ends, and other requests get their turn."""

_PAUSE = 0.005
"""Seconds between two tries of a run that finds no room."""

_TRIES = 3
"""How often a request is begun whose model is replaced while it runs."""


class _Replaced(Exception):
    """The model was replaced, and its successor may have other tokens and gives other embeddings."""


class Texts:
    """One request of texts for a model. Belongs to the event loop, and there to one task.

    The constructor admits it, as that of `Inference`: the model's name may be wrong, the queue full, a limit reached. It raises
    NotFound for a model that takes no texts, or is configured for another task. `nbytes` is the size of the body; `priority`
    and `timeout`, in seconds from `arrived` on, are as in an inference. Once its first run is queued the others wait for room,
    in the queue and in memory. `close` it in the end.
    """

    def __init__(
        self, tenant: Tenant, name: str, options: TextOptions, nbytes: int, priority: int = 0, timeout: float | None = None
    ) -> None:
        self._tenant = tenant
        self._name = name
        self._priority = priority
        self._timeout = timeout
        self._options = options
        self._arrived = time.monotonic_ns()
        self._first: Inference | None = Inference(tenant, name, None, nbytes)
        self._served = self._first.served
        self._open: set[Inference] = set()
        """Those of the runs that have begun."""
        tenant.lane.begin_several()
        try:
            self._text, self.encoder = encoder_of(self._served, options)
        except Exception as error:
            self.close(error)
            raise

    async def run(self, texts: Sequence[Any], where: str) -> "tuple[list[Tokens], Any]":
        """The tokens of texts, of pairs, or of lists of tokens, and a row for each, all of one model: where that is replaced
        meanwhile, both are made again. Raises as `RunningText.tokens`, DeadlineExceeded, and what an inference ends with; then
        all of the request's runs are cancelled.
        """
        for _ in range(_TRIES):
            tokens = await self._tokens(texts, where)
            try:
                return tokens, await self._results(tokens)
            except _Replaced:
                self._served = self._tenant.catalog.route(self._name, None, self._served)
                self._text, self.encoder = encoder_of(self._served, self._options)
        raise Unavailable(f"model {self._name!r} was replaced {_TRIES} times while the request ran; send it again")

    async def _tokens(self, texts: Sequence[Any], where: str) -> "list[Tokens]":
        try:
            async with asyncio.timeout(self._left()):
                return await self._text.tokens(texts, self.encoder, where, self._tenant.lane.slots.blocks)
        except MemoryFull as error:
            raise self._tenant.lane.admission.reject(str(error)) from None
        except TimeoutError:
            raise self._tenant.lane.admission.expire(self._timeout or 0.0) from None

    async def _results(self, tokens: "Sequence[Tokens]") -> Any:
        batches = self.encoder.batches(tokens)
        rows: list[Any] = [None] * len(tokens)
        if len(batches) == 1:
            await self._run_all(batches, tokens, rows)
        else:
            batches.reverse()  # The longest first, which shows at once if they do not fit.
            runners = [asyncio.ensure_future(self._run_all(batches, tokens, rows)) for _ in range(_AT_A_TIME)]
            try:
                await asyncio.gather(*runners)
            finally:
                for each in runners:
                    each.cancel()
                await asyncio.wait(runners)
        return np.stack(rows)

    def close(self, error: BaseException | None = None) -> None:
        """It is answered, or ends with this error. Call it once."""
        first, self._first = self._first, None
        if first and error:
            first.cancel(error)
        self._tenant.lane.end_several()

    async def _run_all(self, batches: list[list[int]], tokens: "Sequence[Tokens]", rows: list[Any]) -> None:
        """Run batches until none is left, and put their results where they belong."""
        while batches:
            batch, begun = batches.pop(0), self._first is None
            try:
                found = await self._run([tokens[index] for index in batch])
            except BaseException as error:
                if not (begun and isinstance(error, QueueFull)):
                    batches.clear()  # The request ends, so no other run of it is to begin.
                    raise
                batches.insert(0, batch)  # There was no memory for it.
                await asyncio.sleep(_PAUSE)
                continue
            for index, row in zip(batch, found, strict=True):
                rows[index] = row

    async def _run(self, tokens: "Sequence[Tokens]") -> Any:
        inference, self._first = self._first, None
        if inference is None:
            lane = self._tenant.lane
            while lane.full:  # The request was admitted, so it waits rather than fails.
                await lane.has_room()
            if self._tenant.catalog.with_key(self._served.key) is None:
                raise _Replaced
            inference = Inference(self._tenant, self._name, self._served.version, 0, True)
        inference.arrived = self._arrived
        self._open.add(inference)
        try:
            return await self._run_one(inference, tokens)
        except BaseException as error:
            self._fails(inference, error)
            raise
        finally:
            self._open.discard(inference)

    def _fails(self, inference: Inference, error: BaseException) -> None:
        """The request ends with this run, and the others with it: it is counted once. Not if the run is tried again."""
        if not inference.is_retried(error):
            for each in self._open - {inference}:
                each.silent = True

    async def _run_one(self, inference: Inference, tokens: "Sequence[Tokens]") -> Any:
        ended: asyncio.Future[Done] = asyncio.get_running_loop().create_future()

        def on_end(end: Done | Exception) -> None:
            if ended.done():
                return
            if isinstance(end, Exception):
                self._fails(inference, end)
                ended.set_exception(end)
            else:
                ended.set_result(end)

        try:
            self._submit(inference, tokens, on_end)
        except _Replaced as error:
            inference.silent = True
            inference.cancel(error)
            raise
        except Exception as error:
            raise inference.fail(error) from error
        try:
            done = await ended
        except asyncio.CancelledError as error:
            inference.cancel(error)
            raise
        except DeadlineExceeded as error:
            raise (expired(self._timeout) if self._timeout and self._has_expired() else error) from None
        slot = inference.slot_of(done)
        try:
            places = [(shape, slot.view[offset : offset + nbytes]) for shape, offset, nbytes in done.outputs]
            found = self.encoder.result(tokens, places)
        except Exception as error:
            raise inference.fail(error) from error
        inference.succeed(done)
        return found

    def _submit(self, inference: Inference, tokens: "Sequence[Tokens]", on_end: Any) -> None:
        """Write a batch into a slot and queue it. Raises _Replaced."""
        slot = inference.take_slot(begun=True)
        served = inference.served
        if served.key != self._served.key:
            raise _Replaced
        filled = self.encoder.fill(tokens)
        inputs = [Input(shape, array) for shape, array in zip(filled.shapes, filled.arrays, strict=True)]
        write_inputs(inputs, served.signature, slot, served.request_cache.output_reserve)
        timeout = None if self._timeout is None else inference.time_left(self._timeout)
        inference.submit(filled.shapes, self._priority, timeout, on_end, self.encoder.unasked)

    def _has_expired(self) -> bool:
        return (self._left() or 0.0) <= 0

    def _left(self) -> float | None:
        return None if self._timeout is None else self._timeout - (time.monotonic_ns() - self._arrived) / 1e9


def encoder_of(served: Any, options: TextOptions) -> "tuple[RunningText, Encoder]":
    """The tokenizer and the encoder of a version. Raises NotFound for one that takes no texts."""
    if served.text is None:
        why = "its tokenizer cannot be used, see the log" if served.folder else "it has no tokenizer.json"
        raise NotFound(f"model {served.name!r} does not take texts: {why}")
    try:
        return served.text, served.text.encoder(options)
    except NoEncoder as error:
        raise NotFound(f"model {served.name!r} does not take texts: {error}") from error
