import hashlib
import io
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engines.build import BuildOptions, build, build_cached, main
from engines.errors import Cancelled, ModelRefused
from engines.model_files.artifact import Artifact, read_plan, unpack
from engines.model_files.profiles import Profile, Range
from engines.tensorrt.api import TensorRT
from engines.tensorrt.building.builder import Job, PlanRequest, find_or_build, parser_errors
from engines.tensorrt.building.progress import BuildWatch, Step
from tests.models import PASSING, classifier

from .small import ADD, BATCHES, IMAGES, model

SIZES = Range((1, 3, 8, 8), (2, 3, 16, 16), (4, 3, 32, 32))
FIXED = Range((1, 3, 8, 8), (1, 3, 8, 8), (1, 3, 8, 8))


pytestmark = pytest.mark.usefixtures("rtx")


def made(onnx_model: bytes, options: BuildOptions = BuildOptions(), **others: Any) -> Artifact:  # noqa: B008
    """What the engine file of a model says."""
    artifact = unpack(build(onnx_model, options, **others), "model").artifact
    assert artifact is not None
    return artifact


def test_a_model_becomes_an_engine_file_that_says_what_it_takes_and_gives(rtx: TensorRT) -> None:
    data = model(IMAGES)
    artifact = made(data, BuildOptions((Profile({"x": SIZES}),)))
    assert str(artifact.signature) == "<Signature x FP32[-1, 3, -1, -1] -> y FP32[-1, 3, -1, -1], batch none>"
    assert artifact.signature.inputs[0].dims == artifact.signature.outputs[0].dims == ("batch", 3, "h", "w")
    assert artifact.profiles == (Profile({"x": SIZES}),)
    assert artifact.source == hashlib.sha256(data).hexdigest()
    assert (artifact.library, artifact.version, artifact.targets) == (rtx.library, rtx.version, ())
    assert artifact.options == {"optimization_level": 3, "max_aux_streams": 1, "flags": []}
    assert artifact.layers == 1


def test_a_placeholder_is_no_name_that_has_to_have_one_size() -> None:
    """The library refuses a profile in which dimensions of one name have sizes apart."""
    options = BuildOptions((Profile({"x": Range((1, 3, 48, 192), (1, 3, 48, 192), (4, 3, 48, 192))}),))
    with pytest.raises(ModelRefused, match="side"):
        build(classifier("n", 3, "side", "side"), options)
    signature = made(classifier("?", 3, "?", "?"), options).signature
    assert [spec.dims for spec in (*signature.inputs, *signature.outputs)] == [("", 3, "", ""), ("", 3)]


def test_builds_are_the_same_every_time() -> None:
    assert build(model(ADD)) == build(model(ADD))


def test_options_reach_the_library_and_are_recorded() -> None:
    options = BuildOptions(
        targets=("8.6", "12.0"), optimization_level=1, max_aux_streams=2, flags=("no_tf32", "weight_streaming")
    )
    artifact = made(model(ADD), options)
    assert artifact.targets == ("8.6", "12.0")
    assert artifact.options == {"optimization_level": 1, "max_aux_streams": 2, "flags": ["no_tf32", "weight_streaming"]}
    assert build(model(ADD), options) != build(model(ADD))


def test_an_engine_without_auxiliary_streams_is_refused_where_the_library_answers_wrongly_without(rtx: TensorRT) -> None:
    with pytest.raises(ModelRefused, match=r"max_aux_streams is 0; TensorRT-RTX .* needs 1 or more: without auxiliary streams"):
        build(model(ADD), BuildOptions(max_aux_streams=0))


@pytest.mark.parametrize(
    "options", [{"max_batch": 0}, {"optimization_level": 6}, {"optimization_level": -1}, {"max_aux_streams": -1}]
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, int]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name} is {value}; expected"):
        BuildOptions(**options)  # type: ignore[arg-type]


def test_several_profiles_are_built_in() -> None:
    options = BuildOptions((Profile({"x": SIZES}), Profile({"x": FIXED})))
    assert made(model(IMAGES), options).profiles == options.profiles
    with_one = build(model(IMAGES), BuildOptions((Profile({"x": SIZES}),)))
    assert len(build(model(IMAGES), options)) > len(with_one)


