"""The table `text` of `[models.NAME]`: how texts become embeddings or scores."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.functional_validators import BeforeValidator
from typing_extensions import TypedDict

from .forms import Form

MOST_TOKENS = 1 << 20


class TextOptions(NamedTuple):
    """How a model with a tokenizer is used. `max_tokens` 0 and `output` "" are for the tokenizer and the model to say."""

    task: Literal["embed", "rerank"] = "embed"
    pooling: Literal["mean", "cls", "last"] = "mean"
    normalize: bool = True
    max_tokens: int = 0
    truncate: bool = False
    output: str = ""


class TextTable(TypedDict, total=False):
    """How a model with a tokenizer is used."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    task: Annotated[
        Literal["embed", "rerank"], Field(description="Embeddings by default; scores of pairs of texts for a cross-encoder.")
    ]
    pooling: Annotated[
        Literal["mean", "cls", "last"], Field(description="How tokens become a text's embedding: mean by default.")
    ]
    normalize: Annotated[bool, Field(description="Whether embeddings have length 1, as they do by default.")]
    max_tokens: Annotated[
        int, Field(ge=1, le=MOST_TOKENS, description="Most tokens of a text; the tokenizer's or the model's own, or 512.")
    ]
    truncate: Annotated[bool, Field(description="Whether longer texts are cut; by default they are refused.")]
    output: Annotated[str, Field(min_length=1, description="The output to use, if not the usual one.")]


_TABLE: TypeAdapter[TextTable] = TypeAdapter(TextTable)


def _text(value: object) -> TextOptions:
    if isinstance(value, TextOptions):
        return value
    given: Any = _TABLE.validate_python(value, strict=True)
    return TextOptions(**given)


def _written(value: TextOptions) -> dict[str, Any]:
    return {key: each for key, each in value._asdict().items() if each != TextOptions._field_defaults[key]}


Text = Annotated[
    TextOptions,
    BeforeValidator(_text, json_schema_input_type=TextTable),
    Form(
        "table",
        "a table with any of task ('embed', 'rerank'), pooling ('mean', 'cls', 'last'), normalize, max_tokens, truncate and "
        'output, as in { pooling = "cls", max_tokens = 256 }',
        _written,
    ),
]
