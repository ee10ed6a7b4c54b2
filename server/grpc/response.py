"""The outputs in a slot into a ModelInferResponse as bytes, which is a copy: the slot can be released afterwards."""

from collections.abc import Sequence

from engines import wire

from ..link.messages import Extent
from ..link.slots import Slot
from ..protocol.classification import Classes
from ..protocol.request import InferRequest
from ..protocol.response import Written, outer_shape
from ..tenants.catalog import ServedModel
from .messages import ModelInferResponse

_FINAL = "triton_final_response"
_RAW_CONTENTS = 6 << 3 | 2
"""The byte before each element of raw_output_contents: its number, and that it has a length."""


def encode(
    served: ServedModel,
    request: InferRequest,
    slot: Slot,
    extents: Sequence[Extent],
    written: Written,
    final: bool | None = None,
) -> bytes:
    """The answer with the requested outputs, all of them in raw_output_contents, in their order.

    `written` has the outputs that are classified. `final`: whether it is the last part, which Triton says in streams, or
    None. Raises Failed if the model's configuration has no reshape for the shape of one.
    """
    message = ModelInferResponse(model_name=served.name, model_version=served.version, id=request.id or "")
    if final is not None:
        message.parameters[_FINAL].bool_param = final
    tensors: list[bytes | memoryview] = []
    for position, _, classes in request.outputs:
        spec, (shape, offset, nbytes) = served.signature.outputs[position], extents[position]
        if classes:
            known = written[position]
            assert isinstance(known, Classes)
            message.outputs.add(name=spec.name, datatype="BYTES", shape=known.shape)
            data: bytes | memoryview = wire.pack(known.texts)
        else:
            outer = outer_shape(spec, shape) if spec.form else shape
            message.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=outer)
            data = slot.view[offset : offset + nbytes]
        tensors += (_prefix(len(data)), data)
    return b"".join([message.SerializeToString(), *tensors])


def empty_end(served: ServedModel, request_id: str) -> bytes:
    """The answer without outputs that follows the last part."""
    message = ModelInferResponse(model_name=served.name, model_version=served.version, id=request_id)
    message.parameters[_FINAL].bool_param = True
    data: bytes = message.SerializeToString()
    return data


def _prefix(size: int) -> bytes:
    """What is written before a tensor of so many bytes."""
    prefix = bytearray([_RAW_CONTENTS])
    while size > 127:
        prefix.append(size & 127 | 128)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)
