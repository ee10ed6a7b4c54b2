"""Decodes an inference request into a slot; everything is checked before anything is written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from engines import Signature, TensorSpec, wire

from ..errors import BadRequest, TooLarge
from ..link.messages import Shape
from ..link.slots import Slot
from .json_document import Object, count, field, flag, parameters, parse, refuse, short, show, unsigned
from .json_tensors import InputDeclaration
from .split_body import Awaited, Buffer, RequestBody, SplitBody, checked, needs_check

_MAX_DIMENSIONS = 64
"""As in numpy. No model has more, and multiplying a body full of dimensions would take seconds."""

ASK = "ask for a binary tensor (parameters.binary_data_output on the request, or binary_data on the output)"
"""The advice in errors about outputs that JSON cannot represent."""
_RAW = "Inference-Header-Content-Length: 0, a raw body,"


class RequestedOutput(NamedTuple):
    """An output by its position in the signature; `classes` is the number of classes to return in its place, 0 for none."""

    position: int
    binary: bool
    classes: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one request, and how its answer writes NaN and infinity.

    - `json`: bytes of JSON.
    - `elements`: elements of one tensor.
    - `nonfinite`: "literal" for `NaN`, `Infinity` and `-Infinity`, or "null".
    - `texts`: elements of all BYTES tensors together; each costs many times its bytes in the process that runs the model.
    """

    json: int
    elements: int
    nonfinite: str = "literal"
    texts: int = 1 << 18


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request without its tensor data. `timeout` is in seconds; priority 0 is the default, 1 the highest.

    `shapes` has one shape per input, after the reshapes of the model's configuration. `classified`: whether any output is to
    be classified. `unasked` is as in `Room`: the outputs that are not requested.
    """

    id: str | None
    shapes: tuple[Shape, ...]
    outputs: tuple[RequestedOutput, ...]
    priority: int
    timeout: float | None
    classified: bool = False
    unasked: int = 0


class Input(NamedTuple):
    """A checked input: its shape in the model, its data, and what it was declared as, unless it is a default."""

    shape: Shape
    data: Buffer
    declared: InputDeclaration | None = None


class Placement(NamedTuple):
    """Where the binary tensors of a request go that have not arrived yet.

    `places` has for each, in the body's order, its offset in the slot, where it begins in the body, and its size in bytes.
    `unchecked` are those whose contents `check_arrived` has to look at: offset, size, and what they were declared as.
    """

    request: InferRequest
    places: tuple[tuple[int, int, int], ...]
    unchecked: tuple[tuple[int, int, InputDeclaration], ...] = ()


def decode(
    body: bytes,
    header_length: int | None,
    signature: Signature,
    slot: Slot,
    limits: Limits,
    document: Object | None = None,
    output_reserve: int = 0,
) -> InferRequest:
    """Check a request against a model and write its tensors into the slot.

    `header_length` is the value of Inference-Header-Content-Length: the bytes of JSON, with binary tensors after it;
    None if the whole body is JSON, 0 if the whole body is the one input. `document` is that JSON if it is already parsed.
    The slot gets `output_reserve` bytes beyond the inputs and the outputs of known size, if available. Raises BadRequest,
    TooLarge, MemoryFull or TensorMismatch; the slot then stays with its owner.
    """
    if header_length == 0:
        return _decode_raw(body, signature, slot, limits, output_reserve)
    return decode_body(_split(body, header_length, limits, document), signature, slot, limits, output_reserve)


def decode_body(body: RequestBody, signature: Signature, slot: Slot, limits: Limits, output_reserve: int = 0) -> InferRequest:
    """As `decode`, of a request that is split into its document and its tensors."""
    request, inputs = _check(body, signature, limits)
    write_inputs(inputs, signature, slot, output_reserve)
    return request


def place(
    head: bytes, length: int, signature: Signature, slot: Slot, limits: Limits, output_reserve: int = 0
) -> Placement | None:
    """Check a request of which only the JSON, `head`, has arrived, of a body of `length` bytes; where its tensors belong.

    An empty `head` is that of a raw body. None if the tensors' places are not known before they have come. Takes memory only
    if it is free. Otherwise as `decode`.
    """
    if head:
        check_json(len(head), length, limits)
        request, inputs = _check(SplitBody(parse(head), None, len(head), length), signature, limits)
    elif signature.inputs[0].datatype.size:
        request, inputs = _check_raw(Awaited(0, length), length, signature, limits)
    else:
        return None
    offsets = write_inputs(inputs, signature, slot, output_reserve, False)
    placed = sorted([(item.data, offset, item.declared) for item, offset in zip(inputs, offsets, strict=True)
                     if isinstance(item.data, Awaited)], key=_start_of)  # fmt: skip
    return Placement(
        request,
        tuple([(offset, data.start, data.nbytes) for data, offset, _ in placed]),
        tuple([(offset, data.nbytes, known) for data, offset, known in placed if known and needs_check(known.spec)]),
    )


def check_arrived(placement: Placement, slot: Slot) -> None:
    """Check the contents of tensors that were received into the slot. Raises BadRequest."""
    for offset, nbytes, declared in placement.unchecked:
        checked(slot.view[offset : offset + nbytes], declared)


def _start_of(placed: tuple[Awaited, int, InputDeclaration | None]) -> int:
    return placed[0].start


def _check(body: RequestBody, signature: Signature, limits: Limits) -> tuple[InferRequest, list[Input]]:
    """The request, and its checked inputs in the signature's order."""
    values = parameters(body.document)
    refuse_reserved(values)
    timeout = unsigned(values, "timeout")
    inputs = _inputs(body, signature, limits)
    outputs = requested_outputs(body.document, signature, flag(values, "binary_data_output") or False)
    request = InferRequest(
        id=field(body.document, "id", str) or None,
        shapes=tuple([item.shape for item in inputs]),
        outputs=outputs,
        priority=unsigned(values, "priority") or 0,
        timeout=timeout / 1e6 if timeout else None,
        classified=any(output.classes for output in outputs),
        unasked=signature.unasked([output.position for output in outputs]),
    )
    return request, inputs


