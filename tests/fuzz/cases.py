"""Requests made of a seed: whole ones, and ones that were damaged in one of many ways. Pure."""

import gzip
import json
import math
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .models import KINDS, MOST_ROWS, Oracle
from .wire import Document, binary_elements

TEXTS = ("", "a", "grün", 'q"\\/', "\0", "𝄞" * 3, "long " * 40, "1:2")
WORDS: tuple[Any, ...] = (
    *("", "x", "y", "a", "sum", "FP32", "BYTES", "INT64", "é", "\0", None, True, False),
    *(-1, 0, 1, 2, 3, 1.0, 0.5, 1e39, 2**31, 2**40, 2**63, 2**64),
    *([], [1], [1, 2], [2, 2], [[1, 2], [3, 4]], [[]], [["a"]], [2**40, 0], [1] * 70),
    *({}, {"a": 1}, {"name": "y"}, [{"name": "y"}], {"binary_data": True}, {"binary_data_size": 8}, {"binary_data_size": 0}),
)
SCRAPS = (
    b"",
    b"\0",
    b"\xff",
    b"[",
    b"]",
    b"{",
    b"}",
    b":",
    b",",
    b'"',
    b"9",
    b"-",
    b"e9",
    b"NaN",
    b"null",
    b".",
    b"\\u0000",
    b"\r\n",
    b" ",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `head` is the JSON, `rest` the tensors behind it; `size` is what the header says of the JSON's length.

    `size` None means that there is no such header. `damage` says what was done to it; whole requests have to be answered.
    `lines` are further headers, `claimed` is what Content-Length says in place of the truth, `raw` is sent in place of all.
    """

    model: str
    head: bytes
    rest: bytes
    size: int | None
    damage: str = ""
    lines: tuple[str, ...] = ()
    claimed: int | None = None
    raw: bytes | None = None

    def data(self) -> bytes:
        """What goes over the wire."""
        if self.raw is not None:
            return self.raw
        body = self.head + self.rest
        zipped = "Content-Encoding: gzip" in self.lines
        body = gzip.compress(body, 1) if zipped and self.damage != "not gzip" else body
        lines = [f"POST /v2/models/{self.model}/infer HTTP/1.1", "Host: fuzz", *self.lines]
        lines.append(f"Content-Length: {len(body) if self.claimed is None else self.claimed}")
        if self.size is not None:
            lines.append(f"Inference-Header-Content-Length: {self.size}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class Maker:
    """Cases, one after another; equal seeds make equal ones."""

    def __init__(self, oracle: Oracle, seed: str) -> None:
        self._oracle = oracle
        self._random = random.Random(seed)
        self._models = sorted(oracle.models)

    def case(self) -> Case:
        """The next one; every second is damaged."""
        whole = self._whole()
        if self._random.random() < 0.5:
            return whole
        name = self._random.choices(list(DAMAGES), [OFTEN.get(name, 1) for name in DAMAGES])[0]
        return replace(DAMAGES[name](self._random, whole), damage=name)

    def _whole(self) -> Case:
        chance, model = self._random, self._random.choice(self._models)
        sizes = {dim: chance.choice((0, 1, 1, 2, 3, 7)) for dim in ("n", "m")} | {"batch": chance.randint(1, MOST_ROWS)}
        entries, rest = [], b""
        for name, (kind, dims) in self._oracle.inputs(model).items():
            shape = [sizes.get(dim, dim) for dim in dims]
            values = [self._value(kind) for _ in range(math.prod(shape))]
            entry: Document = {"name": name, "datatype": kind, "shape": shape}
            if kind == "FP16" or chance.random() < 0.5:
                data = _wire(kind, values)
                entry["parameters"], rest = {"binary_data_size": len(data)}, rest + data
            else:
                entry["data"] = values if chance.random() < 0.5 else _nested(values, shape)
            entries.append(dict(self._shuffled(list(entry.items()))))
        document: Document = {"inputs": entries, **self._extras(model)}
        head = json.dumps(document, ensure_ascii=chance.random() < 0.5, indent=chance.choice((None, None, 1))).encode()
        lines = ("Content-Encoding: gzip",) if chance.random() < 0.1 else ()
        return Case(model, head, rest, len(head) if rest or chance.random() < 0.2 else None, lines=lines)

    def _extras(self, model: str) -> Document:
        chance, found = self._random, {}
        outputs = self._oracle.output_names(model)
        needs_binary = model == "same_fp16"
        if chance.random() < 0.3:
            found["id"] = chance.choice(("", "7", 'ä"b'))
        if chance.random() < 0.4 or needs_binary:
            found["parameters"] = {"binary_data_output": True, "note": chance.choice(("a", 1, 0.5, True))}
        if chance.random() < 0.4:
            asked = self._shuffled(outputs)[: chance.randint(1, len(outputs))]
            found["outputs"] = [self._asked(name, needs_binary) for name in asked]
        return found

    def _asked(self, name: str, needs_binary: bool) -> Document:
        if needs_binary or self._random.random() < 0.5:
            return {"name": name, "parameters": {"binary_data": needs_binary or self._random.random() < 0.5}}
        return {"name": name}

    def _value(self, kind: str) -> Any:
        chance, code = self._random, KINDS[kind][1]
        if kind == "BYTES":
            return chance.choice(TEXTS)
        if kind == "BOOL":
            return chance.random() < 0.5
        if code[1] == "f":
            most = float(np.finfo(code).max)
            value = chance.choice((0.0, -0.0, 1.0, -2.5, most, -most, chance.uniform(-1000, 1000)))
            return float(np.array(value, code))
        limits = np.iinfo(code)
        return chance.choice((limits.min, limits.max, 0, 1, chance.randint(limits.min, limits.max)))

    def _shuffled(self, items: list[Any]) -> list[Any]:
        return self._random.sample(items, len(items))


def _wire(kind: str, values: list[Any]) -> bytes:
    if kind == "BYTES":
        return binary_elements([value.encode() for value in values])
    return np.array(values, KINDS[kind][1]).tobytes()


def _nested(values: list[Any], shape: list[int]) -> Any:
    if len(shape) < 2 or 0 in shape:
        return values
    step = len(values) // shape[0]
    return [_nested(values[at * step : (at + 1) * step], shape[1:]) for at in range(shape[0])]


Damage = Callable[[random.Random, Case], Case]


def _fields(chance: random.Random, case: Case) -> Case:
    """Up to three fields replaced, dropped or doubled."""
    changed = json.loads(case.head)
    for _ in range(chance.randint(1, 3)):
        parent: Any = changed
        while parent:
            key = chance.choice(sorted(parent) if isinstance(parent, dict) else range(len(parent)))
            if not isinstance(parent[key], dict | list) or not parent[key] or chance.random() < 0.4:
                break
            parent = parent[key]
        if not parent:
            break
        what = chance.choice(("replace", "replace", "drop", "double"))
        if what == "drop":
            del parent[key]
        elif what == "double" and isinstance(parent, list):
            parent.append(deepcopy(parent[key]))
        else:
            parent[key] = deepcopy(chance.choice(WORDS))
    head = json.dumps(changed).encode()
    return replace(case, head=head, size=None if case.size is None else len(head))


def _element(chance: random.Random, case: Case) -> Case:
    """An element of a tensor in the JSON replaced, as by a value of another type."""
    changed = json.loads(case.head)
    if not (given := [entry["data"] for entry in changed["inputs"] if entry.get("data")]):
        return _json(chance, case)
    data = chance.choice(given)
    while isinstance(data[0], list) and data[0]:
        data = chance.choice(data)
    data[chance.randrange(len(data))] = deepcopy(chance.choice(WORDS))
    head = json.dumps(changed).encode()
    return replace(case, head=head, size=None if case.size is None else len(head))


def _scraps(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randint(0, len(changed))
        changed[at : at + chance.randint(0, 3)] = chance.choice(SCRAPS)
    return bytes(changed)


def _json(chance: random.Random, case: Case) -> Case:
    head = _scraps(chance, case.head)
    return replace(case, head=head, size=None if case.size is None else len(head))


def _cut(chance: random.Random, case: Case) -> Case:
    """The body ends too soon, and so does the connection."""
    return replace(case, lines=(), claimed=len(case.head + case.rest) + chance.choice((1, 7, 1 << 20)))


DAMAGES: dict[str, Damage] = {
    "fields": _fields,
    "element": _element,
    "JSON": _json,
    "tensors": lambda chance, case: replace(case, rest=_scraps(chance, case.rest)),
    "length of the JSON": lambda chance, case: replace(
        case, size=max(0, len(case.head) + chance.choice((-len(case.head), -1, 1, 2, 1000)))
    ),
    "cut": _cut,
    "not gzip": lambda _, case: replace(case, lines=("Content-Encoding: gzip",)),
    "encoding": lambda chance, case: replace(
        case, lines=(f"Content-Encoding: {chance.choice(('br', 'gzip, gzip', 'x', '', 'identity'))}",)
    ),
    "deep": lambda chance, case: replace(case, head=b"[" * chance.choice((200, 100_000)), rest=b"", size=None),
    "model": lambda chance, case: replace(case, model=chance.choice(("none", "same_fp32/versions/9", "%00", "same_fp32/x"))),
    "bytes": lambda chance, case: replace(case, raw=_scraps(chance, case.data())),
}
"""By name; what they make may be a whole request all the same."""
OFTEN = {"fields": 3, "element": 3, "JSON": 3, "tensors": 3}
"""How many times as often as the others."""
