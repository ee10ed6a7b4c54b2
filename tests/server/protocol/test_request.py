from dataclasses import replace

import pytest

from engines import Signature
from server.errors import BadRequest, TooLarge
from server.protocol.request import Limits, RequestedOutput, decode
from tests.memory import slot_of

from .messages import (
    LIMITS,
    PAIR,
    Document,
    binary,
    body_of,
    model,
    nested,
    refusal,
    request,
    spec,
    take,
    tensor,
)


def test_a_request_without_options_asks_for_every_output_as_json() -> None:
    found = take(
        request(tensor([1, 2], "INT32", name="a"), tensor(["x"], "BYTES", name="b")), replace(PAIR, outputs=PAIR.outputs[:1])
    )
    assert (found.request.id, found.request.priority, found.request.timeout) == (None, 0, None)
    assert found.request.shapes == ((2,), (1,))
    assert found.request.outputs == (RequestedOutput(0, binary=False),)


def test_id_parameters_and_outputs_are_decoded() -> None:
    document = request(
        tensor([1]), id="7", parameters={"priority": 3, "timeout": 1500, "mine": "x", "binary_data_output": True}
    )
    found = take(document, model()).request
    assert (found.id, found.priority, found.timeout) == ("7", 3, 0.0015)
    assert found.outputs == (RequestedOutput(0, binary=True),)


def test_outputs_are_answered_in_the_order_and_each_in_the_form_that_was_asked_for() -> None:
    outputs = [{"name": "d"}, {"name": "c", "parameters": {"binary_data": False, "classification": 0}}]
    inputs = tensor([1, 2], "INT32", name="a"), tensor([], "BYTES", name="b")
    found = take(request(*inputs, outputs=outputs, parameters={"binary_data_output": True}), PAIR)
    assert found.request.outputs == (RequestedOutput(1, binary=True), RequestedOutput(0, binary=False))


def test_a_model_without_inputs_takes_none() -> None:
    signature = Signature((), (spec("y", "FP32", 1),))
    assert take({"inputs": []}, signature).tensors == ()
    assert "has no input 'x'; it has none" in refusal(request(tensor([1])), signature)


@pytest.mark.parametrize("values", [{"data": None}, {"parameters": None}])
def test_a_field_that_is_null_is_absent(values: dict[str, None]) -> None:
    document = binary(4) if "data" in values else tensor([0.0])
    assert take(request(document | values), model(), *([b"\0" * 4] if "data" in values else [])).tensors == (((1,), b"\0" * 4),)


@pytest.mark.parametrize("levels", [3, 100, 1000, 100_000])
@pytest.mark.parametrize("leaf", ["1", '"a:b"', "", "null", "{}"])
@pytest.mark.parametrize(
    "body",
    [
        '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": %s}]}',
        '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [[1, %s], 1]}]}',
        '{"inputs": [{"name": "x", "datatype": "FP32", "shape": %s, "data": [1]}]}',
        '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1], "parameters": {"a": %s}}]}',
        '{"inputs": [{"name": %s}]}',
        '{"inputs": %s}',
        '{"inputs": [], "parameters": {"a": %s}}',
        '{"inputs": [], "parameters": {"timeout": %s}}',
        '{"inputs": [], "id": %s}',
        '{"inputs": [], "other": %s}',
        '{"inputs": [], "other": {"data": %s}}',
    ],
)
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_nesting_is_refused_in_every_field_however_deep_it_is(body: str, levels: int, leaf: str, datatype: str) -> None:
    document = (body % nested(levels, leaf)).replace("FP32", datatype).encode()
    assert refusal(document, model(datatype, "n", "m"))


