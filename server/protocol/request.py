"""An inference request from bytes into a slot: everything is checked before anything is written."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from engines import Signature, TensorSpec, wire
from server.errors import BadRequest, TooLarge
from server.link.messages import Shape
from server.link.slots import Slot

from .json_document import Object, count, field, flag, parameters, parse, refuse, short, show, unsigned
from .json_tensors import Declared, to_array, to_wire

_MOST_DIMENSIONS = 64
"""As in numpy; no model has more, and the product of a body full of them would take seconds."""

ASK = "ask for a binary tensor (parameters.binary_data_output on the request, or binary_data on the output)"
"""What to do where JSON cannot carry an output."""
_RAW = "Inference-Header-Content-Length: 0, a raw body,"

Buffer = Any
"""Whatever can be written to a slot: bytes, a memoryview, or a contiguous array."""


class Wanted(NamedTuple):
    """An output to answer with: its place in the signature, whether as a binary tensor, and as how many classes if any."""

    position: int
    binary: bool
    classes: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of JSON that one request may have, elements that one tensor may claim, and what JSON has for NaN and infinity.

    `texts` is how many elements all BYTES tensors of one request may have: each costs many times its bytes where it is run.
    `nonfinite` is "literal" for `NaN`, `Infinity` and `-Infinity`, or "null".
    """

    json: int
    elements: int
    nonfinite: str = "literal"
    texts: int = 1 << 18


@dataclass(frozen=True, slots=True)
class InferRequest:
    """What a request says beside its tensors. `timeout` is in seconds; priority 0 is the default, 1 the highest.

    `shapes` are the model's, one for each input, where its configuration shows callers others.
    `classified` is whether an output is asked for as classes.
    """

    id: str | None
    shapes: tuple[Shape, ...]
    outputs: tuple[Wanted, ...]
    priority: int
    timeout: float | None
    classified: bool = False


class Body:
    """A request body taken apart: its JSON, and the binary tensors that follow."""

    def __init__(self, document: Object, binary: memoryview, is_all_json: bool) -> None:
        self.document = document
        self.binary = binary
        self.is_all_json = is_all_json
        self.taken = 0
        self.texts = 0

    def count_texts(self, elements: int, where: str, limits: Limits) -> None:
        """There are so many texts in the input at this path. Raises TooLarge for more than a request may have."""
        self.texts += elements
        if self.texts > limits.texts:
            text = f"{where}shape: {self.texts} elements of BYTES in one request"
            raise TooLarge(f"{text}; the limit is {limits.texts} (server.max_string_elements)")

    def take(self, size: int, where: str) -> memoryview:
        """The next binary tensor, that of the input at this path."""
        if (left := len(self.binary) - self.taken) < size:
            why = ", which without the header Inference-Header-Content-Length is all JSON" if self.is_all_json else ""
            came = f"{where}parameters.binary_data_size: {size}"
            raise BadRequest(f"{came}, but {count(left, 'byte')} of the body remain{why}")
        self.taken += size
        return self.binary[self.taken - size : self.taken]


class Input(NamedTuple):
    """One input as it came: its shape in the model, and its bytes."""

    shape: Shape
    data: Buffer


def decode(
    body: bytes,
    header_length: int | None,
    signature: Signature,
    slot: Slot,
    limits: Limits,
    document: Object | None = None,
    spare: int = 0,
) -> InferRequest:
    """Check a whole request against a model and write its tensors into the slot.

    `header_length` is the value of Inference-Header-Content-Length: the bytes of JSON, with binary tensors after it;
    None where the whole body is JSON, 0 where the whole body is the one input. `document` is that JSON where it was parsed
    before. The slot gets `spare` bytes more than these inputs and the outputs of known size need, if it can. Raises
    BadRequest, TooLarge, MemoryFull or TensorMismatch, and leaves the slot's owner as it was.
    """
    if header_length == 0:
        return _decode_raw(body, signature, slot, limits, spare)
    parts = _take_apart(body, header_length, limits, document)
    values = parameters(parts.document)
    _refuse_reserved(values)
    timeout = unsigned(values, "timeout")
    inputs = _inputs(parts, signature, limits)
    outputs = _outputs(parts.document, signature, flag(values, "binary_data_output") or False)
    request = InferRequest(
        id=field(parts.document, "id", str),
        shapes=tuple([item.shape for item in inputs]),
        outputs=outputs,
        priority=unsigned(values, "priority") or 0,
        timeout=timeout / 1e6 if timeout else None,
        classified=any(wanted.classes for wanted in outputs),
    )
    _write(inputs, signature, slot, spare)
    return request


