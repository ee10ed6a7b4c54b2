"""Requests as clients send them, models for them, and helpers to decode them into a slot."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest

from engines import DATATYPES, Signature, TensorSpec, wire
from engines.memory import view
from server.errors import BadRequest
from server.protocol.request import InferRequest, Limits, decode
from tests.memory import slot_of

Document = dict[str, Any]

LIMITS = Limits(json=1 << 20, elements=64 << 20)

INTEGERS = tuple(name for name, datatype in DATATYPES.items() if datatype.kind in ("int", "uint"))


def spec(name: str, datatype: str, *dims: int | str) -> TensorSpec:
    return TensorSpec(name, DATATYPES[datatype], dims)


def model(datatype: str = "FP32", *dims: int | str, max_batch: int = 0) -> Signature:
    """A model of one input `x` and one output `y` of the same type and dimensions, by default one dynamic one."""
    dims = dims or ("n",)
    return Signature((spec("x", datatype, *dims),), (spec("y", datatype, *dims),), max_batch)


PAIR = Signature((spec("a", "INT32", 2), spec("b", "BYTES", "n")), (spec("c", "INT32", 2), spec("d", "FP16", "n")))
"""Two inputs, of which one is BYTES, and two outputs, of which one has no JSON form."""
BATCHED = model("FP32", "batch", 2, max_batch=4)


def tensor(data: Any, datatype: str = "FP32", shape: Any = None, name: str = "x", **parameters: Any) -> Document:
    """An input with JSON data; the shape is that of a flat list unless said otherwise."""
    entry = {"name": name, "datatype": datatype, "shape": [len(data)] if shape is None else shape, "data": data}
    return entry | ({"parameters": parameters} if parameters else {})


def binary(size: Any, datatype: str = "FP32", shape: Any = None, name: str = "x", **parameters: Any) -> Document:
    """An input whose data follows the JSON."""
    shape = [size // DATATYPES[datatype].size] if shape is None else shape
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size, **parameters}}


def request(*inputs: Any, **fields: Any) -> Document:
    return {"inputs": list(inputs), **fields}


def body_of(document: Any) -> bytes:
    """A document as bytes; one that is bytes already stays as it is, so that it may be no JSON at all."""
    return document if isinstance(document, bytes) else json.dumps(document).encode()


class Decoded(NamedTuple):
    """A decoded request, with the shape and bytes of each tensor as the worker finds them in the slot."""

    request: InferRequest
    tensors: tuple[tuple[tuple[int, ...], bytes], ...]


def take(document: Any, signature: Signature, *tensors: bytes, limits: Limits = LIMITS) -> Decoded:
    """Decode a request: JSON alone, or, where tensors are given, with those after it."""
    head = body_of(document)
    return take_bytes(head + b"".join(tensors), len(head) if tensors else None, signature, limits)


def take_bytes(body: bytes, header_length: int | None, signature: Signature, limits: Limits = LIMITS) -> Decoded:
    slot = slot_of()
    taken = decode(body, header_length, signature, slot, limits)
    found, _ = slot.inputs(signature, taken.shapes, slot.capacity)
    return Decoded(taken, tuple((tensor.shape, bytes(view(tensor.address, tensor.nbytes))) for tensor in found))


def refusal(
    document: Any,
    signature: Signature | None = None,
    *tensors: bytes,
    kind: type[Exception] = BadRequest,
    limits: Limits = LIMITS,
) -> str:
    """The text of the refusal, whose class must be exactly `kind`."""
    with pytest.raises(kind) as caught:
        take(document, signature or model(), *tensors, limits=limits)
    assert type(caught.value) is kind
    return str(caught.value)


def elements(document: Any, signature: Signature) -> list[Any]:
    """The elements of the only input of a valid request."""
    ((_, data),) = take(document, signature).tensors
    values: list[Any] = np.frombuffer(data, signature.inputs[0].datatype.numpy).tolist()
    return values


def packed(*texts: str) -> bytes:
    return wire.pack(text.encode() for text in texts)


def nested(levels: int, leaf: str = "1") -> str:
    return "[" * levels + leaf + "]" * levels


def floats(values: Iterable[float]) -> bytes:
    return np.array(list(values), "<f4").tobytes()
