"""`greenlane verify` on a simulated GPU: a shape that the library answers wrongly is found."""

import json
from pathlib import Path

import pytest

from greenlane.__main__ import main
from tests.engines.simulated import AFFINE, ROWS
from tests.engines.small import model
from tests.greenlane.curve.test_on_gpu import CONFIG
from tests.simulation import Gpu, installed
from tests.simulation.gpu import every_third
from tests.simulation.plans import make_plan
from tests.simulation.tensorrt import library

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "affine.plan").write_bytes(make_plan(model(AFFINE), ROWS))
    (tmp_path / "affine.onnx").write_bytes(model(AFFINE))
    (tmp_path / "models").mkdir()
    (tmp_path / "c.toml").write_text(CONFIG)
    return ["verify", str(tmp_path / "affine.plan"), "--config", str(tmp_path / "c.toml")]


def test_a_shape_that_is_answered_wrongly_is_status_1(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    gpu = Gpu()
    gpu.wrong_for = lambda shapes: shapes[0][0] == 5
    with installed(gpu, library(gpu)):
        status = main([*words, "--from", "x:1x3", "--to", "x:8x3", "--json", "-"])
    out, err = capsys.readouterr()
    assert status == 1, err
    found = json.loads(out)
    assert [each["shapes"] for each in found["shapes"] if each["verdict"] == "wrong"] == [[[5, 3]]]
    assert (found["compared"], found["wrong"], found["precision"]) == (8, 1, "TF32")
    assert found["shapes"][4]["route"] == [[6, 3]]
    assert "5x3 would run with 6x3" in err
    assert "wrong: output y" in err


def test_a_shape_that_is_answered_rightly_now_and_then_is_wrong(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    gpu = Gpu()
    gpu.wrong_for = every_third(lambda shapes: shapes[0][0] == 5)
    with installed(gpu, library(gpu)):
        status = main([*words, "--shape", "x:5x3", "--shape", "x:6x3", "--json", "-"])
    out, err = capsys.readouterr()
    assert status == 1, err
    unsteady, right = json.loads(out)["shapes"]
    assert (unsteady["verdict"], unsteady["runs"]) == ("wrong", 16)
    assert unsteady["why"].startswith("output 'y' is unsteady: it differs by ")
    assert unsteady["spread"] > 0.01 > 0 == right["spread"]
    assert right["verdict"] == "right"


def test_a_wrong_shape_says_nothing_of_rows(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    gpu = Gpu()
    gpu.wrong_for = lambda shapes: shapes[0][0] == 2
    with installed(gpu, library(gpu)):
        main([*words, "--shape", "x:2x3", "--json", "-"])
    out, _ = capsys.readouterr()
    assert json.loads(out)["rows_depend"] is None
    assert json.loads(out)["rows_unknown"] is None


def test_a_plan_without_its_onnx_file_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path(words[1]).with_suffix(".onnx").unlink()
    gpu = Gpu()
    with installed(gpu, library(gpu)):
        status = main(words)
    assert status == 2
    assert "there is no affine.onnx beside it" in capsys.readouterr().err
