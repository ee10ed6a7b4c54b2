"""The simulated TensorRT against the real library, which can be imported without a GPU: what it has, that has, called the same.

The tests of engines.tensorrt use up every name of the simulation, so this also says that the names engines.tensorrt uses exist.
"""

import re
from enum import IntEnum
from typing import Any

import pytest

from tests.simulation import tensorrt, tensorrt_config
from tests.simulation.install import public

real = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the rtx extra")

OURS = public(tensorrt) | public(tensorrt_config)
CLASSES = sorted(OURS)
ENUMS = [name for name in CLASSES if issubclass(OURS[name], IntEnum)]
PLAIN = [name for name in CLASSES if name not in ENUMS]
MEMBERS = [(name, member) for name in PLAIN for member in vars(OURS[name]) if not member.startswith("_")]
METHODS = [(name, member) for name, member in MEMBERS if callable(getattr(OURS[name], member))]
METHODS.remove(("ILogger", "Severity"))


def overloads(function: Any) -> list[list[str]]:
    """The parameters of each of its overloads, less `self`, as its description has them."""
    signatures = re.findall(r"^(?:\d+\. )?\w+\((self: .*)\) ->", function.__doc__ or "", re.MULTILINE)
    return [re.findall(r"(?:^|, )(\w+): ", signature)[1:] for signature in signatures]


@pytest.mark.parametrize("name", CLASSES)
def test_a_simulated_class_is_one_of_the_library(name: str) -> None:
    assert isinstance(getattr(real, name), type)


@pytest.mark.parametrize(("name", "member"), MEMBERS)
def test_a_simulated_member_is_one_of_the_library(name: str, member: str) -> None:
    simulated, theirs = (getattr(kind, member) for kind in (OURS[name], getattr(real, name)))
    assert callable(simulated) == callable(theirs)


@pytest.mark.parametrize(("name", "member"), METHODS)
def test_a_simulated_method_is_called_as_one_of_the_library_s_overloads_is(name: str, member: str) -> None:
    method = getattr(OURS[name], member)
    ours = list(method.__code__.co_varnames[1 : method.__code__.co_argcount])
    assert ours in overloads(getattr(getattr(real, name), member))


@pytest.mark.parametrize("name", ["Runtime", "ILogger"])
def test_what_is_made_by_name_is_made_of_what_the_simulation_takes(name: str) -> None:
    initialise = OURS[name].__init__
    code = getattr(initialise, "__code__", None)
    ours = list(code.co_varnames[1 : code.co_argcount]) if code else []
    assert ours in overloads(getattr(real, name).__init__)


@pytest.mark.parametrize("name", ENUMS)
def test_a_simulated_enumeration_has_the_library_s_values(name: str) -> None:
    theirs = getattr(real, name).__members__
    assert {member.name: member.value for member in OURS[name]}.items() <= {
        key: int(value) for key, value in theirs.items()
    }.items()


def test_what_the_library_says_is_as_severe_as_the_simulation_has_it() -> None:
    theirs = {name: int(value) for name, value in real.ILogger.Severity.__members__.items()}
    assert {member.name: member.value for member in tensorrt.ILogger.Severity} == theirs
