"""Reads TOML tables into dataclasses whose fields say what they accept, as in `port: Annotated[int, whole(0, 65535)]`.

`faults` lists everything that is wrong with a table and changes nothing; `build` makes the object of a table without
faults. Fields that are not annotated with a kind are no keys of the file.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

from .values import Kind, shown

T = TypeVar("T")
KeyPath = tuple[str, ...]
Fault = tuple[KeyPath, str]

_MOST_LISTED = 12
_NEAR = 0.7  # of 1, which is the same: `prot` is near `port`, `priority` is not


def faults(cls: type, table: object, *path: str) -> Iterator[Fault]:
    """Yield what is wrong with the table at `path`, which is to become a `cls`."""
    if not isinstance(table, dict):
        yield not_a_table(table, path)
        return
    kinds = _kinds(cls)
    yield from unknown(table, kinds, path)
    meant = as_meant(table, kinds)
    for name, kind in kinds.items():
        if name in table:
            yield from _value_faults(kind, table[name], (*path, name))
        elif name in _required(cls) and name not in meant:
            yield (*path, name), f"missing; expected {kind.expected}"


def build(cls: type[T], table: Mapping[str, object], **given: object) -> T:
    """Return the object of a table without faults; `given` are the fields that are no keys of the file."""
    kinds = _kinds(cls)
    return cls(**given, **{name: kinds[name].read(value) for name, value in table.items()})


def unknown(table: Iterable[str], known: Iterable[str], path: KeyPath) -> Iterator[Fault]:
    """Yield the keys that are not among the known ones, each with the nearest of them."""
    known = list(known)
    for key in table:
        if key not in known:
            yield (*path, key), f"unknown key; {nearest(key, known)}"


def as_meant(table: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return the table with its unknown keys under the names they are near to; of two tables under one name, both."""
    known = list(known)
    meant = {key: value for key, value in table.items() if key in known}
    for key, value in table.items():
        if key not in known:
            name = _near(key, known) or key
            both = isinstance(value, dict) and isinstance(meant.get(name), dict)
            meant[name] = {**value, **meant[name]} if both else meant.get(name, value)
    return meant


def keys(cls: type) -> Iterable[str]:
    """Return the names of the keys that a table for this class may have."""
    return _kinds(cls)


def kind(cls: type, key: str) -> Kind[Any]:
    """Return what a key of a table for this class accepts."""
    return _kinds(cls)[key]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question about the known name nearest to this one, or what is known where none is near."""
    known = list(known)
    near = _near(name, known)
    return f"did you mean {near!r}?" if near else f"expected {_listed(known)}"


def _near(name: str, known: Iterable[str]) -> str | None:
    folded = {text.casefold(): text for text in known}
    name = name.casefold()
    near = get_close_matches(name, folded, n=1, cutoff=_NEAR) or [text for text in folded if name in text.split("_")]
    return folded[near[0]] if near else None


def _listed(names: list[str]) -> str:
    shown = " or ".join(names[:_MOST_LISTED])
    return shown if len(names) <= _MOST_LISTED else f"one of {len(names)}, such as {shown}"


def not_a_table(value: object, path: KeyPath) -> Fault:
    """Return the fault of something else standing where a table belongs."""
    return path, f"{shown(value)} is not a table; write [{dotted(path)}]"


def dotted(path: KeyPath) -> str:
    """Return the path as TOML writes it: parts that are no bare keys are quoted."""
    bare = re.compile("[A-Za-z0-9_-]+")
    return ".".join(part if bare.fullmatch(part) else json.dumps(part, ensure_ascii=False) for part in path)


def _value_faults(kind: Kind[Any], value: object, path: KeyPath) -> Iterator[Fault]:
    try:
        kind.read(value)
    except ValueError as error:
        yield path, str(error)


def _kinds(cls: type) -> dict[str, Kind[Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _required(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