def _take_apart(body: bytes, header_length: int | None, limits: Limits, document: Object | None) -> Body:
    size = len(body) if header_length is None else header_length
    if size > len(body):
        raise BadRequest(f"Inference-Header-Content-Length: {size}; expected at most {len(body)}, the bytes of the body")
    if size > limits.json:
        limit = f"the limit is {limits.json} (server.max_json_tensor)"
        raise TooLarge(f"{size} bytes of JSON; {limit}. Send large tensors as binary tensors: {_HINT}")
    if document is None:
        document = parse(body if size == len(body) else body[:size])
    return Body(document, memoryview(body)[size:], header_length is None)


_HINT = "the header Inference-Header-Content-Length, parameters.binary_data_size for each input, the bytes after the JSON"


def _inputs(body: Body, signature: Signature, limits: Limits) -> list[Input]:
    """The inputs in the signature's order."""
    specs = {spec.name: spec for spec in signature.inputs}
    found: dict[str, Input] = {}
    for place, entry in enumerate(field(body.document, "inputs", list, required=True)):
        where = f"inputs[{place}]."
        spec = specs[_name(entry, specs, where, "input")]
        if spec.name in found:
            raise BadRequest(f"{where}name: {spec.name!r} stands twice; expected each input once")
        found[spec.name] = _input(entry, spec, body, where, limits)
    if left := len(body.binary) - body.taken:
        more = count(left, "byte")
        raise BadRequest(f"the body has {more} more than its JSON and parameters.binary_data_size of its inputs say")
    if len(found) < len(specs):
        _fill(found, specs)
    return [found[name] for name in specs]


def _fill(found: dict[str, Input], specs: dict[str, TensorSpec]) -> None:
    """Put what the model has itself in the place of inputs that were left out. Raises BadRequest if it has nothing."""
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


def _input(entry: Object, spec: TensorSpec, body: Body, where: str, limits: Limits) -> Input:
    datatype = field(entry, "datatype", str, where, required=True)
    if datatype != spec.datatype.name:
        raise BadRequest(f"{where}datatype: {show(datatype)}; expected {spec.datatype}, as input {spec.name!r} is")
    shape = _shape(field(entry, "shape", list, where, required=True), f"{where}shape", limits)
    values = parameters(entry, where) if "parameters" in entry else {}
    if "shared_memory_region" in values:
        raise BadRequest(f"{where}parameters.shared_memory_region: shared memory is not served, since regions have no tenant")
    size = unsigned(values, "binary_data_size", f"{where}parameters.") if values else None
    if (size is None) == (entry.get("data") is None):
        how = "missing; expected an array, or" if size is None else "given; expected either this or"
        raise BadRequest(f"{where}data: {how} parameters.binary_data_size")
    if not spec.datatype.size:
        body.count_texts(math.prod(shape), where, limits)
    declared = Declared(where, spec, shape)
    inner = spec.inward(shape) if spec.form else shape
    if size is None:
        return Input(inner, _json_data(entry, declared))
    if spec.datatype.size and size != (expected := spec.nbytes(shape)):
        raise BadRequest(f"{declared}: parameters.binary_data_size is {size}; the shape asks for {expected}")
    return Input(inner, _checked(body.take(size, where), declared))


def _json_data(entry: Object, declared: Declared) -> Buffer:
    data = entry["data"]
    if type(data) is not list and not isinstance(data, np.ndarray):
        refuse(f"{declared.where}data", data, "an array")
    convert: Callable[[Any, Declared], Buffer] = to_wire if declared.spec.datatype.kind == "bytes" else to_array
    return convert(data, declared)


def _shape(values: list[Any], where: str, limits: Limits) -> Shape:
    if len(values) > _MOST_DIMENSIONS:
        raise BadRequest(f"{where}: {len(values)} dimensions; a tensor has at most {_MOST_DIMENSIONS}")
    for axis, value in enumerate(values):
        if type(value) is not int or value < 0:
            raise BadRequest(f"{where}[{axis}]: {show(value)}; expected an integer of at least 0")
    # Zeros count as ones: an empty tensor must not smuggle in a dimension that an output would then have.
    if math.prod(value or 1 for value in values) > limits.elements:
        raise BadRequest(f"{where}: {show(values)} is more than the {limits.elements} elements that a body could carry")
    return tuple(values)


