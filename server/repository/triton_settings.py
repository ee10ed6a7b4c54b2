"""Settings of Triton's `config.pbtxt` that say how a model runs and have an equivalent here.

`model_warmup` and `optimization.cuda.graph_spec` set which shapes are warmed up, and `optimization.cuda.graphs` whether CUDA
graphs are used. The tenant's partition decides where a model runs, and requests decide their priority: so `kind`, `gpus` and
`priority` are ignored, among others, and so is the `count` of `instance_group`, with the reason.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from engines.settings import Sample
from engines.signature import Form

from ..config.values import MOST_WARM
from ..protocol.json_document import short, show
from .model_settings import StatedSetting

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
