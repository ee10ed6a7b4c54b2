"""How a model is to run: what `[models.NAME]`, `config.pbtxt` and the device's section say, made into an engine's settings.

One rule: what is said in our own words and cannot be honoured is refused; what Triton's words ask for is warned of, so that
a repository made for Triton serves as it is.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from engines import RuntimeSettings

from ..config.schema import MOST_INSTANCES, DeviceConfig, ModelOptions
from ..config.tables import dotted, kind, nearest
from ..config.values import shown

__all__ = [
    "EXECUTION",
    "FIELDS",
    "MOST_INSTANCES",
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
"""What the parameters of a `config.pbtxt` begin with that are keys of `[models.NAME]`."""

EXECUTION = "greenlane.execution"
"""The parameter that says which way a model runs, as JSON in a text: Triton's clients know parameters to be texts."""

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "graphs": "graphs",
        "strategy": "dynamic_shapes_kernel_specialization_strategy",
        "cuda_graphs": "cuda_graph_strategy",
        "allocation": "allocation_strategy",
        "profile": "profile",
        "profiles": "build_profiles",
        "instances": "instances",
        "weight_budget": "weight_streaming_budget",
        "copies": "copies",
        "warm_up": "warm_up",
    }
)
"""The keys of `[models.NAME]` that say how it runs, and the fields of RuntimeSettings; `instances` is the server's own."""

_VALUES = {("cuda_graphs", "on"): "whole_graph_capture", ("cuda_graphs", "off"): "disabled"}

Unsupported = Callable[[Mapping[str, object]], Mapping[str, str]]
"""Which fields cannot be honoured where models run, and why; see `engines.unsupported`."""


class StatedSetting(NamedTuple):
    """A setting as RuntimeSettings has it, as it came, the file and the key that said it, and whether in Triton's words."""

    value: object
    came: object
    source: str
    key: str
    is_tritons: bool = False

    @property
    def where(self) -> str:
        return f"{self.source}: {self.key}" if self.source else self.key


StatedSettings = Mapping[str, StatedSetting]
"""What is said of a model, by the fields of RuntimeSettings, and `instances`."""


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """What holds: the engine's settings, and how many executors are bound. With problems it is not to be served."""

    settings: RuntimeSettings
    instances: int = 1
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def default_settings(device: DeviceConfig) -> RuntimeSettings:
    """The settings of a model of which nothing is said."""
    return RuntimeSettings(copies=device.copies, warm_up="usual")


def resolve_settings(sayings: StatedSettings, base: RuntimeSettings, unsupported: Unsupported) -> ResolvedSettings:
    """The settings of one model, from what is said of it and `base` for the rest. Raises nothing: problems are listed."""
    lacking = unsupported({field: said.value for field, said in sayings.items()})
    held = {field: said.value for field, said in sayings.items() if field not in lacking}
    instances = held.pop("instances", 1)
    problems, warnings = [], []
    for field, why in lacking.items():
        said = sayings[field]
        text = f"{said.where}: {_shown(said.came)} cannot be honoured: {why}"
        if said.is_tritons:
            warnings.append(f"{text}; it is ignored")
        else:
            problems.append(f"{text}; leave it out")
    settings = base.merge(**held)
    return ResolvedSettings(settings, instances if isinstance(instances, int) else 1, tuple(problems), tuple(warnings))


def from_options(options: ModelOptions, path: Sequence[str], source: str = "") -> dict[str, StatedSetting]:
    """What a section of the server's configuration says; `source` is that file, `path` the section's."""
    said = {}
    for key, field in FIELDS.items():
        if (value := getattr(options, key)) is not None:
            said[field] = StatedSetting(_VALUES.get((key, value), value), value, source, dotted((*path, key)))
    return said


def from_parameters(parameters: Mapping[str, str], source: str) -> tuple[dict[str, StatedSetting], list[str]]:
    """What parameters of a `config.pbtxt` say that begin with PREFIX, and the names of the others.

    Raises ValueError naming the parameter, what came and what was expected.
    """
    said, others = {}, []
    for name, text in parameters.items():
        key = name.removeprefix(PREFIX)
        if name == EXECUTION:  # Of a configuration that was asked for here, and comes back.
            continue
        if key == name:
            others.append(name)
        elif key not in FIELDS:
            raise ValueError(f"parameters {shown(name)}: there is no such setting; {nearest(key, FIELDS)}")
        else:
            value = _of_text(name, key, text)
            said[FIELDS[key]] = StatedSetting(_VALUES.get((key, str(value)), value), text, source, f"parameters {name}")
    return said, others


def _of_text(name: str, key: str, text: str) -> Any:
    """A setting that is written as a text: `4` is a number there too, and `1, 4, 32` a list."""
    accepts = kind(ModelOptions, key)
    for candidate in _readings(text):
        try:
            return accepts.read(candidate)
        except ValueError:
            continue
    raise ValueError(f"parameters {shown(name)}: {shown(text)} is not {accepts.expected}")


def _readings(text: str) -> Iterator[object]:
    yield text
    if re.fullmatch(r"[0-9]{1,18}", text):
        yield int(text)
    if re.fullmatch(r"\s*[0-9]{1,18}\s*(,\s*[0-9]{1,18}\s*)*", text):
        yield [int(number) for number in text.split(",")]
    if text.lstrip().startswith("["):
        with suppress(ValueError):
            yield json.loads(text)


def _shown(value: object) -> str:
    return shown([{} if isinstance(item, tuple) else item for item in value]) if isinstance(value, tuple) else shown(value)