def _checked(data: memoryview, declared: Declared) -> memoryview:
    """Binary data whose every element is one that the data type has."""
    kind = declared.spec.datatype.kind
    if kind == "bytes":
        _check_elements(data, declared)
    elif kind == "bool" and len(data) and np.frombuffer(data, np.uint8).max() > 1:
        raise BadRequest(f"{declared}: bytes other than 0 and 1 in its binary data; expected one of them for each element")
    return data


def _check_elements(data: memoryview, declared: Declared) -> None:
    """Any bytes may be elements, each with its length before it, and all within the data."""
    try:
        deque(wire.starts(data, math.prod(declared.shape)), maxlen=0)
    except ValueError as error:
        raise BadRequest(f"{declared}: {error}") from error


def _write(inputs: Sequence[Input], signature: Signature, slot: Slot, spare: int) -> None:
    """Check the shapes against the model, and write the data where `Slot.place` puts it."""
    room = signature.output_bytes(signature.check([item.shape for item in inputs]))
    sources = [memoryview(item.data).cast("B") if _size(item.data) else memoryview(b"") for item in inputs]
    offsets = slot.place(signature, [len(source) for source in sources], room, spare)
    for offset, source in zip(offsets, sources, strict=True):
        slot.view[offset : offset + len(source)] = source


def _size(data: Buffer) -> int:
    return data.nbytes if isinstance(data, np.ndarray | memoryview) else len(data)


def _outputs(document: Object, signature: Signature, binary: bool) -> tuple[Wanted, ...]:
    known = {spec.name: index for index, spec in enumerate(signature.outputs)}
    entries = field(document, "outputs", list)
    if not entries:
        return tuple([_wanted(signature, index, binary, "outputs") for index in known.values()])
    wanted: dict[str, Wanted] = {}
    for place, entry in enumerate(entries):
        where = f"outputs[{place}]."
        name = _name(entry, known, where, "output")
        if name in wanted:
            raise BadRequest(f"{where}name: {name!r} stands twice; expected each output once")
        values = parameters(entry, where)
        if values.get("shared_memory_region"):
            raise BadRequest(f"{where}parameters.shared_memory_region: not served here; ask for the tensor itself")
        classes = unsigned(values, "classification", f"{where}parameters.") or 0
        own = flag(values, "binary_data", f"{where}parameters.")
        wanted[name] = _wanted(signature, known[name], binary if own is None else own, where[:-1], classes)
    return tuple(wanted.values())


def _wanted(signature: Signature, index: int, binary: bool, where: str, classes: int = 0) -> Wanted:
    spec = signature.outputs[index]
    if classes:
        if spec.datatype.kind in ("bool", "bytes"):
            raise BadRequest(f"{where}.parameters.classification: output {spec.name!r} is {spec.datatype}; expected numbers")
        return Wanted(index, binary, classes)
    if not binary and spec.datatype.name in ("FP16", "BF16"):
        raise BadRequest(f"{where}: output {spec.name!r} is {spec.datatype}, which has no JSON form; {ASK}")
    return Wanted(index, binary)


def _refuse_reserved(values: Object) -> None:
    for key in values:
        if key.startswith("triton_"):
            raise BadRequest(f"parameters.{short(key)}: names that begin with triton_ are reserved")
        if key in ("sequence_id", "sequence_start", "sequence_end") and values[key]:
            raise BadRequest(f"parameters.{key}: sequences are not served here; every request stands alone")


def _decode_raw(body: bytes, signature: Signature, slot: Slot, limits: Limits, spare: int) -> InferRequest:
    """The raw form: the whole body is the only input, and every output is answered as a binary tensor."""
    if len(signature.inputs) != 1:
        raise BadRequest(f"{_RAW} needs a model of 1 input; this one has {len(signature.inputs)}")
    spec = signature.inputs[0]
    shape = _raw_shape(spec, len(body), 1 if signature.max_batch else 0)
    _shape(list(shape), "shape of the raw body", limits)
    data = memoryview(wire.pack([body]) if spec.datatype.kind == "bytes" else body)
    inner = spec.inward(shape)
    _write([Input(inner, _checked(data, Declared("raw body.", spec, shape)))], signature, slot, spare)
    return InferRequest(None, (inner,), tuple(Wanted(place, True) for place in range(len(signature.outputs))), 0, None)


def _raw_shape(spec: TensorSpec, size: int, batch: int) -> Shape:
    """The batch is 1, and one variable dimension takes what the others leave."""
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
