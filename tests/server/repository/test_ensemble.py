"""Ensembles in configurations: their steps, and errors that name them."""

from dataclasses import replace

import pytest

from engines import DATATYPES, ModelRefused, Signature, TensorSpec, chain
from engines.signature import Form
from server.repository.ensemble import EnsembleStep, StepModel, chain_steps, step_warnings
from server.repository.model_config import ConfigRefused, ModelConfig, from_json, parse
from server.scheduling.batching import Batching
from server.tenants.catalog import ServedModel
from tests.fakes import FakeEngine, Script

OUTPUT = 'platform: "ensemble" output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 3 ] } ]\n'


def step(model: str, takes: dict[str, str], gives: dict[str, str], version: str = "-1") -> str:
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in takes.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in gives.items()]
    return f'{{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}'


def ensemble(*steps: str, rest: str = OUTPUT) -> str:
    return f"{rest} ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"


def read(text: str) -> ModelConfig:
    return parse(text, "e/config.pbtxt")


FIRST, SECOND = step("a", {"x": "IN"}, {"y": "middle"}), step("b", {"x": "middle"}, {"y": "OUT"}, "3")


def test_steps_are_read_with_their_models_versions_and_tensors() -> None:
    config = read(ensemble(FIRST, SECOND))
    assert config.steps == (
        EnsembleStep("a", None, {"x": "IN"}, {"y": "middle"}, "ensemble_scheduling.step[0] (a)"),
        EnsembleStep("b", 3, {"x": "middle"}, {"y": "OUT"}, "ensemble_scheduling.step[1] (b)"),
    )
    assert config.unread == ()


def test_the_same_is_read_from_json() -> None:
    text = """{"platform": "ensemble", "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [3]}],
        "ensemble_scheduling": {"step": [{"model_name": "a", "input_map": {"x": "IN"}, "output_map": {"y": "OUT"}}]}}"""
    (only,) = from_json(text).steps
    assert (only.model, only.version, only.inputs, only.outputs) == ("a", None, {"x": "IN"}, {"y": "OUT"})


def test_steps_are_sorted_by_their_tensors() -> None:
    third = step("c", {"left": "OUT1", "right": "middle"}, {"y": "OUT"})
    second = step("b", {"x": "middle"}, {"y": "OUT1"})
    assert [each.model for each in read(ensemble(third, second, FIRST)).steps] == ["a", "b", "c"]
    assert [each.model for each in read(ensemble(FIRST, second, third)).steps] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (OUTPUT, "platform is 'ensemble', but ensemble_scheduling has no step; expected one or more"),
        (
            ensemble(FIRST, rest='platform: "onnxruntime_onnx"'),
            "ensemble_scheduling with platform 'onnxruntime_onnx'; expected platform: 'ensemble'",
        ),
        (
            ensemble(FIRST, rest='platform: "ensemble"'),
            "an ensemble has to list its output: which of its steps' tensors it gives",
        ),
        (ensemble("{ }"), "ensemble_scheduling.step[0] has no model_name"),
        (ensemble(step("a", {"x": "IN"}, {"y": "OUT"}, "0")), "ensemble_scheduling.step[0] (a): model_version is 0; expected"),
        (ensemble(step("a", {"x": ""}, {"y": "OUT"})), "ensemble_scheduling.step[0] (a): input_map 'x' has no value; expected"),
        (ensemble(step("a", {"x": "IN"}, {})), "ensemble_scheduling.step[0] (a) has no output_map, so nothing comes of it"),
        (
            ensemble(FIRST, FIRST),
            "ensemble_scheduling.step[1] (a) gives 'middle', which ensemble_scheduling.step[0] (a) gives too",
        ),
        (
            ensemble(step("c", {"x": "p"}, {"y": "OUT"}), step("a", {"x": "q"}, {"y": "p"}), step("b", {"x": "p"}, {"y": "q"})),
            "the steps wait for each other: ensemble_scheduling.step[1] (a) takes 'q', which is of "
            "ensemble_scheduling.step[2] (b) takes 'p', which is of ensemble_scheduling.step[1] (a)",
        ),
        (
            ensemble(step("a", {"x": "p"}, {"y": "p"})),
            "the steps wait for each other: ensemble_scheduling.step[0] (a) takes 'p'",
        ),
        (ensemble(FIRST, rest=f"{OUTPUT} dynamic_batching {{ }}"), "oneof"),
    ],
)
def test_invalid_ensembles_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigRefused) as refused:
        read(text)
    assert "e/config.pbtxt" in str(refused.value)
    assert why in str(refused.value)


def served(max_batch: int, **batching: object) -> StepModel:
    specs = [TensorSpec(name, DATATYPES["FP32"], (dim, 3)) for name, dim in (("x", ""), ("y", "k"))]
    signature = Signature((specs[0],), (specs[1],), max_batch)
    how = Batching(signature, max_batch, **batching) if batching else None  # type: ignore[arg-type]
    return StepModel(ServedModel("a", "1", "a/1#1", signature, "", {}, how), FakeEngine(signature, Script()))


def test_step_with_smaller_batches_than_the_ensemble_is_refused() -> None:
    steps = read(ensemble(FIRST, SECOND)).steps
    for most, expected in ((2, "batches of up to 2"), (0, "no batches, as it has no max_batch_size")):
        with pytest.raises(ModelRefused) as refused:
            chain_steps(steps, [served(4), served(most)], 4)
        assert str(refused.value) == (
            f"the ensemble's largest batch is 4, but ensemble_scheduling.step[1] (b) takes {expected}; lower it"
        )


def test_steps_share_one_batch_dimension() -> None:
    steps = read(ensemble(FIRST, SECOND)).steps
    signature = chain(chain_steps(steps, [served(8), served(4)], 0), ["OUT"]).signature
    assert (signature.inputs[0].dims, signature.inputs[0].limits) == (("k", 3), ((1, 4),))
    assert signature.outputs[0].dims == ("k", 3)


def test_batch_delay_of_a_step_is_warned_of() -> None:
    steps = read(ensemble(FIRST, SECOND)).steps
    (note,) = step_warnings(steps, [served(4, delay=0.0), served(4, delay=0.001)])
    assert note.startswith("ensemble_scheduling.step[1] (b) has a batch delay or preferred batches, which apply to requests")


def test_reshape_of_a_step_is_refused() -> None:
    steps, part = read(ensemble(FIRST, SECOND)).steps, served(4)
    signature = part.served.signature
    formed = replace(signature, outputs=(replace(signature.outputs[0], form=Form((-1, 3, 1), (-1, 3))),))
    with pytest.raises(ModelRefused, match=r"step\[1\] \(b\): 'y' has a reshape, which is not served within an ensemble"):
        chain_steps(steps, [part, part._replace(served=replace(part.served, signature=formed))], 4)
