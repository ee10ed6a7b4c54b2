"""A ModelInferRequest as bytes into a document and tensors, without copying raw tensors; see `RequestBody`."""

from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from ..errors import BadRequest, TooLarge
from ..protocol.json_document import Object, count, short
from ..protocol.json_slices import SLICE
from ..protocol.request import Limits
from ..protocol.time_slices import Steps
from ..protocol.typed_tensors import Typed
from .messages import ModelInferRequest

_VARINT, _BYTES = 0, 2
"""Kinds of fields: a number, or bytes with their length before them."""
_FIXED = {1: 8, 5: 4}
"""The bytes of the other kinds."""
_RAW_CONTENTS = 7 << 3 | _BYTES
"""The number and kind of raw_input_contents, as they are written before each element."""
_MAX_FIELDS = 1024
"""Parameters, inputs, outputs and tensors of one request together; each takes Python a microsecond or two."""
_VALUES = 1 << 13
"""Typed values converted per time slice: less than half a millisecond."""
_EMPTY_END = "triton_enable_empty_final_response"
"""The only reserved parameter that is no mistake: with it a client of a stream asks for an empty answer after the last part."""

_TYPES: dict[str, Any] = {
    "bool_contents": np.bool_, "int_contents": np.int32, "int64_contents": np.int64, "uint_contents": np.uint32,
    "uint64_contents": np.uint64, "fp32_contents": np.float32, "fp64_contents": np.float64,
}  # fmt: skip


class Parsed(NamedTuple):
    """The message without its raw tensors, and those; `long`: it is to be made a document in time slices."""

    message: Any
    raw: list[memoryview]
    long: bool


def parse(data: bytes, limits: Limits) -> Parsed:
    """Parse a message. Raises BadRequest, TooLarge."""
    head, raw = _split(data)
    if len(head) > limits.json:
        text = f"{len(head)} bytes besides raw_input_contents; the limit is {limits.json} (server.max_json_tensor)"
        raise TooLarge(f"{text}. Send large tensors in raw_input_contents")
    try:
        return Parsed(ModelInferRequest.FromString(head), raw, len(head) > SLICE)
    except DecodeError as error:
        raise BadRequest(f"the message is no ModelInferRequest: {error}") from error


def _split(data: bytes) -> tuple[bytes, list[memoryview]]:
    """The fields of a message other than its raw tensors, and those, which are not copied. Raises BadRequest."""
    view, end = memoryview(data), len(data)
    raw: list[memoryview] = []
    kept: list[memoryview] = []
    at = start = 0
    for _ in range(_MAX_FIELDS):
        if at == end:
            kept.append(view[start:])
            return b"".join(kept), raw
        tag, begin = _varint(data, at)
        if tag & 7 == _VARINT:
            _, after = _varint(data, begin)
        elif tag & 7 == _BYTES:
            size, begin = _varint(data, begin)
            after = begin + size
        elif (fixed := _FIXED.get(tag & 7)) is not None:
            after = begin + fixed
        else:
            raise BadRequest(f"the message is no ModelInferRequest: there is no field at byte {at}")
        if after > end:
            raise BadRequest(f"the message is no ModelInferRequest: the field at byte {at} goes beyond its end")
        if tag == _RAW_CONTENTS:
            raw.append(view[begin:after])
            kept.append(view[start:at])
            start = after
        at = after
    raise BadRequest(f"the message has more than {_MAX_FIELDS} parameters, inputs, outputs and tensors")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that is written at an offset, and the offset behind it. Raises BadRequest."""
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, at + index + 1
    raise BadRequest(f"the message is no ModelInferRequest: there is no number at byte {at}")


def wants_empty_end(message: Any) -> bool:
    """Whether an empty answer is to follow the last part."""
    return _EMPTY_END in message.parameters and bool(message.parameters[_EMPTY_END].bool_param)


def document(parsed: Parsed) -> Steps[Object]:
    """The document of a message, its tensors as `TensorsBody` expects them. Raises BadRequest."""
    message, raw, _ = parsed
    if raw and len(raw) != len(message.inputs):
        came = count(len(message.inputs), "input")
        raise BadRequest(f"raw_input_contents: {len(raw)} given for {came}; expected one for each, in their order")
    inputs: list[Object] = []
    for index, tensor in enumerate(message.inputs):
        entry: Object = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        entry["parameters"] = _parameters(tensor.parameters, f"inputs[{index}].")
        typed = yield from _typed(tensor.contents, f"inputs[{index}].") if tensor.HasField("contents") else _nothing()
        if typed and raw:
            raise BadRequest(f"inputs[{index}].contents: given; expected nothing, as raw_input_contents has the tensors")
        entry["data"] = raw[index] if raw else typed
        inputs.append(entry)
    parameters = _parameters(message.parameters, "")
    parameters.pop(_EMPTY_END, None)
    parameters["binary_data_output"] = True
    outputs: list[Object] = []
    for index, output in enumerate(message.outputs):
        values = _parameters(output.parameters, f"outputs[{index}].")
        values.pop("binary_data", None)  # It chooses between JSON and binary, of which there is no choice.
        outputs.append({"name": output.name, "parameters": values})
    return {"id": message.id or None, "parameters": parameters, "inputs": inputs, "outputs": outputs}


def _nothing() -> Steps[None]:
    return
    yield


def _typed(contents: Any, where: str) -> Steps[Typed | None]:
    """The values of one input; None if there are none."""
    given = [field for field, _ in contents.ListFields()]
    if len(given) > 1:
        names = " and ".join(field.name for field in given)
        raise BadRequest(f"{where}contents: {names} given; expected one of them")
    if not given:
        return None
    name: str = given[0].name
    values = getattr(contents, name)
    if name == "bytes_contents":
        return Typed(name, list(values))
    array = np.empty(len(values), _TYPES[name])
    for start in range(0, len(values), _VALUES):
        array[start : start + _VALUES] = values[start : start + _VALUES]
        yield
    return Typed(name, array)


def _parameters(entries: Any, where: str) -> Object:
    """The parameters of a request, or of the input or output that `where` names. Raises BadRequest."""
    return {key: getattr(value, _choice(key, value, where)) for key, value in entries.items()}


def _choice(key: str, value: Any, where: str) -> str:
    chosen: str | None = value.WhichOneof("choice")
    if chosen is None:
        text = "no value; expected one such as int64_param or string_param"
        raise BadRequest(f"{where}parameters.{short(key)}: {text}")
    return chosen
