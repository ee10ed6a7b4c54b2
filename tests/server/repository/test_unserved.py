"""Models that Triton serves and Greenlane does not are refused in one sentence, which says what to do instead."""

from pathlib import Path

import pytest

from server.repository.model_config import ConfigRefused, parse
from server.repository.model_repository import Problem, Repository


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            'input { name: "INPUT" data_type: TYPE_INT32 dims: 1 } sequence_batching { control_input [ { name: "START" '
            "control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }",
            "sequence_batching is not served, as every request stands alone; make the state an input and an output",
        ),
        ("model_transaction_policy { decoupled: true }", "model_transaction_policy.decoupled is not served, as there are no"),
        ("batch_input { kind: BATCH_ITEM_SHAPE }", "batch_input is not served, as a model sees what its requests say; make"),
        ("batch_output { source_input: 'x' }", "batch_output is not served"),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }',
            "input 'x': allow_ragged_batch is not served; pad to one shape, or have requests run one by one",
        ),
        (
            'backend: "python"',
            "backend is 'python'; served here are onnxruntime, onnxruntime_onnx, tensorrt, tensorrt_plan, ensemble; export",
        ),
        ('platform: "pytorch_libtorch"', "platform is 'pytorch_libtorch'; served here are "),
        ('platform: "tensorflow_savedmodel"', "platform is 'tensorflow_savedmodel'; served here are "),
        ('backend: "openvino"', "backend is 'openvino'; served here are "),
    ],
)
def test_unserved_features_are_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(ConfigRefused) as refused:
        parse(text, "m/config.pbtxt")
    assert str(refused.value).startswith(f"m/config.pbtxt: {reason}")
    assert str(refused.value).count(";") == (2 if "served here are" in reason else 1)


def test_files_of_other_backends_are_recognized(tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").touch()
    assert Repository(tmp_path, {}).read("m").problems == (
        Problem(
            "1",
            "no model.onnx or model.plan in m/1: model.py is of the backend python, which is not served; export what it "
            "computes to ONNX and serve that, or let the client do it around a request",
        ),
    )
