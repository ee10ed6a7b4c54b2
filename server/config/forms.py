"""How a TOML file writes a value, and how the reference and an error name it."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo

from .tables import dotted

BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SECONDS = {"us": (1, 10**6), "ms": (1, 10**3), "s": (1, 1), "min": (60, 1)}  # As fractions, so that 500us is exactly 0.0005.
RATES = {"TB": 10**12, "GB": 10**9, "MB": 10**6}
_MOST_SHOWN = 60  # Characters of a value in an error, so that a pasted file does not hide what was expected.


@dataclass(frozen=True, slots=True)
class Form:
    """How a file writes a type: its name in the reference, what an error expects, and the inverse of reading it.

    Values of `secret` types are never shown: the key itself may have been pasted in place of its digest.
    """

    name: str
    expected: str
    write: Callable[[Any], object] = lambda value: value
    secret: bool = False


def form_of(field: FieldInfo) -> Form:
    """The form of a model's field: the last one of its annotations, or that of a plain Python type and its bounds."""
    notes = list(_notes(field))
    if forms := [note for note in notes if isinstance(note, Form)]:
        return forms[-1]
    types = [note for note in notes if isinstance(note, type)]
    if bool in types:
        return Form("true or false", "true or false")
    if int in types or float in types:
        least, most = (next((getattr(note, key) for note in notes if hasattr(note, key)), None) for key in ("ge", "le"))
        bounds = f"from {least} to {most}" if most is not None else f"of {least} or more"
        number = f"whole number {bounds}" if int in types else f"number {bounds}"
        return Form(number, f"a {number}")
    choices = [note for note in notes if isinstance(note, str)]
    return Form(" or ".join(f'`"{choice}"`' for choice in choices), " or ".join(map(repr, choices)))


def _notes(field: FieldInfo) -> Iterable[object]:
    """The types, literals and annotations that a field is declared with, the outermost last."""

    def walk(annotation: object) -> Iterable[object]:
        yield annotation
        for argument in get_args(annotation):
            yield from walk(argument)

    yield from walk(field.annotation)
    yield from field.metadata


def shown(value: object, secret: bool = False) -> str:
    """A value for an error, as a TOML file may write it, cut off where it is long."""
    if isinstance(value, str):
        return f"<{len(value)} character{'s' * (len(value) != 1)}>" if secret else cut(repr(value))
    if isinstance(value, list):
        return cut(f"[{', '.join(shown(item, secret) for item in value)}]")
    if isinstance(value, dict):
        if secret:
            return "a table"
        items = (f"{dotted((key,))} = {shown(item, secret)}" for key, item in value.items())
        return cut(f"{{ {', '.join(items)} }}") if value else "{}"
    try:
        return str(value).lower() if isinstance(value, bool) else cut(str(value))
    except ValueError:  # Python writes no integer of more than 4300 digits, but reads one written in hexadecimal.
        return "a number of thousands of digits"


def literal(value: object) -> str:
    """A value in TOML, in one line and as long as it is: texts in double quotes, tables in braces."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{dotted((key,))} = {literal(each)}' for key, each in value.items())} }}"
    return shown(value)


def cut(text: str) -> str:
    """The text, cut off where it is long."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def write_size(count: int) -> str | int:
    """Bytes in the largest binary unit that needs no fraction."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if count and count % BYTES[unit] == 0), None)
    return f"{count // BYTES[unit]}{unit}" if unit else count


def write_rate(count: int) -> str:
    """Bytes a second in the largest unit that needs no fraction of more than nine digits."""
    texts = ((unit, f"{count / factor:.9f}".rstrip("0").rstrip(".")) for unit, factor in RATES.items() if count >= factor)
    return next(
        (f"{text}{unit}/s" for unit, text in texts if round(float(text) * RATES[unit]) == count), f"{count / 10**6}MB/s"
    )


def write_duration(seconds: float) -> str:
    """Seconds as a file has them: in whole minutes from two on, in milliseconds or microseconds below a second."""
    if seconds >= 120 and seconds % 60 == 0:
        return f"{seconds / 60:g}min"
    factor, unit = (1, "s") if seconds >= 1 or not seconds else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * factor:g}{unit}"
