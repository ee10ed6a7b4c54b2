"""Triton's model configuration, `config.pbtxt` or its JSON form: what it says, whether the model agrees, and our own.

Only what decides how a model is served here is read. The rest is tolerated and named in `unread`, so that a
repository made for Triton serves as it is. The schema is built in code: a generated file would need Triton's sources.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, text_format
from google.protobuf.descriptor import Descriptor

from engines.datatypes import DATATYPES
from engines.errors import ModelRefused
from engines.signature import Signature, TensorSpec

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
        "optional string default_model_filename 8",
        "optional string backend 17",
    ),
    "ModelInput": ("optional string name 1", "optional DataType data_type 2", "repeated int64 dims 4"),
    "ModelOutput": ("optional string name 1", "optional DataType data_type 2", "repeated int64 dims 3"),
    "ModelVersionPolicy": ("oneof Latest latest 1", "oneof All all 2", "oneof Specific specific 3"),
    "Latest": ("optional uint32 num_versions 1",),
    "All": (),
    "Specific": ("repeated int64 versions 1",),
}
_DATA_TYPES = "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"

_FILENAMES = {
    "": ("model.onnx", "model.plan"),
    "onnxruntime": ("model.onnx",),
    "onnxruntime_onnx": ("model.onnx",),
    "tensorrt": ("model.plan",),
    "tensorrt_plan": ("model.plan",),
}


# Strings, comments, words and numbers, and all else by character.
_TOKEN = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*|[\w.+-]+|[^\s\w]""")

Words = Iterator[tuple[tuple[str, int], tuple[str, int]]]
"""Each word and where it ends, with the one that follows."""


class ConfigRefused(ValueError):
    """A model configuration that cannot be followed; the text names the file, the place, what came and what was expected."""


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions of a model are served: the `latest` highest, the `specific` ones, or with `latest` 0 all of them."""

    latest: int = 1
    specific: tuple[int, ...] = ()

    def select(self, versions: Sequence[int]) -> list[int]:
        """Those of `versions` to serve, ascending."""
        if self.specific:
            return sorted(set(versions).intersection(self.specific))
        return sorted(versions)[-self.latest :]  # -0 is the start: all of them

    def describe(self) -> dict[str, object]:
        """As in Triton's JSON."""
        if self.specific:
            return {"specific": {"versions": list(self.specific)}}
        return {"latest": {"num_versions": self.latest}} if self.latest else {"all": {}}


class StatedTensor(NamedTuple):
    """An input or output as configured: its protocol data type, and sizes or -1, without the batch if there is one."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is configured for a model; the defaults are those of a model without `config.pbtxt`.

    `max_batch` is what counts, None where nothing is said. `stated_max_batch` is what the file says, which another
    setting may have overruled; dims in the file leave the batch out if that is above 0. Of `filenames` the first one
    present is the model. `unread` names the fields that were ignored, nested ones as `input.reshape`.
    """

    name: str = ""
    max_batch: int | None = None
    stated_max_batch: int | None = None
    inputs: tuple[StatedTensor, ...] = ()
    outputs: tuple[StatedTensor, ...] = ()
    versions: VersionPolicy = VersionPolicy()
    filenames: tuple[str, ...] = _FILENAMES[""]
    unread: tuple[str, ...] = ()
    source: str = "config.pbtxt"


def parse(text: str, source: str) -> ModelConfig:
    """Read a `config.pbtxt`. `source` is what errors call it. Raises ConfigRefused."""
    message = _MODEL_CONFIG()
    known, unread = _blank_unread(text, message.DESCRIPTOR, source)
    try:
        text_format.Parse(known, message)
    except (text_format.ParseError, ValueError) as error:
        raise ConfigRefused(f"{source}:{error}") from error
    return _Reader(source).read(message, unread)


def from_json(text: str, source: str = "the config parameter") -> ModelConfig:
    """Read the JSON form, as in a request to load a model. Raises ConfigRefused."""
    message, unread = _MODEL_CONFIG(), list[str]()
    try:
        document = orjson.loads(text)
        if not isinstance(document, dict):
            raise ValueError(f"expected a JSON object, got {type(document).__name__}")
        json_format.ParseDict(_known(document, message.DESCRIPTOR, "", unread), message)
    except (json_format.ParseError, ValueError) as error:
        raise ConfigRefused(f"{source}: {error}") from error
    return _Reader(source).read(message, unread)


