"""`/v1/embeddings`, `/v1/rerank` and `/v1/models`: encoder models, for clients of OpenAI's, Cohere's and Jina's APIs."""

from enum import Enum
from typing import Any

from fastapi import APIRouter, Request, Response

from ..config.schema import ModelOptions
from ..config.text import DEFAULTS, TextOptions
from ..errors import BadRequest, NotFound
from ..protocol.json_document import parse
from ..tenants.service import Service, Tenant
from . import text_messages, text_schemas
from .body import read_body
from .dependencies import ServiceDep, TenantDep
from .framework import cancel_on_disconnect, json_response
from .metadata import ModelName
from .openapi import errors, operation_id, request_body
from .texts import Texts, encoder_of

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
