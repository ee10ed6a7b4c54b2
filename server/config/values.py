"""The types of configuration values: how each is checked, and in what form a file writes it (`forms`).

A validation context (the folder of the file, which paths are relative to) says that values come from a file. Objects made
in code have none, and give paths, durations and core numbers as the program has them.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Required, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationInfo
from typing_extensions import TypedDict

from partitions.plan import ranges

from .forms import BYTES, RATES, SECONDS, Form, write_duration, write_rate, write_size

MOST_WARM = 64
"""Shapes to be ready for: each is run before its model is served, and compiled first where a GPU needs that."""

MOST_PROFILES = 16
MOST_STEPS = 1_000_000
"""Optimization profiles that a model is built with: an executor has a context for each."""

MOST_WEIGHT = 1_000_000
"""Of a version, so that a typo is an error."""

MOST_WIDTHS = 8
"""Shares of a ladder: for each the models' executors take memory."""

LEND = 0.001
"""Seconds that `lend = true` stands for."""

LEAST_RATE = 10**6
"""Bytes a second of a fence that names a rate."""

WATCH = 5.0
"""Seconds between two looks that `watch = true` stands for."""
LEAST_WATCH = 0.1
"""The least seconds between two looks."""

MOST_SECONDS = 366.0 * 24 * 60 * 60
"""Of a duration: clocks and timers take no more than some centuries, and a typo is to be an error."""

LEAST_WATCHDOG = 1.0
"""Seconds: an event loop of a busy machine is late by tenths of one."""

_SIZE = r"^([0-9]{1,15})(B|[KMGT]i?B)$"
_DURATION = r"^([0-9]{1,15}(?:\.[0-9]{1,9})?)(us|ms|s|min)$"
_RATE = r"^([0-9]{1,9}(?:\.[0-9]{1,9})?)([TGM]B)/s$"
_RANGE = r"([0-9]{1,9})(?:-([0-9]{1,9}))?"
_MOST_CORES = 2**16  # So that a typo such as "0-99999999999" gives an error instead of filling the memory.


