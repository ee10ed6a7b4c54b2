"""What the engines and the simulation use of TensorRT, against manifests of what three versions of it offer.

The manifests are `manifest/*.json`; `manifest/collect.py` says how they were taken. The one of TensorRT-RTX is also held
against the bindings that are installed, so that it cannot be out of date.
"""

import ast
import importlib.metadata
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engines.tensorrt import api
from tests.simulation import tensorrt, tensorrt_config
from tests.simulation.install import public

from ..manifest import MANIFESTS, collect, find_manifest, takes

OURS = public(tensorrt) | public(tensorrt_config)
ENUMS = sorted(name for name, kind in OURS.items() if issubclass(kind, IntEnum))
PLAIN = sorted(set(OURS) - set(ENUMS))
MEMBERS = [(name, member) for name in PLAIN for member in vars(OURS[name]) if not member.startswith("_")]
MEMBERS.remove(("ILogger", "Severity"))

FOLDER = Path(api.__file__).parent
SOURCES = [*sorted(FOLDER.glob("*.py")), *sorted((FOLDER / "building").glob("*.py"))]
RECEIVERS = {
    "builder.py": {
        "builder": "Builder",
        "config": "IBuilderConfig",
        "network": "INetworkDefinition",
        "parser": "OnnxParser",
        "tensor": "ITensor",
        "library_profile": "IOptimizationProfile",
        "cache": "ITimingCache",
    },
    "": {
        "plan": "ICudaEngine",
        "config": "IRuntimeConfig",
        "trt_context": "IExecutionContext",
        "_trt_context": "IExecutionContext",
    },
}
"""The class that the last name of an expression is of, as in `self._trt_context.infer_shapes()`; by file, or "" for others."""
GUARDED = {
    "CudaGraphStrategy",
    "ComputeCapability",
    "DynamicShapesKernelSpecializationStrategy",
    "EngineInvalidityDiagnostics",
    "create_runtime_cache",
    "cuda_graph_strategy",
    "dynamic_shapes_kernel_specialization_strategy",
    "get_aliased_input_tensor",
    "get_engine_stat",
    "get_engine_validity",
    "num_compute_capabilities",
    "profile_stream",
    "set_compute_capability",
    "set_runtime_cache",
}
"""Members that some versions lack. The code checks that they exist before it uses them."""


class Use(NamedTuple):
    """An attribute in the source: where, of what, its name, and how it is called, if it is: None for a `*` argument's count."""

    where: str
    receiver: str
    name: str
    called: bool
    count: int | None
    keywords: tuple[str, ...]


def uses() -> list[Use]:
    """Every attribute in the sources."""
    return [use for path in SOURCES for use in _uses(path)]


def _uses(path: Path) -> list[Use]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return [_use(path, node, calls.get(id(node))) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]


def _use(path: Path, node: ast.Attribute, call: ast.Call | None) -> Use:
    receiver = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
    arguments = call.args if call else []
    count = None if any(isinstance(each, ast.Starred) for each in arguments) else len(arguments)
    keywords = tuple(each.arg or "**" for each in call.keywords) if call else ()
    return Use(f"{path.name}:{node.lineno}", receiver, node.attr, call is not None, count, keywords)


def class_of(use: Use) -> str:
    """The library's class that an attribute belongs to; empty for objects that are not the library's."""
    file = use.where.partition(":")[0]
    return RECEIVERS.get(file, RECEIVERS[""]).get(use.receiver, "")


def has(manifest: Any, kind: str, name: str) -> bool:
    members = manifest["classes"].get(kind, {})
    return name in members.get("methods", {}) or name in members.get("properties", {})


THEIRS = [use for use in uses() if class_of(use)]
MODULE = [use for use in uses() if use.receiver == "module" and use.name != "__version__"]


def test_the_manifests_are_of_the_versions_that_are_served() -> None:
    assert [name.rpartition(".")[0] for name in MANIFESTS] == ["tensorrt-10.11.0", "tensorrt-11.4.0", "tensorrt_rtx-1.6.1"]


def test_the_manifest_of_the_installed_version_matches_it() -> None:
    real = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the rtx extra")

    assert collect.describe(real) == find_manifest("tensorrt_rtx", real.__version__)
    assert importlib.metadata.version("tensorrt-rtx-cu13-bindings") == real.__version__


@pytest.mark.parametrize("version", MANIFESTS)
@pytest.mark.parametrize("use", THEIRS, ids=lambda use: f"{use.where} {use.name}")
def test_what_the_engines_use_is_there_or_asked_for_first(use: Use, version: str) -> None:
    assert has(MANIFESTS[version], class_of(use), use.name) or use.name in GUARDED


@pytest.mark.parametrize("use", MODULE, ids=lambda use: f"{use.where} {use.name}")
def test_a_class_that_the_engines_use_is_there_or_asked_for_first(use: Use) -> None:
    lacking = [name for name, manifest in MANIFESTS.items() if use.name not in manifest["classes"]]
    assert not lacking or (use.name in GUARDED and len(lacking) < len(MANIFESTS))


