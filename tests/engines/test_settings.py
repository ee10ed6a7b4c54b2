import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.settings import RuntimeSettings, streaming_budget

EVERYTHING = {
    "cuda_graph_strategy": "whole_graph_capture",
    "dynamic_shapes_kernel_specialization_strategy": "eager",
    "allocation_strategy": "user_managed",
    "cache_path": "kernels",
    "weight_streaming_budget": 1,
}
"""Every setting that a library has a part in, changed from its default."""


def test_the_defaults_are_lazy_kernels_no_graphs_and_a_file_of_the_users() -> None:
    settings = RuntimeSettings()
    assert settings.cuda_graph_strategy == "disabled"
    assert settings.dynamic_shapes_kernel_specialization_strategy == "lazy"
    assert settings.allocation_strategy == "static"
    assert settings.copies == "auto"
    assert settings.weight_streaming_budget is None
    assert settings.cache_file is not None
    assert settings.cache_file.is_relative_to(Path.home())


@pytest.mark.parametrize(
    ("name", "value", "choice"),
    [
        ("cuda_graph_strategy", "whole", "'whole_graph_capture'"),
        ("dynamic_shapes_kernel_specialization_strategy", "EAGER", "'eager'"),
        ("allocation_strategy", None, "'on_profile_change'"),
        ("copies", "", "'engine'"),
        ("cache_path", None, "a path"),
        ("weight_streaming_budget", -1, "bytes from 0"),
        ("weight_streaming_budget", True, "bytes from 0"),
        ("weight_streaming_budget", "1GiB", "bytes from 0"),
    ],
)
def test_a_wrong_value_is_refused_with_the_field_the_value_and_the_choices(name: str, value: object, choice: str) -> None:
    with pytest.raises(ValueError, match=name) as refusal:
        RuntimeSettings(**{name: value})  # type: ignore[arg-type]
    assert f"{name} is {value!r}; expected" in str(refusal.value)
    assert choice in str(refusal.value)


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        RuntimeSettings().copies = "sm"  # type: ignore[misc]


def test_merging_gives_new_settings_and_leaves_the_old() -> None:
    old = RuntimeSettings()
    new = old.merge(copies="sm", weight_streaming_budget=0)
    assert (old.copies, new.copies, new.weight_streaming_budget) == ("auto", "sm", 0)
    assert new != old
    assert new == RuntimeSettings(copies="sm", weight_streaming_budget=0)
    assert new.merge() == new


def test_merging_checks_values() -> None:
    with pytest.raises(ValueError, match="copies is 'dma'"):
        RuntimeSettings().merge(copies="dma")


def test_merging_an_unknown_field_names_the_nearest_and_all_there_are() -> None:
    with pytest.raises(TypeError, match="'copys'; did you mean 'copies'") as refusal:
        RuntimeSettings().merge(copys="sm")
    assert all(name in str(refusal.value) for name in EVERYTHING)


def test_merging_an_unknown_field_like_no_other_names_all_there_are() -> None:
    with pytest.raises(TypeError, match="'x'; there are cuda_graph_strategy, "):
        RuntimeSettings().merge(x=1)


def test_an_empty_cache_path_keeps_nothing() -> None:
    assert RuntimeSettings(cache_path="").cache_file is None
    assert RuntimeSettings(cache_path=Path("here")).cache_file == Path("here")


@pytest.mark.parametrize(("name", "value"), EVERYTHING.items())
def test_a_setting_that_the_library_lacks_warns_and_has_no_effect(name: str, value: Any) -> None:
    asked = RuntimeSettings(copies="sm", **{name: value})
    with pytest.warns(UserWarning, match=f"TensorRT 9 has no {name}: {value!r} has no effect") as caught:
        settings = asked.effective("TensorRT 9", EVERYTHING.keys() - {name})
    assert len(caught) == 1
    assert getattr(settings, name) == ("" if name == "cache_path" else getattr(RuntimeSettings(), name))
    assert settings.copies == "sm"


def test_settings_that_the_library_has_are_kept_without_a_word() -> None:
    settings = RuntimeSettings(**EVERYTHING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settings.effective("TensorRT 9", EVERYTHING) == settings


def test_defaults_never_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RuntimeSettings().effective("ONNX Runtime", ()).cache_file is None
        assert RuntimeSettings(cache_path="").effective("ONNX Runtime", ()).cache_file is None


def broken() -> int:
    raise RuntimeError("no budget")


@pytest.mark.parametrize(
    ("asked", "baked", "budget"),
    [(3, 5, 3), (0, 5, 0), (None, 5, 5), (None, None, 7), (99, None, 10), (None, 99, 10)],
)
def test_the_budget_asked_for_goes_before_the_baked_one_before_the_librarys(asked: int, baked: int, budget: int) -> None:
    assert streaming_budget(asked, baked, 10, lambda: 7) == budget


@given(st.none() | st.integers(0), st.none() | st.integers(0), st.integers(0), st.integers(0))
def test_the_budget_is_never_more_than_can_be_streamed(asked: int, baked: int, streamable: int, own: int) -> None:
    assert 0 <= streaming_budget(asked, baked, streamable, lambda: own) <= streamable


def test_a_library_that_cannot_say_streams_everything() -> None:
    assert streaming_budget(None, None, 10, broken) == 0
