"""A model's configuration: read from `config.pbtxt` or its JSON form, checked, and applied to the model's signature.

Only fields that affect how a model is served here are read; `pbtxt` tolerates the rest.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

from engines.datatypes import DATATYPES
from engines.errors import ModelRefused
from engines.signature import Form, Shape, Signature, TensorSpec, obstacle

from ..protocol.json_document import short, show
from ..scheduling.batching import largest_batch
from ..scheduling.queue_policy import Batching, QueuePolicy, read_queues
from .ensemble import PLATFORM, EnsembleStep, read_steps
from .model_settings import PARAMETERS, StatedSettings, from_parameters, from_triton
from .pbtxt import ConfigRefused, Reading, read_json, read_text
from .triton_schema import MESSAGE
from .unserved import alternative, unserved

__all__ = [
    "ConfigRefused",
    "ModelConfig",
    "StatedTensor",
    "VersionPolicy",
    "apply",
    "batching",
    "from_json",
    "parse",
    "stated_shapes",
]

_FILENAMES = {
    "": ("model.onnx", "model.plan"),
    "onnxruntime": ("model.onnx",),
    "onnxruntime_onnx": ("model.onnx",),
    "tensorrt": ("model.plan",),
    "tensorrt_plan": ("model.plan",),
    PLATFORM: (),
}


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions of a model are served: the `latest` highest, or `specific` ones, or all if `latest` is 0."""

    latest: int = 1
    specific: tuple[int, ...] = ()

    def select(self, versions: Sequence[int]) -> list[int]:
        """The versions to serve among these, in ascending order."""
        if self.specific:
            return sorted(set(versions).intersection(self.specific))
        return sorted(versions)[-self.latest :]  # -0 is the start: all of them

    def describe(self) -> dict[str, object]:
        """This policy in Triton's JSON."""
        if self.specific:
            return {"specific": {"versions": list(self.specific)}}
        return {"latest": {"num_versions": self.latest}} if self.latest else {"all": {}}


class StatedTensor(NamedTuple):
    """An input or output as configured: the protocol's data type, and sizes or -1, without the batch dimension.

    `dims` is the shape in requests. `reshape` is the model's own shape, if it differs; see `signature.Form`. Requests may leave
    out an `optional` input if the model has a default for it.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a model; the defaults are those of a model without `config.pbtxt`.

    `max_batch` is the value in force, None if there is none, and `max_batch_key` is the file and key it is from.
    `stated_max_batch` is the value in this file, which the server's configuration may have overruled; the file's dims leave out
    the batch dimension if it is above 0. `batch_delay` is in seconds; `preferred_batches` are in ascending order. The model is
    the first of `filenames` that exists; an ensemble has `steps` and no file. `settings` say how it runs, see `model_settings`.
    `labels` are the names of label files in the model's directory, by output. `unread` names the fields that were ignored,
    nested ones as `input.reshape`. `message` is the whole configuration, see `triton_schema`. `source` is its name in errors.
    """

    name: str = ""
    max_batch: int | None = None
    max_batch_key: str = ""
    stated_max_batch: int | None = None
    inputs: tuple[StatedTensor, ...] = ()
    outputs: tuple[StatedTensor, ...] = ()
    batch_delay: float = 0.0
    preferred_batches: tuple[int, ...] = ()
    versions: VersionPolicy = VersionPolicy()
    filenames: tuple[str, ...] = _FILENAMES[""]
    steps: tuple[EnsembleStep, ...] = ()
    settings: StatedSettings = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    queues: QueuePolicy | None = None
    unread: tuple[str, ...] = ()
    message: Any = field(default_factory=MESSAGE, repr=False)
    source: str = "config.pbtxt"


def parse(text: str, source: str) -> ModelConfig:
    """Read a `config.pbtxt`. `source` is its name in errors. Raises ConfigRefused."""
    return _read(read_text(text, source), source)


def from_json(text: str, source: str = "the config parameter") -> ModelConfig:
    """Read the JSON form, as in a request to load a model. Raises ConfigRefused, also for fields that Triton does not know.

    A file may have such fields, as it may be made for a newer Triton; in a request they are mistakes.
    """
    config = _read(read_json(text, source), source)
    if unknown := [name for name in config.unread if name.endswith(")")]:  # See `pbtxt.Reading`.
        raise ConfigRefused(f"{source}: {unknown[0]}")
    return config