@pytest.mark.parametrize("use", THEIRS, ids=lambda use: f"{use.where} {use.name}")
def test_what_the_engines_use_is_called_as_it_can_be(use: Use) -> None:
    for manifest in MANIFESTS.values():
        if has(manifest, class_of(use), use.name):
            methods = manifest["classes"][class_of(use)]["methods"]
            assert not use.called or any(takes(each, use.count, use.keywords) for each in methods[use.name])


def test_what_is_asked_for_first_is_in_one_version_and_not_in_all() -> None:
    everything = [
        {*manifest["classes"], *(name for kind in manifest["classes"].values() for part in kind.values() for name in part)}
        for manifest in MANIFESTS.values()
    ]
    assert set.union(*everything) >= GUARDED
    assert not set.intersection(*everything) & GUARDED - {"profile_stream"}  # One of IBuilderConfig is everywhere.


def test_every_library_object_is_known_by_the_name_that_the_engines_give_it() -> None:
    """A name in RECEIVERS that is no longer in the sources would weaken the tests above."""
    used = {(use.where.partition(":")[0], use.receiver) for use in THEIRS}
    found = {(file if file in RECEIVERS else "", receiver) for file, receiver in used}
    assert found == {(file, receiver) for file, names in RECEIVERS.items() for receiver in names}


def test_what_only_the_library_has_is_not_used_by_another_name() -> None:
    """A new variable name for a library object, such as a context, would be missing in RECEIVERS and shows here."""
    methods = {
        name
        for manifest in MANIFESTS.values()
        for kind in ("IExecutionContext", "ICudaEngine", "IRuntimeConfig", "IBuilderConfig", "INetworkDefinition")
        for name in manifest["classes"][kind]["methods"]
        if "_" in name.strip("_") and not name.startswith("__")
    }
    unknown = [use for use in uses() if use.called and use.name in methods and not class_of(use)]
    assert [use.where + " " + use.name for use in unknown if use.name != "create_runtime_cache"] == []


@pytest.mark.parametrize("feature", api.FEATURES)
def test_a_feature_is_found_by_a_name_that_some_version_has(feature: str) -> None:
    kind, _, member = api.FEATURES[feature].partition(".")
    assert any(kind in manifest["classes"] and (not member or has(manifest, kind, member)) for manifest in MANIFESTS.values())


@pytest.mark.parametrize("name", PLAIN)
def test_a_simulated_class_is_one_of_the_library(name: str) -> None:
    assert any(name in manifest["classes"] for manifest in MANIFESTS.values())


@pytest.mark.parametrize(("name", "member"), MEMBERS)
def test_a_simulated_member_is_one_of_the_library_and_called_as_one_of_its_overloads_is(name: str, member: str) -> None:
    there = [kind for manifest in MANIFESTS.values() if (kind := manifest["classes"].get(name, {})) and _member(kind, member)]
    assert there
    for kind in there:
        _check(getattr(OURS[name], member), _member(kind, member))


def _member(kind: Any, member: str) -> Any:
    """A method's overloads, a property's access, or None."""
    overridden = kind.get("overridden", {}).get(member)
    return kind["methods"].get(member) or kind["properties"].get(member) or (overridden is not None and [overridden]) or None


def _check(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, str):
        assert isinstance(ours, property)
        assert theirs == "read and set" or ours.fset is None
    else:
        for overload in parameters(ours):
            assert any(_calls(overload, each) for each in theirs), (overload, theirs)


def parameters(function: Any) -> list[list[str]]:
    """Its positional parameters in order, and each keyword-only one as another overload."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = list(code.co_varnames[1 : code.co_argcount])
    required = len(names) - len(defaults)
    by_name = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    return [[*names[:required], *(f"{name}?" for name in names[required:])], *([f"{name}?"] for name in by_name)]


def _calls(ours: list[str], theirs: list[str]) -> bool:
    """The names are the same, and what is optional in the simulation is optional in the library."""
    same = [each.rstrip("?") for each in ours] == [each.rstrip("?") for each in theirs]
    return same and all(each.endswith("?") or not our.endswith("?") for our, each in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ENUMS)
def test_a_simulated_enumeration_has_the_library_s_values(name: str) -> None:
    there = [manifest["classes"][name]["values"] for manifest in MANIFESTS.values() if name in manifest["classes"]]
    assert there
    for values in there:
        assert {member.name: member.value for member in OURS[name]}.items() <= values.items()


def test_what_the_library_says_is_as_severe_as_the_simulation_has_it() -> None:
    for manifest in MANIFESTS.values():
        severities = manifest["classes"]["ILogger"]["enumerations"]["Severity"]
        assert {member.name: member.value for member in tensorrt.ILogger.Severity} == severities
