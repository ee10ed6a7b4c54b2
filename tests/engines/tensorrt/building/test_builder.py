"""The budget for streamed weights that an engine file recommends, with the real TensorRT-RTX builder."""

from pathlib import Path

import pytest

from engines.build import main
from engines.model_files.artifact import read_plan
from engines.tensorrt.building.builder import BuildOptions, build
from tests.engines.small import model

ADD = model("add (float[2, 3] x) => (float[2, 3] y) { y = Add(x, x) }")


pytestmark = pytest.mark.usefixtures("rtx")


def test_a_weight_budget_is_recorded_in_the_engine_file(tmp_path: Path) -> None:
    """F74."""
    path = tmp_path / "add.onnx"
    path.write_bytes(ADD)
    assert main([str(path), "--flag", "weight_streaming", "--weight-streaming-budget", "4096"]) == 0
    artifact = read_plan(path.with_suffix(".plan")).artifact
    assert artifact is not None
    assert artifact.options["weight_streaming_budget"] == 4096


def test_without_a_weight_budget_nothing_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "add.plan"
    path.write_bytes(build(ADD, BuildOptions(flags=("weight_streaming",))))
    artifact = read_plan(path).artifact
    assert artifact is not None
    assert "weight_streaming_budget" not in artifact.options


@pytest.mark.parametrize(("budget", "flags"), [(-1, ("weight_streaming",)), (5, ())])
def test_an_impossible_weight_budget_is_refused_before_the_build(budget: int, flags: tuple[str, ...]) -> None:
    """F74."""
    with pytest.raises(ValueError, match=f"weight_streaming_budget is {budget}; expected 0 or more, and the flag"):
        BuildOptions(flags=flags, weight_streaming_budget=budget)
