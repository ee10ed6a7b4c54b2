"""Requests and answers of Triton's generate extension: flat JSON objects, whose members are tensors and parameters by name.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md, and the conversion in
Triton's http_server.cc for what that leaves open.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson

from engines import Signature, TensorSpec

from ..errors import BadRequest, TooLarge
from ..link.messages import Extent, Shape
from ..link.slots import Slot
from .json_document import Object, count, field, parse, refuse, short, unsigned
from .json_tensors import InputDeclaration, dump, to_array, to_wire
from .request import InferRequest, Input, Limits, fill_missing, refuse_reserved, requested_outputs, write_inputs
from .response import elements

MAX_BYTES = 1 << 20
"""A longer request is refused: it is parsed at once, and holds up the tenant's other requests meanwhile."""
_SCALARS = (str, int, float, bool)
_PARAMETERS = "parameters"
_ID = "id"


def decode(body: bytes, signature: Signature, slot: Slot, limits: Limits, output_reserve: int = 0) -> InferRequest:
    """Check a request against a model and write its tensors into the slot.

    A member that is named like an input is that tensor: a value, or a flat array whose length decides the dimensions that vary.
    Every other one is a parameter, and so is what is in `parameters` and is not named like an input. All outputs are answered.
    Raises BadRequest, TooLarge, MemoryFull or TensorMismatch; the slot then stays with its owner.
    """
    check(len(body), limits)
    for what, tensors in (("input", signature.inputs), ("output", signature.outputs)):
        if half := next((spec for spec in tensors if spec.datatype.name in ("FP16", "BF16")), None):
            text = f"generate: {what} {half.name!r} is {half.datatype}, which has no JSON form"
            raise BadRequest(f"{text}; use infer with binary tensors")
    document = parse(body, tensors=False)
    specs = {spec.name: spec for spec in signature.inputs}
    found: dict[str, Input] = {}
    values: Object = {}
    for where, name, value in _members(document, specs):
        if name in found or name in values:
            raise BadRequest(
                f"{where}: {short(name)!r} given twice; expected each {'input' if name in specs else 'parameter'} once"
            )
        if name not in specs:
            values[name] = _parameter(where, value)
        else:
            found[name] = _input(where, specs[name], value, limits)
    refuse_reserved(values)
    fill_missing(found, specs)
    timeout, inputs = unsigned(values, "timeout"), [found[name] for name in specs]
    request = InferRequest(
        id=field(values, _ID, str) or None,
        shapes=tuple([item.shape for item in inputs]),
        outputs=requested_outputs({}, signature, False),
        priority=unsigned(values, "priority") or 0,
        timeout=timeout / 1e6 if timeout else None,
    )
    write_inputs(inputs, signature, slot, output_reserve)
    return request


def most(limits: Limits) -> tuple[int, str]:
    """The bytes that a request may have, and the key that says so; "" for `MAX_BYTES`."""
    return min((MAX_BYTES, ""), (limits.json, " (server.max_json_tensor)"))


def check(length: int, limits: Limits) -> None:
    """Raise TooLarge for a request of more bytes than it may have."""
    limit, key = most(limits)
    if length > limit:
        raise TooLarge(f"{length} bytes of JSON; the limit for generate is {limit}{key}. Use infer for large tensors")


def encode(
    model: str,
    version: str,
    request: InferRequest,
    signature: Signature,
    slot: Slot,
    extents: Sequence[Extent],
    nonfinite: str = "literal",
) -> bytes:
    """An answer, or a part of one, as JSON on one line: each output is an array, or a value if it has one element.

    An output named `model_name`, `model_version` or `id` is in its place. Raises BadRequest if an output cannot be written as
    JSON.
    """
    answer: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id is not None:
        answer[_ID] = request.id
    for spec, (shape, offset, nbytes) in zip(signature.outputs, extents, strict=True):
        data = slot.view[offset : offset + nbytes]
        if math.prod(shape) != 1:
            answer[spec.name] = elements(spec, data, shape, nonfinite)
        elif spec.datatype.kind == "bytes":
            answer[spec.name] = elements(spec, data, shape, nonfinite)[0]
        else:
            answer[spec.name] = orjson.Fragment(dump(np.frombuffer(data, spec.datatype.numpy), nonfinite)[1:-1])
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def event(document: bytes) -> bytes:
    """A JSON document, which has no line breaks, as a Server-Sent Event."""
    return b"data: %b\n\n" % document


def _members(document: Object, specs: dict[str, TensorSpec]) -> Iterator[tuple[str, str, Any]]:
    """The path, name and value of each member, those of `parameters` included."""
    for name, value in document.items():
        if name == _PARAMETERS and name not in specs:
            if type(value) is not dict:
                refuse(_PARAMETERS, value, "an object")
            for inner, parameter in value.items():
                yield f"{_PARAMETERS}.{short(inner)}", inner, parameter
        else:
            yield short(name), name, value


def _parameter(where: str, value: Any) -> Any:
    if type(value) not in _SCALARS:
        refuse(where, value, "a string, a number or true or false, as it is no input of the model's")
    return value


def _input(where: str, spec: TensorSpec, value: Any, limits: Limits) -> Input:
    """The tensor of a value or a flat array."""
    data = value if type(value) is list else [value]
    if type(value) is not list and type(value) not in _SCALARS:
        refuse(where, value, f"a value or an array of {spec.datatype}, as input {spec.name!r} is")
    if len(data) > limits.elements:
        raise BadRequest(f"{where}: {len(data)} elements; the limit is {limits.elements}")
    if not spec.datatype.size and len(data) > limits.texts:
        limit = f"the limit is {limits.texts} (server.max_string_elements)"
        raise TooLarge(f"{where}: {len(data)} elements of BYTES; {limit}")
    shape = _shape(where, spec, len(data))
    declared = InputDeclaration(f"{where}.", spec, (len(data),))
    return Input(spec.inward(shape), (to_wire if spec.datatype.kind == "bytes" else to_array)(data, declared))


def _shape(where: str, spec: TensorSpec, elements: int) -> Shape:
    """The shape of so many elements: the last dimension that varies takes what the others leave, which are 1 if they vary."""
    left, rest = divmod(elements, math.prod([dim for dim in spec.shape if dim != -1]) or 1)
    shape: list[int] = []
    for dim in reversed(spec.shape):
        shape.append(left if dim == -1 else dim)
        left = 1 if dim == -1 else left
    if rest or left != 1 or math.prod(shape) != elements:
        came = count(elements, "element")
        raise BadRequest(f"{where}: {came}, which cannot have the shape of input {spec.name!r}, {list(spec.shape)}")
    return tuple(reversed(shape))
