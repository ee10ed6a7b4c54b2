"""How a model runs: settings in `[models.NAME]`, `config.pbtxt` and `[device]`, resolved to an engine's RuntimeSettings.

One rule: a setting in Greenlane's own terms that cannot be honoured is refused; one in Triton's terms only causes a warning, so
that a repository made for Triton can be served unchanged.

Of Triton's fields `model_warmup` and `optimization.cuda.graph_spec` set which shapes are warmed up, and
`optimization.cuda.graphs` whether CUDA graphs are used. The tenant's partition decides where a model runs, and requests decide
their priority: so `kind`, `gpus` and `priority` are ignored, among others, and so is the `count` of `instance_group`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from engines import Loop, RuntimeSettings
from engines.settings import Sample
from engines.signature import Form

from ..config.file import read
from ..config.forms import cut, form_of, shown
from ..config.schema import DeviceConfig, ModelOptions
from ..config.tables import dotted, nearest
from ..config.values import MOST_WARM
from ..protocol.json_document import short, show

__all__ = [
    "EXECUTION",
    "FIELDS",
    "PREFIX",
    "ResolvedSettings",
    "StatedSetting",
    "StatedSettings",
    "Unsupported",
    "default_settings",
    "from_options",
    "from_parameters",
    "resolve_settings",
]

PREFIX = "greenlane."
"""Prefix of `config.pbtxt` parameters that are keys of `[models.NAME]`."""

EXECUTION = "greenlane.execution"
"""The parameter in which we show how a model runs: JSON in a string, as parameters are strings to Triton's clients."""

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "graphs": "graphs",
        "strategy": "dynamic_shapes_kernel_specialization_strategy",
        "cuda_graphs": "cuda_graph_strategy",
        "allocation": "allocation_strategy",
        "profile": "profile",
        "profiles": "build_profiles",
        "weight_budget": "weight_streaming_budget",
        "copies": "copies",
        "warm_up": "warm_up",
        "loop": "loop",
        "verify": "verify",
    }
)
"""Keys of `[models.NAME]` and their fields in RuntimeSettings."""

_ONE_AT_A_TIME = "inferences of a tenant run one after another on its partition, and dynamic_batching joins them"

_VALUES = {("cuda_graphs", "on"): "whole_graph_capture", ("cuda_graphs", "off"): "disabled"}

Unsupported = Callable[[Mapping[str, object]], Mapping[str, str]]
"""Returns, for settings by field, those that the device cannot honour and why; see `engines.unsupported`."""


class StatedSetting(NamedTuple):
    """A setting: its value in RuntimeSettings, the value as written, file and key, and whether it is in Triton's terms."""

    value: object
    written: object
    source: str
    key: str
    is_tritons: bool = False

    @property
    def where(self) -> str:
        return f"{self.source}: {self.key}" if self.source else self.key


StatedSettings = Mapping[str, StatedSetting]
"""Settings of a model, by field of RuntimeSettings; and Triton's number of `instances`, if above 1, which is never honoured."""


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The settings of a model's engine. With problems the model must not be served."""

    settings: RuntimeSettings
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def default_settings(device: DeviceConfig) -> RuntimeSettings:
    """The settings of a model without any of its own."""
    return RuntimeSettings(copies=device.copies, warm_up="usual")


def resolve_settings(stated: StatedSettings, base: RuntimeSettings, unsupported: Unsupported) -> ResolvedSettings:
    """The settings of one model: those stated, and `base` for the rest. Never raises; problems are listed."""
    lacking = dict(unsupported({field: setting.value for field, setting in stated.items()}))
    if "instances" in stated:
        lacking["instances"] = _ONE_AT_A_TIME
    held = {field: setting.value for field, setting in stated.items() if field not in lacking}
    problems, warnings = [], []
    for field, why in lacking.items():
        setting = stated[field]
        text = f"{setting.where}: {_shown(setting.written)} cannot be honoured: {why}"
        if setting.is_tritons:
            warnings.append(f"{text}; it is ignored")
        else:
            problems.append(f"{text}; leave it out")
    return ResolvedSettings(base.merge(**held), tuple(problems), tuple(warnings))


