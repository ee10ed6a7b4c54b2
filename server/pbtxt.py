"""`config.pbtxt`, and the same as JSON, read into a protobuf message; fields that mean nothing here are set aside.

Triton has many more fields than are read here. They are named and otherwise tolerated, so that a repository made for
Triton serves as it is; those that Triton has not are taken for misspelt. The schema is built in code: a generated file
would need Triton's sources.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, NamedTuple

import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from .protocol.document import short, show

# Names and numbers as in https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto;
# `ModelOutput` numbers its dims differently, so it is a message of its own.
_MESSAGES = {
    "ModelConfig": (
        "optional string name 1",
        "optional string platform 2",
        "optional ModelVersionPolicy version_policy 3",
        "optional int32 max_batch_size 4",
        "repeated ModelInput input 5",
        "repeated ModelOutput output 6",
        "repeated ModelInstanceGroup instance_group 7",
        "optional string default_model_filename 8",
        "optional ModelDynamicBatching dynamic_batching 11",
        "optional ModelOptimizationPolicy optimization 12",
        "map ModelParameter parameters 14",
        "repeated ModelWarmup model_warmup 16",
        "optional string backend 17",
    ),
    "ModelInput": ("optional string name 1", "optional DataType data_type 2", "repeated int64 dims 4"),
    "ModelOutput": ("optional string name 1", "optional DataType data_type 2", "repeated int64 dims 3"),
    "ModelDynamicBatching": ("repeated int32 preferred_batch_size 1", "optional uint64 max_queue_delay_microseconds 2"),
    "ModelInstanceGroup": ("optional string name 1", "optional int32 count 2", "repeated string profile 5"),
    "ModelOptimizationPolicy": ("optional Cuda cuda 3",),
    "Cuda": ("optional bool graphs 1", "repeated GraphSpec graph_spec 3"),
    "GraphSpec": ("optional int32 batch_size 1", "map GraphShape input 2"),
    "GraphShape": ("repeated int64 dim 1",),
    "ModelParameter": ("optional string string_value 1",),
    "ModelWarmup": ("optional string name 1", "optional uint32 batch_size 2", "map WarmupInput inputs 3"),
    "WarmupInput": ("optional DataType data_type 1", "repeated int64 dims 2", "optional bool zero_data 3"),
    "ModelVersionPolicy": ("oneof Latest latest 1", "oneof All all 2", "oneof Specific specific 3"),
    "Latest": ("optional uint32 num_versions 1",),
    "All": (),
    "Specific": ("repeated int64 versions 1",),
}
_IGNORED = {
    "ModelConfig": (
        "runtime batch_input batch_output sequence_batching ensemble_scheduling cc_model_filenames metric_tags "
        "model_operations model_transaction_policy model_repository_agents response_cache model_metrics"
    ),
    "ModelDynamicBatching": (
        "preserve_ordering priority_levels default_priority_level default_queue_policy priority_queue_policy"
    ),
    "ModelInstanceGroup": "kind gpus rate_limiter secondary_devices passive host_policy",
    "ModelOptimizationPolicy": (
        "graph priority execution_accelerators input_pinned_memory output_pinned_memory gather_kernel_buffer_threshold "
        "eager_batching"
    ),
    "Cuda": "busy_wait_events output_copy_stream",
    "GraphSpec": "graph_lower_bound",
    "ModelWarmup": "count",
    "WarmupInput": "random_data input_data_file",
    "ModelInput": "format reshape is_shape_tensor allow_ragged_batch optional is_non_linear_format_io",
    "ModelOutput": "reshape label_filename is_shape_tensor is_non_linear_format_io",
}
_DATA_TYPES = "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"

# Strings, comments, words and numbers, and all else by character.
_TOKEN = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*|[\w.+-]+|[^\s\w]""")

Words = Iterator[tuple[tuple[str, int], tuple[str, int]]]
"""Each word and where it ends, with the one that follows."""