def apply(config: ModelConfig, signature: Signature) -> Signature:
    """The signature as configured: its largest batch set, dynamic dimensions narrowed to the sizes that are stated.

    Raises ModelRefused where the configuration contradicts the model, naming the tensor and both values.
    """
    sizes: dict[str, int] = {}
    inputs = _narrow_all(config, "input", config.inputs, signature.inputs, sizes)
    outputs = _narrow_all(config, "output", config.outputs, signature.outputs, sizes)
    names = {tensor.name for tensor in config.inputs}
    if names and (missing := [spec.name for spec in signature.inputs if spec.name not in names]):
        _contradiction(config, f"the model also has input {missing[0]!r}; list all inputs or none")
    narrowed = replace(signature, inputs=_fix(inputs, sizes), outputs=_fix(outputs, sizes))
    return narrowed if config.max_batch is None else narrowed.with_max_batch(config.max_batch)


def describe(name: str, versions: VersionPolicy, signature: Signature, platform: str) -> dict[str, object]:
    """The JSON of `GET /v2/models/NAME/config`. `platform` is `<project>_<format>`."""
    return {
        "name": name,
        "platform": platform,
        "backend": platform.partition("_")[0],
        "version_policy": versions.describe(),
        "max_batch_size": signature.max_batch,
        "input": [_describe_tensor(spec, signature.max_batch) for spec in signature.inputs],
        "output": [_describe_tensor(spec, signature.max_batch) for spec in signature.outputs],
    }


def _describe_tensor(spec: TensorSpec, max_batch: int) -> dict[str, object]:
    return {
        "name": spec.name,
        "data_type": spec.datatype.config_name,
        "dims": list(spec.shape[1:] if max_batch else spec.shape),
    }


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
    field.label = field.LABEL_REPEATED if label == "repeated" else field.LABEL_OPTIONAL
    if kind.islower():
        field.type = field.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type_name = f".inference.{kind}"
    if label == "oneof":
        field.oneof_index = 0
        if not message.oneof_decl:
            message.oneof_decl.add(name="policy_choice")


_MODEL_CONFIG = _message_class()


class _Reader:
    """From protobuf's message to ours; `source` is what errors call it."""

    def __init__(self, source: str) -> None:
        self._source = source

    def read(self, message: Any, unread: list[str]) -> ModelConfig:
        max_batch = message.max_batch_size if message.HasField("max_batch_size") else None
        if (max_batch or 0) < 0:
            self._refuse(f"max_batch_size is {max_batch}; expected 0 (no batching) or more")
        return ModelConfig(
            name=message.name,
            max_batch=max_batch,
            stated_max_batch=max_batch,
            inputs=self._tensors("input", message.input),
            outputs=self._tensors("output", message.output),
            versions=self._versions(message.version_policy),
            filenames=self._filenames(message),
            unread=tuple(dict.fromkeys(unread)),
            source=self._source,
        )

    def _refuse(self, text: str) -> NoReturn:
        raise ConfigRefused(f"{self._source}: {text}")

    def _tensors(self, field: str, messages: Any) -> tuple[StatedTensor, ...]:
        tensors = tuple(self._tensor(field, index, message) for index, message in enumerate(messages))
        names = [tensor.name for tensor in tensors]
        if repeated := [name for name in names if names.count(name) > 1]:
            self._refuse(f"{field} {repeated[0]!r} is listed twice")
        return tensors

    def _tensor(self, field: str, index: int, message: Any) -> StatedTensor:
        if not message.name:
            self._refuse(f"{field}[{index}] has no name")
        datatypes = {datatype.config_name: datatype.name for datatype in DATATYPES.values()}
        config_name = message.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[message.data_type].name
        if config_name not in datatypes:
            self._refuse(f"{field} {message.name!r} has no data_type; expected one such as TYPE_FP32")
        if wrong := [dim for dim in message.dims if dim < 1 and dim != -1]:
            self._refuse(f"{field} {message.name!r}: {wrong[0]} in dims {list(message.dims)}; expected 1 or more, or -1")
        return StatedTensor(message.name, datatypes[config_name], tuple(message.dims))

    def _versions(self, message: Any) -> VersionPolicy:
        choice = message.WhichOneof("policy_choice")
        if choice == "all":
            return VersionPolicy(latest=0)
        if choice == "specific":
            return self._specific(message.specific.versions)
        if message.latest.HasField("num_versions") and not message.latest.num_versions:
            self._refuse("version_policy.latest.num_versions is 0; expected 1 or more")
        return VersionPolicy(latest=message.latest.num_versions or 1)

    def _specific(self, versions: Sequence[int]) -> VersionPolicy:
        if not versions or min(versions) < 1:
            self._refuse(f"version_policy.specific.versions is {list(versions)}; expected one or more, each 1 or above")
        return VersionPolicy(latest=0, specific=tuple(sorted(set(versions))))

    def _filenames(self, message: Any) -> tuple[str, ...]:
        for field in ("platform", "backend"):
            if (value := getattr(message, field)) not in _FILENAMES:
                self._refuse(f"{field} is {value!r}; served here are {', '.join(filter(None, _FILENAMES))}")
        filename = message.default_model_filename
        if filename in (".", "..") or "/" in filename or "\0" in filename:
            self._refuse(f"default_model_filename is {filename!r}; expected the name of a file in the version's directory")
        return (filename,) if filename else _FILENAMES[message.backend or message.platform]


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
                yield prefix + word, end - len(word), _skip_value(words)