def test_an_engine_without_dynamic_inputs_has_as_many_profiles_as_its_file_says() -> None:
    one, two = (build(model(ADD), BuildOptions((Profile(sms=48),) * count)) for count in (1, 2))
    assert len(two) > 1.5 * len(one)


def test_dynamic_batches_get_a_default_profile_which_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "greenlane.engines"):
        artifact = made(model(BATCHES), BuildOptions(max_batch=4))
    assert artifact.profiles == (Profile({"x": Range((1, 4), (4, 4), (4, 4))}),)
    assert "profile 0: no range given for input 'x': built for 1x4..4x4..4x4" in caplog.messages


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (IMAGES, BuildOptions(), "input 'x' has dynamic dimensions besides the first"),
        (IMAGES, BuildOptions((Profile({"z": SIZES}),)), "profile 0: the model has no input 'z'; it has 'x'"),
        (ADD, BuildOptions(targets=("8.6", "9.0")), "TensorRT-RTX .* has no target 9.0; it has 7.5, 8.0, 8.6"),
        (ADD, BuildOptions(flags=("fp16",)), "TensorRT-RTX .* has no builder flag 'fp16'; it has .*, weight_streaming"),
        (
            "m (int64[2] s, float[6] x) => (float[a, b] y) { y = Reshape(x, s) }",
            BuildOptions(),
            "the values of input 's' decide shapes",
        ),
        (PASSING, BuildOptions(), "output 'x' has the name of an input, which a plan cannot have; rename one"),
        (
            "m (float[2] x) => (float[2] y) { t = Relu(x) y = Mystery(t) }",
            BuildOptions(),
            "node 1 \\(Mystery\\): Op type Mystery",
        ),
        ("m (string[2] x) => (string[2] y) { y = Identity(x) }", BuildOptions(), "input 'x': Failed to convert"),
    ],
)
def test_a_model_or_options_that_cannot_be_built_are_refused_with_the_reason(
    text: str, options: BuildOptions, why: str
) -> None:
    with pytest.raises(ModelRefused, match=f"^some/model.onnx: {why}"):
        build(model(text), options, path=Path("some/model.onnx"))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"junk", "not an ONNX file, or a truncated one: Failed to parse the ONNX model."),
        (model(IMAGES)[:40], "not an ONNX file, or a truncated one: Failed to parse the ONNX model."),
        (bytes(1000), "not an ONNX file, or a truncated one: it has no outputs"),
        (b"", "not an ONNX file (0 bytes)"),
    ],
)
def test_a_file_that_is_not_onnx_is_refused_as_such(data: bytes, why: str) -> None:
    with pytest.raises(ModelRefused) as caught:
        build(data)
    assert str(caught.value) == f"the model: {why}"


def test_nodes_are_named_where_the_model_names_them() -> None:
    proto = onnx.load_from_string(model("m (float[2] x) => (float[2] y) { y = Mystery(x) }"))
    proto.graph.node[0].name = "the culprit"
    with pytest.raises(ModelRefused, match="node 'the culprit' \\(Mystery\\): "):
        build(proto.SerializeToString())


def test_only_the_first_parser_errors_are_reported() -> None:
    error = SimpleNamespace(desc=lambda: "bad", node=lambda: -1, func=lambda: "f")
    assert parser_errors([error] * 3) == "bad; bad; bad"
    assert parser_errors([error] * 5) == "bad; bad; bad; and 2 more"


def test_a_failed_build_reports_the_library_s_first_error() -> None:
    with pytest.raises(ModelRefused, match=r"^the model: .") as refusal:
        build(model(ADD), BuildOptions(flags=("version_compatible",)))  # It needs a library that RTX does not come with.
    assert "cudaError" not in str(refusal.value)
    assert "the library gave no reason" not in str(refusal.value)


def test_doubles_are_served_as_floats_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    artifact = made(model("m (double[2] x) => (double[2] y) { y = Relu(x) }"))
    assert artifact.signature.inputs[0].datatype.name == "FP32"
    assert "'x' is FP64 in the ONNX; TensorRT-RTX" in caplog.text


def test_sizes_are_those_that_the_library_inferred() -> None:
    text = "m (float[2, 3] x, float[n, 3] d) => (float[guess, 3] y, float[m, k] i) { y = Relu(x) i = Relu(d) }"
    signature = made(model(text)).signature
    assert [spec.dims for spec in signature.outputs] == [(2, 3), ("m", 3)]
    proto = onnx.load_from_string(model(BATCHES))
    proto.graph.output[0].type.tensor_type.shape.dim[0].Clear()
    assert made(proto.SerializeToString()).signature.outputs[0].dims == ("", 4)


