import logging
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.errors import ModelRefused
from engines.settings import RuntimeSettings
from engines.tensorrt.api import (
    Message,
    TensorRT,
    clean_message,
    collect_messages,
    engine_facts,
    find_tensorrt,
    first_error,
    on_message,
)

NO_DRIVER = "CUDA driver version is insufficient"


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    modules = ["engines.settings", "engines.model_files.artifact", "engines.build", "engines.inspect", "engines.tensorrt.api"]
    program = (
        f"import sys, {', '.join(modules)}; sys.exit(any('tensorrt' in m.split('.')[0] or m == 'cuda' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3]).returncode == 0


def test_the_library_says_what_it_is_and_what_it_can_do(rtx: TensorRT) -> None:
    assert rtx.library == "tensorrt_rtx"
    assert rtx.version == rtx.module.__version__
    assert str(rtx) == f"TensorRT-RTX {rtx.version}"
    assert {"cuda_graph_strategy", "cache_path", "compute_capabilities", "engine_validity"} <= rtx.features
    asked = RuntimeSettings(cuda_graph_strategy="whole_graph_capture")
    assert asked.effective(str(rtx), rtx.features) == asked


def test_a_library_that_is_not_installed_is_refused_with_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.11: cannot open shared object file')")
    (tmp_path / "tensorrt_bindings.py").write_text("raise ImportError('for another Python')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ModelRefused, match=r"run scripts/install cpu,rtx.*tensorrt: libnvinfer.so.11.*tensorrt_bindings: for another"
    ):
        find_tensorrt(["tensorrt"])


BARE = """
__version__ = "8.6.1"
class ILogger: pass
class IRuntimeConfig: pass
class ComputeCapability: pass
"""


def test_features_are_found_by_name_in_the_first_library_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt_bindings.py").write_text(BARE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        api = find_tensorrt(["tensorrt", "tensorrt_rtx"])
    finally:
        sys.modules.pop("tensorrt_bindings", None)
    assert str(api) == "TensorRT 8.6.1"
    assert api.features == {"runtime_config"}
    assert api.targets() == {}
    assert api.validity(b"plan") == ("UNKNOWN", ())


def test_targets_are_compute_capabilities(rtx: TensorRT) -> None:
    targets = rtx.targets()
    assert {"8.6", "12.0"} <= targets.keys()
    assert targets["12.0"] is rtx.module.ComputeCapability.SM120
    assert all(target.replace(".", "").isdigit() for target in targets)


def test_types_have_the_protocols_names_or_are_refused_with_the_tensors(rtx: TensorRT) -> None:
    types = rtx.module.DataType
    names = {
        member: rtx.datatype("x", member).name for member in (types.FLOAT, types.HALF, types.BF16, types.INT64, types.BOOL)
    }
    assert list(names.values()) == ["FP32", "FP16", "BF16", "INT64", "BOOL"]
    with pytest.raises(ModelRefused, match="tensor 'x' has type FP8, which the protocol does not have"):
        rtx.datatype("x", types.FP8)


def test_bytes_that_are_no_plan_are_refused(rtx: TensorRT) -> None:
    with pytest.raises(ModelRefused, match=f"^model.plan: {rtx} cannot load it: .") as refusal:
        rtx.deserialize(b"junk" * 100, "model.plan")
    assert "the library gave no reason" not in str(refusal.value)
    assert rtx.validity(b"junk" * 100) == ("INVALID", ("MALFORMED_ENGINE",))
    assert rtx.facts(b"junk" * 100) is None


def test_facts_are_what_the_engine_says() -> None:
    engine = SimpleNamespace(num_layers=3, num_aux_streams=1, device_memory_size_v2=4096)
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
    api = TensorRT(SimpleNamespace(Runtime=lambda logger: runtime), "tensorrt", "11", frozenset(), None)
    assert api.facts(b"plan") == {"layers": 3, "auxiliary_streams": 1, "device_memory": 4096}
    assert engine_facts(SimpleNamespace()) == {}


def test_several_reasons_are_decoded() -> None:
    members = {"VERSION_MISMATCH": 1, "UNSUPPORTED_CC": 2, "OLD_CUDA_DRIVER": 4}
    verdict: Any = (SimpleNamespace(name="INVALID"), 6)
    module = SimpleNamespace(
        Runtime=lambda logger: SimpleNamespace(get_engine_validity=lambda plan: verdict),
        EngineInvalidityDiagnostics=SimpleNamespace(__members__=members),
    )
    api = TensorRT(module, "tensorrt_rtx", "1.7", frozenset({"engine_validity"}), None)
    assert api.validity(b"plan") == ("INVALID", ("UNSUPPORTED_CC", "OLD_CUDA_DRIVER"))


def test_messages_are_collected_whichever_logger_the_library_keeps(rtx: TensorRT) -> None:
    held = rtx.module.Runtime(rtx.logger)  # From now on the library ignores other loggers.
    other = find_tensorrt(["tensorrt_rtx"])
    assert other.logger is not rtx.logger
    with pytest.raises(ModelRefused) as refusal:
        other.deserialize(b"junk" * 100, "model.plan")
    assert "the library gave no reason" not in str(refusal.value)
    del held


def test_messages_are_collected_by_the_thread_that_caused_them() -> None:
    with collect_messages() as outer:
        on_message("ERROR", "one")
        thread = threading.Thread(target=on_message, args=("ERROR", "elsewhere"))
        thread.start()
        thread.join()
        with collect_messages() as inner:
            on_message("INFO", "two")
        on_message("WARNING", "three")
    assert outer == [("ERROR", "one"), ("WARNING", "three")]
    assert inner == [("INFO", "two")]


def test_uncollected_messages_are_logged_and_verbose_ones_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "greenlane.tensorrt"):
        on_message("INTERNAL_ERROR", "100 % wrong")
        on_message("VERBOSE", "tactic 17")
        on_message(
            "WARNING", "The logger passed into createInferRuntime differs from one already registered for an existing builder"
        )
        on_message("INFO", "loaded")
    assert [(record.levelname, record.message) for record in caplog.records] == [("ERROR", "100 % wrong"), ("INFO", "loaded")]


def test_the_first_error_is_the_reason_and_not_the_noise_after_it() -> None:
    messages = [Message("WARNING", "slow"), Message("INTERNAL_ERROR", "first"), Message("ERROR", "cudaError 35")]
    assert first_error(messages) == "first"
    assert first_error([]) == "the library gave no reason"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (Network has dynamic or shape inputs, but no "
            "optimization profile has been defined. In validate at /_src/optimizer/api/network.cpp:3890)",
            "API Usage Error (Network has dynamic or shape inputs, but no optimization profile has been defined.)",
        ),
        (
            "IRuntime::deserializeCudaEngine: Error Code 1: Cuda Runtime (In ScopedCudaStream at /_src/a.cpp:25 (cudaError 35: "
            f"{NO_DRIVER} for CUDA runtime version))",
            f"Cuda Runtime (cudaError 35: {NO_DRIVER} for CUDA runtime version)",
        ),
        ('Assertion failed: convert(t, &u) && "Failed to convert."', "Failed to convert."),
        ("Op type Foo is not\n supported", "Op type Foo is not supported"),
        ("In summary: no", "In summary: no"),
    ],
)
def test_clean_message_removes_source_files_and_conditions(said: str, expected: str) -> None:
    assert clean_message(said) == expected
