"""What the protocol answers of the server, of a model and of what was counted, over HTTP and over gRPC."""

from typing import Annotated, Any

from msgspec import Meta

from .. import EXTENSIONS, __version__
from ..facts import Fact

Shape = Annotated[list[int], "Sizes, the batch dimension included; -1 for any size.", Meta(examples=[[-1, 3]])]


class ServerMetadata(Fact):
    """The server."""

    name: Annotated[str, Meta(examples=["greenlane"])]
    version: str
    extensions: Annotated[list[str], "Extensions of the Open Inference Protocol that are served."]


SERVER = ServerMetadata("greenlane", __version__, EXTENSIONS)


class TensorMetadata(Fact):
    """An input or output of a model."""

    name: str
    datatype: Annotated[str, Meta(examples=["FP32"])]
    shape: Shape


class ModelMetadata(Fact):
    """A model: its versions and signature."""

    name: str
    versions: Annotated[list[str], "Versions that are served, in ascending order."]
    platform: Annotated[str, Meta(examples=["onnxruntime_onnx"])]
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Duration(Fact):
    """How often something happened, and for how long in all."""

    count: int
    ns: Annotated[int, "Nanoseconds in all."]


class InferenceStatistics(Fact):
    """Requests and where their time went."""

    success: Annotated[Duration, "Requests answered, from the complete body to the encoded answer."]
    fail: Annotated[Duration, "Requests that got an error."]
    queue: Annotated[Duration, "From decoded inputs to the beginning of the run."]
    compute_input: Annotated[Duration, "Decoding of inputs."]
    compute_infer: Annotated[Duration, "Runs of the model."]
    compute_output: Annotated[Duration, "From the end of the run to the encoded answer."]
    cache_hit: Annotated[Duration, "Always 0: there is no cache of responses."]
    cache_miss: Annotated[Duration, "Always 0: there is no cache of responses."]


class BatchStatistics(Fact):
    """Runs of one batch size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ResponseStatistics(Fact):
    """Parts of answers that have one number."""

    compute_infer: Duration
    compute_output: Duration
    success: Annotated[Duration, "Parts that were answered."]
    fail: Annotated[Duration, "Answers that ended with an error in this part."]
    empty_response: Annotated[Duration, "Answers that ended before this part."]
    cancel: Annotated[Duration, "Answers whose clients disconnected in this part."]


class ModelStatistics(Fact):
    """What one tenant used of one version of a model, as in Triton's statistics extension."""

    name: str
    version: str
    last_inference: Annotated[int, "Milliseconds since 1970; 0 for never."]
    inference_count: Annotated[int, "Inferences; each row of a batch counts."]
    execution_count: Annotated[int, "Runs of the model."]
    inference_stats: InferenceStatistics
    response_stats: Annotated[
        dict[str, ResponseStatistics], "By the number of a part, from 0 to 63; empty for models that answer as a whole."
    ]
    batch_stats: list[BatchStatistics]
    memory_usage: Annotated[list[Any], "Always empty."]


class Statistics(Fact):
    """Counts and times, by model and version."""

    model_stats: list[ModelStatistics]