def save_with_weights(folder: Path, value: float) -> Path:
    """A model whose weights lie in a file beside it."""
    weights = numpy_helper.from_array(np.full((4, 4), value, np.float32), "w")
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", tensors[:1], tensors[1:], [weights])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "model.onnx"
    (folder / "weights").unlink(missing_ok=True)
    onnx.save(proto, str(path), save_as_external_data=True, location="weights", size_threshold=0)
    return path


def test_external_weights_are_found_and_part_of_the_source_digest(tmp_path: Path) -> None:
    path = save_with_weights(tmp_path, 1)
    artifact = made(path.read_bytes(), path=path)
    save_with_weights(tmp_path, 2)
    assert made(path.read_bytes(), path=path).source != artifact.source
    with pytest.raises(ModelRefused, match="Failed to import initializer"):
        build(path.read_bytes())


def test_progress_rises_and_a_build_can_be_cancelled() -> None:
    seen: list[Step] = []

    def watch(step: Step) -> bool:
        seen.append(step)
        return len(seen) < 5

    with pytest.raises(Cancelled, match=r"^the model: the build was cancelled"):
        build(model(ADD), progress=watch)
    assert len(seen) == 5
    assert [step.share for step in seen] == sorted(step.share for step in seen)


def test_an_error_in_the_progress_callback_ends_the_build() -> None:
    def fail(step: Step) -> bool:
        raise LookupError(step.phase)

    with pytest.raises(LookupError, match="Cloning network graph"):
        build(model(ADD), progress=fail)


def test_a_partition_that_cannot_be_tuned_for_is_recorded_and_logged(rtx: TensorRT, caplog: pytest.LogCaptureFixture) -> None:
    artifact = made(model(ADD), BuildOptions((Profile(sms=48),)), api=replace(rtx, features=rtx.features - {"profile_stream"}))
    assert artifact.profiles == (Profile(sms=48, tuned=False),)
    assert f"profile 0: recorded as meant for 48 SMs, but not tuned for them: {rtx} cannot" in caplog.text


def test_a_partition_without_a_stream_to_measure_on_is_recorded_and_logged(
    rtx: TensorRT, caplog: pytest.LogCaptureFixture
) -> None:
    made(model(ADD), BuildOptions((Profile(sms=48),)), api=replace(rtx, features=rtx.features | {"profile_stream"}))
    assert "not tuned for them: no partition to measure on" in caplog.text


def test_a_profile_is_tuned_on_a_stream_of_its_partition_where_the_library_can(rtx: TensorRT) -> None:
    """Only the library's object that takes the stream is replaced by a fake, as this version has none."""
    theirs = SimpleNamespace(profile_stream=0)
    added: list[object] = []
    api = replace(rtx, features=rtx.features | {"profile_stream"})
    job = Job(api, b"", BuildOptions(), None, {48: 0x1234}.__getitem__, None, BuildWatch(lambda step: True))
    builder = SimpleNamespace(create_optimization_profile=lambda: theirs)
    profile = job.add(builder, SimpleNamespace(add_optimization_profile=added.append), 0, Profile(sms=48))
    assert profile == Profile(sms=48, tuned=True)
    assert theirs.profile_stream == 0x1234
    assert added == [theirs]


def test_a_library_that_builds_for_its_own_gpu_has_no_targets(rtx: TensorRT) -> None:
    api = replace(rtx, features=rtx.features - {"compute_capabilities"})
    with pytest.raises(ModelRefused, match=r"has no target 8.6; it builds for the GPU it runs on"):
        build(model(ADD), BuildOptions(targets=("8.6",)), api=api)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(model(ADD))
    return path


def plans(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.suffix not in (".lock", ".source"))