def from_options(options: ModelOptions, path: Sequence[str], source: str = "") -> dict[str, StatedSetting]:
    """The settings in a section of the server's configuration; `source` is that file, `path` the section."""
    found = {}
    for key, field in FIELDS.items():
        if (value := getattr(options, key)) is not None:
            found[field] = StatedSetting(_setting(key, value), value, source, dotted((*path, key)))
    return found


def from_parameters(parameters: Mapping[str, str], source: str) -> tuple[dict[str, StatedSetting], list[str]]:
    """The settings in those parameters of a `config.pbtxt` that begin with PREFIX, and the names of the other parameters.

    Raises ValueError naming the parameter, what came and what was expected.
    """
    found, others = {}, []
    for name, text in parameters.items():
        key = name.removeprefix(PREFIX)
        if name == EXECUTION:  # The configuration was read from a Greenlane server.
            continue
        if key == name:
            others.append(name)
        elif key not in FIELDS:
            raise ValueError(f"parameters {shown(name)}: there is no such setting; {nearest(key, FIELDS)}")
        else:
            value = _of_text(name, key, text)
            found[FIELDS[key]] = StatedSetting(_setting(key, value), text, source, f"parameters {name}")
    return found, others


def _setting(key: str, value: Any) -> Any:
    """The value in RuntimeSettings of a key's."""
    return Loop(*value) if key == "loop" else _VALUES.get((key, str(value)), value)


def _of_text(name: str, key: str, text: str) -> Any:
    """A setting written as a string: `4` may be a number, and `1, 4, 32` a list."""
    for candidate in _readings(text):
        with suppress(ValueError):
            return read(ModelOptions, key, candidate)
    raise ValueError(f"parameters {shown(name)}: {shown(text)} is not {form_of(ModelOptions.model_fields[key]).expected}")


def _readings(text: str) -> Iterator[object]:
    yield text
    if re.fullmatch(r"[0-9]{1,18}", text):
        yield int(text)
    if re.fullmatch(r"\s*[0-9]{1,18}\s*(,\s*[0-9]{1,18}\s*)*", text):
        yield [int(number) for number in text.split(",")]
    if text.lstrip().startswith(("[", "{")):
        with suppress(ValueError):
            yield json.loads(text)


def _shown(value: object) -> str:
    if not isinstance(value, tuple):
        return shown(value)
    return cut(f"[{', '.join('a table' if isinstance(item, tuple) else shown(item) for item in value)}]")


_SWITCH: Mapping[str, object] = MappingProxyType({"0": False, "1": True, "false": False, "true": True})
_PARAMETERS: Mapping[str, tuple[str, Mapping[str, object]]] = MappingProxyType(
    {
        "intra_op_thread_count": ("intra_op_threads", {}),
        "inter_op_thread_count": ("inter_op_threads", {}),
        "execution_mode": ("execution_mode", {"0": "sequential", "1": "parallel"}),
        "enable_mem_arena": ("memory_arena", _SWITCH),
        "enable_mem_pattern": ("memory_pattern", _SWITCH),
    }
)
"""Parameters of Triton's ONNX Runtime backend that mean the same here: our field, and the values allowed if not numbers."""

_LEVELS: Mapping[int, str] = MappingProxyType({-1: "basic", 1: "extended", 2: "none"})
"""ONNX Runtime's optimization level for each `optimization.graph.level`, as in Triton; other levels mean all."""

PARAMETERS = frozenset(_PARAMETERS)
"""The names of parameters that are read here."""


def from_triton(message: Any, max_batch: int, source: str) -> dict[str, StatedSetting]:
    """The settings in a `config.pbtxt`, by field of RuntimeSettings. `max_batch` is its `max_batch_size`, `source` its name.

    Raises ValueError naming the field, what came and what was expected.
    """
    found: dict[str, tuple[object, str]] = {}
    if message.optimization.cuda.HasField("graphs"):
        found["graphs"] = "on" if message.optimization.cuda.graphs else "off", "optimization.cuda.graphs"
    named = len(message.model_warmup) + len(message.optimization.cuda.graph_spec)
    if named > MOST_WARM:
        raise ValueError(f"{named} samples to warm up; expected at most {MOST_WARM}")
    if samples := tuple(dict.fromkeys(_samples(message, max_batch))):
        found["warm_up"] = samples, "model_warmup" if message.model_warmup else "optimization.cuda.graph_spec"
    if level := message.optimization.graph.level:
        found["graph_optimization"] = _LEVELS.get(level, "all"), "optimization.graph.level"
    for name in sorted(PARAMETERS.intersection(message.parameters)):
        found[_PARAMETERS[name][0]] = _parameter(name, message.parameters[name].string_value), f"parameters {name}"
    if (count := _instances(message.instance_group)) > 1:
        found["instances"] = count, "instance_group.count"
    if (profile := _profile(message.instance_group)) is not None:
        found["profile"] = profile, "instance_group.profile"
    return {field: StatedSetting(value, value, source, key, is_tritons=True) for field, (value, key) in found.items()}