def check_json(size: int, length: int, limits: Limits) -> None:
    """Check how many bytes of a body of `length` are JSON. Raises BadRequest, TooLarge."""
    if size > length:
        raise BadRequest(f"Inference-Header-Content-Length: {size}; expected at most {length}, the bytes of the body")
    if size > limits.json:
        limit = f"the limit is {limits.json} (server.max_json_tensor)"
        raise TooLarge(f"{size} bytes of JSON; {limit}. Send large tensors as binary tensors: {_HINT}")


def _split(body: bytes, header_length: int | None, limits: Limits, document: Object | None) -> SplitBody:
    size = len(body) if header_length is None else header_length
    check_json(size, len(body), limits)
    if document is None:
        document = parse(body if size == len(body) else body[:size])
    return SplitBody(document, memoryview(body)[size:], size, len(body), header_length is None)


_HINT = "the header Inference-Header-Content-Length, parameters.binary_data_size for each input, the bytes after the JSON"


def _inputs(body: RequestBody, signature: Signature, limits: Limits) -> list[Input]:
    """The checked inputs, in the signature's order."""
    specs = {spec.name: spec for spec in signature.inputs}
    found: dict[str, Input] = {}
    for index, entry in enumerate(field(body.document, "inputs", list, required=True)):
        where = f"inputs[{index}]."
        spec = specs[_name(entry, specs, where, "input")]
        if spec.name in found:
            raise BadRequest(f"{where}name: {spec.name!r} given twice; expected each input once")
        found[spec.name] = _input(entry, spec, body, where, limits)
    body.finish()
    if len(found) < len(specs):
        fill_missing(found, specs)
    return [found[name] for name in specs]


