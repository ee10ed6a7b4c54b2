"""The table `text` of `[models.NAME]`: how texts become embeddings or scores."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.functional_validators import BeforeValidator
from typing_extensions import TypedDict

from .forms import Form

MOST_TOKENS = 1 << 20


class TextOptions(NamedTuple):
    """How a model with a tokenizer is used. "", None and 0 are for the model and the files beside it to say."""

    task: Literal["embed", "rerank"] = "embed"
    pooling: Literal["", "mean", "cls", "last", "max"] = ""
    normalize: bool | None = None
    max_tokens: int = 0
    truncate: bool = False
    output: str = ""
    token_ids: bool = False


DEFAULTS = TextOptions()


class TextTable(TypedDict, total=False):
    """How a model with a tokenizer is used."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    task: Annotated[
        Literal["embed", "rerank"], Field(description="Embeddings by default; scores of pairs of texts for a cross-encoder.")
    ]
    pooling: Annotated[
        Literal["mean", "cls", "last", "max"],
        Field(description="How tokens become a text's embedding: as the files beside the tokenizer say, else mean."),
    ]
    normalize: Annotated[
        bool, Field(description="Whether embeddings have length 1: as the files beside the tokenizer say, else true.")
    ]
    max_tokens: Annotated[
        int, Field(ge=1, le=MOST_TOKENS, description="Most tokens of a text; what the files beside the tokenizer say, or 512.")
    ]
    truncate: Annotated[bool, Field(description="Whether longer texts are cut; by default they are refused.")]
    output: Annotated[str, Field(min_length=1, description="The output to use, if not the usual one.")]
    token_ids: Annotated[
        bool, Field(description="Whether clients may send tokens of this tokenizer in place of texts; refused by default.")
    ]


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
        "a table with any of task ('embed', 'rerank'), pooling ('mean', 'cls', 'last', 'max'), normalize, max_tokens, "
        'truncate, output and token_ids, as in { pooling = "cls", max_tokens = 256 }',
        _written,
    ),
]
