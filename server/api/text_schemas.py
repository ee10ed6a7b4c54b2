"""Answers of the routes for texts, and requests as pydantic models, which /openapi.json shows; see `schemas`."""

from typing import Annotated, Literal

from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field

from ..facts import Fact

MOST_TEXTS = 2048
"""Texts of one request, as at OpenAI."""

Name = Annotated[str, Field(description="A model that takes texts.", examples=["minilm"])]
Timeout = Annotated[int | None, Field(ge=0, description="Microseconds, as of an inference; 0: none.")]
Priority = Annotated[int | None, Field(ge=0, description="1 is served first; 0, the default, last.")]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Asked(BaseModel):
    """Base of requests. Members that clients of other servers send besides these are ignored."""

    model_config = ConfigDict(protected_namespaces=())


class EmbeddingsRequest(Asked):
    """Texts to be embedded, as OpenAI's clients send them."""

    model: Name
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_TEXTS)]
    ) = Field(description="A text, a list of texts, the tokens of a text, or a list of these.", examples=[["a cat", "a dog"]])
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: float32 in little-endian order.")
    dimensions: int | None = Field(None, ge=0, description="The first so many; 0 or left out: all that the model has.")
    timeout: Timeout = None
    priority: Priority = None


class Embedding(Fact):
    """The embedding of one text."""

    object: Literal["embedding"]
    index: Annotated[int, "Of the text in the request."]
    embedding: Annotated[list[float] | str, "Numbers, or with `encoding_format` base64 a text."]


class Usage(Fact):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Fact):
    """An embedding for each text, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class DocumentText(BaseModel):
    """A document as an object."""

    text: Text


class RerankRequest(Asked):
    """A query and the documents to be ordered by it, as Cohere's and Jina's clients send them."""

    model: Name
    query: str = Field(examples=["what is a cat?"])
    documents: list[Text | DocumentText] = Field(min_length=1, max_length=MOST_TEXTS, examples=[["a small animal", "a car"]])
    top_n: int | None = Field(None, ge=0, description="How many results; 0 or left out: all.")
    return_documents: bool | None = Field(None, description="Whether results have the documents' texts.")
    timeout: Timeout = None
    priority: Priority = None


class RankedText(Fact):
    """The document that a result is of."""

    text: str


class Ranked(Fact, omit_defaults=True):
    """A document and how well it answers the query."""

    index: Annotated[int, "Of the document in the request."]
    relevance_score: Annotated[float, "A cross-encoder's score, from 0 to 1, or a cosine, from -1 to 1."]
    document: Annotated[RankedText | None, "With `return_documents`."] = None


class RankingUsage(Fact):
    """Tokens of all texts."""

    total_tokens: int


class Ranking(Fact):
    """The documents, the best first."""

    object: Literal["list"]
    model: str
    results: list[Ranked]
    usage: RankingUsage


class TextModel(Fact):
    """A model that takes texts."""

    id: Annotated[str, "Its name."]
    object: Literal["model"]
    created: Annotated[int, "Always 0: it is not known."]
    owned_by: Annotated[str, "The tenant."]


class TextModels(Fact):
    """The models that take texts."""

    object: Literal["list"]
    data: list[TextModel]


class OpenAIErrorContent(Fact):
    """What is wrong."""

    message: Annotated[str, "The text of the error, as everywhere else."]
    type: Annotated[str, Meta(examples=["invalid_request_error"])]
    param: None
    code: Annotated[str | None, Meta(examples=["model_not_found"])]


class OpenAIError(Fact):
    """An error as OpenAI's clients expect it."""

    error: OpenAIErrorContent