def test_json_over_the_limit_is_too_large_and_mentions_binary_tensors() -> None:
    document = body_of(request(tensor([1.0] * 20)))
    message = refusal(document, kind=TooLarge, limits=Limits(json=len(document) - 1, elements=100))
    assert message.startswith(f"{len(document)} bytes of JSON; the limit is {len(document) - 1} (server.max_json_tensor). ")
    assert "binary tensors" in message
    assert "Inference-Header-Content-Length" in message
    assert take(document, model(), limits=Limits(json=len(document), elements=100)).tensors


TEXTS = Signature((spec("x", "BYTES", "n"), spec("z", "BYTES", "m"), spec("number", "INT32", "k")), (spec("y", "INT32", 1),))


@pytest.mark.parametrize("as_json", [True, False])
def test_too_many_string_elements_are_too_large(as_json: bool) -> None:
    limits = Limits(json=1 << 20, elements=1 << 20, texts=5)

    def texts(count: int, name: str) -> Document:
        if as_json:
            return tensor([""] * count, "BYTES", name=name)
        return {"name": name, "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": 4 * count}}

    numbers = tensor([1] * 9, "INT32", name="number")
    few, many = ({"inputs": [numbers, texts(3, "x"), texts(count, "z")]} for count in (2, 3))
    data = b"" if as_json else b"\0" * 20
    assert take(few, TEXTS, data, limits=limits).tensors
    with pytest.raises(TooLarge) as caught:
        take(many, TEXTS, data + data[:4], limits=limits)
    expected = "inputs[2].shape: 6 elements of BYTES in one request; the limit is 5 (server.max_string_elements)"
    assert str(caught.value) == expected


def test_binary_tensors_do_not_count_as_json() -> None:
    document = body_of(request(binary(4000)))
    assert take(document, model(), b"\0" * 4000, limits=Limits(json=len(document), elements=1000)).tensors


def test_empty_sequence_parameters_are_accepted() -> None:
    parameters = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    assert take(request(tensor([1]), parameters=parameters), model()).tensors


def test_an_output_may_be_asked_for_as_classes() -> None:
    taken = take(request(tensor([1]), outputs=[{"name": "y", "parameters": {"classification": 3}}]), model()).request
    assert (taken.outputs, taken.classified) == ((RequestedOutput(0, binary=False, classes=3),), True)
    assert not take(request(tensor([1])), model()).request.classified


@pytest.mark.parametrize("name", ["BOOL", "BYTES"])
def test_classification_needs_a_numeric_output(name: str) -> None:
    signature = Signature(model().inputs, (spec("y", name, "n"),))
    message = refusal(request(tensor([1]), outputs=[{"name": "y", "parameters": {"classification": 1}}]), signature)
    assert message == f"outputs[0].parameters.classification: output 'y' is {name}; expected numbers"


@pytest.mark.parametrize("name", ["FP16", "BF16"])
def test_half_precision_may_be_classified_in_json(name: str) -> None:
    signature = Signature(model().inputs, (spec("y", name, "n"),))
    outputs = [{"name": "y", "parameters": {"classification": 1}}]
    assert take(request(tensor([1]), outputs=outputs), signature).request.classified


@pytest.mark.parametrize("name", ["FP16", "BF16"])
def test_half_precision_is_not_answered_as_json(name: str) -> None:
    signature = Signature(model().inputs, (spec("y", name, "n"),))
    message = f"output 'y' is {name}, which has no JSON form; ask for a binary tensor"
    assert refusal(request(tensor([1])), signature).startswith(f"outputs: {message}")
    assert refusal(request(tensor([1]), outputs=[{"name": "y"}]), signature).startswith(f"outputs[0]: {message}")


def test_refused_request_leaves_the_slot_unchanged() -> None:
    slot = slot_of(3)
    slot.view[: slot.capacity] = b"\x05" * slot.capacity
    document = body_of(request(binary(4), binary(4)))
    with pytest.raises(BadRequest):
        decode(document + b"\0" * 8, len(document), model(), slot, LIMITS)
    assert bytes(slot.view[: slot.capacity]) == b"\x05" * slot.capacity