def fill_missing(found: dict[str, Input], specs: dict[str, TensorSpec]) -> None:
    """Fill in defaults for missing inputs. Raises BadRequest for those without a default."""
    missing = []
    for name, spec in specs.items():
        if name not in found:
            if spec.default is None:
                missing.append(name)
            else:
                found[name] = Input(spec.default.shape, spec.default.data)
    if missing:
        raise BadRequest(f"inputs: {_quote(missing)} missing; the model takes {_quote(specs)}")


def _name(entry: Any, known: "dict[str, Any]", where: str, what: str) -> str:
    if type(entry) is not dict:
        refuse(where[:-1], entry, "an object")
    name: str = field(entry, "name", str, where, required=True)
    if name not in known:
        raise BadRequest(f"{where}name: the model has no {what} {short(name)!r}; it has {_quote(known)}")
    return name


def _input(entry: Object, spec: TensorSpec, body: RequestBody, where: str, limits: Limits) -> Input:
    datatype = field(entry, "datatype", str, where, required=True)
    if datatype != spec.datatype.name:
        raise BadRequest(f"{where}datatype: {show(datatype)}; expected {spec.datatype}, as input {spec.name!r} is")
    shape = _shape(field(entry, "shape", list, where, required=True), f"{where}shape", limits)
    values = parameters(entry, where) if "parameters" in entry else {}
    if "shared_memory_region" in values:
        raise BadRequest(f"{where}parameters.shared_memory_region: shared memory is not served, since regions have no tenant")
    if not spec.datatype.size:
        body.count_texts(math.prod(shape), where, limits.texts)
    declared = InputDeclaration(where, spec, shape)
    data = body.data(entry, values, declared)
    return Input(spec.inward(shape) if spec.form else shape, data, declared)


def _shape(values: list[Any], where: str, limits: Limits) -> Shape:
    if len(values) > _MAX_DIMENSIONS:
        raise BadRequest(f"{where}: {len(values)} dimensions; a tensor has at most {_MAX_DIMENSIONS}")
    for axis, value in enumerate(values):
        if type(value) is not int or value < 0:
            refuse(f"{where}[{axis}]", value, "an integer of at least 0")
    # A zero counts as one: otherwise an empty tensor could pass with a huge dimension, which an output may then have.
    if math.prod(value or 1 for value in values) > limits.elements:
        raise BadRequest(f"{where}: {show(values)} is more than the {limits.elements} elements that a body could carry")
    return tuple(values)


def write_inputs(
    inputs: Sequence[Input], signature: Signature, slot: Slot, output_reserve: int, evict: bool = True
) -> list[int]:
    """Check the shapes against the model, and write what data there is at the offsets from `Slot.lay_out`, the result."""
    room = signature.output_bytes(signature.check([item.shape for item in inputs]))
    sizes = [_size(item.data) for item in inputs]
    offsets = slot.lay_out(signature, sizes, room, output_reserve, evict)
    for item, offset, size in zip(inputs, offsets, sizes, strict=True):
        if size and not isinstance(item.data, Awaited):
            slot.view[offset : offset + size] = memoryview(item.data).cast("B")
    return offsets


def _size(data: Buffer) -> int:
    return data.nbytes if isinstance(data, np.ndarray | memoryview | Awaited) else len(data)


def requested_outputs(document: Object, signature: Signature, binary: bool) -> tuple[RequestedOutput, ...]:
    """The outputs that a request names, or all. Raises BadRequest for one that cannot be answered in the form asked for."""
    known = {spec.name: index for index, spec in enumerate(signature.outputs)}
    entries = field(document, "outputs", list)
    if not entries:
        return tuple([_requested_output(signature, index, binary, "outputs") for index in known.values()])
    requested: dict[str, RequestedOutput] = {}
    for index, entry in enumerate(entries):
        where = f"outputs[{index}]."
        name = _name(entry, known, where, "output")
        if name in requested:
            raise BadRequest(f"{where}name: {name!r} given twice; expected each output once")
        values = parameters(entry, where)
        if values.get("shared_memory_region"):
            raise BadRequest(f"{where}parameters.shared_memory_region: not served here; ask for the tensor itself")
        classes = unsigned(values, "classification", f"{where}parameters.") or 0
        explicit = flag(values, "binary_data", f"{where}parameters.")
        as_binary = binary if explicit is None else explicit
        requested[name] = _requested_output(signature, known[name], as_binary, where[:-1], classes)
    return tuple(requested.values())


