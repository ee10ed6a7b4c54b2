import warnings
from pathlib import Path
from typing import Any

import pytest

from engines import DATATYPES, ModelRefused, Signature, TensorSpec, load_engine, unsupported
from engines.settings import ONNX_RUNTIMES, RuntimeSettings, streaming_budget, unsupported_by
from tests import models

PLAN = Path("folder/model.plan")
EVERYTHING = {
    "cuda_graph_strategy": "whole_graph_capture",
    "dynamic_shapes_kernel_specialization_strategy": "lazy",
    "allocation_strategy": "user_managed",
    "cache_path": "kernels",
    "weight_streaming_budget": 1,
    "intra_op_threads": 2,
    "inter_op_threads": 2,
    "execution_mode": "parallel",
    "graph_optimization": "none",
    "memory_arena": False,
    "memory_pattern": False,
    "memory_limit": 1,
    "trial_limit": 1,
}
"""Every setting that needs support by the library, changed from its default."""


def test_the_defaults_are_those_for_serving() -> None:
    """F41: kernels that a graph of ours may keep, graphs of ours and none of the library's, a file beside the plan."""
    settings = RuntimeSettings()
    assert settings.graphs == "on"
    assert settings.cuda_graph_strategy == "disabled"
    assert settings.dynamic_shapes_kernel_specialization_strategy == "eager"
    assert settings.allocation_strategy == "static"
    assert settings.copies == "sm"
    assert settings.profile is None
    assert settings.weight_streaming_budget is None
    assert settings.cache_file(PLAN) == Path("folder/model.plan.cache")


@pytest.mark.parametrize(
    ("name", "value", "choice"),
    [
        ("cuda_graph_strategy", "whole", "'whole_graph_capture'"),
        ("dynamic_shapes_kernel_specialization_strategy", "EAGER", "'eager'"),
        ("allocation_strategy", None, "'on_profile_change'"),
        ("copies", "", "'engine'"),
        ("graphs", "yes", "'required'"),
        ("cache_path", 3, "a path"),
        ("profile", -1, "a profile's number from 0"),
        ("profile", True, "a profile's number from 0"),
        ("weight_streaming_budget", -1, "bytes from 0"),
        ("weight_streaming_budget", True, "bytes from 0"),
        ("weight_streaming_budget", "1GiB", "bytes from 0"),
        ("memory_limit", -1, "bytes from 0"),
        ("trial_limit", -1, "seconds from 0"),
        *(
            ("warm_up", value, "'usual', or a tuple of batch sizes")
            for value in ("all", (), [1], (0,), (True,), (((),),), None)
        ),
        ("warm_up", ((("x", (0, 3)),),), "shapes by input"),
        ("warm_up", ((("x", [1, 3]),),), "shapes by input"),
        ("batch_padding", 1, "True or False"),
        ("memory_arena", 0, "True or False"),
        ("intra_op_threads", -1, "a number of threads"),
        ("inter_op_threads", None, "a number of threads"),
        ("execution_mode", "both", "'parallel'"),
        ("graph_optimization", 99, "'extended'"),
        ("optional_inputs", "x", "a tuple of names"),
        ("optional_inputs", (1,), "a tuple of names"),
        ("usual_shapes", (("x", (-2,)),), "a tuple of names with sizes"),
        ("usual_shapes", {"x": (1,)}, "a tuple of names with sizes"),
    ],
)
def test_a_wrong_value_is_refused_with_the_field_the_value_and_the_choices(name: str, value: object, choice: str) -> None:
    """F39, F74: when settings are made, whatever the backend."""
    with pytest.raises(ValueError, match=name) as refusal:
        RuntimeSettings(**{name: value})  # type: ignore[arg-type]
    assert f"{name} is {value!r}; expected" in str(refusal.value)
    assert choice in str(refusal.value)


def test_settings_cannot_be_changed_in_place() -> None:
    """F40."""
    with pytest.raises(AttributeError):
        RuntimeSettings().copies = "sm"  # type: ignore[misc]


def test_merging_gives_new_settings_and_leaves_the_old() -> None:
    old = RuntimeSettings()
    new = old.merge(copies="auto", weight_streaming_budget=0)
    assert (old.copies, new.copies, new.weight_streaming_budget) == ("sm", "auto", 0)
    assert new != old
    assert new == RuntimeSettings(copies="auto", weight_streaming_budget=0)
    assert new.merge() == new


def test_merging_checks_values() -> None:
    with pytest.raises(ValueError, match="copies is 'dma'"):
        RuntimeSettings().merge(copies="dma")


