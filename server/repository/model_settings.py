"""How a model runs: settings in `[models.NAME]`, `config.pbtxt` and `[device]`, resolved to an engine's RuntimeSettings.

One rule: a setting in Greenlane's own terms that cannot be honoured is refused; one in Triton's terms only causes a warning, so
that a repository made for Triton can be served unchanged.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from engines import Loop, RuntimeSettings

from ..config.file import read
from ..config.forms import form_of, shown
from ..config.schema import DeviceConfig, ModelOptions
from ..config.tables import dotted, nearest

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
    return shown([{} if isinstance(item, tuple) else item for item in value]) if isinstance(value, tuple) else shown(value)
