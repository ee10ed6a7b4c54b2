"""Triton's model configuration as a protobuf message, and which of its fields have no effect here.

The schema is a table (see `server.protocol.protobuf`), because a generated file would need Triton's sources. Names, numbers
and order are those of https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto, except that
nested messages are not nested here.
"""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from ..protocol.protobuf import made_at_once, message_classes

_ENUMS = {
    "DataType": (
        "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 TYPE_INT32 TYPE_INT64 "
        "TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16"
    ),
    "Format": "FORMAT_NONE FORMAT_NHWC FORMAT_NCHW",
    "InstanceKind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
    "SecondaryDeviceKind": "KIND_NVDLA",
    "BatchInputKind": (
        "BATCH_ELEMENT_COUNT BATCH_ACCUMULATED_ELEMENT_COUNT BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO "
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE BATCH_ITEM_SHAPE BATCH_ITEM_SHAPE_FLATTEN"
    ),
    "BatchOutputKind": "BATCH_SCATTER_WITH_INPUT_SHAPE",
    "ModelPriority": "PRIORITY_DEFAULT PRIORITY_MAX PRIORITY_MIN",
    "TimeoutAction": "REJECT DELAY",
    "ControlKind": "CONTROL_SEQUENCE_START CONTROL_SEQUENCE_READY CONTROL_SEQUENCE_END CONTROL_SEQUENCE_CORRID",
}

