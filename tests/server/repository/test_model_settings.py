"""Settings of how a model runs: their sources, which overrules which, and those that cannot be honoured."""

from collections.abc import Mapping

import pytest

from engines import Loop, RuntimeSettings
from server.config.schema import DeviceConfig, ModelOptions
from server.repository.model_settings import (
    FIELDS,
    StatedSetting,
    default_settings,
    from_options,
    from_parameters,
    resolve_settings,
)

EVERY_KEY = ModelOptions(
    graphs="required",
    strategy="none",
    cuda_graphs="on",
    allocation="user_managed",
    profile=1,
    profiles=((("x", ((1, 3), (8, 3), (8, 3))),),),
    weight_budget=2**30,
    copies="engine",
    warm_up=(1, 4, 32),
    loop=((("next", "x"),), 64, "done", ("y",)),
    verify="required",
)
EVERY_TEXT = {
    "greenlane.graphs": "required",
    "greenlane.strategy": "none",
    "greenlane.cuda_graphs": "on",
    "greenlane.allocation": "user_managed",
    "greenlane.profile": "1",
    "greenlane.profiles": '[{"x": {"min": [1, 3], "max": [8, 3]}}]',
    "greenlane.weight_budget": "1GiB",
    "greenlane.copies": "engine",
    "greenlane.warm_up": "1, 4,32",
    "greenlane.loop": '{"feed": {"next": "x"}, "steps": 64, "until": "done", "outputs": ["y"]}',
    "greenlane.verify": "required",
}
EVERY_SETTING = RuntimeSettings(
    graphs="required",
    dynamic_shapes_kernel_specialization_strategy="none",
    cuda_graph_strategy="whole_graph_capture",
    allocation_strategy="user_managed",
    profile=1,
    build_profiles=((("x", ((1, 3), (8, 3), (8, 3))),),),
    weight_streaming_budget=2**30,
    copies="engine",
    warm_up=(1, 4, 32),
    loop=Loop((("next", "x"),), 64, "done", ("y",)),
    verify="required",
)
"""The same settings in the server's configuration, in a model's parameters, and as RuntimeSettings."""


def honoured(asked: Mapping[str, object]) -> dict[str, str]:
    return {}


def test_every_key_reaches_the_engines_settings() -> None:
    settled = resolve_settings(from_options(EVERY_KEY, ("models", "m")), RuntimeSettings(), honoured)
    assert settled.settings == EVERY_SETTING
    assert (settled.problems, settled.warnings) == ((), ())
    assert all(getattr(EVERY_KEY, key) is not None for key in FIELDS)


def test_every_key_may_be_a_parameter_of_the_model() -> None:
    said, others = from_parameters(EVERY_TEXT, "m/config.pbtxt")
    settled = resolve_settings(said, RuntimeSettings(), honoured)
    assert (settled.settings, others) == (EVERY_SETTING, [])
    assert EVERY_TEXT.keys() == {f"greenlane.{key}" for key in FIELDS}


def test_default_settings_are_those_of_the_device() -> None:
    base = default_settings(DeviceConfig(copies="engine"))
    assert base == RuntimeSettings(copies="engine", warm_up="usual")
    assert resolve_settings({}, base, honoured).settings == base
    assert resolve_settings(from_options(ModelOptions(copies="sm"), ()), base, honoured).settings.copies == "sm"


def test_execution_parameter_is_accepted_and_ignored() -> None:
    assert from_parameters({"greenlane.execution": "{}"}, "c") == ({}, [])


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("graph", "on", "parameters 'greenlane.graph': there is no such setting; did you mean 'graphs'?"),
        ("max_batch", "4", "parameters 'greenlane.max_batch': there is no such setting; expected graphs or "),
        ("graphs", "yes", "parameters 'greenlane.graphs': 'yes' is not 'on' or 'off' or 'required'"),
        ("instances", "2", "parameters 'greenlane.instances': there is no such setting; expected graphs or "),
        ("profile", "-1", "parameters 'greenlane.profile': '-1' is not a whole number of 0 or more"),
        ("weight_budget", "much", "parameters 'greenlane.weight_budget': 'much' is not a size: "),
        ("warm_up", "4, 1", "parameters 'greenlane.warm_up': '4, 1' is not 'opt', 'usual', or a list of batch sizes"),
        ("warm_up", "", "parameters 'greenlane.warm_up': '' is not 'opt', 'usual', or "),
        ("profile", "9" * 5000, "parameters 'greenlane.profile': '9999"),
    ],
)
def test_a_parameter_that_is_wrong_is_named_with_what_was_expected(name: str, text: str, why: str) -> None:
    with pytest.raises(ValueError, match="parameters ") as refusal:
        from_parameters({f"greenlane.{name}": text}, "c")
    assert str(refusal.value).startswith(why)
    assert len(str(refusal.value)) < 300


def test_unsupported_settings_are_refused_and_tritons_warned_of() -> None:
    lacking = {name: f"the library has no {name}" for name in ("graphs", "cuda_graph_strategy", "profile")}
    sayings = {
        **from_options(ModelOptions(cuda_graphs="on", graphs="required", copies="sm"), ("models", "m"), "greenlane.toml"),
        "instances": StatedSetting(2, 2, "m/config.pbtxt", "instance_group.count", is_tritons=True),
        "profile": StatedSetting(3, "3", "m/config.pbtxt", "parameters greenlane.profile"),
    }
    settled = resolve_settings(
        sayings, RuntimeSettings(), lambda asked: {name: lacking[name] for name in asked if name in lacking}
    )
    assert settled.problems == (
        "greenlane.toml: models.m.graphs: 'required' cannot be honoured: the library has no graphs; leave it out",
        "greenlane.toml: models.m.cuda_graphs: 'on' cannot be honoured: the library has no cuda_graph_strategy; leave it out",
        "m/config.pbtxt: parameters greenlane.profile: '3' cannot be honoured: the library has no profile; leave it out",
    )
    assert settled.warnings == (
        "m/config.pbtxt: instance_group.count: 2 cannot be honoured: inferences of a tenant run one after another on its "
        "partition, and dynamic_batching joins them; it is ignored",
    )
    assert settled.settings == RuntimeSettings(copies="sm")
