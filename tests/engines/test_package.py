import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from engines import ModelRefused, load_engine
from tests import models
from tests.fakes import FakeDevice


@pytest.mark.parametrize(
    ("name", "what"),
    [("model.pt", ".pt"), ("model.ONNX", ".ONNX"), ("model", "files without a suffix"), (".onnx", "files without")],
)
def test_a_file_that_no_engine_reads_is_refused_with_what_is_read(name: str, what: str) -> None:
    with pytest.raises(ModelRefused) as caught:
        load_engine(name)
    assert str(caught.value).startswith(f"{name}: no engine reads {what}")
    assert "expected .onnx or .plan" in str(caught.value)


@pytest.mark.parametrize(("name", "expected"), [("model.onnx", "cuda or cpu"), ("model.plan", "cuda")])
def test_a_device_that_no_engine_serves_from_is_refused_with_those_that_are(name: str, expected: str) -> None:
    with pytest.raises(ModelRefused) as caught:
        load_engine(name, FakeDevice())
    served = f"no engine serves {Path(name).suffix} from a device of kind 'fake'"
    assert str(caught.value) == f"{name}: {served}; expected {expected}"


def test_a_plan_is_refused_on_a_cpu_with_what_to_serve_there() -> None:
    with pytest.raises(ModelRefused, match="a plan needs a GPU, and this is a CPU; serve the ONNX file it was built from"):
        load_engine("model.plan")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_named_by_text_or_path(tmp_path: Path, kind: type[str] | type[Path]) -> None:
    engine = load_engine(kind(models.save(tmp_path / "model.onnx", models.identity())))
    assert engine.platform == "onnxruntime_onnx"


def test_without_onnx_runtime_a_model_for_it_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "engines.onnxruntime.engine", raising=False)
    with pytest.raises(ModelRefused, match=r"model\.onnx: ONNX Runtime is not installed; run scripts/install cpu"):
        load_engine("model.onnx")


@pytest.mark.skipif(find_spec("tensorrt_rtx_bindings") is None, reason="needs the rtx extra")
def test_what_serves_from_a_gpu_is_imported_before_processes_are_forked_without_a_thread_that_they_would_lack() -> None:
    """In another process, as it stays imported."""
    code = """
import os, sys
import numpy  # Which has threads of its own, and forks with them.
import engines
before = len(os.listdir("/proc/self/task"))
engines.preload()
print("tensorrt_rtx_bindings" in sys.modules, "partitions.cuda.device" in sys.modules)
print(len(os.listdir("/proc/self/task")) - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["True True", "0"]


@pytest.mark.parametrize("library", ["raise RuntimeError('no such symbol')", ""])
def test_a_library_that_is_broken_or_a_folder_of_its_name_does_not_end_what_processes_are_forked_from(
    tmp_path: Path, library: str
) -> None:
    """Those of a server on cores too, where there is a driver. Without code the folder is imported as an empty package."""
    (tmp_path / "tensorrt_rtx").mkdir()
    if library:
        (tmp_path / "tensorrt_rtx/__init__.py").write_text(library)
    code = "import sys, engines; engines.preload(); print('tensorrt_rtx' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == f"{not library}"