def apply(config: ModelConfig, signature: Signature) -> Signature:
    """The signature as configured: with its largest batch, and dynamic dimensions narrowed to the configured sizes.

    A size goes for all dimensions of its name where the library has it so, else for outputs only, if the name has one size.

    Raises ModelRefused, naming the tensor and both values, if the configuration contradicts the model.
    """
    sizes: dict[str, int] = {}
    inputs = _narrow_all(config, "input", config.inputs, signature.inputs, sizes, signature.same_sizes)
    outputs = _narrow_all(config, "output", config.outputs, signature.outputs, sizes, signature.same_sizes)
    names = {tensor.name for tensor in config.inputs}
    if names and (missing := [spec.name for spec in signature.inputs if spec.name not in names]):
        _contradiction(config, f"the model also has input {_name(missing[0])}; list all inputs or none")
    sizes = {dim: size for dim, size in sizes.items() if size >= 0}
    narrowed = replace(signature, inputs=_fix(inputs, sizes if signature.same_sizes else {}), outputs=_fix(outputs, sizes))
    return narrowed if config.max_batch is None else _with_batch(config, narrowed, config.max_batch)


def stated_shapes(config: ModelConfig, most: int) -> tuple[tuple[str, Shape], ...]:
    """The model's shape of each input as configured, -1 where it varies; none if they are above `most` bytes.

    No request has as many, so there is no use in being ready for it.
    """
    batch = (-1,) if config.stated_max_batch else ()
    found = [(each, (*batch, *(each.dims if each.reshape is None else each.reshape))) for each in config.inputs]
    nbytes = sum((DATATYPES[each.datatype].size or 1) * math.prod(max(1, size) for size in shape) for each, shape in found)
    return tuple((each.name, shape) for each, shape in found) if nbytes <= most else ()


def _with_batch(config: ModelConfig, signature: Signature, max_batch: int) -> Signature:
    try:
        return signature.with_max_batch(max_batch)
    except ModelRefused as error:
        raise ModelRefused(f"{config.max_batch_key}: {error}") from error


def batching(config: ModelConfig, signature: Signature) -> tuple[Batching | None, str]:
    """How requests for the model are batched, or None; and why not, if the model takes batches. `signature` is `apply`'s."""
    most = largest_batch(signature)
    if most < 2:
        return None, ""
    if why := obstacle(signature):
        return None, f"requests are not joined into batches: {why}"
    return Batching(signature, most, config.batch_delay, config.preferred_batches), ""


def _read(reading: Reading, source: str) -> ModelConfig:
    """Raises ConfigRefused."""
    try:
        return _Reader(source).read(reading)
    except ValueError as error:
        raise ConfigRefused(f"{source}: {error}") from error


