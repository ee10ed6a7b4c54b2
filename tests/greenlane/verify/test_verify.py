"""`greenlane verify`: which shapes, what is said of them, and the exit status."""

import json
from pathlib import Path

import pytest

from engines import ModelRefused, load_engine
from greenlane.__main__ import main
from greenlane.verify.command import ends, grid
from tests.models import save

ANY = "any (float[n, s, 2] x, float[n, s] w) => (float[n, s, 2] y) { y = Relu(x) }"
FREE = "free (float[n, m] x) => (float[n, m] y) { y = Neg(x) }"
WIDE = "wide (float[n, a] x, float[n, b] w, float[n, c] v) => (float[n, a] y) { y = Neg(x) }"
ROWS = "rows (float[n, 4] x) => (float[n, 4] y) { y = Tanh(x) }"
CENTRED = "centred (float[n, 4] x) => (float[n, 4] y) { m = ReduceMean<axes = [0], keepdims = 1>(x) y = Sub(x, m) }"
NEVER = "never (float[n, 4] x) => (float[n, 4] y) { z = Sub(x, x) y = Div(z, z) }"
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [ {
  model_name: "rows" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
} ] }
"""
CONFIG = """
[device]
backend = "cpu"
[models]
repository = "models"
[models.rows]
max_batch = 4
[tenants.acme]
cores = 1
models = ["*"]
"""


def test_the_grid_has_its_ends_and_one_size_for_each_name(tmp_path: Path) -> None:
    signature = load_engine(save(tmp_path / "m.onnx", ANY)).signature
    least, most = ends(signature, {"x": (1, 3, 2), "w": (1, 3)}, {"x": (4, 9, 2), "w": (4, 9)})
    whole = grid(signature, least, most, 1000, 0)
    assert len(whole) == len(set(whole)) == 4 * 7
    assert all(w == x[:2] for x, w in whole)
    some = grid(signature, least, most, 10, 0)
    assert len(some) == 10
    assert (some[0], some[-1]) == (whole[0], whole[-1])
    assert some == grid(signature, least, most, 10, 0) != grid(signature, least, most, 10, 1)
    assert [len(grid(signature, least, most, count, 0)) for count in (1, 2, 3)] == [1, 2, 3]


def test_a_grid_of_more_shapes_than_memory_holds_is_sampled(tmp_path: Path) -> None:
    signature = load_engine(save(tmp_path / "m.onnx", WIDE)).signature
    names, most = [spec.name for spec in signature.inputs], 999_999_999
    every = grid(signature, *ends(signature, dict.fromkeys(names, (1, 1)), dict.fromkeys(names, (1, most))), 3, 0)
    assert len(every) == 3
    assert (every[0], every[-1]) == (((1, 1),) * 3, ((1, most),) * 3)


@pytest.mark.parametrize(
    ("least", "text"),
    [
        ({}, r"sizes of input x \[n, s, 2\] vary"),
        ({"z": (1,)}, "no input 'z'"),
        ({"x": (1, 3)}, r"x:1x3: the model's input is"),
    ],
)
def test_shapes_that_the_model_does_not_have_are_refused(tmp_path: Path, least: dict[str, tuple[int, ...]], text: str) -> None:
    signature = load_engine(save(tmp_path / "m.onnx", ANY)).signature
    with pytest.raises(ModelRefused, match=text):
        ends(signature, least, least)


def verified(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["verify", *words])
    return status, "".join(capsys.readouterr())


@pytest.fixture
def config(tmp_path: Path) -> list[str]:
    for name, source in {"rows": ROWS, "centred": CENTRED, "never": NEVER, "free": FREE}.items():
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        save(tmp_path / "models" / name / "1" / "model.onnx", source)
    (tmp_path / "models" / "both" / "1").mkdir(parents=True)
    (tmp_path / "models" / "both" / "config.pbtxt").write_text(ENSEMBLE)
    (tmp_path / "c.toml").write_text(CONFIG)
    return ["--config", str(tmp_path / "c.toml")]


def test_a_model_of_the_repository_is_right_up_to_its_largest_batch(
    config: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = verified(capsys, "rows", *config, "--json", str(tmp_path / "out.json"))
    assert status == 0, said
    assert "4 shapes: 4 right, 0 wrong, 0 unverified" in said
    assert "rows do not depend on each other: they may be joined" in said
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["compared"], found["wrong"], found["rows_depend"], found["precision"]) == (4, 0, None, "FP32")
    assert [each["shapes"] for each in found["shapes"]] == [[[rows, 4]] for rows in range(1, 5)]


def test_rows_that_depend_on_each_other_are_status_1(config: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, said = verified(capsys, "centred", *config)
    assert status == 1
    assert "rows depend on each other: output 'y'" in said
    assert "requests must not be joined" in said


def test_a_model_without_finite_answers_is_status_2(config: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, said = verified(capsys, "never", *config, "--shape", "x:2x4")
    assert status == 2
    assert "2x4                             -  unverified: model.onnx: its answers to random inputs are not finite" in said
    assert "1 shape: 0 right, 0 wrong, 1 unverified" in said
    assert "whether rows depend on each other is not known" in said


def test_json_alone_is_on_standard_output(config: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "models" / "rows" / "1" / "model.onnx")
    assert main(["verify", path, *config, "--from", "x:1x4", "--to", "x:3x4", "--seconds", "0.000001", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["compared"] == 1
    assert "2 shapes were not compared" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["row"], "there is no model 'row' in the repository"),
        (["no.onnx"], "there is no such file"),
        (["rows", "--shape", "x:2x5"], "--shape: input 'x'"),
        (["free", "--shape", "x:999999999x999999999"], "there is no memory for such shapes; give smaller ones"),
        (["rows", "--shape", "y:2x4"], "--shape: there is no input 'y'; the model has x"),
        (["free", "--from", "x:8x4", "--to", "x:1x9"], "there is no size from 8 to 1, as --from and --to say of a dimension"),
        (["both"], "model both is an ensemble; compare its steps: rows"),
        (["never", "--json", "/absent/file"], "/absent/file cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_verified_is_status_2(
    words: list[str], text: str, config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = verified(capsys, *words, *config)
    assert status == 2
    assert text in said


@pytest.mark.parametrize(
    "words", [["m", "--from", "x:1x4"], ["m", "--from", "x:1", "--to", "y:2"], ["m", "--shape", "x"], ["m", "--count", "0"]]
)
def test_a_wrong_command_line_is_status_64(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *words])
    assert ended.value.code == 64
