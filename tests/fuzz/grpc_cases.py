"""Messages of ModelInfer made of a seed: whole ones, and ones that were damaged in one of many ways. Pure."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import ModelInferRequest

from .cases import TEXTS
from .models import KINDS, MOST_ROWS, Arrays, Oracle
from .wire import Unreadable, binary_elements, elements, text

CONTENTS = {
    "BOOL": "bool", "INT8": "int", "INT16": "int", "INT32": "int", "INT64": "int64", "UINT8": "uint", "UINT16": "uint",
    "UINT32": "uint", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64", "BYTES": "bytes",
}  # fmt: skip
"""Where typed values of a datatype are; FP16 has none."""
NAMES = ("", "x", "y", "a", "é", "\0", "x" * 3000, "same_fp32", "FP32", "BYTES", "INT64")
NUMBERS = (0, 1, -1, 2, 3, 7, 2**31, -(2**31), 2**62, -(2**63), 2**63 - 1)
PARAMETERS = ("timeout", "priority", "sequence_id", "triton_x", "classification", "binary_data", "binary_data_size", "note")
SCRAPS = (
    b"",
    b"\0",
    b"\xff",
    b"\x3a\x00",
    b"\x3a\xff\xff\x03",
    b"\x80" * 11,
    b"\x0b",
    b"\x0c",
    b"\x2a\x02\x0a\x00",
    b"\x08\x01",
)


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `damage` says what was done to it, and is empty for a whole one."""

    model: str
    message: bytes
    damage: str = ""

    def data(self) -> bytes:
        return self.message


class MessageMaker:
    """Messages, one after another; equal seeds make equal ones."""

    def __init__(self, oracle: Oracle, seed: str) -> None:
        self._oracle = oracle
        self._random = random.Random(seed)
        self._models = sorted(oracle.models)

    def case(self) -> Message:
        """The next one; every second is damaged."""
        whole = self._whole()
        if self._random.random() < 0.5:
            return whole
        name = self._random.choice(sorted(DAMAGES))
        return replace(whole, message=DAMAGES[name](self._random, whole.message), damage=name)

    def _whole(self) -> Message:
        chance, model = self._random, self._random.choice(self._models)
        request = ModelInferRequest(model_name=model, id=chance.choice(("", "7", 'ä"b')))
        sizes = {dim: chance.choice((0, 1, 1, 2, 3, 7)) for dim in ("n", "m")} | {"batch": chance.randint(1, MOST_ROWS)}
        inputs = self._oracle.inputs(model)
        raw = chance.random() < 0.5 or any(kind == "FP16" for kind, _ in inputs.values())
        for name, (kind, dims) in inputs.items():
            shape = [sizes.get(dim, dim) for dim in dims]
            values = [self._value(kind) for _ in range(math.prod(shape))]
            given = request.inputs.add(name=name, datatype=kind, shape=shape)
            if raw:
                texts = kind == "BYTES"
                data = binary_elements(values) if texts else np.array(values, KINDS[kind][1]).tobytes()
                request.raw_input_contents.append(data)
            else:
                getattr(given.contents, f"{CONTENTS[kind]}_contents").extend(values)
        for name in chance.sample(names := self._oracle.output_names(model), chance.randint(0, len(names))):
            request.outputs.add(name=name)
        return Message(model, request.SerializeToString())

    def _value(self, kind: str) -> Any:
        chance, code = self._random, KINDS[kind][1]
        if kind == "BYTES":
            return chance.choice(TEXTS).encode()
        if kind == "BOOL":
            return chance.random() < 0.5
        if code[1] == "f":
            most = float(np.finfo(code).max)
            return float(np.array(chance.choice((0.0, -0.0, 1.5, most, -most, math.inf, math.nan)), code))
        limits = np.iinfo(code)
        return chance.choice((limits.min, limits.max, 0, 1, chance.randint(limits.min, limits.max)))


def tensors(given: Any, raw: Sequence[bytes]) -> Arrays:
    """Tensors of a message as the protocol describes them. Raises Unreadable."""
    found: Arrays = {}
    if raw and len(raw) != len(given):
        raise Unreadable(f"{len(raw)} raw tensors for {len(given)}")
    for index, tensor in enumerate(given):
        kind, name = tensor.datatype, tensor.name
        if kind not in KINDS or name in found:
            raise Unreadable(f"{name!r} of {kind!r}")
        values = _values(kind, raw[index]) if raw else list(getattr(tensor.contents, f"{CONTENTS[kind]}_contents"))
        try:
            parts = [text(value) for value in values] if kind == "BYTES" else values
            found[name] = np.array(parts, KINDS[kind][1]).reshape(list(tensor.shape))
        except (ValueError, OverflowError) as error:
            raise Unreadable(f"{name!r}: {error}") from error
    return found


