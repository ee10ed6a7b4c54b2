"""The messages of `inference.GRPCInferenceService`, and of gRPC's health service, as tables.

Names and numbers are those of
https://github.com/triton-inference-server/common/blob/main/protobuf/grpc_service.proto, of which KServe's is a part, and of
https://github.com/grpc/grpc/blob/master/src/proto/grpc/health/v1/health.proto, except that nested messages are not nested
here, which is the same on the wire.
"""

from typing import Any

from ..protocol.protobuf import message_classes

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

_TENSOR_CONTENTS = (
    "repeated bool bool_contents 1",
    "repeated int32 int_contents 2",
    "repeated int64 int64_contents 3",
    "repeated uint32 uint_contents 4",
    "repeated uint64 uint64_contents 5",
    "repeated float fp32_contents 6",
    "repeated double fp64_contents 7",
    "repeated bytes bytes_contents 8",
)
_PARAMETER = (
    "oneof bool bool_param 1",
    "oneof int64 int64_param 2",
    "oneof string string_param 3",
    "oneof double double_param 4",
    "oneof uint64 uint64_param 5",
)
_MODEL = ("optional string name 1", "optional string version 2")
_CHANGE = (
    "optional string repository_name 1",
    "optional string model_name 2",
    "map string:ModelRepositoryParameter parameters 3",
)
_DURATIONS = ["success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"]

_MESSAGES: dict[str, tuple[str, ...]] = {
    "ServerLiveResponse": ("optional bool live 1",),
    "ServerReadyResponse": ("optional bool ready 1",),
    "ServerMetadataResponse": ("optional string name 1", "optional string version 2", "repeated string extensions 3"),
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": ("optional bool ready 1",),
    "ModelMetadataRequest": _MODEL,
    "ModelMetadataResponse": (
        "optional string name 1",
        "repeated string versions 2",
        "optional string platform 3",
        "repeated TensorMetadata inputs 4",
        "repeated TensorMetadata outputs 5",
    ),
    "TensorMetadata": ("optional string name 1", "optional string datatype 2", "repeated int64 shape 3"),
    "InferParameter": _PARAMETER,
    "InferTensorContents": _TENSOR_CONTENTS,
    "ModelInferRequest": (
        "optional string model_name 1",
        "optional string model_version 2",
        "optional string id 3",
        "map string:InferParameter parameters 4",
        "repeated InferInputTensor inputs 5",
        "repeated InferRequestedOutputTensor outputs 6",
        "repeated bytes raw_input_contents 7",
    ),
    "InferInputTensor": (
        "optional string name 1",
        "optional string datatype 2",
        "repeated int64 shape 3",
        "map string:InferParameter parameters 4",
        "optional InferTensorContents contents 5",
    ),
    "InferRequestedOutputTensor": ("optional string name 1", "map string:InferParameter parameters 2"),
    "ModelInferResponse": (
        "optional string model_name 1",
        "optional string model_version 2",
        "optional string id 3",
        "map string:InferParameter parameters 4",
        "repeated InferOutputTensor outputs 5",
        "repeated bytes raw_output_contents 6",
    ),
    "InferOutputTensor": (
        "optional string name 1",
        "optional string datatype 2",
        "repeated int64 shape 3",
        "map string:InferParameter parameters 4",
        "optional InferTensorContents contents 5",
    ),
    # Of the type ModelInferResponse. The answer is encoded already, and a message is the same on the wire as its bytes.
    "ModelStreamInferResponse": ("optional string error_message 1", "optional bytes infer_response 2"),
    "ModelConfigRequest": _MODEL,
    # Of the type ModelConfig, which is encoded already.
    "ModelConfigResponse": ("optional bytes config 1",),
    "ModelStatisticsRequest": _MODEL,
    "ModelStatisticsResponse": ("repeated ModelStatistics model_stats 1",),
    "ModelStatistics": (
        "optional string name 1",
        "optional string version 2",
        "optional uint64 last_inference 3",
        "optional uint64 inference_count 4",
        "optional uint64 execution_count 5",
        "optional InferStatistics inference_stats 6",
        "repeated InferBatchStatistics batch_stats 7",
        "repeated MemoryUsage memory_usage 8",
        "map string:InferResponseStatistics response_stats 9",
    ),
    "InferStatistics": tuple(f"optional StatisticDuration {name} {n}" for n, name in enumerate(_DURATIONS, 1)),
    "StatisticDuration": ("optional uint64 count 1", "optional uint64 ns 2"),
    "InferBatchStatistics": (
        "optional uint64 batch_size 1",
        "optional StatisticDuration compute_input 2",
        "optional StatisticDuration compute_infer 3",
        "optional StatisticDuration compute_output 4",
    ),
    "MemoryUsage": ("optional string type 1", "optional int64 id 2", "optional uint64 byte_size 3"),
    "InferResponseStatistics": (
        "optional StatisticDuration compute_infer 1",
        "optional StatisticDuration compute_output 2",
        "optional StatisticDuration success 3",
        "optional StatisticDuration fail 4",
        "optional StatisticDuration empty_response 5",
        "optional StatisticDuration cancel 6",
    ),
    "RepositoryIndexRequest": ("optional string repository_name 1", "optional bool ready 2"),
    "RepositoryIndexResponse": ("repeated ModelIndex models 1",),
    "ModelIndex": (
        "optional string name 1",
        "optional string version 2",
        "optional string state 3",
        "optional string reason 4",
    ),
    "RepositoryModelLoadRequest": _CHANGE,
    "RepositoryModelUnloadRequest": _CHANGE,
    "ModelRepositoryParameter": (
        "oneof bool bool_param 1",
        "oneof int64 int64_param 2",
        "oneof string string_param 3",
        "oneof bytes bytes_param 4",
    ),
    "LogSettingsRequest": ("map string:LogSetting settings 1",),
    "LogSettingsResponse": ("map string:LogSetting settings 1",),
    "LogSetting": ("oneof bool bool_param 1", "oneof uint32 uint32_param 2", "oneof string string_param 3"),
    "TraceSettingRequest": ("map string:TraceSetting settings 1", "optional string model_name 2"),
    "TraceSettingResponse": ("map string:TraceSetting settings 1",),
    "TraceSetting": ("repeated string value 1",),
    "HealthCheckResponse": ("optional ServingStatus status 1",),
}

MESSAGES: dict[str, Any] = message_classes(
    "inference", _MESSAGES, {"ServingStatus": "UNKNOWN SERVING NOT_SERVING SERVICE_UNKNOWN"}
)
"""The class of each message."""
ModelInferRequest = MESSAGES["ModelInferRequest"]
ModelInferResponse = MESSAGES["ModelInferResponse"]
ModelStreamInferResponse = MESSAGES["ModelStreamInferResponse"]