def _skip_value(words: Words) -> int:
    """Move on to the end of a field's value and of the separator after it, and return where that is; -1 if there is none."""
    depth = 0
    for (word, end), (following, _) in words:
        depth += (word in ("{", "<", "[")) - (word in ("}", ">", "]"))
        if depth <= 0 and word != ":" and not following.startswith((",", ";", '"', "'")):
            return end
    return -1


def _known(document: Mapping[str, Any], kind: Descriptor, prefix: str, unread: list[str]) -> dict[str, Any]:
    """The document without the fields that `kind` does not have, whose names go to `unread`."""
    fields = {name: field for field in kind.fields for name in (field.name, field.json_name)}
    unread += [prefix + name for name in document if name not in fields]
    known = {name: value for name, value in document.items() if name in fields}
    for name, value in known.items():
        if inner := fields[name].message_type:
            known[name] = _known_value(value, inner, f"{prefix}{fields[name].name}.", unread)
    return known


def _known_value(value: Any, kind: Descriptor, prefix: str, unread: list[str]) -> Any:
    """Where a message belongs there may be a list of them, or something wrong, which is left for protobuf to refuse."""
    if isinstance(value, list):
        return [_known(item, kind, prefix, unread) if isinstance(item, dict) else item for item in value]
    return _known(value, kind, prefix, unread) if isinstance(value, dict) else value


def _contradiction(config: ModelConfig, text: str) -> NoReturn:
    raise ModelRefused(f"{config.source} contradicts the model: {text}")


def _narrow_all(
    config: ModelConfig, kind: str, tensors: Sequence[StatedTensor], specs: Sequence[TensorSpec], sizes: dict[str, int]
) -> list[TensorSpec]:
    stated = {tensor.name: tensor for tensor in tensors}
    names = [spec.name for spec in specs]
    if unknown := [name for name in stated if name not in names]:
        _contradiction(config, f"the model has no {kind} {unknown[0]!r}, it has {', '.join(map(repr, names))}")
    return [_narrow(config, stated[spec.name], spec, sizes) if spec.name in stated else spec for spec in specs]


def _narrow(config: ModelConfig, stated: StatedTensor, spec: TensorSpec, sizes: dict[str, int]) -> TensorSpec:
    """Compare one tensor; sizes of named dimensions go to `sizes`, those of nameless ones to the tensor returned."""
    if stated.datatype != spec.datatype.name:
        configured = DATATYPES[stated.datatype].config_name
        _contradiction(config, f"{spec.name!r} is {configured}, but {spec.datatype.config_name} in the model")
    wanted = (-1, *stated.dims) if config.stated_max_batch else stated.dims
    if len(wanted) != len(spec.dims):
        batch = " with its batch" if config.stated_max_batch else ""
        _contradiction(config, f"{spec.name!r} is {list(wanted)}{batch}, but {list(spec.shape)} in the model")
    pairs = enumerate(zip(wanted, spec.dims, strict=True))
    return replace(spec, dims=tuple(_narrow_dim(config, spec, axis, want, dim, sizes) for axis, (want, dim) in pairs))


def _narrow_dim(
    config: ModelConfig, spec: TensorSpec, axis: int, want: int, dim: int | str, sizes: dict[str, int]
) -> int | str:
    if want < 0:
        return dim
    have = sizes.setdefault(dim, want) if dim and isinstance(dim, str) else dim or want
    if have != want:
        where = f"elsewhere, where it is {dim!r} too" if isinstance(dim, str) else "in the model"
        _contradiction(config, f"dimension {axis} of {spec.name!r} is {want}, but {have} {where}")
    return want


def _fix(specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> tuple[TensorSpec, ...]:
    """The same with the sizes of named dimensions in place of their names, wherever these occur."""
    dims = [tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.dims) for spec in specs]
    return tuple(replace(spec, dims=fixed) for spec, fixed in zip(specs, dims, strict=True))
