"""The kinds of value a configuration file holds: sizes, durations, core ranges, digests, names.

A kind turns what TOML delivered into what the program uses, and says in one phrase what it expects, so that every
refusal reads alike: what came, "is not", what was expected.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_WARM = 64
"""Shapes to be ready for: each is run before its model is served, and compiled first where that is what a GPU needs."""

MOST_PROFILES = 16
"""Optimization profiles that a model is built with: an executor has a context for each."""

_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SECONDS = {"us": (1, 10**6), "ms": (1, 10**3), "s": (1, 1), "min": (60, 1)}  # as fractions, so that 500us is 0.0005
_MOST_CORES = 2**16  # so that a slip such as "0-99999999999" is a message and not a full memory
_MOST_SHOWN = 60  # characters of a value, so that a file pasted into it does not bury what was expected


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """How to read one kind of value; `secret` ones are never shown, for somebody may have pasted the key itself."""

    expected: str
    parse: Callable[[object], T]
    secret: bool = False

    def read(self, value: object) -> T:
        """Return the value in the program's form. Raises ValueError: what came, and what was expected."""
        try:
            return self.parse(value)
        except ValueError:
            raise ValueError(f"{shown(value, self.secret)} is not {self.expected}") from None


def shown(value: object, secret: bool = False) -> str:
    """Return a value as the file's author knows it, or how it begins where it is long."""
    if isinstance(value, str):
        return f"<{len(value)} character{'s' * (len(value) != 1)}>" if secret else _cut(repr(value))
    if isinstance(value, list):
        return _cut(f"[{', '.join(shown(item, secret) for item in value)}]")
    if isinstance(value, dict):
        return "a table"
    return str(value).lower() if isinstance(value, bool) else _cut(_number(value))


