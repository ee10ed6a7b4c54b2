"""`greenlane curve` on this machine's cores, with a tiny model and a convolution; and what it says of mistakes."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engines import Work
from greenlane.__main__ import main
from greenlane.curve.command import name_of_file
from greenlane.curve.subject import Source
from greenlane.report import page as reported
from tests import models

Run = Callable[..., tuple[int, str, str]]

CONFIG = """
[device]
backend = "cpu"
cores = "{cores}"
[models]
repository = "models"
[tenants.acme]
cores = 1
models = ["*"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration `c.toml` on the first core, whose repository has `tiny`, and `conv`, which takes batches of up to 4."""
    root = tmp_path_factory.mktemp("curve")
    (root / "c.toml").write_text(CONFIG.format(cores=min(os.sched_getaffinity(0))))
    for name in ("tiny", "conv"):
        (root / "models" / name / "1").mkdir(parents=True)
    models.save(root / "models" / "tiny" / "1" / "model.onnx", "tiny (float[8] x) => (float[8] y) { y = Neg(x) }")
    conv(root / "models" / "conv" / "1" / "model.onnx")
    (root / "models" / "conv" / "config.pbtxt").write_text("max_batch_size: 4\n")
    return root


def conv(path: Path) -> None:
    weights = numpy_helper.from_array(np.full((8, 3, 3, 3), 0.1, np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", c, 32, 32]) for name, c in (("x", 3), ("y", 8)))
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)], "conv", [x], [y], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.fixture
def curve(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on that configuration: its exit status, and what it printed."""

    def run(*words: str, config: bool = True) -> tuple[int, str, str]:
        status = main(["curve", *words, *(["--config", str(folder / "c.toml")] if config else [])])
        return status, *capsys.readouterr()

    return run


def test_a_target_that_is_easy_is_kept_and_everything_is_written(curve: Run, tmp_path: Path) -> None:
    """The target is generous: what is tested is that it is measured and said, not how fast this machine is."""
    plot, html, document = (tmp_path / name for name in ("curve.png", "curve.html", "curve.json"))
    files = ["--plot", str(plot), "--html", str(html), "--json", str(document)]
    status, out, _ = curve("conv", "--batch", "2", "--rate", "400", "--p99", "10s", "--seconds", "2", *files)
    assert status == 0, out
    assert "conv, batch 2, on CPU, 1 core" in out
    assert "1 core of 1: the smallest share that keeps a p99 of 10000 ms at 400 requests a second" in out
    assert '[tenants.NAME]\ncores = 1\nmodels = ["conv"]\ntarget_p99 = "10000ms"\ntarget_rate = 400' in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    page = html.read_text()
    assert 'src="data:image/png;base64,' in page
    assert "http://" not in page
    found = json.loads(document.read_text())
    assert found["smallest"] == 1
    assert found["points"][0]["at_rate"]["requests"] >= 500
    assert found["points"][0]["requests_per_second"] > 400


def test_a_file_is_measured_without_a_configuration_and_json_alone_on_standard_output(curve: Run, folder: Path) -> None:
    path = folder / "models" / "tiny" / "1" / "model.onnx"
    status, out, err = curve(str(path), "--seconds", "0.2", "--json", "-", "--shares", "1g", config=False)
    assert status == 0
    assert json.loads(out)["points"][0]["granules"] == 1
    assert "requests/s" in err


def test_a_target_that_no_share_keeps_is_status_2_with_the_best_that_was_seen(curve: Run) -> None:
    status, out, _ = curve("tiny", "--rate", "800", "--p99", "1us", "--seconds", "1")
    assert status == 2
    assert "no share that was measured keeps a p99 of 1 us at 800 requests a second; the best was " in out


def test_a_rate_beyond_what_a_share_answers_is_overloaded_without_trying(curve: Run) -> None:
    status, out, _ = curve("conv", "--rate", "1e8", "--p99", "1ms", "--seconds", "0.2")
    assert status == 2
    assert "all are overloaded: 1 core answered " in out


def test_a_rate_without_a_p99_is_measured_and_no_share_is_chosen_for_it(curve: Run) -> None:
    status, out, _ = curve("tiny", "--rate", "50", "--seconds", "0.5")
    assert status == 0
    assert re.search(r"- +- +20  too few$", out, re.MULTILINE), out
    assert "no --p99 was given, so no share is chosen" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["konv"], "there is no model 'konv' in the repository of c.toml; did you mean 'conv'?"),
        (["absent.onnx"], "absent.onnx: there is no such file; expected a file, or a model's name in the repository"),
        (["c.toml"], "c.toml is no model; did you mean --config c.toml, and a model's name in its repository?"),
        (["conv", "--batch", "8"], "--batch 8: model conv takes up to 4 rows in one run (its max_batch)"),
        (["tiny", "--batch", "2"], "--batch 2: model tiny takes no batches; its inputs are x [8]"),
        (["conv", "--batch", "2", "--shape", "x:1x3x32x32"], "--batch 2: the shapes given for model conv have other rows: 1"),
        (["tiny", "--shape", "z:8"], "--shape z: model tiny has no such input; it has x"),
        (["tiny", "--shape", "x:9"], "dimension 0 of shape [9] is 9; expected 8"),
        (["tiny", "--shares", "1,64"], "--shares: 64 cores, but the device has 1"),
        (
            ["tiny", "--rate", "50", "--p99", "5s"],
            "50 requests a second are 8 in four fifths of --seconds 0.2 (the other fifth is for requests back to back and "
            "alone): too few for a p99, which takes 500; give --seconds 13",
        ),
        (["tiny", "--html", "/no/folder/x.html"], "/no/folder/x.html cannot be written: No such file or directory"),
        (["tiny", "--bandwidth"], "has no counters of what it moves; whole GPUs from Hopper on have"),
        (["tiny", "--json", "/"], "/ cannot be written: Is a directory"),
        (["tiny", "--shares", "2g"], "--shares: 2 granules, but the device has 1"),
    ],
)
def test_what_cannot_be_measured_is_status_2_and_a_sentence(curve: Run, words: list[str], said: str) -> None:
    status, out, err = curve(*words, "--seconds", "0.2")
    assert status == 2
    assert "requests/s" not in out, "no table was begun"
    assert said in err
    assert err.startswith("greenlane: ")
    assert len(err.splitlines()) == 1