_MESSAGES = {
    "ModelConfig": (
        "optional string name 1",
        "optional string platform 2",
        "optional string backend 17",
        "optional string runtime 25",
        "optional ModelVersionPolicy version_policy 3",
        "optional int32 max_batch_size 4",
        "repeated ModelInput input 5",
        "repeated ModelOutput output 6",
        "repeated BatchInput batch_input 20",
        "repeated BatchOutput batch_output 21",
        "optional ModelOptimizationPolicy optimization 12",
        "oneof ModelDynamicBatching dynamic_batching 11",
        "oneof ModelSequenceBatching sequence_batching 13",
        "oneof ModelEnsembling ensemble_scheduling 15",
        "repeated ModelInstanceGroup instance_group 7",
        "optional string default_model_filename 8",
        "map string:string cc_model_filenames 9",
        "map string:string metric_tags 10",
        "map string:ModelParameter parameters 14",
        "repeated ModelWarmup model_warmup 16",
        "optional ModelOperations model_operations 18",
        "optional ModelTransactionPolicy model_transaction_policy 19",
        "optional ModelRepositoryAgents model_repository_agents 23",
        "optional ModelResponseCache response_cache 24",
        "optional ModelMetrics model_metrics 26",
    ),
    "ModelVersionPolicy": ("oneof Latest latest 1", "oneof All all 2", "oneof Specific specific 3"),
    "Latest": ("optional uint32 num_versions 1",),
    "All": (),
    "Specific": ("repeated int64 versions 1",),
    "ModelInput": (
        "optional string name 1",
        "optional DataType data_type 2",
        "optional Format format 3",
        "repeated int64 dims 4",
        "optional Reshape reshape 5",
        "optional bool is_shape_tensor 6",
        "optional bool allow_ragged_batch 7",
        "optional bool optional 8",
        "optional bool is_non_linear_format_io 9",
    ),
    "ModelOutput": (
        "optional string name 1",
        "optional DataType data_type 2",
        "repeated int64 dims 3",
        "optional Reshape reshape 5",
        "optional string label_filename 4",
        "optional bool is_shape_tensor 6",
        "optional bool is_non_linear_format_io 7",
    ),
    "Reshape": ("repeated int64 shape 1",),
    "BatchInput": (
        "optional BatchInputKind kind 1",
        "repeated string target_name 2",
        "optional DataType data_type 3",
        "repeated string source_input 4",
    ),
    "BatchOutput": ("repeated string target_name 1", "optional BatchOutputKind kind 2", "repeated string source_input 3"),
    "ModelOptimizationPolicy": (
        "optional Graph graph 1",
        "optional ModelPriority priority 2",
        "optional Cuda cuda 3",
        "optional ExecutionAccelerators execution_accelerators 4",
        "optional PinnedMemoryBuffer input_pinned_memory 5",
        "optional PinnedMemoryBuffer output_pinned_memory 6",
        "optional uint32 gather_kernel_buffer_threshold 7",
        "optional bool eager_batching 8",
    ),
    "Graph": ("optional int32 level 1",),
    "Cuda": (
        "optional bool graphs 1",
        "optional bool busy_wait_events 2",
        "repeated GraphSpec graph_spec 3",
        "optional bool output_copy_stream 4",
    ),
    "GraphSpec": ("optional int32 batch_size 1", "map string:GraphShape input 2", "optional LowerBound graph_lower_bound 3"),
    "LowerBound": ("optional int32 batch_size 1", "map string:GraphShape input 2"),
    "GraphShape": ("repeated int64 dim 1",),
    "ExecutionAccelerators": (
        "repeated Accelerator gpu_execution_accelerator 1",
        "repeated Accelerator cpu_execution_accelerator 2",
    ),
    "Accelerator": ("optional string name 1", "map string:string parameters 2"),
    "PinnedMemoryBuffer": ("optional bool enable 1",),
    "ModelDynamicBatching": (
        "repeated int32 preferred_batch_size 1",
        "optional uint64 max_queue_delay_microseconds 2",
        "optional bool preserve_ordering 3",
        "optional uint64 priority_levels 4",
        "optional uint64 default_priority_level 5",
        "optional ModelQueuePolicy default_queue_policy 6",
        "map uint64:ModelQueuePolicy priority_queue_policy 7",
    ),
    "ModelQueuePolicy": (
        "optional TimeoutAction timeout_action 1",
        "optional uint64 default_timeout_microseconds 2",
        "optional bool allow_timeout_override 3",
        "optional uint32 max_queue_size 4",
    ),
    "ModelSequenceBatching": (
        "oneof StrategyDirect direct 3",
        "oneof StrategyOldest oldest 4",
        "optional uint64 max_sequence_idle_microseconds 1",
        "repeated ControlInput control_input 2",
        "repeated State state 5",
        "optional bool iterative_sequence 6",
    ),
    "StrategyDirect": ("optional uint64 max_queue_delay_microseconds 1", "optional float minimum_slot_utilization 2"),
    "StrategyOldest": (
        "optional int32 max_candidate_sequences 1",
        "repeated int32 preferred_batch_size 2",
        "optional uint64 max_queue_delay_microseconds 3",
        "optional bool preserve_ordering 4",
    ),
    "ControlInput": ("optional string name 1", "repeated Control control 2"),
    "Control": (
        "optional ControlKind kind 1",
        "repeated int32 int32_false_true 2",
        "repeated float fp32_false_true 3",
        "repeated bool bool_false_true 5",
        "optional DataType data_type 4",
    ),
    "State": (
        "optional string input_name 1",
        "optional string output_name 2",
        "optional DataType data_type 3",
        "repeated int64 dims 4",
        "repeated InitialState initial_state 5",
        "optional bool use_same_buffer_for_input_output 6",
        "optional bool use_growable_memory 7",
    ),
    "InitialState": (
        "optional DataType data_type 1",
        "repeated int64 dims 2",
        "oneof bool zero_data 3",
        "oneof string data_file 4",
        "optional string name 5",
    ),
    "ModelEnsembling": ("repeated Step step 1", "optional uint32 max_inflight_requests 2"),
    "Step": (
        "optional string model_name 1",
        "optional int64 model_version 2",
        "map string:string input_map 3",
        "map string:string output_map 4",
        "optional string model_namespace 5",
    ),
    "ModelInstanceGroup": (
        "optional string name 1",
        "optional InstanceKind kind 4",
        "optional int32 count 2",
        "optional ModelRateLimiter rate_limiter 6",
        "repeated int32 gpus 3",
        "repeated SecondaryDevice secondary_devices 8",
        "repeated string profile 5",
        "optional bool passive 7",
        "optional string host_policy 9",
    ),
    "ModelRateLimiter": ("repeated Resource resources 1", "optional uint32 priority 2"),
    "Resource": ("optional string name 1", "optional bool global 2", "optional uint32 count 3"),
    "SecondaryDevice": ("optional SecondaryDeviceKind kind 1", "optional int64 device_id 2"),
    "ModelParameter": ("optional string string_value 1",),
    "ModelWarmup": (
        "optional string name 1",
        "optional uint32 batch_size 2",
        "map string:WarmupInput inputs 3",
        "optional uint32 count 4",
    ),
    "WarmupInput": (
        "optional DataType data_type 1",
        "repeated int64 dims 2",
        "oneof bool zero_data 3",
        "oneof bool random_data 4",
        "oneof string input_data_file 5",
    ),
    "ModelOperations": ("repeated string op_library_filename 1",),
    "ModelTransactionPolicy": ("optional bool decoupled 1",),
    "ModelRepositoryAgents": ("repeated Agent agents 1",),
    "Agent": ("optional string name 1", "map string:string parameters 2"),
    "ModelResponseCache": ("optional bool enable 1",),
    "ModelMetrics": ("repeated MetricControl metric_control 1",),
    "MetricControl": ("optional MetricIdentifier metric_identifier 1", "oneof HistogramOptions histogram_options 2"),
    "MetricIdentifier": ("optional string family 1",),
    "HistogramOptions": ("repeated double buckets 1",),
}