def test_a_model_is_built_once_for_its_source_its_options_and_its_library(tmp_path: Path, source: Path, rtx: TensorRT) -> None:
    folder = tmp_path / "a" / "b"
    first = build_cached(source, folder)
    written = first.stat().st_mtime_ns, first.stat().st_ino
    assert build_cached(source, folder, api=rtx) == first
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == written
    assert first.read_bytes() == build(model(ADD), path=source)
    others = {
        build_cached(source, folder, BuildOptions(optimization_level=1)),
        build_cached(source, folder, device="H100"),
        build_cached(source, folder, BuildOptions((Profile(sms=8),))),
    }
    source.write_bytes(model(BATCHES))
    others.add(build_cached(source, folder))
    assert len(others | {first}) == 5
    assert plans(folder) == sorted(path.name for path in others | {first})
    assert all(re.fullmatch(r"model-[0-9a-f]{32}.plan", path.name) for path in others)


def test_another_version_or_platform_of_the_library_has_a_file_of_its_own(tmp_path: Path, source: Path, rtx: TensorRT) -> None:
    makers = [(rtx.library, rtx.version), (rtx.library, "0.1"), ("tensorrt", rtx.version)]
    requests = [PlanRequest(source, tmp_path, BuildOptions(), *maker) for maker in makers]
    assert len({find_or_build(request, build) for request in requests}) == 3


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_a_damaged_file_is_built_again(tmp_path: Path, source: Path, damage: bytes | None) -> None:
    path = build_cached(source, tmp_path / "plans")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] if damage is None else damage)
    assert build_cached(source, tmp_path / "plans") == path
    assert path.read_bytes() == whole


def test_builds_at_once_make_one_file_and_all_get_it(tmp_path: Path, source: Path) -> None:
    building = threading.Barrier(4)
    builds: list[Step] = []

    def get(_: int) -> Path:
        building.wait()
        return build_cached(source, tmp_path / "plans", progress=lambda step: builds.append(step) is None)

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(get, range(4)))
    assert plans(tmp_path / "plans") == [path.name for path in paths]
    assert len([step for step in builds if step == builds[0]]) == 1


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ModelRefused, match=r"nothing.onnx: No such file"):
        build_cached(tmp_path / "nothing.onnx", tmp_path)
    with pytest.raises(ModelRefused, match=r"model.onnx.*: (Not a directory|File exists)"):
        build_cached(source, source)


def test_the_command_writes_an_engine_file_and_says_so(source: Path, capsys: pytest.CaptureFixture[str], rtx: TensorRT) -> None:
    assert main([str(source)]) == 0
    output = source.with_suffix(".plan")
    shown = capsys.readouterr()
    assert re.fullmatch(f"{output}: [0-9,]+ bytes in [0-9.]+ s with {rtx}\n", shown.out)
    assert shown.err.startswith("  4% Cloning network graph\n")
    assert plans(source.parent) == ["model.onnx", "model.plan"]


def test_the_command_takes_profiles_targets_and_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "model.onnx", tmp_path / "out"
    path.write_bytes(model(IMAGES))
    shapes = ["--min", "x:1x3x8x8", "--opt", "x:2x3x16x16", "--max", "x:4x3x32x32"]
    rest = ["--target", "8.6, 12.0", "--flag", "no_tf32", "--optimization-level", "2", "--max-aux-streams", "1"]
    second = ["--profile", "--sms", "16", "--opt", "x:1x3x8x8"]
    assert main([str(path), "-o", str(output), *shapes, "--sms", "48", *second, *rest, "--library", "tensorrt_rtx"]) == 0
    artifact = read_plan(output).artifact
    assert artifact is not None
    assert artifact.profiles == (Profile({"x": SIZES}, 48), Profile({"x": FIXED}, 16))
    assert artifact.targets == ("8.6", "12.0")
    assert artifact.options == {"optimization_level": 2, "max_aux_streams": 1, "flags": ["no_tf32"]}
    assert "warning: profile 1: recorded as meant for 16 SMs, but not tuned" in capsys.readouterr().err


