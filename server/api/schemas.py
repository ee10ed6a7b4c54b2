"""What /openapi.json shows of the tenants' API and no fact says: as pydantic models, which only document.

Requests are read by `protocol.json_document`, whose errors name field and value; inferences are answered without a framework.
tests/end_to_end/test_openapi.py compares real answers with what is shown, order of fields included.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field

from ..facts import Fact
from ..tenants.catalog import ModelState


class Schema(BaseModel):
    """Base of all schemas: no other fields than these, which keeps descriptions and answers in step."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Error(Fact):
    """Every error that this server answers."""

    error: Annotated[
        str,
        "What is wrong: the field, what came, what was expected.",
        Meta(examples=["inputs[0].datatype: \"FP64\"; expected FP32, as input 'x' is"]),
    ]


class Live(Fact):
    """The server answers."""

    live: Literal[True]


class Ready(Fact):
    """The server accepts inferences."""

    ready: Literal[True]


class ModelReady(Fact):
    """A model that can be called."""

    name: str
    ready: Literal[True]


class ModelConfiguration(Schema):
    """Triton's model configuration as JSON: what is configured, completed from the model and with Triton's defaults.

    The fields are those of Triton's model_config.proto; the ones listed here are always there.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    name: str
    platform: str
    backend: str
    version_policy: dict[str, Any]
    max_batch_size: int
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]
    optimization: dict[str, Any]
    instance_group: list[dict[str, Any]]
    default_model_filename: str
    parameters: dict[str, dict[str, Any]]


class RepositoryEntry(Schema):
    """A model, or one version of it, in the repository index."""

    name: str
    version: str | None = Field(None, description="Left out where the state is that of the whole model.")
    state: ModelState
    reason: str | None = Field(None, description="Why it is not ready.")


class IndexRequest(Schema):
    """Which models to list."""

    ready: bool = Field(False, description="Only models that are ready.")


class LoadParameters(Schema):
    """Parameters of a load."""

    config: str | None = Field(
        None,
        description="A configuration to use in place of the model's `config.pbtxt`: the JSON form, as text. At most 64 KiB.",
        examples=['{"max_batch_size": 8}'],
    )


class LoadRequest(Schema):
    """How to load a model. Without a body it is loaded as the repository has it."""

    parameters: LoadParameters | None = None


class UnloadRequest(Schema):
    """Parameters, as Triton's clients send them, are accepted and mean nothing."""

    parameters: dict[str, str | float | bool] | None = None


class RequestedInput(Schema):
    """An input tensor."""

    name: str
    datatype: str = Field(examples=["FP32"])
    shape: list[int] = Field(examples=[[1, 2]])
    data: list[Any] | None = Field(
        None, description="Elements in row-major order, nested or flat. Not with `binary_data_size`."
    )
    parameters: dict[str, str | float | bool] | None = Field(
        None, description="`binary_data_size`: bytes of this tensor behind the JSON."
    )


class RequestedOutput(Schema):
    """An output that is asked for."""

    name: str
    parameters: dict[str, str | float | bool] | None = Field(
        None, description="`binary_data`: whether it comes behind the JSON. `classification`: how many of its highest classes."
    )


class InferRequest(Schema):
    """An inference. With `Inference-Header-Content-Length`, binary tensors follow the JSON."""

    id: str | None = Field(None, description="Comes back with the answer.")
    inputs: list[RequestedInput]
    outputs: list[RequestedOutput] | None = Field(None, description="All outputs if left out.")
    parameters: dict[str, str | float | bool] | None = Field(
        None,
        description="`timeout`: microseconds. `priority`: 1 is served first; 0, the default, last. `binary_data_output`: "
        "whether outputs come behind the JSON unless they say otherwise.",
    )


class InferredOutput(Schema):
    """An output tensor."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] | None = Field(None, description="`binary_data_size`: bytes of this tensor behind the JSON.")
    data: list[Any] | None = Field(None, description="Elements in row-major order, flat.")


class InferResponse(Schema):
    """Outputs of an inference, in the order in which they were asked for."""

    model_name: str
    model_version: str
    outputs: list[InferredOutput]
    id: str | None = None


class GenerateRequest(Schema):
    """Inputs by their names: each a value, or a flat array. What is not named like an input is a parameter."""

    model_config = ConfigDict(extra="allow")

    id: str | None = Field(None, description="Comes back with the answer.")
    text_input: str | None = Field(None, description="An input of models that have one of this name, as those for text do.")
    parameters: dict[str, Any] | None = Field(
        None,
        description="More inputs and parameters. `timeout`: microseconds, for the whole answer. `priority`: as for `infer`.",
    )


class GenerateResponse(Schema):
    """Outputs by their names: each a value, or a flat array."""

    model_config = ConfigDict(extra="allow")

    model_name: str
    model_version: str
    id: str | None = None