_IGNORED = {
    "ModelConfig": (
        "runtime cc_model_filenames metric_tags model_operations model_repository_agents response_cache model_metrics"
    ),
    "ModelEnsembling": "max_inflight_requests",
    "Step": "model_namespace",
    "ModelDynamicBatching": "preserve_ordering",
    "ModelQueuePolicy": "timeout_action",
    "ModelInstanceGroup": "kind gpus rate_limiter secondary_devices passive host_policy",
    "ModelOptimizationPolicy": "priority execution_accelerators gather_kernel_buffer_threshold eager_batching",
    "Cuda": "busy_wait_events output_copy_stream",
    "GraphSpec": "graph_lower_bound",
    "ModelWarmup": "count",
    "WarmupInput": "random_data input_data_file",
    "ModelInput": "is_shape_tensor is_non_linear_format_io",
    "ModelOutput": "is_shape_tensor is_non_linear_format_io",
}
"""Fields that are read and mean nothing here, by message."""


def ignored(message: Any, prefix: str = "") -> Iterator[str]:
    """The fields that are set and mean nothing here, in the schema's order, those within others as `input.reshape`.

    A plain field that has its default says nothing, so it is left out.
    """
    names = _IGNORED.get(message.DESCRIPTOR.name, "").split()
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if not (message.HasField(field.name) if field.message_type and field.has_presence else value):
            continue
        if field.name in names:
            yield prefix + field.name
        elif field.message_type:
            entry = _entry(field)
            path = f"{prefix}{field.name}." + "value." * bool(entry)
            for inner in _messages(value, field, entry):
                yield from ignored(inner, path)


def as_json(message: Any) -> dict[str, Any]:
    """The message as Triton shows it: every plain field, those that are not set with their defaults; messages if set."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields if _is_shown(message, field)}


def _is_shown(message: Any, field: FieldDescriptor) -> bool:
    plain = not field.has_presence or not (field.message_type or field.containing_oneof)
    return plain or message.HasField(field.name)


def _value(message: Any, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if entry := _entry(field):
        return {str(key): _plain(value[key], entry) for key in sorted(value)}
    return _plain(value, field) if field.has_presence else [_plain(item, field) for item in value]


def _plain(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type:
        return as_json(value)
    return field.enum_type.values_by_number[value].name if field.enum_type else value


def _messages(value: Any, field: FieldDescriptor, entry: FieldDescriptor | None) -> list[Any]:
    if entry:
        return [value[key] for key in sorted(value)] if entry.message_type else []
    return [value] if field.has_presence else list(value)


def _entry(field: FieldDescriptor) -> FieldDescriptor | None:
    """The field of a map's values; None if the field is not a map."""
    kind = field.message_type
    return kind.fields_by_name["value"] if kind and kind.GetOptions().map_entry else None


_CLASSES = message_classes("inference", _MESSAGES, _ENUMS, syntax="proto2")
_OBJECTS = made_at_once(_CLASSES)  # Tenants' models are loaded on several threads.
MESSAGE = _CLASSES["ModelConfig"]
"""The class of model configurations."""