def test_the_commands_first_profile_may_be_begun_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model(BATCHES))
    assert main([str(path), "--profile", "--max", "x:2x4", "--profile", "--max-batch", "3"]) == 0
    artifact = read_plan(path.with_suffix(".plan")).artifact
    assert artifact is not None
    assert [profile.ranges["x"].max for profile in artifact.profiles] == [(2, 4), (3, 4)]
    assert "info: profile 1: no range given for input 'x': built for 1x4..3x4..3x4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--min", "x:1x"], "argument --min: 'x:1x' is no shape; expected NAME:1x3x224x224"),
        (["--min", "x:1", "--min", "x:2"], "argument --min: given twice for one profile; --profile begins another"),
        (["--sms", "1", "--sms", "2"], "argument --sms: given twice"),
        (["--library", "onnxruntime"], "invalid choice"),
        (["--max", "a:2x3", "--max-batch", "4"], "argument --max-batch: every profile has a --min, --opt or --max, which give"),
        (["--max-batch", "4", "--profile", "--min", "a:2x3", "--profile", "--opt", "a:2x3"], "argument --max-batch: every"),
    ],
)
def test_wrong_usage_exits_with_status_2(
    source: Path, arguments: Sequence[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(source), *arguments])
    assert end.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--target", "9.0"], "model.onnx: TensorRT-RTX .* has no target 9.0"),
        (["--optimization-level", "9"], "optimization_level is 9; expected 0 to 5"),
        (["--min", "c:1"], "profile 0: the model has no input 'c'; it has 'a', 'b'"),
        (["--max", "a:2x17"], r"^--max a:2x17: the model's input 'a' is \[2, 3\]$"),
        (["--max", "a:2x3", "--profile", "--opt", "b:8"], r"^--opt b:8: the model's input 'b' is \[2, 3\]$"),
        (["--max-batch", "0"], "max_batch is 0; expected 1 or more"),
        (["--sms", "4", "--profile", "--sms", "0"], "profile 1: sms is 0; expected 1 or more"),
        (["-o", "{source}/model.plan"], "model.onnx/model.plan: cannot be written: "),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_and_nothing_written(
    source: Path, arguments: Sequence[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), *(argument.format(source=source) for argument in arguments)]) == 1
    assert re.search(why, capsys.readouterr().err)
    assert plans(source.parent) == ["model.onnx"]


def test_a_directory_as_output_is_refused_before_the_build(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = source.parent / "gpu"
    folder.mkdir()
    assert main([str(source), "-o", str(folder)]) == 1
    expected = f"{folder}: is a directory; expected a file's name, such as {folder}/model.plan\n"
    assert capsys.readouterr().err == expected  # And so no progress is printed.


@pytest.mark.parametrize("name", ["model.onnx", "link.plan"])
def test_the_model_itself_as_output_is_refused_and_stays(source: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, output = source.read_bytes(), source.with_name(name)
    (source.parent / "link.plan").symlink_to(source)
    assert main([str(source), "-o", str(output)]) == 1
    assert capsys.readouterr().err == f"{output}: is the model itself; expected the name of another file\n"
    assert source.read_bytes() == before


def test_an_output_that_cannot_be_written_is_refused_before_the_build(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), "-o", "/proc/a/model.plan"]) == 1
    assert capsys.readouterr().err == "/proc/a/model.plan: cannot be written: No such file or directory: /proc\n"


def test_a_missing_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "model.onnx")]) == 1
    assert "model.onnx: No such file" in capsys.readouterr().err


class Interrupting(io.StringIO):
    """A terminal that sends Ctrl-C as soon as `sign` is printed."""

    def __init__(self, sign: str) -> None:
        super().__init__()
        self._sign = sign

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._sign in text:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_ends_a_build_with_130_and_writes_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Interrupting("Optimizing graph")
    monkeypatch.setattr(sys, "stderr", screen)
    before = signal.getsignal(signal.SIGINT)
    assert main([str(source)]) == 130
    assert screen.getvalue().endswith(f"\r\x1b[K{source}: the build was cancelled\n")
    assert signal.getsignal(signal.SIGINT) is before
    assert plans(source.parent) == ["model.onnx"]


@pytest.mark.parametrize("name", ["build", "inspect"])
def test_the_commands_explain_themselves_without_the_extra_that_they_need(name: str) -> None:
    run = f"runpy.run_module('engines.{name}', run_name='__main__')"
    command = [sys.executable, "-c", f"import runpy, sys; sys.modules['filelock'] = None; sys.argv[1:] = ['--help']; {run}"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: python -m engines.{name}" in done.stdout


def test_the_commands_run_as_modules_and_explain_themselves() -> None:
    for name, word in (("build", "--min"), ("inspect", "FILE.plan")):
        command = [sys.executable, "-m", f"engines.{name}", "--help"]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
        assert word in done.stdout
        assert not done.stderr
