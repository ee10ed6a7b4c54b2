"""The table `text` of `[models.NAME]`: how texts become embeddings or scores."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.functional_validators import BeforeValidator

from .forms import Form
from .tables import Section

MOST_TOKENS = 1 << 20


class TextOptions(Section, frozen=True):
    """How a model with a tokenizer is used."""

    # What is None is for the model and the files beside it to say.

    task: Literal["embed", "rerank"] = Field(
        default="embed", description="Embeddings by default; scores of pairs of texts for a cross-encoder."
    )
    pooling: Literal["mean", "cls", "last", "max"] | None = Field(
        default=None, description="How tokens become a text's embedding: as the files beside the tokenizer say, else mean."
    )
    normalize: bool | None = Field(
        default=None, description="Whether embeddings have length 1: as the files beside the tokenizer say, else true."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TOKENS,
        description="Most tokens of a text; what the files beside the tokenizer say, or 512.",
    )
    truncate: bool = Field(default=False, description="Whether longer texts are cut; by default they are refused.")
    output: str | None = Field(default=None, min_length=1, description="The output to use, if not the usual one.")
    token_ids: bool = Field(
        default=False, description="Whether clients may send tokens of this tokenizer in place of texts; refused by default."
    )


DEFAULTS = TextOptions.model_construct()

Text = Annotated[
    TextOptions,
    BeforeValidator(TextOptions.model_validate),
    Form(
        "table",
        "a table with any of task ('embed', 'rerank'), pooling ('mean', 'cls', 'last', 'max'), normalize, max_tokens, "
        'truncate, output and token_ids, as in { pooling = "cls", max_tokens = 256 }',
        lambda value: value.model_dump(exclude_defaults=True),
    ),
]