def _number(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # Python writes no number of more than 4300 digits, but reads one that is in hexadecimal.
        return "a number of thousands of digits"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def whole(least: int, most: int | None = None) -> Kind[int]:
    """Whole numbers from `least` to `most`, both included; true and false are none."""

    def parse(value: object) -> int:
        number = _whole(value)
        if number < least or (most is not None and number > most):
            raise ValueError
        return number

    return Kind(f"a whole number{f' of {least} or more' if most is None else f' from {least} to {most}'}", parse)


def one_of(*choices: str, why: str = "") -> Kind[str]:
    """One of these texts; `why` is added to the refusal of anything else."""

    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError
        return _text(value)

    return Kind(" or ".join(map(repr, choices)) + why, parse)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _match(pattern: str, value: object) -> re.Match[str]:
    found = re.fullmatch(pattern, _text(value))
    if found is None:
        raise ValueError
    return found


def size_from(least: int) -> Kind[int]:
    """Sizes of at least so many bytes."""

    def parse(value: object) -> int:
        if (number := _size(value)) < least:
            raise ValueError
        return number

    return Kind(f"a size of at least {least} bytes: a whole number of bytes, or a text such as '64MiB' or '10MB'", parse)


def _size(value: object) -> int:
    if not isinstance(value, str):
        return whole(0).parse(value)
    found = _match(r"([0-9]{1,15})(B|[KMG]i?B)", value)
    return int(found[1]) * _BYTES[found[2]]


def _duration(value: object) -> float:
    found = _match(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(us|ms|s|min)", value)
    times, over = _SECONDS[found[2]]
    return float(found[1]) * times / over


def duration_from(least: int) -> Kind[float]:
    """Durations of at least so many seconds."""

    def parse(value: object) -> float:
        if (seconds := _duration(value)) < least:
            raise ValueError
        return seconds

    return Kind(f"a duration of at least {least} s: a text such as '1.5s' or '15min'", parse)


def _origins(value: object) -> tuple[str, ...]:
    return tuple(_match(r"\*|https?://[^/\s*]+", item)[0] for item in _list(value))


def _cores(value: object) -> tuple[int, ...]:
    cores = [core for part in _text(value).split(",") for core in _core_range(part.strip())]
    if len(set(cores)) < len(cores):
        raise ValueError
    return tuple(sorted(cores))


def _core_range(part: str) -> range:
    found = _match(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last < _MOST_CORES:
        raise ValueError
    return range(first, last + 1)


def _digest(value: object) -> str:
    return _match(r"[0-9A-Fa-f]{64}", value)[0].lower()


def _digests(value: object) -> tuple[str, ...]:
    return tuple(map(_digest, _list(value)))


def _names(value: object) -> tuple[str, ...]:
    names = tuple(map(_text, _list(value)))
    if not names or ("*" in names and len(names) > 1):
        raise ValueError
    return names


def _hosts(value: object) -> tuple[str, ...]:
    return tuple(_match(r"[0-9A-Za-z_](?:[0-9A-Za-z_.-]*[0-9A-Za-z_])?", each)[0].lower() for each in _list(value))


def _batches(value: object) -> tuple[int, ...]:
    sizes = tuple(map(whole(1).parse, _list(value)))
    if sizes != tuple(sorted(set(sizes))):
        raise ValueError
    return sizes


def _warm_up(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str) and value in ("opt", "usual"):
        return value
    if not 0 < len(sizes := _batches(value)) <= MOST_WARM:
        raise ValueError
    return sizes


def _profiles(value: object) -> tuple[object, ...]:
    if not 0 < len(profiles := _list(value)) <= MOST_PROFILES:
        raise ValueError
    return tuple(tuple((name, _range(sizes)) for name, sizes in _table(profile).items()) for profile in profiles)


def _range(value: object) -> tuple[tuple[int, ...], ...]:
    """The smallest, the usual and the largest shape; what is not said is the next larger one that is, or the largest."""
    said = {name: tuple(map(whole(0).parse, _list(shape))) for name, shape in _table(value).items()}
    best = said.get("opt") or said.get("max") or said.get("min") or ()
    shapes = said.get("min", best), best, said.get("max", best)
    least, _, most = shapes
    fits = len({len(shape) for shape in shapes}) == 1 and all(
        low <= size <= high and high for low, size, high in zip(*shapes, strict=True)
    )
    if not set(said) <= {"min", "opt", "max"} or not (least and most and fits):
        raise ValueError
    return shapes


def _table(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not value:
        raise ValueError
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError
    return value


FLAG = Kind("true or false", _flag)
TEXT = Kind("a text of at least one character", _text)
SIZE = Kind("a size: bytes as a whole number, or a text such as '64MiB' or '10MB'", _size)
DURATION = Kind("a duration: a text such as '500us', '10ms', '1.5s' or '15min'", _duration)
CORES = Kind("core numbers, each once and ascending, as a text such as '0-7' or '0,2-3'", _cores)
DIGEST = Kind("a SHA-256 digest: the 64 hexadecimal digits that sha256sum prints", _digest, secret=True)
DIGESTS = Kind("a list of SHA-256 digests: each the 64 hexadecimal digits that sha256sum prints", _digests, secret=True)
BATCHES = Kind("a list of batch sizes, each 1 or more and above the one before it, as in [4, 8]", _batches)
WARM_UP = Kind(
    "'opt', 'usual', or a list of batch sizes, each 1 or more and above the one before it, as in [1, 4, 32]", _warm_up
)
ORIGINS = Kind("a list of origins of web pages, as in ['https://app.example'], or ['*'] for any", _origins)
HOSTS = Kind("a list of host names, each without a port, as in ['gpu1.example.com']", _hosts)
PROFILES = Kind(
    f"a list of 1 to {MOST_PROFILES} optimization profiles, each a table with shapes for inputs by name, none smaller than the "
    "one before it, as in [{ x = { min = [1, 16], opt = [8, 16], max = [32, 16] } }]",
    _profiles,
)
NAMES = Kind("a list of one or more model names, or ['*'] alone for all", _names)
