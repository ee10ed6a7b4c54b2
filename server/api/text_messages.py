"""Requests and answers of OpenAI's embeddings API, and of reranking as Cohere and Jina have it. Pure.

Source: https://platform.openai.com/docs/api-reference/embeddings and https://jina.ai/reranker (its API), 2026.
"""

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from msgspec.structs import asdict

from ..errors import BadRequest
from ..protocol.json_document import Object, count, field, refuse, unsigned
from . import text_schemas as schemas
from .text_schemas import MOST_TEXTS


class EmbeddingsRequest(NamedTuple):
    """What is asked for. `texts` are texts or lists of tokens; `timeout` is in seconds."""

    model: str
    texts: list[Any]
    as_base64: bool
    dimensions: int | None
    priority: int
    timeout: float | None


class RerankRequest(NamedTuple):
    """What is asked for. `most` is how many results to return; `with_documents` whether with their texts."""

    model: str
    query: str
    documents: list[str]
    most: int
    with_documents: bool
    priority: int
    timeout: float | None


def read_embeddings(document: Object) -> EmbeddingsRequest:
    """Check a request. Raises BadRequest."""
    encoding = field(document, "encoding_format", str) or "float"
    if encoding not in ("float", "base64"):
        raise BadRequest(f"encoding_format: {encoding!r}; expected 'float' or 'base64'")
    dimensions = unsigned(document, "dimensions", "")
    return EmbeddingsRequest(
        field(document, "model", str, required=True),
        _texts(document.get("input")),
        encoding == "base64",
        dimensions or None,
        *_queueing(document),
    )


def read_rerank(document: Object) -> RerankRequest:
    """Check a request. Raises BadRequest."""
    documents = []
    for index, each in enumerate(field(document, "documents", list, required=True)):
        text = each.get("text") if isinstance(each, dict) else each
        if type(text) is not str or not text:
            refuse(f"documents[{index}]", each, "text, or an object with text")
        documents.append(text)
    _check_count("documents", documents)
    query = field(document, "query", str, required=True)
    most = unsigned(document, "top_n", "") or len(documents)
    with_documents = field(document, "return_documents", bool) or False
    model = field(document, "model", str, required=True)
    return RerankRequest(model, query, documents, most, with_documents, *_queueing(document))


def embeddings(request: EmbeddingsRequest, rows: Any, tokens: int, normalize: bool) -> bytes:
    """The answer: an embedding for each text, and how many tokens they had. Raises BadRequest for too many dimensions."""
    if request.dimensions is not None:
        if request.dimensions > rows.shape[1]:
            raise BadRequest(f"dimensions: {request.dimensions}; expected at most {rows.shape[1]}, as many as the model has")
        rows = rows[:, : request.dimensions]
        if normalize:
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    rows = np.ascontiguousarray(rows, np.float32)
    data = [schemas.Embedding("embedding", index, _base64(row) if request.as_base64 else row) for index, row in enumerate(rows)]
    answer = schemas.Embeddings("list", data, request.model, schemas.Usage(tokens, tokens))
    return orjson.dumps(answer, asdict, orjson.OPT_SERIALIZE_NUMPY)


def ranking(request: RerankRequest, scores: Sequence[float], tokens: int) -> schemas.Ranking:
    """The answer: the documents with the highest scores, the best first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.most]
    texts = {index: schemas.RankedText(request.documents[index]) for index in order if request.with_documents}
    results = [schemas.Ranked(index, scores[index], texts.get(index)) for index in order]
    return schemas.Ranking("list", request.model, results, schemas.RankingUsage(tokens))


_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def error(status: int, text: str, routed: bool) -> schemas.OpenAIError:
    """An error as OpenAI's clients expect it; `routed` is whether there is something at the path."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return schemas.OpenAIError(schemas.OpenAIErrorContent(text, kind, None, _CODES.get(status) if routed else None))


def _base64(row: Any) -> str:
    return base64.b64encode(row).decode("ascii")


def _queueing(document: Object) -> tuple[int, float | None]:
    """Priority and timeout, which are in microseconds as in an inference."""
    timeout = unsigned(document, "timeout", "")
    return unsigned(document, "priority", "") or 0, timeout / 1e6 if timeout else None


def _texts(given: Any) -> list[Any]:
    """A text, a list of texts, the tokens of a text, or a list of these."""
    if type(given) is str:
        given = [given]
    if type(given) is not list:
        refuse("input", given, "text, a list of texts, or tokens")
    if given and type(given[0]) is int:
        given = [given]
    _check_count("input", given)
    for index, each in enumerate(given):
        tokens = type(each) is list and each and all(type(token) is int and token >= 0 for token in each)
        if not tokens and (type(each) is not str or not each):
            refuse(f"input[{index}]", each, "text that is not empty, or a list of tokens")
    return list(given)


def _check_count(name: str, given: Sequence[Any]) -> None:
    if not 1 <= len(given) <= MOST_TEXTS:
        raise BadRequest(f"{name}: {count(len(given), 'text')}; expected 1 to {MOST_TEXTS}")
