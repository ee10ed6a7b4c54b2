"""Tensors of any type and shape from a client to the model and back."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult

from engines import DATATYPES, Signature, TensorSpec, wire
from engines.signature import align
from server.link.messages import Extent
from server.protocol.request import InferRequest, RequestedOutput
from server.protocol.response import encode
from tests.memory import slot_of

from .messages import Document, request, take

Array = np.ndarray[Any, np.dtype[Any]]

BINARY_ONLY = ("FP16", "BF16")


@dataclass(frozen=True)
class Sample:
    """A tensor of a model and its value; texts are an array of objects, BF16 its 16 bits."""

    spec: TensorSpec
    value: Array
    binary: bool

    @property
    def wire(self) -> bytes:
        if self.spec.datatype.kind == "bytes":
            return wire.pack(text.encode() for text in self.value.ravel())
        return self.value.tobytes()

    def entry(self, flat: bool) -> Document:
        head = {"name": self.spec.name, "datatype": self.spec.datatype.name, "shape": list(self.value.shape)}
        if self.binary:
            return head | {"parameters": {"binary_data_size": len(self.wire)}}
        return head | {"data": self.value.ravel().tolist() if flat or not self.value.shape else self.value.tolist()}


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    """Tensors with names of their own, of any type and shape, some of their dimensions dynamic."""
    names = draw(st.lists(st.text(min_size=1, max_size=4), unique=True, max_size=4))
    return [draw(sample(name)) for name in names]


@st.composite
def sample(draw: st.DrawFn, name: str) -> Sample:
    datatype = DATATYPES[draw(st.sampled_from(sorted(DATATYPES)))]
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    dims = tuple(size if draw(st.booleans()) else "" for size in shape)
    binary = datatype.name in BINARY_ONLY or draw(st.booleans())
    finite: Any = {"allow_nan": binary, "allow_infinity": binary} if datatype.name.startswith("FP") else None
    texts = st.text(max_size=5)
    kind: Any = object if datatype.kind == "bytes" else datatype.numpy
    value = draw(hnp.arrays(kind, shape, elements=texts if kind is object else finite))
    return Sample(TensorSpec(name, datatype, dims), value, binary)


@given(samples(), st.randoms(use_true_random=False), st.booleans())
def test_inputs_reach_the_worker_as_they_were_sent(inputs: list[Sample], random: Any, flat: bool) -> None:
    signature = Signature(tuple(item.spec for item in inputs), ())
    sent = random.sample(inputs, len(inputs))
    found = take(request(*(item.entry(flat) for item in sent)), signature, *(item.wire for item in sent if item.binary), b"")
    assert found.tensors == tuple((item.value.shape, item.wire) for item in inputs)


@given(samples())
def test_outputs_reach_the_client_as_the_model_left_them(outputs: list[Sample]) -> None:
    body, header_length = answer(outputs)
    document = json.loads(body[:header_length])
    rest = body[header_length:] if header_length is not None else b""
    for item, entry in zip(outputs, document["outputs"], strict=True):
        assert (entry["name"], entry["datatype"]) == (item.spec.name, item.spec.datatype.name)
        assert tuple(entry["shape"]) == item.value.shape
        if item.binary:
            size = entry["parameters"]["binary_data_size"]
            assert rest[:size] == item.wire
            rest = rest[size:]
        else:
            np.testing.assert_array_equal(np.array(entry["data"], item.value.dtype), item.value.ravel())
    assert rest == b""


@given(samples())
def test_the_reference_client_reads_every_answer(outputs: list[Sample]) -> None:
    readable = [item for item in outputs if item.spec.datatype.name != "BF16"]  # It shows those as another type.
    result = InferResult.from_response_body(*_for_client(readable))
    for item in readable:
        found = result.as_numpy(item.spec.name)
        assert found.shape == item.value.shape
        if item.spec.datatype.kind == "bytes":
            assert [_text(element) for element in found.ravel()] == item.value.ravel().tolist()
        else:
            np.testing.assert_array_equal(found, item.value)


@given(samples())
def test_what_the_reference_client_writes_is_understood(inputs: list[Sample]) -> None:
    writable = [item for item in inputs if item.spec.datatype.name != "BF16"]
    signature = Signature(tuple(item.spec for item in writable), (TensorSpec("y", DATATYPES["FP32"], (1,)),))
    outputs = [InferRequestedOutput("y", binary_data=True)]
    body, size = InferenceServerClient.generate_request_body([_input(item) for item in writable], outputs)
    head, rest = (bytes(body), []) if size is None else (bytes(body[:size]), [bytes(body[size:])])
    found = take(head, signature, *rest)
    assert found.request.outputs == (RequestedOutput(0, binary=True),)
    assert found.tensors == tuple((item.value.shape, item.wire) for item in writable)


def answer(outputs: list[Sample]) -> tuple[bytes, int | None]:
    slot, extents, end = slot_of(), [], 0
    for item in outputs:
        slot.reserve(end + len(item.wire))
        slot.view[end : end + len(item.wire)] = item.wire
        extents.append(Extent(item.value.shape, end, len(item.wire)))
        end = align(end + len(item.wire))
    asked = InferRequest(None, (), tuple(RequestedOutput(place, item.binary) for place, item in enumerate(outputs)), 0, None)
    encoded = encode("m", "1", asked, Signature((), tuple(item.spec for item in outputs)), slot, extents)
    return encoded.body, encoded.header_length


def _for_client(outputs: list[Sample]) -> tuple[bytes, bool, int | None]:
    body, header_length = answer(outputs)
    return body, False, header_length


def _input(item: Sample) -> InferInput:
    made = InferInput(item.spec.name, list(item.value.shape), item.spec.datatype.name)
    made.set_data_from_numpy(item.value, binary_data=item.binary)
    return made


def _text(element: Any) -> str:
    return element.decode() if isinstance(element, bytes) else str(element)
