"""Encodes the outputs in a slot into an answer body; its binary tensors stay in the slot."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from engines import Signature, TensorSpec, wire

from ..errors import BadRequest, Failed
from ..link.messages import Extent
from ..link.slots import Slot
from .classification import UNLABELLED, Classes, Labels, classify
from .json_slices import ELEMENTS, dump_slices
from .json_tensors import dump
from .request import ASK, InferRequest
from .time_slices import Steps

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


class InferResponse(NamedTuple):
    """A complete body: JSON, and the binary tensors after it, most of them still in the slot: valid until it is released.

    `header_length` is the bytes of JSON before the binary tensors, None if none are asked for.
    """

    document: bytes
    tensors: Sequence[bytes | memoryview]
    header_length: int | None

    def copied(self) -> "InferResponse":
        """The same, with nothing left in the slot."""
        return InferResponse(self.body, (), self.header_length)

    @property
    def body(self) -> bytes:
        """All of it, as a copy."""
        return b"".join([self.document, *self.tensors])


Written = Mapping[int, orjson.Fragment | Classes]
"""Outputs that `write_long` has already encoded or classified, by their positions in the signature."""


def is_long(request: InferRequest, signature: Signature, extents: Sequence[Extent]) -> bool:
    """Whether an output is large enough JSON to be written in time slices."""
    return any(_is_long(signature.outputs[position], binary, extents[position]) for position, binary, _ in request.outputs)


def write_long(
    request: InferRequest,
    signature: Signature,
    slot: Slot,
    extents: Sequence[Extent],
    nonfinite: str = "literal",
    labels: Labels = UNLABELLED,
) -> Steps[dict[int, orjson.Fragment | Classes]]:
    """Write the large JSON outputs for `encode`, and classify outputs. Raises BadRequest if a classification is too large."""
    written: dict[int, orjson.Fragment | Classes] = {}
    for position, binary, classes in request.outputs:
        spec, extent = signature.outputs[position], extents[position]
        data = slot.view[extent.offset : extent.offset + extent.nbytes]
        if classes:
            batched = signature.max_batch > 0
            written[position] = yield from classify(spec, data, extent.shape, classes, batched, labels.of(spec.name))
        elif _is_long(spec, binary, extent):
            written[position] = yield from dump_slices(np.frombuffer(data, spec.datatype.numpy), nonfinite)
    return written


def _is_long(spec: TensorSpec, binary: bool, extent: Extent) -> bool:
    return not binary and spec.datatype.kind != "bytes" and math.prod(extent.shape) > ELEMENTS


def encode(
    model: str,
    version: str,
    request: InferRequest,
    signature: Signature,
    slot: Slot,
    extents: Sequence[Extent],
    written: Written | None = None,
    nonfinite: str = "literal",
) -> InferResponse:
    """The answer with the requested outputs. `written` must have the outputs that are to be classified.

    `nonfinite` is how NaN and infinity are written, see `Limits`. Raises BadRequest if an output cannot be written as JSON,
    Failed if the model's configuration has no reshape for the shape of one.
    """
    outputs: list[dict[str, Any]] = []
    tensors: list[bytes | memoryview] = []
    for position, binary, classes in request.outputs:
        spec, (shape, offset, nbytes) = signature.outputs[position], extents[position]
        known = written[position] if written and position in written else None
        if classes:
            assert isinstance(known, Classes)
            outputs.append(_classified(spec, known, binary, tensors))
            continue
        data = slot.view[offset : offset + nbytes]
        outer = outer_shape(spec, shape) if spec.form else shape
        entry: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype.name, "shape": outer}
        if binary:
            entry["parameters"] = {"binary_data_size": nbytes}
            tensors.append(data)
        else:
            entry["data"] = elements(spec, data, shape, nonfinite) if known is None else known
        outputs.append(entry)
    head: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": outputs}
    if request.id is not None:
        head["id"] = request.id
    document = orjson.dumps(head, option=_OPTIONS)
    if all(not binary for _, binary, _ in request.outputs):
        return InferResponse(document, (), None)
    return InferResponse(document, tensors, len(document))


def outer_shape(spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that clients see of an output that the configuration reshapes."""
    outer = spec.form and spec.form.outward(shape)
    if outer is None:
        inner = list(spec.form.inner) if spec.form else []
        raise Failed(f"output {spec.name!r}: the model gave shape {list(shape)}; its configuration has {inner} reshaped")
    return outer


def _classified(spec: TensorSpec, classes: Classes, binary: bool, tensors: list[bytes | memoryview]) -> dict[str, Any]:
    """The JSON entry of a classified output; appends its data to `tensors` if it is binary."""
    entry: dict[str, Any] = {"name": spec.name, "datatype": "BYTES", "shape": classes.shape}
    if binary:
        tensors.append(data := wire.pack(classes.texts))
        entry["parameters"] = {"binary_data_size": len(data)}
    else:
        entry["data"] = [text.decode() for text in classes.texts]
    return entry


def elements(spec: TensorSpec, data: memoryview, shape: tuple[int, ...], nonfinite: str) -> Any:
    """An output's elements, flat, for orjson. Raises BadRequest for BYTES that are not text."""
    if spec.datatype.kind == "bytes":
        return _texts(spec, data, math.prod(shape))
    array = np.frombuffer(data, spec.datatype.numpy)
    if spec.datatype.kind == "float" and not np.isfinite(array).all():
        return orjson.Fragment(dump(array, nonfinite))
    return array


def _texts(spec: TensorSpec, data: memoryview, count: int) -> list[str]:
    try:
        return wire.texts(wire.unpack(data, count))
    except ValueError as error:
        raise BadRequest(f"output {spec.name!r}: {error}, which JSON cannot carry; {ASK}") from error