def _values(kind: str, data: bytes) -> Any:
    if kind == "BYTES":
        return elements(data)
    try:
        return np.frombuffer(data, KINDS[kind][1])
    except ValueError as error:
        raise Unreadable(str(error)) from error


Damage = Callable[[random.Random, bytes], bytes]


def _fields(chance: random.Random, message: bytes) -> bytes:
    """Up to three fields of the message changed."""
    request = ModelInferRequest.FromString(message)
    for _ in range(chance.randint(1, 3)):
        chance.choice(_CHANGES)(chance, request)
    return request.SerializeToString()


def _change_shape(chance: random.Random, request: Any) -> None:
    if request.inputs:
        shape = chance.choice(request.inputs).shape
        if shape and chance.random() < 0.7:
            shape[chance.randrange(len(shape))] = chance.choice(NUMBERS)
        else:
            shape.extend([chance.choice(NUMBERS)] * chance.choice((1, 2, 70)))


def _change_name(chance: random.Random, request: Any) -> None:
    fields = [(request, "model_name"), (request, "model_version"), (request, "id")]
    for given in request.inputs:
        fields += [(given, "name"), (given, "datatype"), (given, "datatype")]
    fields += [(output, "name") for output in request.outputs]
    message, field = chance.choice(fields)
    setattr(message, field, chance.choice((*NAMES, *KINDS)))


def _change_parameters(chance: random.Random, request: Any) -> None:
    where = chance.choice([request, *request.inputs, *request.outputs]).parameters[chance.choice(PARAMETERS)]
    kind = chance.choice(("bool_param", "int64_param", "string_param", "double_param", "uint64_param", None))
    if kind:
        values = {
            "bool_param": True,
            "string_param": chance.choice(NAMES),
            "double_param": chance.choice((0.5, math.nan, 1e308)),
        }
        setattr(where, kind, values.get(kind, abs(chance.choice(NUMBERS)) % 2**63))


def _change_tensors(chance: random.Random, request: Any) -> None:
    raw = request.raw_input_contents
    if raw and chance.random() < 0.7:
        at = chance.randrange(len(raw))
        raw[at] = chance.choice((raw[at][:-1], raw[at] + b"\1", b"", raw[at] * 2, b"\xff" * len(raw[at])))
    elif chance.random() < 0.5:
        raw.append(b"1234")
    elif request.inputs:
        kind = chance.choice(sorted(set(CONTENTS.values())))
        values = {"bytes": [b"\xff", b""], "bool": [True]}.get(kind, [1, 2, 300])
        getattr(chance.choice(request.inputs).contents, f"{kind}_contents").extend(values)


def _double_or_drop(chance: random.Random, request: Any) -> None:
    field = chance.choice((request.inputs, request.outputs, request.raw_input_contents))
    if field and chance.random() < 0.5:
        del field[chance.randrange(len(field))]
    elif field:
        field.append(chance.choice(field))


_CHANGES = (_change_shape, _change_name, _change_parameters, _change_tensors, _double_or_drop)


def _bytes(chance: random.Random, message: bytes) -> bytes:
    changed = bytearray(message)
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(changed))
        changed[at : at + chance.randint(0, 3)] = chance.choice((*SCRAPS, chance.randbytes(chance.randint(1, 3))))
    return bytes(changed)


DAMAGES: dict[str, Damage] = {
    "fields": _fields,
    "bytes": _bytes,
    "random": lambda chance, _: chance.randbytes(chance.choice((1, 2, 5, 40, 3000))),
    "cut": lambda chance, message: message[: chance.randint(0, len(message))],
    "twice": lambda _, message: message + message,
    "fields more": lambda chance, message: (
        message + chance.choice((b"\x3a\0", b"\x2a\0", b"\xfa\x7f\0")) * chance.choice((3, 5000))
    ),
}
"""By name; what they make may be a whole message all the same."""


def read(message: bytes) -> Any:
    """The message as protobuf reads it. Raises Unreadable."""
    try:
        return ModelInferRequest.FromString(message)
    except DecodeError as error:
        raise Unreadable(str(error)) from error