class ConfigRefused(ValueError):
    """A model configuration that cannot be followed; the text names the file, the place, what came and what was expected."""


class Reading(NamedTuple):
    """The message, and the fields that were ignored in their order, those within others as `input.reshape`."""

    message: Any
    unread: tuple[str, ...]


def read_text(text: str, source: str) -> Reading:
    """Read protobuf's text form; `source` is what errors call it. Raises ConfigRefused."""
    message = _MODEL_CONFIG()
    known, unread = _blank_unread(text, message.DESCRIPTOR, source)
    try:
        text_format.Parse(known, message)
    except (text_format.ParseError, ValueError) as error:
        raise ConfigRefused(f"{source}:{_tidy(str(error))}") from error
    return Reading(message, tuple(dict.fromkeys(unread)))


def read_json(text: str, source: str) -> Reading:
    """Read the JSON form; `source` is what errors call it. Raises ConfigRefused."""
    message, unread = _MODEL_CONFIG(), list[str]()
    try:
        known = _known(orjson.loads(text), message.DESCRIPTOR, "", unread)
        json_format.ParseDict(known, message)
    except (json_format.ParseError, ValueError) as error:
        raise ConfigRefused(f"{source}: {_tidy(str(error))}") from error
    return Reading(message, tuple(dict.fromkeys(unread)))


def _tidy(text: str) -> str:
    """A library's error in one line, without the line of the file that it quotes, and without long words."""
    first = re.sub(r"^(\d+:\d+ : )'.*': ", r"\1", text.partition("\n")[0])
    return re.sub(r"(\S{50})\S+", r"\1...", first)


def _blank_unread(text: str, schema: Descriptor, source: str) -> tuple[str, list[str]]:
    """The text with spaces in place of fields that are not in the schema, so that places stay, and those fields' names.

    Protobuf's own way to skip such fields stumbles over `instance_group [ { ... } ]`, which nearly every file has.
    """
    tokens = [token for token in _TOKEN.finditer(text) if not token[0].startswith("#")]
    words = pairwise([*((token[0], token.end()) for token in tokens), ("", len(text))])
    unread = list(_unread_fields(words, schema, ""))
    for name, start, end in unread:
        if end < start:
            line = text.count("\n", 0, start) + 1
            raise ConfigRefused(f"{source}:{line}: {name} has no value, or a bracket in it is not closed")
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return text, [name for name, _, _ in unread]


def _unread_fields(words: Words, kind: Descriptor, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of each field, up to the closing bracket, that `kind` does not have.

    A word is a field's name if a colon or an opening bracket follows: no value has one after it.
    """
    inner, path = None, ""
    for (word, end), (following, _) in words:
        if word in ("}", ">"):
            return
        if word in ("{", "<") and inner:
            yield from _unread_fields(words, inner, path)
        elif word.isidentifier() and following in (":", "{", "<", "["):
            field = kind.fields_by_name.get(word)
            if field:
                inner, path = field.message_type, f"{prefix}{word}."
            else:
                yield prefix + _judged(word, kind), end - len(word), _skip_value(words)


def _skip_value(words: Words) -> int:
    """Move on to the end of a field's value and of the separator after it, and return where that is; -1 if there is none."""
    depth = 0
    for (word, end), (following, _) in words:
        depth += (word in ("{", "<", "[")) - (word in ("}", ">", "]"))
        if depth <= 0 and word != ":" and not following.startswith((",", ";", '"', "'")):
            return end
    return -1


def _judged(name: str, kind: Descriptor) -> str:
    """The name of a field that `kind` does not have here, with the one that was meant where Triton has none either."""
    ignored = _IGNORED.get(kind.name, "").split()
    if re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name) in ignored:
        return name
    near = get_close_matches(name, [*kind.fields_by_name, *ignored], n=1)
    return f"{short(name)} ({f'did you mean {near[0]}?' if near else 'there is no such field'})"