def _requested_output(signature: Signature, index: int, binary: bool, where: str, classes: int = 0) -> RequestedOutput:
    spec = signature.outputs[index]
    if classes:
        if spec.datatype.kind in ("bool", "bytes"):
            raise BadRequest(f"{where}.parameters.classification: output {spec.name!r} is {spec.datatype}; expected numbers")
        return RequestedOutput(index, binary, classes)
    if not binary and spec.datatype.name in ("FP16", "BF16"):
        raise BadRequest(f"{where}: output {spec.name!r} is {spec.datatype}, which has no JSON form; {ASK}")
    return RequestedOutput(index, binary)


def refuse_reserved(values: Object) -> None:
    """Raise BadRequest for parameters that are reserved, or that ask for what is not served."""
    for key in values:
        if key.startswith("triton_"):
            raise BadRequest(f"parameters.{short(key)}: names that begin with triton_ are reserved")
        if key in ("sequence_id", "sequence_start", "sequence_end") and values[key]:
            raise BadRequest(f"parameters.{key}: sequences are not served here; every request stands alone")


def _decode_raw(body: bytes, signature: Signature, slot: Slot, limits: Limits, output_reserve: int) -> InferRequest:
    """The raw form: the whole body is the model's only input, and all outputs are answered as binary tensors."""
    request, inputs = _check_raw(body, len(body), signature, limits)
    write_inputs(inputs, signature, slot, output_reserve)
    return request


def _check_raw(data: Buffer, length: int, signature: Signature, limits: Limits) -> tuple[InferRequest, list[Input]]:
    """As `_check`, for a raw body of so many bytes, which may be `Awaited`."""
    if len(signature.inputs) != 1:
        raise BadRequest(f"{_RAW} needs a model of 1 input; this one has {len(signature.inputs)}")
    spec = signature.inputs[0]
    shape = _raw_shape(spec, length, 1 if signature.max_batch else 0)
    _shape(list(shape), "shape of the raw body", limits)
    declared = InputDeclaration("raw body.", spec, shape)
    if not isinstance(data, Awaited):
        data = checked(memoryview(wire.pack([data]) if spec.datatype.kind == "bytes" else data), declared)
    inner = spec.inward(shape)
    outputs = tuple([RequestedOutput(index, True) for index in range(len(signature.outputs))])
    return InferRequest(None, (inner,), outputs, 0, None), [Input(inner, data, declared)]


def _raw_shape(spec: TensorSpec, size: int, batch: int) -> Shape:
    """The shape of a raw body: the batch is 1, and at most one variable dimension follows from the size."""
    dims = (1, *spec.shape[1:]) if batch else spec.shape
    variable = dims.count(-1)
    if variable > 1 or (spec.datatype.kind == "bytes" and math.prod(abs(dim) for dim in dims) != 1):
        raise BadRequest(f"{_RAW} cannot tell the shape of input {spec.name!r}, {list(spec.shape)}; send its shape in JSON")
    row = math.prod(dim for dim in dims if dim != -1) * spec.datatype.size
    left = 1 if spec.datatype.kind == "bytes" else size // row if row else 0
    shape = tuple(left if dim == -1 else dim for dim in dims)
    if spec.datatype.size and spec.nbytes(shape) != size:
        came = count(size, "byte")
        raise BadRequest(f"{_RAW} of {came} does not fit input {spec.name!r}, {spec.datatype}{list(spec.shape)}")
    return shape


def _quote(names: "Sequence[str] | dict[str, Any]") -> str:
    return ", ".join(map(repr, names)) or "none"