def test_merging_an_unknown_field_names_the_nearest_and_all_there_are() -> None:
    """F40."""
    with pytest.raises(TypeError, match="'copys'; did you mean 'copies'") as refusal:
        RuntimeSettings().merge(copys="sm")
    assert all(name in str(refusal.value) for name in EVERYTHING)


def test_the_cache_file_is_in_the_plan_s_folder_or_as_set(tmp_path: Path) -> None:
    """F41."""
    assert RuntimeSettings(cache_path="").cache_file(PLAN) is None
    assert RuntimeSettings(cache_path=Path("here")).cache_file(PLAN) == Path("here")
    assert RuntimeSettings(cache_path=tmp_path).cache_file(PLAN) == tmp_path / "model.plan.cache"
    kept = RuntimeSettings(cache_path="~/kernels").cache_file(PLAN)
    assert kept is not None
    assert kept.is_relative_to(Path.home())


@pytest.mark.parametrize(("name", "value"), EVERYTHING.items())
def test_a_setting_that_the_library_lacks_warns_and_has_no_effect_or_is_refused(name: str, value: Any) -> None:
    """F42."""
    asked = RuntimeSettings(copies="sm", **{name: value})
    if name in ("cache_path", "weight_streaming_budget"):
        with pytest.raises(ModelRefused, match=f"TensorRT 9 has no {name}, and {value!r} is asked for; leave it out"):
            asked.effective("TensorRT 9", EVERYTHING.keys() - {name})
        return
    with pytest.warns(UserWarning, match=f"TensorRT 9 has no {name}: {value!r} has no effect") as caught:
        settings = asked.effective("TensorRT 9", EVERYTHING.keys() - {name})
    assert len(caught) == 1
    assert getattr(settings, name) == getattr(RuntimeSettings(), name)
    assert settings.copies == "sm"


def test_settings_that_the_library_has_are_kept_without_a_warning() -> None:
    settings = RuntimeSettings(**EVERYTHING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settings.effective("TensorRT 9", EVERYTHING) == settings


def test_defaults_never_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RuntimeSettings().effective("ONNX Runtime", ()).cache_file(PLAN) is None
        assert RuntimeSettings(cache_path="").effective("ONNX Runtime", ()).cache_file(PLAN) is None


def broken() -> int:
    raise RuntimeError("no budget")


@pytest.mark.parametrize(
    ("asked", "baked", "budget"),
    [(3, 5, 3), (0, 5, 0), (None, 5, 5), (None, None, 7), (99, None, 10), (None, 99, 10)],
)
def test_the_weight_budget_is_the_setting_s_else_the_file_s_else_the_library_s(asked: int, baked: int, budget: int) -> None:
    """F74."""
    assert streaming_budget(asked, baked, 10, lambda: 7) == budget


def test_a_library_that_cannot_say_streams_everything() -> None:
    assert streaming_budget(None, None, 10, broken) == 0


def test_a_cpu_s_engine_takes_settings_with_a_warning_for_each_that_has_no_effect(tmp_path: Path) -> None:
    """F42."""
    path = models.save(tmp_path / "model.onnx", models.identity())
    with pytest.warns(UserWarning, match="ONNX Runtime has no cuda_graph_strategy: 'whole_graph_capture' has no effect"):
        engine = load_engine(path, settings=RuntimeSettings(cuda_graph_strategy="whole_graph_capture"))
    assert engine.platform == "onnxruntime_onnx"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"cache_path": "kernels"}, "ONNX Runtime has no cache_path, and 'kernels' is asked for; leave it out"),
        ({"weight_streaming_budget": 5}, "ONNX Runtime has no weight_streaming_budget, and 5 is asked for; leave it out"),
        (
            {"build_profiles": ((("x", ((1,), (2,), (3,))),),)},
            "build_profiles are for TensorRT, and ONNX Runtime runs any shape",
        ),
    ],
)
def test_a_cpu_s_engine_has_no_kernels_to_keep_no_weights_to_stream_and_no_profiles(
    tmp_path: Path, asked: dict[str, Any], why: str
) -> None:
    """F42."""
    path = models.save(tmp_path / "model.onnx", models.identity())
    with pytest.raises(ModelRefused, match=rf"model\.onnx: {why}"):
        load_engine(path, settings=RuntimeSettings(**asked))