def test_a_refused_run_leaves_no_new_file_and_keeps_an_old_one(curve: Run, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.html"
    old.write_text("{}")
    assert curve("tiny", "--shares", "64", "--html", str(new), "--json", str(old))[0] == 2
    assert old.read_text() == "{}"
    assert not new.exists()


def test_sizes_that_vary_have_to_be_said(curve: Run, folder: Path, tmp_path: Path) -> None:
    path = models.save(tmp_path / "any.onnx", "any (float[n, 3, m] x) => (float[n, 3, m] y) { y = Neg(x) }")
    status, _, err = curve(str(path))
    assert status == 2
    assert "sizes of its input x [n, 3, m] vary; say which to measure, as in --shape x:1x3x64" in err
    assert curve(str(path), "--shape", "x:2x3x4", "--seconds", "0.2")[0] == 0


def test_all_inputs_whose_sizes_have_to_be_said_are_named_at_once(curve: Run, tmp_path: Path) -> None:
    path = models.save(
        tmp_path / "two.onnx", "two (float[n, m] a, float[n] b, float[k, 2, l] c) => (float[n, m] y) { y = Neg(a) }"
    )
    _, _, err = curve(str(path))
    assert "its inputs a [n, m] and of c [k, 2, l] vary; say which to measure, as in --shape a:1x64 --shape c:1x2x64" in err
    _, _, err = curve(str(path), "--shape", "a:1x4")
    assert "its input c [k, 2, l] vary; say which to measure, as in --shape c:1x2x64" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give either a MODEL, by its name in the repository or its file, or --all"),
        (["tiny", "--all"], "give either a MODEL"),
        (["tiny", "--rate", "0"], "argument --rate: '0'; expected a number above 0"),
        (["tiny", "--seconds", "1e18"], "argument --seconds: '1e18'; expected a number above 0 and up to 1e9"),
        (["--all", "--target", "acme=1e400/5ms"], "expected a tenant, its requests a second above 0 and its p99"),
        (["tiny", "--p99", "5ms"], "--p99 needs a --rate"),
        (["tiny", "--rate", "9", "--p99", "5"], "argument --p99: '5'; expected a duration above 0 such as 500us, 5ms or 1.5s"),
        (["tiny", "--shares", "0"], "expected numbers of cores or SMs from 1 on"),
        (["tiny", "--shape", "x"], "'x' is no shape; expected INPUT:1x3x224x224"),
        (["tiny", "--mix", "a=1"], "--mix is for --all"),
        (["--all", "--bandwidth"], "--bandwidth is for one MODEL, not for --all"),
        (["--all", "--rate", "5"], "--rate is for one MODEL, not for --all; give a tenant's with --target NAME=800/5ms"),
        (
            ["--all", "--target", "acme=0/5ms"],
            "expected a tenant, its requests a second above 0 and its p99, as in acme=800/5ms",
        ),
    ],
)
def test_wrong_command_lines_have_a_status_that_no_target_has(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["curve", *words])
    assert ended.value.code == 64
    assert said in " ".join(capsys.readouterr().err.split())


def test_pictures_without_matplotlib_are_refused_before_anything_is_measured(
    curve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported, "find_spec", lambda _: None)
    status, out, err = curve("tiny", "--plot", "x.png")
    assert status == 2
    assert "--plot needs matplotlib, which is not installed; run scripts/install plots, or leave it out" in err
    assert out == ""


def test_a_configuration_that_cannot_be_read_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "tiny", "--config", str(tmp_path / "absent.toml")]) == 2
    assert "absent.toml: cannot be read" in capsys.readouterr().err


def test_ctrl_c_ends_it_with_nothing_in_flight(curve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while requests are sent, from the thread that sends them."""
    sent = []

    class Interrupting(Source):
        def enqueue(self) -> Work:
            sent.append(super().enqueue())
            if len(sent) == 10:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return sent[-1]

    monkeypatch.setattr("greenlane.curve.subject.Source", Interrupting)
    before = signal.getsignal(signal.SIGINT)
    assert curve("tiny", "--seconds", "60")[0] == 130
    assert all(work.wait() for work in sent)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("path", "name"), [("models/conv/1/model.onnx", "conv"), ("nets/conv.onnx", "conv"), ("1/model.plan", None)]
)
def test_a_file_of_a_repository_is_called_as_the_model_is_there(tmp_path: Path, path: str, name: str | None) -> None:
    assert name_of_file(tmp_path / path) == (name or tmp_path.name)