class _Reader:
    """Reads a protobuf message into a ModelConfig, from this `source`. Raises ValueError with what is wrong."""

    def __init__(self, source: str) -> None:
        self._source = source

    def read(self, reading: Reading) -> ModelConfig:
        message = reading.message
        max_batch = message.max_batch_size if message.HasField("max_batch_size") else None
        if (max_batch or 0) < 0:
            raise ValueError(f"max_batch_size is {max_batch}; expected 0 (no batching) or more")
        if why := unserved(message):
            raise ValueError(why)
        settings, others = self._settings(message, max_batch or 0)
        filenames = self._filenames(message)
        return ModelConfig(
            name=message.name,
            max_batch=max_batch,
            max_batch_key="" if max_batch is None else f"{self._source}: max_batch_size",
            stated_max_batch=max_batch,
            inputs=self._tensors("input", message.input),
            outputs=self._tensors("output", message.output),
            batch_delay=message.dynamic_batching.max_queue_delay_microseconds / 1e6,
            preferred_batches=self._preferred(message.dynamic_batching, max_batch),
            versions=self._versions(message.version_policy),
            filenames=filenames,
            steps=read_steps(message),
            settings=settings,
            labels=self._labels(message.output),
            queues=read_queues(message.dynamic_batching),
            unread=(*reading.unread, *(f"parameters.{short(name)}" for name in others if name not in PARAMETERS)),
            message=message,
            source=self._source,
        )

    def _settings(self, message: Any, max_batch: int) -> tuple[StatedSettings, list[str]]:
        """How the model runs, Greenlane's parameters before Triton's fields; and the names of all other parameters."""
        texts = {name: message.parameters[name].string_value for name in sorted(message.parameters)}
        ours, others = from_parameters(texts, self._source)
        return {**from_triton(message, max_batch, self._source), **ours}, others

    def _tensors(self, field: str, messages: Any) -> tuple[StatedTensor, ...]:
        tensors = tuple(self._tensor(field, index, message) for index, message in enumerate(messages))
        repeated = [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]
        if repeated:
            raise ValueError(f"{field} {_name(repeated[0])} is listed twice")
        return tensors

    def _tensor(self, field: str, index: int, message: Any) -> StatedTensor:
        if not message.name:
            raise ValueError(f"{field}[{index}] has no name")
        datatypes = {datatype.config_name: datatype.name for datatype in DATATYPES.values()}
        config_name = message.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[message.data_type].name
        if config_name not in datatypes:
            raise ValueError(f"{field} {_name(message.name)} has no data_type; expected one such as TYPE_FP32")
        where = f"{field} {_name(message.name)}"
        dims = self._dims(f"{where}: ", "dims", message.dims)
        reshape = self._dims(f"{where}: ", "reshape.shape", message.reshape.shape) if message.HasField("reshape") else None
        if reshape is not None and (why := Form(dims, reshape).obstacle()):
            raise ValueError(f"{where} cannot be reshaped from dims to reshape.shape: {why}")
        optional = field == "input" and message.optional
        return StatedTensor(message.name, datatypes[config_name], dims, reshape, optional)

    def _dims(self, where: str, key: str, values: Any) -> tuple[int, ...]:
        if wrong := [dim for dim in values if dim < 1 and dim != -1]:
            raise ValueError(f"{where}{wrong[0]} in {key} {show(list(values))}; expected 1 or more, or -1")
        return tuple(values)

    def _labels(self, outputs: Any) -> dict[str, str]:
        named = {output.name: output.label_filename for output in outputs if output.label_filename}
        for output, path in named.items():
            if path.startswith("/") or ".." in path.split("/") or "\0" in path:
                expected = "expected the name of a file in the model's directory"
                raise ValueError(f"output {_name(output)}: label_filename is {_name(path)}; {expected}")
        return named

    def _preferred(self, message: Any, max_batch: int | None) -> tuple[int, ...]:
        sizes = tuple(sorted(set(message.preferred_batch_size)))
        if sizes and max_batch == 0:
            why = "max_batch_size is 0, so nothing is joined into batches; raise that, or leave the sizes out"
            raise ValueError(f"dynamic_batching.preferred_batch_size is {show(list(sizes))}, but {why}")
        if wrong := [size for size in sizes if size < 1 or (max_batch is not None and size > max_batch)]:
            most = "" if max_batch is None else f" to {max_batch}, the max_batch_size"
            expected = f"expected 1{most or ' or more'}"
            raise ValueError(f"dynamic_batching.preferred_batch_size: {wrong[0]} in {show(list(sizes))}; {expected}")
        return sizes

    def _versions(self, message: Any) -> VersionPolicy:
        choice = message.WhichOneof("choice")
        if choice == "all":
            return VersionPolicy(latest=0)
        if choice == "specific":
            return self._specific(message.specific.versions)
        if message.latest.HasField("num_versions") and not message.latest.num_versions:
            raise ValueError("version_policy.latest.num_versions is 0; expected 1 or more")
        return VersionPolicy(latest=message.latest.num_versions or 1)

    def _specific(self, versions: Sequence[int]) -> VersionPolicy:
        if not versions or min(versions) < 1:
            raise ValueError(
                f"version_policy.specific.versions is {show(list(versions))}; expected one or more, each 1 or above"
            )
        return VersionPolicy(latest=0, specific=tuple(sorted(set(versions))))

    def _filenames(self, message: Any) -> tuple[str, ...]:
        for key in ("platform", "backend"):
            if (value := getattr(message, key)) not in _FILENAMES:
                served = ", ".join(filter(None, _FILENAMES))
                raise ValueError(f"{key} is {_name(value)}; served here are {served}{alternative(value)}")
        filename = message.default_model_filename
        if filename in (".", "..") or "/" in filename or "\0" in filename:
            raise ValueError(
                f"default_model_filename is {_name(filename)}; expected the name of a file in the version's directory"
            )
        return (filename,) if filename else _FILENAMES[message.backend or message.platform]


def _name(text: str) -> str:
    """A string of the configuration in quotes, shortened."""
    return short(repr(text))


