"""Requests and answers of the tenants' API as pydantic models, which /openapi.json shows.

They document: requests are read by `protocol.json_document`, whose errors name field and value, and answers are written
without being validated. tests/end_to_end/test_openapi.py compares real answers with them, order of fields included.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Schema(BaseModel):
    """Base of all schemas: no other fields than these, which keeps descriptions and answers in step."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


Shape = Annotated[list[int], Field(description="Sizes, the batch dimension included; -1 for any size.", examples=[[-1, 3]])]


class Error(Schema):
    """Every error that this server answers."""

    error: str = Field(
        description="What is wrong: the field, what came, what was expected.",
        examples=["inputs[0].datatype: \"FP64\"; expected FP32, as input 'x' is"],
    )


class ServerMetadata(Schema):
    """The server."""

    name: str = Field(examples=["greenlane"])
    version: str
    extensions: list[str] = Field(description="Extensions of the Open Inference Protocol that are served.")


class Live(Schema):
    """The server answers."""

    live: Literal[True]


class Ready(Schema):
    """The server accepts inferences."""

    ready: Literal[True]


class ModelReady(Schema):
    """A model that can be called."""

    name: str
    ready: Literal[True]


class TensorMetadata(Schema):
    """An input or output of a model."""

    name: str
    datatype: str = Field(examples=["FP32"])
    shape: Shape


class ModelMetadata(Schema):
    """A model: its versions and signature."""

    name: str
    versions: list[str] = Field(description="Versions that are served, in ascending order.")
    platform: str = Field(examples=["onnxruntime_onnx"])
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


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


class Duration(Schema):
    """How often something happened, and for how long in all."""

    count: int
    ns: int = Field(description="Nanoseconds in all.")


class InferenceStatistics(Schema):
    """Requests and where their time went."""

    success: Duration = Field(description="Requests answered, from the complete body to the encoded answer.")
    fail: Duration = Field(description="Requests that got an error.")
    queue: Duration = Field(description="From decoded inputs to the beginning of the run.")
    compute_input: Duration = Field(description="Decoding of inputs.")
    compute_infer: Duration = Field(description="Runs of the model.")
    compute_output: Duration = Field(description="From the end of the run to the encoded answer.")
    cache_hit: Duration = Field(description="Always 0: there is no cache of responses.")
    cache_miss: Duration = Field(description="Always 0: there is no cache of responses.")


class BatchStatistics(Schema):
    """Runs of one batch size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ResponseStatistics(Schema):
    """Parts of answers that have one number."""

    compute_infer: Duration
    compute_output: Duration
    success: Duration = Field(description="Parts that were answered.")
    fail: Duration = Field(description="Answers that ended with an error in this part.")
    empty_response: Duration = Field(description="Answers that ended before this part.")
    cancel: Duration = Field(description="Answers whose clients disconnected in this part.")


class ModelStatistics(Schema):
    """What one tenant used of one version of a model, as in Triton's statistics extension."""

    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since 1970; 0 for never.")
    inference_count: int = Field(description="Inferences; each row of a batch counts.")
    execution_count: int = Field(description="Runs of the model.")
    inference_stats: InferenceStatistics
    response_stats: dict[str, ResponseStatistics] = Field(
        description="By the number of a part, from 0 to 63; empty for models that answer as a whole."
    )
    batch_stats: list[BatchStatistics]
    memory_usage: list[Any] = Field(description="Always empty.")


class Statistics(Schema):
    """Counts and times, by model and version."""

    model_stats: list[ModelStatistics]


class RepositoryEntry(Schema):
    """A model, or one version of it, in the repository index."""

    name: str
    version: str | None = Field(None, description="Left out where the state is that of the whole model.")
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
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
