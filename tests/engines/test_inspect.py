import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.datatypes import DATATYPES
from engines.errors import ModelRefused
from engines.inspect import engine_report, engine_rows, file_rows, main
from engines.model_files.artifact import Artifact, PlanFile, unpack
from engines.model_files.profiles import Profile, Range
from engines.signature import Signature, TensorSpec
from engines.tensorrt.api import find_tensorrt
from engines.tensorrt.building.builder import BuildOptions, build

from .small import BATCHES, model

SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("batch", 3, "")),), (TensorSpec("y", DATATYPES["INT8"], (2,)),))


def artifact(version: str = "1", facts: dict[str, int] | None = None) -> Artifact:
    profiles = (Profile({"x": Range((1, 3, 1), (2, 3, 2), (4, 3, 4))}, 48),)
    return Artifact(
        "tensorrt_rtx", version, ("8.6",), "5ea1", SIGNATURE, profiles, {"max_aux_streams": 0}, 7, facts, "linux x86_64"
    )


def test_everything_that_the_file_says_is_shown() -> None:
    facts = {"auxiliary_streams": 0, "device_memory": 1_048_576}
    rows = list(file_rows(PlanFile(memoryview(b"plan"), artifact(facts=facts))))
    assert rows == [
        ("plan", "4 bytes"),
        ("library", "tensorrt_rtx 1, on linux x86_64"),
        ("source", "sha256 5ea1"),
        ("targets", "8.6"),
        ("options", "max_aux_streams 0"),
        ("network", "7 layers"),
        ("input", "x FP32 [batch, 3, ?]"),
        ("output", "y INT8 [2]"),
        ("profile 0", "x 1x3x1..2x3x2..4x3x4; meant, but not tuned, for 48 SMs"),
        ("at build", "auxiliary streams 0, device memory 1,048,576"),
    ]


def test_a_plan_says_what_others_it_shares_kernels_with() -> None:
    rows = [dict(file_rows(PlanFile(memoryview(b""), replace(artifact(), source=source, structure="1a7e")))) for source in "12"]
    assert rows[0]["kernels"] == rows[1]["kernels"]
    assert re.fullmatch("of sha256 [0-9a-f]{64}; plans with the same share them", rows[0]["kernels"])


def test_inspect_says_that_no_gpu_was_available_at_build() -> None:
    assert list(file_rows(PlanFile(memoryview(b""), artifact())))[-1] == ("at build", "no GPU was available to load the engine")


def test_a_bare_plan_says_nothing() -> None:
    rows = list(file_rows(PlanFile(memoryview(b"plan"), None)))
    assert rows == [("plan", "4 bytes, bare: only the library that built it can say what it holds")]


def test_an_engine_is_shown_with_its_tensors() -> None:
    engine = SimpleNamespace(
        num_layers=2,
        num_io_tensors=1,
        get_tensor_name=lambda index: "xyz"[index],
        get_tensor_mode=lambda name: SimpleNamespace(name="INPUT"),
        get_tensor_dtype=lambda name: SimpleNamespace(name="FLOAT"),
        get_tensor_shape=lambda name: (-1, 3),
    )
    assert list(engine_rows(engine)) == [("engine", "layers 2"), ("input", "x FLOAT [-1, 3]")]


@pytest.fixture(scope="module")
def library() -> str:
    try:
        return str(find_tensorrt())
    except ModelRefused as refusal:
        pytest.skip(str(refusal))


def test_a_real_plan_is_shown_and_why_its_engine_could_not_be_asked(
    tmp_path: Path, library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.plan"
    path.write_bytes(build(model(BATCHES), BuildOptions(max_batch=4)))
    assert main([str(path)]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["file"] == f"{path}, {path.stat().st_size:,} bytes"
    assert shown["input"] == "x FP32 [batch, 4]"
    assert shown["output"] == "y FP32 [batch, 4]"
    assert shown["profile"] == "0    x 1x4..4x4..4x4"
    assert shown["installed"] == library


def test_a_bare_plan_of_another_version_is_judged_by_the_library(library: str) -> None:
    rows = dict(engine_report(PlanFile(memoryview(b"junk" * 100), None)))
    assert rows["validity"] == "INVALID: MALFORMED_ENGINE"
    assert f"the plan: {library} cannot load it: " in rows["engine"]


def test_an_engine_file_of_another_version_is_not_handed_to_the_library(library: str) -> None:
    data = artifact("0.1").pack(unpack(build(model(BATCHES)), "model").plan)
    rows = dict(engine_report(unpack(data, "model.plan")))
    assert "built with tensorrt_rtx 0.1, but this is" in rows["engine"]


def _uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt_rtx", "tensorrt_rtx_bindings", "tensorrt", "tensorrt_bindings"):
        monkeypatch.setitem(sys.modules, name, None)


def test_inspect_without_a_library_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _uninstall(monkeypatch)
    rows = dict(engine_report(PlanFile(memoryview(b"plan"), None)))
    assert rows["engine"].startswith("not loaded: no TensorRT is installed; run scripts/install cpu,rtx (or cpu,tensorrt)")


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command prints instead of a description."""
    assert main([str(path)]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(tmp_path / "model.plan", capsys) == "No such file or directory"


@pytest.mark.parametrize("content", [b"x", b"\0" * 100, b"not a plan\n" * 100])
def test_a_file_that_can_be_no_plan_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "model.plan"
    path.write_bytes(content)
    assert refused(path, capsys).startswith("not an engine file; expected what `greenlane build` makes")


def test_an_empty_or_cut_file_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.plan"
    path.write_bytes(b"")
    assert refused(path, capsys).startswith("empty; ")
    path.write_bytes(artifact().pack(b"plan")[:-1])
    assert refused(path, capsys).startswith("the engine file is truncated: ")


def test_inspect_distinguishes_an_onnx_model_from_garbage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model(BATCHES))
    assert refused(path, capsys).startswith("an ONNX model; expected what `greenlane build` makes of an ONNX model")


@pytest.mark.parametrize("magic", [b"ftrt", b"vtrt"])
def test_a_bare_plan_of_either_library_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], magic: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    _uninstall(monkeypatch)
    path = tmp_path / "model.plan"
    path.write_bytes(magic)
    assert main([str(path)]) == 0
    assert "4 bytes, bare: only the library" in capsys.readouterr().out


def test_without_a_library_an_engine_file_still_says_what_it_takes_and_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _uninstall(monkeypatch)
    path = tmp_path / "model.plan"
    path.write_bytes(artifact().pack(b"p"))
    assert main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "plan         1 byte\n" in shown
    assert "input        x FP32 [batch, 3, ?]" in shown
    assert "engine       not loaded: no TensorRT is installed; run scripts/install cpu,rtx (or cpu,tensorrt)" in shown