def _contradiction(config: ModelConfig, text: str) -> NoReturn:
    raise ModelRefused(f"{config.source} contradicts the model: {text}")


def _narrow_all(
    config: ModelConfig,
    kind: str,
    tensors: Sequence[StatedTensor],
    specs: Sequence[TensorSpec],
    sizes: dict[str, int],
    same_sizes: bool,
) -> list[TensorSpec]:
    stated = {tensor.name: tensor for tensor in tensors}
    names = [spec.name for spec in specs]
    if unknown := [name for name in stated if name not in names]:
        those = ", ".join(map(_name, names)) or "none"
        if config.steps and kind == "input":
            _contradiction(config, f"no step takes input {_name(unknown[0])}; of the ensemble the steps take {those}")
        _contradiction(config, f"the model has no {kind} {_name(unknown[0])}, it has {those}")
    narrowed = []
    for spec in specs:
        if spec.name in stated:
            wanted = spec
            spec = _narrow(config, stated[spec.name], spec)
            _record(config, spec.name, zip(wanted.dims, spec.dims, strict=True), sizes, same_sizes)
        narrowed.append(spec)
    return narrowed


def _record(
    config: ModelConfig, name: str, dims: Iterable[tuple[int | str, int | str]], sizes: dict[str, int], same_sizes: bool
) -> None:
    """Record in `sizes`, for `_fix`, the sizes that named dimensions are given, -1 for a name with several.

    `dims` are a tensor's before and after. Several are a contradiction where the library wants the `same_sizes`.
    """
    for axis, (dim, want) in enumerate(dims):
        if isinstance(dim, str) and dim and isinstance(want, int) and (have := sizes.setdefault(dim, want)) != want:
            sizes[dim] = -1
            if same_sizes:
                there = f"{have} elsewhere, where it is {_name(dim)} too"
                _contradiction(config, f"dimension {axis} of {_name(name)} is {want}, but {there}")


def _narrow(config: ModelConfig, stated: StatedTensor, spec: TensorSpec) -> TensorSpec:
    """One tensor with its configured sizes."""
    if stated.datatype != spec.datatype.name:
        configured = DATATYPES[stated.datatype].config_name
        _contradiction(config, f"{_name(spec.name)} is {configured}, but {spec.datatype.config_name} in the model")
    form = _form(config, stated, spec)
    wanted = form.inner
    if len(wanted) != len(spec.dims):
        batch = " with its batch" if config.stated_max_batch else ""
        reshaped = "" if form.inner == form.outer else " (reshape.shape)"
        came = f"{_name(spec.name)} is {show(list(wanted))}{reshaped}{batch}"
        batched = not config.stated_max_batch and len(wanted) + 1 == len(spec.dims) and isinstance(spec.dims[0], str)
        hint = "; dims leave the batch out only with a max_batch_size above 0: set it" if batched else ""
        _contradiction(config, f"{came}, but {list(spec.shape)} in the model{hint}")
    pairs = enumerate(zip(wanted, spec.dims, strict=True))
    dims = tuple(_narrow_dim(config, spec, axis, want, dim) for axis, (want, dim) in pairs)
    return replace(spec, dims=dims, form=None if form.inner == form.outer else form)


def _form(config: ModelConfig, stated: StatedTensor, spec: TensorSpec) -> Form:
    """The shapes in requests and in the model, with the batch dimension if there is one.

    ONNX Runtime does not distinguish a scalar from a tensor of unknown rank. Configured as in Triton, with dims of one element,
    such a tensor is given to the model as a scalar.
    """
    batch = (-1,) if config.stated_max_batch else ()
    reshape = stated.dims if stated.reshape is None else stated.reshape
    if not spec.dims and not batch and stated.reshape is None and all(dim == 1 for dim in stated.dims):
        reshape = ()
    return Form((*batch, *stated.dims), (*batch, *reshape))


def _narrow_dim(config: ModelConfig, spec: TensorSpec, axis: int, want: int, dim: int | str) -> int | str:
    if want < 0:
        return dim
    if isinstance(dim, int) and dim != want:
        _contradiction(config, f"dimension {axis} of {_name(spec.name)} is {want}, but {dim} in the model")
    return want


def _fix(specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> tuple[TensorSpec, ...]:
    """The specs with the names of dimensions replaced by their sizes, where these are known."""
    dims = [tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.dims) for spec in specs]
    return tuple(replace(spec, dims=fixed) for spec, fixed in zip(specs, dims, strict=True))