@pytest.mark.parametrize(
    "wrong", [[], ("x",), ((),), ((("x", ((1,), (2,))),),), ((("x", ((1,), (2,), ("a",))),),), ((("x", 1),),)]
)
def test_invalid_profiles_are_refused_with_what_was_expected(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a tuple, for each profile one with three shapes for each input"):
        RuntimeSettings(build_profiles=wrong)


def test_a_cpu_s_engine_has_no_graphs_to_require(tmp_path: Path) -> None:
    """F42."""
    path = models.save(tmp_path / "model.onnx", models.identity())
    with pytest.raises(ModelRefused, match=r"model\.onnx: graphs are required, but ONNX Runtime on a CPU has none"):
        load_engine(path, settings=RuntimeSettings(graphs="required"))


def test_warm_up_takes_batch_sizes_and_shapes() -> None:
    warm_up = (1, 4, (("x", (8, 3)), ("y", (8,))))
    assert RuntimeSettings(warm_up=warm_up) == RuntimeSettings(warm_up=warm_up)
    assert hash(RuntimeSettings(warm_up=warm_up)) != hash(RuntimeSettings(warm_up=(1, 4)))


X, Y, SQUARE = (TensorSpec(name, DATATYPES["FP32"], dims) for name, dims in (("x", ("n", 3)), ("y", ("n",)), ("s", ("n", "n"))))


@pytest.mark.parametrize(
    ("signature", "pads"),
    [
        (Signature((X,), (Y,)), True),
        (Signature((X,), (Y,), 8), True),
        (Signature((SQUARE,), (Y,)), False),
        (Signature((X,), (TensorSpec("y", DATATYPES["FP32"], ()),)), False),
        (Signature((X, TensorSpec("scale", DATATYPES["FP32"], (1,))), (Y,)), False),
        (Signature((), (Y,)), False),
    ],
    ids=["rows", "rows with a limit", "an ambiguous batch", "a scalar output", "an input without rows", "no inputs"],
)
def test_batches_are_padded_only_if_rows_are_independent(signature: Signature, pads: bool) -> None:
    assert RuntimeSettings(batch_padding=True).pads(signature) == pads
    assert not RuntimeSettings().pads(signature)


ASKED = {"graphs": "on", "copies": "sm", "warm_up": (1, 4), **EVERYTHING}


def test_missing_features_of_a_library_are_known_before_loading() -> None:
    assert unsupported_by("TensorRT 10.11", ("cache_path", "allocation_strategy", *ONNX_RUNTIMES), ASKED) == {
        name: f"TensorRT 10.11 has no {name}"
        for name in ("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy", "weight_streaming_budget")
    }
    assert unsupported_by("TensorRT 9", (), {"cuda_graph_strategy": "disabled"}) == {}


def test_onnx_runtime_supports_warm_up_and_no_gpu_settings() -> None:
    found = unsupported(Path("m.onnx"), None, ASKED)
    assert found.keys() == {"copies", *EVERYTHING} - set(ONNX_RUNTIMES)
    assert found["allocation_strategy"] == "ONNX Runtime on a CPU allocates its memory itself"
    assert unsupported(Path("m.onnx"), None, {"graphs": "off", "cuda_graph_strategy": "disabled", "warm_up": "opt"}) == {}
    assert unsupported(Path("m.onnx"), None, {"graphs": "required"}) == {"graphs": "ONNX Runtime on a CPU has no CUDA graphs"}


@pytest.mark.parametrize(
    ("asked", "cores", "threads"),
    [
        ({}, 4, (4, 1)),
        ({"intra_op_threads": 2, "inter_op_threads": 3}, 4, (2, 1)),
        ({"intra_op_threads": 99}, 4, (4, 1)),
        ({"execution_mode": "parallel"}, 4, (1, 4)),
        ({"execution_mode": "parallel", "inter_op_threads": 2}, 4, (3, 2)),
        ({"execution_mode": "parallel", "inter_op_threads": 2, "intra_op_threads": 2}, 4, (2, 2)),
        ({"execution_mode": "parallel", "inter_op_threads": 9, "intra_op_threads": 9}, 4, (1, 4)),
        ({"execution_mode": "parallel"}, 1, (1, 1)),
    ],
)
def test_there_are_never_more_threads_than_cores(asked: dict[str, Any], cores: int, threads: tuple[int, int]) -> None:
    assert RuntimeSettings(**asked).threads(cores) == threads
    assert sum(threads) - 1 <= cores


def test_onnx_runtime_honours_its_own_settings_and_tensorrt_none_of_them() -> None:
    asked: dict[str, object] = {"intra_op_threads": 2, "execution_mode": "parallel", "memory_arena": True}
    assert unsupported(Path("m.onnx"), None, asked) == {}
    assert unsupported_by("TensorRT 9", (), asked) == {
        "intra_op_threads": "TensorRT 9 has no intra_op_threads",
        "execution_mode": "TensorRT 9 has no execution_mode",
    }