def _known(document: object, kind: Descriptor, path: str, unread: list[str]) -> dict[str, Any]:
    """The object without the fields that `kind` does not have, whose names go to `unread`; ValueError for what is none."""
    if not isinstance(document, dict):
        raise ValueError(_mistaken(path, document, "an object"))
    fields = {name: field for field in kind.fields for name in (field.name, field.json_name)}
    where = re.sub(r"\[\d+\]", "", path) + "." * bool(path)
    unread += [where + _judged(name, kind) for name in document if name not in fields]
    values = {name: value for name, value in document.items() if name in fields and value is not None}
    return {name: _known_field(value, fields[name], f"{path}{path and '.'}{name}", unread) for name, value in values.items()}


def _known_field(value: object, field: FieldDescriptor, path: str, unread: list[str]) -> Any:
    if field.message_type and field.message_type.GetOptions().map_entry:
        return _known_map(value, field.message_type.fields_by_name["value"], path, unread)
    if field.has_presence:
        return _known_value(value, field, path, unread)
    if not isinstance(value, list):
        raise ValueError(_mistaken(path, value, "an array"))
    return [_known_value(item, field, f"{path}[{index}]", unread) for index, item in enumerate(value)]


def _known_map(value: object, field: FieldDescriptor, path: str, unread: list[str]) -> Any:
    if not isinstance(value, dict):
        raise ValueError(_mistaken(path, value, "an object"))
    return {key: _known_value(item, field, f"{path}.{short(key)}", unread) for key, item in value.items()}


def _known_value(value: object, field: FieldDescriptor, path: str, unread: list[str]) -> Any:
    if field.message_type:
        return _known(value, field.message_type, path, unread)
    if field.enum_type and value not in list(field.enum_type.values_by_name):
        raise ValueError(_mistaken(path, value, "a data type such as TYPE_FP32"))
    if field.type == field.TYPE_STRING and not isinstance(value, str):
        raise ValueError(_mistaken(path, value, "a string"))
    if field.type == field.TYPE_BOOL:
        if not isinstance(value, bool):
            raise ValueError(_mistaken(path, value, "true or false"))
        return value
    if field.cpp_type != field.CPPTYPE_STRING and not field.enum_type and not _is_integer(value):
        raise ValueError(_mistaken(path, value, "an integer"))
    return value


def _is_integer(value: object) -> bool:
    """As protobuf's JSON has them: it writes large ones as strings."""
    return type(value) is int or (isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value, re.ASCII) is not None)


def _mistaken(path: str, value: object, expected: str) -> str:
    return f"{path}{path and ': '}{show(value)}; expected {expected}"


def _message_class() -> Any:
    """The protobuf class, in a pool of its own: Triton's generated one may be loaded in this process too."""
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto2")
    data_type = file.enum_type.add(name="DataType")
    for number, name in enumerate(_DATA_TYPES.split()):
        data_type.value.add(name=f"TYPE_{name}", number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add_field(message, *field.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


def _add_field(message: descriptor_pb2.DescriptorProto, label: str, kind: str, name: str, number: str) -> None:
    field = message.field.add(name=name, number=int(number))
    field.label = field.LABEL_REPEATED if label in ("repeated", "map") else field.LABEL_OPTIONAL
    if label == "map":
        kind = f"{message.name}.{_add_entry(message, kind, name)}"
    if kind.islower():
        field.type = field.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type_name = f".inference.{kind}"
    if label == "oneof":
        field.oneof_index = 0
        if not message.oneof_decl:
            message.oneof_decl.add(name="policy_choice")


def _add_entry(message: descriptor_pb2.DescriptorProto, kind: str, name: str) -> str:
    """The message that protobuf has for each entry of a map from strings, by the name that it wants for it."""
    entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    _add_field(entry, "optional", "string", "key", "1")
    _add_field(entry, "optional", kind, "value", "2")
    return entry.name


_MODEL_CONFIG = _message_class()