def _parameter(name: str, text: str) -> object:
    """The value of a parameter of the ONNX Runtime backend, all of which are strings."""
    choices = _PARAMETERS[name][1]
    word = text.strip().lower()
    if word in choices:
        return choices[word]
    if not choices and re.fullmatch(r"[0-9]{1,4}", word, re.ASCII):
        return int(word)
    expected = " or ".join(choices) if choices else "a number of threads, or 0 for one a core"
    raise ValueError(f"parameters {name}: {short(repr(text))}; expected {expected}")


def _instances(groups: Any) -> int:
    """The number of instances of all groups together."""
    counts = [group.count or 1 for group in groups]
    if (least := min(counts, default=1)) < 1:
        raise ValueError(f"instance_group.count is {least}; expected 1 or more")
    return sum(counts)


def _profile(groups: Any) -> int | None:
    """The optimization profile, if exactly one is named; with several, the model chooses."""
    names = sorted({name for group in groups for name in group.profile})
    if wrong := [name for name in names if not (name.isascii() and name.isdigit() and len(name) < 5)]:
        came = short(repr(wrong[0]))
        raise ValueError(f"instance_group.profile: {came}; expected the number of an optimization profile, from 0")
    return int(names[0]) if len(names) == 1 else None


def _samples(message: Any, max_batch: int) -> Iterator[Sample]:
    """The samples to warm up or capture, in order."""
    for index, each in enumerate(message.model_warmup):
        dims = {name: list(each.inputs[name].dims) for name in sorted(each.inputs)}
        sample = _sample(f"model_warmup[{index}]", each.batch_size, dims, max_batch)
        yield from (_reshaped(message, shapes) for shapes in sample)
    for index, each in enumerate(message.optimization.cuda.graph_spec):
        dims = {name: list(each.input[name].dim) for name in sorted(each.input)}
        yield from _sample(f"optimization.cuda.graph_spec[{index}]", each.batch_size, dims, max_batch)


def _reshaped(message: Any, sample: Sample) -> Sample:
    """The sample with the model's shapes. A configuration has the clients' shapes, which differ for inputs with `reshape`."""
    if isinstance(sample, int):
        return sample
    forms = {}
    for each in message.input:
        if each.HasField("reshape"):
            batch = (-1,) if message.max_batch_size else ()
            forms[each.name] = Form((*batch, *each.dims), (*batch, *each.reshape.shape))
    inner = {name: forms[name].inward(shape) for name, shape in sample if name in forms}
    return tuple((name, shape if (found := inner.get(name)) is None else found) for name, shape in sample)


def _sample(key: str, rows: int, inputs: Mapping[str, Sequence[int]], max_batch: int) -> Iterator[Sample]:
    """At most one sample: shapes of the inputs, or just a number of rows if no input is named and the model takes batches.

    `inputs` are dims without the batch dimension if the model has one.
    """
    if not 0 <= rows <= max(1, max_batch):
        expected = f"1 to {max_batch}, the max_batch_size" if max_batch else "1, as the model has no max_batch_size"
        raise ValueError(f"{key}.batch_size is {rows}; expected {expected}")
    for name, dims in inputs.items():
        if wrong := [dim for dim in dims if dim < 1]:
            came = f"{wrong[0]} in dims {show(dims)} of input {short(repr(name))}"
            raise ValueError(f"{key}: {came}; expected sizes of 1 or more")
    batch = (max(1, rows),) if max_batch else ()
    if inputs:
        yield tuple((name, (*batch, *dims)) for name, dims in inputs.items())
    else:
        yield from batch
