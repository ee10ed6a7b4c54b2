"""Requests for a model of which no more is known than its metadata: names, data types and shapes, of which some vary. Pure."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np

from engines.datatypes import DATATYPES
from greenlane.load.jobs import Ask
from greenlane.load.wire import post

TEXT = b"greenlane"
"""Every element of a BYTES tensor."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input: -1 stands for a dimension that varies."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """How the dimensions that vary are chosen: `rows` is the batch, `free` every other one; `number` is each integer element.

    Integers may be indices, counts or tokens, which the metadata does not say. So both 1 and 0 are tried.
    """

    rows: int = 1
    free: int = 8
    number: int = 1

    def shape(self, given: Input, batches: bool) -> tuple[int, ...]:
        """The shape of this input."""
        sizes = [self.free if size < 0 else size for size in given.shape]
        if batches and given.shape and given.shape[0] < 0:
            sizes[0] = self.rows
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its tenant's clients see it. `max_batch` 0: it takes no batches."""

    name: str
    inputs: tuple[Input, ...]
    max_batch: int = 0

    @property
    def varies(self) -> bool:
        """Whether a dimension other than the batch is up to the client."""
        return any(-1 in (each.shape[1:] if self.max_batch else each.shape) for each in self.inputs)

    @property
    def path(self) -> str:
        """Where its inferences are asked for."""
        return f"/v2/models/{quote(self.name, safe='')}/infer"

    def unknown(self) -> str:
        """Why no request can be made: a data type that is not known. Empty if one can."""
        names = sorted({each.datatype for each in self.inputs} - DATATYPES.keys())
        return f"the datatype {names[0]} is not known" if names else ""

    def nbytes(self, form: Form) -> int:
        """About how large the body is."""
        sizes = {each.name: DATATYPES[each.datatype].size or len(TEXT) + 4 for each in self.inputs}
        return sum(sizes[each.name] * math.prod(form.shape(each, self.max_batch > 0)) for each in self.inputs)


def described(name: str, metadata: Mapping[str, Any], config: Mapping[str, Any]) -> Model:
    """A model from what GET /v2/models/NAME and .../config answer."""
    inputs = tuple(Input(each["name"], each["datatype"], tuple(each["shape"])) for each in metadata["inputs"])
    return Model(name, inputs, config.get("max_batch_size", 0))


def binary(model: Model, form: Form, headers: Mapping[str, str]) -> Ask:
    """An inference with binary tensors both ways."""
    entries, tensors = [], []
    for each in model.inputs:
        shape = form.shape(each, model.max_batch > 0)
        data = encoded(each.datatype, math.prod(shape), form.number)
        parameters = {"binary_data_size": len(data)}
        entries.append({"name": each.name, "datatype": each.datatype, "shape": shape, "parameters": parameters})
        tensors.append(data)
    head = json.dumps({"parameters": {"binary_data_output": True}, "inputs": entries}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    return Ask(post(model.path, {**headers, **length}, head + b"".join(tensors)))


def padded(model: Model, form: Form, headers: Mapping[str, str], size: int) -> Ask:
    """The same in JSON, in a body of this size at least: space before the end that a server has to read and skip."""
    entries = []
    for each in model.inputs:
        shape = form.shape(each, model.max_batch > 0)
        data = [_in_json(each.datatype, form.number)] * math.prod(shape)
        entries.append({"name": each.name, "datatype": each.datatype, "shape": shape, "data": data})
    text = json.dumps({"inputs": entries}).encode()
    return Ask(post(model.path, {**headers, "Content-Type": "application/json"}, text[:-1].ljust(size - 1) + b"}"))


def wrong(model: Model, headers: Mapping[str, str]) -> tuple[Ask, ...]:
    """Requests for this model, each wrong in another way."""
    first = model.inputs[0] if model.inputs else Input("x", "FP32", (1,))
    entry = {"name": first.name, "datatype": first.datatype, "shape": [1] * (len(first.shape) + 1), "data": [0]}
    documents: list[object] = [
        {"inputs": [entry]},
        {"inputs": [entry | {"datatype": "FP31"}]},
        {"inputs": [entry | {"name": "no such input"}]},
        {"inputs": [entry | {"data": [[0] * 3] * 3}]},
        {"inputs": []},
        [],
    ]
    bodies = [json.dumps(each).encode() for each in documents] + [b"{", b"[" * 5_000]
    return tuple(Ask(post(model.path, headers, body)) for body in bodies)


def encoded(datatype: str, count: int, number: int) -> bytes:
    """So many elements as they are sent in binary form."""
    kind = DATATYPES[datatype]
    if kind.kind == "bytes":
        return (len(TEXT).to_bytes(4, "little") + TEXT) * count
    if kind.kind != "float":
        return np.full(count, number, kind.numpy).tobytes()
    drawn = np.random.default_rng(1).random(count, np.float32)
    return (drawn.view("<u4") >> 16).astype("<u2").tobytes() if datatype == "BF16" else drawn.astype(kind.numpy).tobytes()


def _in_json(datatype: str, number: int) -> Any:
    kind = DATATYPES[datatype].kind
    return {"bytes": TEXT.decode(), "bool": bool(number), "float": 0.5}.get(kind, number)