def _size(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not (found := re.fullmatch(_SIZE, value)):
        raise ValueError
    return int(found[1]) * BYTES[found[2]]


def _duration(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str):
        if info.context is None:
            return value
        raise ValueError  # A file has to name the unit.
    if not (found := re.fullmatch(_DURATION, value)):
        raise ValueError
    times, over = SECONDS[found[2]]
    return float(found[1]) * times / over


def _watchdog(seconds: float) -> float:
    if 0 < seconds < LEAST_WATCHDOG:
        raise ValueError
    return seconds


def _bandwidth(value: object, info: ValidationInfo) -> object:
    """Bytes a second for a rate, a float for a part. A file has to name a rate's unit."""
    if isinstance(value, str) and value != "auto":
        if not (found := re.fullmatch(_RATE, value)):
            raise ValueError
        return round(float(found[1]) * RATES[found[2]])
    if type(value) is int and value == 1:
        return 1.0
    if type(value) is int and info.context is not None:
        raise ValueError
    return value


def _lent(value: object, info: ValidationInfo) -> object:
    """Seconds for a duration; for true and false those that they stand for."""
    return (LEND if value else 0.0) if isinstance(value, bool) else _duration(value, info)


def _watched(value: object, info: ValidationInfo) -> object:
    """The same for the seconds between two looks at the repository."""
    seconds = (WATCH if value else 0.0) if isinstance(value, bool) else _duration(value, info)
    if isinstance(seconds, float) and 0 < seconds < LEAST_WATCH:
        raise ValueError
    return seconds


def _cores(value: object) -> object:
    if not isinstance(value, str):
        return value
    cores = [core for part in value.split(",") for core in _core_range(part.strip())]
    if len(set(cores)) < len(cores):
        raise ValueError
    return tuple(sorted(cores))


def core_numbers(value: object) -> frozenset[int]:
    """The cores that a file's text names; none if it is wrong."""
    try:
        cores = _cores(value)
    except ValueError:
        return frozenset()
    return frozenset(cores) if isinstance(cores, tuple) else frozenset()


def _core_range(part: str) -> range:
    if not (found := re.fullmatch(_RANGE, part)):
        raise ValueError
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last < _MOST_CORES:
        raise ValueError
    return range(first, last + 1)


def _location(value: object, info: ValidationInfo) -> object:
    if info.context is None:
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError
    return Path(info.context, value)


def _ascending(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if any(first >= second for first, second in pairwise(sizes)):
        raise ValueError
    return sizes


def _star_alone(names: tuple[str, ...]) -> tuple[str, ...]:
    if "*" in names and len(names) > 1:
        raise ValueError
    return names


_Shapes = dict[Literal["min", "opt", "max"], list[Annotated[int, Field(ge=0)]]]
_ProfileList = Annotated[
    list[Annotated[dict[str, _Shapes], Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROFILES)
]
_PROFILES: TypeAdapter[list[dict[str, _Shapes]]] = TypeAdapter(_ProfileList, config=ConfigDict(defer_build=True))


def _profiles(value: object) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    profiles = _PROFILES.validate_python(value, strict=True)
    return tuple(tuple((name, _range(shapes)) for name, shapes in profile.items()) for profile in profiles)


class _LoopTable(TypedDict, total=False):
    """How a model is run again and again for one answer."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    feed: Required[
        Annotated[dict[str, str], Field(min_length=1, description="Outputs, and which input of the next run each is.")]
    ]
    steps: Required[Annotated[int, Field(ge=1, le=MOST_STEPS, description="The most runs.")]]
    until: Annotated[str, Field(description="An output that is not zero in the last run.")]
    outputs: Annotated[list[str], Field(min_length=1, description="Those that make a part, by default all.")]


_LOOP: TypeAdapter[_LoopTable] = TypeAdapter(_LoopTable)
_WeightTable = Annotated[
    dict[Annotated[str, Field(pattern=r"^[1-9][0-9]*$")], Annotated[float, Field(ge=0, le=MOST_WEIGHT, allow_inf_nan=False)]],
    Field(min_length=1),
]
_WEIGHTS: TypeAdapter[dict[str, float]] = TypeAdapter(_WeightTable, config=ConfigDict(defer_build=True))


def _loop(value: object) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    table = _LOOP.validate_python(value, strict=True)
    return tuple(table["feed"].items()), table["steps"], table.get("until"), tuple(table.get("outputs", ()))


def _text_or_list(value: str | tuple[Any, ...]) -> str | list[Any]:
    return value if isinstance(value, str) else list(value)


def _write_profiles(profiles: tuple[Any, ...]) -> list[dict[str, dict[str, list[int]]]]:
    keys = ("min", "opt", "max")
    return [{name: dict(zip(keys, map(list, shapes), strict=True)) for name, shapes in profile} for profile in profiles]


def _write_loop(loop: tuple[Any, ...]) -> dict[str, object]:
    feed, steps, until, outputs = loop
    table = {"feed": dict(feed), "steps": steps}
    return table | ({} if until is None else {"until": until}) | ({"outputs": list(outputs)} if outputs else {})


def _weights(value: object) -> tuple[tuple[str, float], ...]:
    """Versions and their weights. Raises ValueError."""
    given = _WEIGHTS.validate_python(dict(value) if isinstance(value, tuple) else value, strict=True)
    if not any(given.values()):
        raise ValueError
    return tuple(given.items())


def _weights_by_model(value: object) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
    """The same for each model. Raises ValueError."""
    given = dict(value) if isinstance(value, tuple) else value
    if not isinstance(given, dict) or not given or "" in given:
        raise ValueError
    return tuple((str(model), _weights(each)) for model, each in given.items())


def _range(said: _Shapes) -> tuple[tuple[int, ...], ...]:
    """The smallest, the usual and the largest shape; an absent one is the next larger that is given, or the largest."""
    best = said.get("opt") or said.get("max") or said.get("min") or []
    shapes = tuple(map(tuple, (said.get("min", best), best, said.get("max", best))))
    least, _, most = shapes
    fits = len(set(map(len, shapes))) == 1 and all(
        low <= size <= high and high for low, size, high in zip(*shapes, strict=True)
    )
    if not (least and most and fits):
        raise ValueError
    return shapes


T = TypeVar("T")
ByName = Annotated[Mapping[str, T], Field(strict=False), AfterValidator(MappingProxyType)]
"""A mapping that cannot be changed, in the file's order."""

_LEAST_MEMORY, _MOST_MEMORY = 2**20, 2**46  # A process has addresses for twice as much.

Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$"), Form("text", "a text of at least one character, without NUL")]
Endpoint = Annotated[
    str,
    Field(pattern=r"^https?://[^/\s][^\s]*$"),
    Form("text", "the address of a receiver, such as 'http://localhost:4318/v1/traces'"),
]
Location = Annotated[
    Path,
    BeforeValidator(_location, json_schema_input_type=Annotated[str, Field(min_length=1)]),
    Form("path", "a text with a path, without NUL", str),
]
SizeOr0 = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(_size, json_schema_input_type=Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=_SIZE)]),
    Form("size, also 0", "a size: bytes as a whole number, or a text such as '64MiB' or '10MB'", write_size),
]
Size = Annotated[
    SizeOr0,
    Field(ge=1),
    Form("size", "a size: 1 or more bytes as a whole number, or a text such as '64MiB' or '10MB'", write_size),
]
Memory = Annotated[
    Size,
    Field(ge=_LEAST_MEMORY, le=_MOST_MEMORY),
    Form(
        f"size from {write_size(_LEAST_MEMORY)} to {write_size(_MOST_MEMORY)}",
        f"a size from {write_size(_LEAST_MEMORY)} to {write_size(_MOST_MEMORY)}: bytes as a number, or a text such as '64MiB'",
        write_size,
    ),
]
Duration = Annotated[
    float,
    Field(ge=0, le=MOST_SECONDS),
    BeforeValidator(_duration, json_schema_input_type=Annotated[str, Field(pattern=_DURATION)]),
    Form("duration", "a duration: a text such as '500us', '10ms', '1.5s' or '15min', at most a year", write_duration),
]
WatchdogTime = Annotated[
    Duration,
    AfterValidator(_watchdog),
    Form("duration from 1s, or 0s", "a duration of at least 1 s, or '0s': a text such as '1.5s' or '15min'", write_duration),
]
Latency = Annotated[
    Duration,
    Field(gt=0),
    Form("duration above 0s", "a duration above 0: a text such as '500us', '5ms' or '1.5s'", write_duration),
]
Lent = Annotated[
    float,
    Field(ge=0, le=1),
    BeforeValidator(_lent, json_schema_input_type=bool | Annotated[str, Field(pattern=_DURATION)]),
    Form(
        "true, false or a duration",
        f"true, which is '{1000 * LEND:g}ms', false, or a duration of at most 1 s: a text such as '500us' or '2ms'",
        lambda seconds: write_duration(seconds) if seconds else False,
    ),
]
BandwidthShare = Annotated[
    Literal["auto"] | Annotated[float, Field(gt=0, le=1)] | Annotated[int, Field(ge=LEAST_RATE)],
    BeforeValidator(
        _bandwidth,
        json_schema_input_type=Literal["auto"] | Annotated[float, Field(gt=0, le=1)] | Annotated[str, Field(pattern=_RATE)],
    ),
    Form(
        '`"auto"`, a part, or a rate',
        "'auto' (the tenant's part of the SMs or cores), a part of the device's above 0 and up to 1, or a rate of at least "
        "1MB/s: a text without spaces such as '1.2TB/s' or '20GB/s'",
        lambda value: write_rate(value) if isinstance(value, int) else value,
    ),
]
Watched = Annotated[
    float,
    Field(ge=0, le=MOST_SECONDS),
    BeforeValidator(_watched, json_schema_input_type=bool | Annotated[str, Field(pattern=_DURATION)]),
    Form(
        "true, false or a duration",
        f"true, which is '{WATCH:g}s', false, or a duration of at least {1000 * LEAST_WATCH:g} ms, such as '1s'",
        lambda seconds: write_duration(seconds) if seconds else False,
    ),
]
KeepAlive = Annotated[
    Duration,
    Field(ge=1),
    Form("duration from 1s", "a duration of at least 1 s: a text such as '1.5s' or '15min'", write_duration),
]
Cores = Annotated[
    tuple[int, ...],
    BeforeValidator(_cores, json_schema_input_type=Annotated[str, Field(pattern=rf"^ *{_RANGE} *(, *{_RANGE} *)*$")]),
    Form("core numbers", "core numbers, each once and ascending, as a text such as '0-7' or '0,2-3'", ranges),
]
_DIGIT64 = Annotated[str, Field(pattern=r"^[0-9A-Fa-f]{64}$"), AfterValidator(str.lower)]
_NAME = Annotated[str, Field(min_length=1)]
DeviceName = Annotated[
    _NAME, Form("device's name", "the name of one device as a text, such as '1'; to be on several, have a tenant on each")
]
_PRINTED = "the 64 hexadecimal digits that `printf %s KEY | sha256sum` prints"
Digest = Annotated[_DIGIT64, Form("digest", f"a SHA-256 digest: {_PRINTED}", secret=True)]
Digests = Annotated[
    tuple[_DIGIT64, ...],
    Field(strict=False),
    Form("list of digests", f"a list of SHA-256 digests: each {_PRINTED}", list, secret=True),
]
Names = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(strict=False, min_length=1),
    AfterValidator(_star_alone),
    Form("list of model names", "a list of one or more model names, or ['*'] alone for all", list),
]
Hosts = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[0-9A-Za-z_]([0-9A-Za-z_.-]*[0-9A-Za-z_])?$"), AfterValidator(str.lower)], ...],
    Field(strict=False),
    Form("list of host names", "a list of host names, each without a port, as in ['gpu1.example.com']", list),
]
Origins = Annotated[
    tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s*]+)$")], ...],
    Field(strict=False),
    Form("list of origins", "a list of origins of web pages, as in ['https://app.example'], or ['*'] for any", list),
]
_BATCHES = "a list of batch sizes, each 1 or more and above the one before it, as in"
Batches = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    Field(strict=False),
    AfterValidator(_ascending),
    Form("list of batch sizes", f"{_BATCHES} [4, 8]", list),
]
MOST_HTTP_PROCESSES = 16
"""HTTP processes of one tenant: its lead would be busy with the requests of fewer."""
HttpProcesses = Annotated[
    Annotated[int, Field(ge=1, le=MOST_HTTP_PROCESSES)] | Literal["auto"],
    Form(f'1 to {MOST_HTTP_PROCESSES}, or `"auto"`', f"a whole number from 1 to {MOST_HTTP_PROCESSES}, or 'auto'"),
]
Widths = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    Field(strict=False, min_length=1, max_length=MOST_WIDTHS),
    AfterValidator(_ascending),
    Form("list of shares", "a list of shares, each 1 or more and above the one before it, as in [4, 8, 16]", list),
]
WarmUp = Annotated[
    Literal["opt", "usual"] | Annotated[Batches, Field(min_length=1, max_length=MOST_WARM)],
    Form('`"opt"`, `"usual"` or list of batch sizes', f"'opt', 'usual', or {_BATCHES} [1, 4, 32]", _text_or_list),
]
Looped = Annotated[
    tuple[Any, ...],
    BeforeValidator(_loop, json_schema_input_type=_LoopTable),
    Form(
        "table",
        "a table with feed, which outputs are which inputs of the next run, and steps, the most runs, from 1 to "
        f'{MOST_STEPS}; and perhaps until and outputs, as in {{ feed = {{ next = "token" }}, steps = 64, until = "done" }}',
        _write_loop,
    ),
]
Weights = Annotated[
    tuple[tuple[str, float], ...],
    BeforeValidator(_weights, json_schema_input_type=_WeightTable),
    Form(
        "table of weights",
        f'a table of versions and their weights, numbers from 0 to {MOST_WEIGHT}, not all 0, as in {{ "1" = 0.9, "2" = 0.1 }}',
        dict,
    ),
]
WeightsByModel = Annotated[
    tuple[tuple[str, tuple[tuple[str, float], ...]], ...],
    BeforeValidator(_weights_by_model, json_schema_input_type=Annotated[dict[str, _WeightTable], Field(min_length=1)]),
    Form(
        "table of weights by model",
        f"a table of models with a table each of versions and their weights, numbers from 0 to {MOST_WEIGHT}, not all 0, as in "
        '{ resnet50 = { "1" = 0.9, "2" = 0.1 } }',
        lambda value: {model: dict(weights) for model, weights in value},
    ),
]
Profiles = Annotated[
    tuple[Any, ...],
    BeforeValidator(_profiles, json_schema_input_type=_ProfileList),
    Form(
        "list of profiles",
        f"a list of 1 to {MOST_PROFILES} optimization profiles, each a table with shapes for inputs by name, none smaller than "
        "the one before it, as in [{ x = { min = [1, 16], opt = [8, 16], max = [32, 16] } }]",
        _write_profiles,
    ),
]
