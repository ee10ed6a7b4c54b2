"""The simulation against the real packages, which can be imported without a GPU: every name of it exists there and is called
the same way.

The tests of partitions.cuda use every name of the simulation, so the names that partitions.cuda uses exist too.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation import core, driver
from tests.simulation.install import public

real_core = pytest.importorskip("cuda.core", reason="needs the cuda extra")
real_driver = pytest.importorskip("cuda.bindings.driver", reason="needs the cuda extra")
real_errors = pytest.importorskip("cuda.core._utils.cuda_utils", reason="needs the cuda extra")
LOST = pytest.importorskip("partitions.cuda.driver").LOST

CLASSES = sorted(set(public(core)) - {"Launch"})
MADE = ["ContextOptions", "Device", "EventOptions", "LaunchConfig", "LegacyPinnedMemoryResource", "Program", "ProgramOptions"]
MADE += ["SMResourceOptions", "StreamOptions", "WorkqueueResourceOptions"]
MEMBERS = [(name, member) for name in CLASSES for member in vars(public(core)[name]) if not member.startswith("_")]
FUNCTIONS = sorted(name for name in dir(driver.Driver) if name.startswith("cu"))
ENUMS = sorted(name for name, value in public(driver).items() if hasattr(value, "__members__"))


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters less `self`. Classes written in C give no signature but begin their description with one."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        names = _described(function.__doc__ or "")
    return [name for name in names if name not in ("self", "cls")]


def _described(text: str) -> list[str]:
    """`count`, `backfill` of "Options(count: int | Sequence[int] | None = None, bool backfill=False)"."""
    inside = text.partition("(")[2].partition("\n")[0]
    while "[" in inside:
        inside = re.sub(r"\[[^\[\]]*\]", "", inside)
    return re.findall(r"(?:^|, )(?:\w+ )?(\w+)(?=[:=,)])", inside)


@pytest.mark.parametrize("name", CLASSES)
def test_a_simulated_class_is_one_of_cuda_core(name: str) -> None:
    assert isinstance(getattr(real_core, name), type)


@pytest.mark.parametrize("name", MADE)
def test_a_simulated_class_is_made_as_the_one_of_cuda_core_is(name: str) -> None:
    ours, theirs = parameters(public(core)[name]), parameters(getattr(real_core, name))
    assert set(ours) <= set(theirs)


@pytest.mark.parametrize(("name", "member"), MEMBERS)
def test_a_simulated_member_is_one_of_cuda_core_called_the_same_way(name: str, member: str) -> None:
    simulated, real = getattr(public(core)[name], member), getattr(getattr(real_core, name), member)
    assert callable(simulated) == callable(real)
    if callable(simulated):
        ours = parameters(simulated)
        assert ours == parameters(real)[: len(ours)]


def test_a_launch_takes_the_stream_the_configuration_the_kernel_and_its_arguments() -> None:
    assert parameters(core.Launch.__call__) == parameters(real_core.launch)


RENAMED = {"useFlags": "flags"}
"""Parameters that later bindings rename; all are passed by position."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_simulated_function_is_one_of_the_driver_s_with_the_same_parameters(name: str) -> None:
    ours, theirs = (
        [RENAMED.get(each, each) for each in parameters(getattr(module, name))] for module in (driver.Driver, real_driver)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ENUMS)
def test_a_simulated_enumeration_has_the_driver_s_values(name: str) -> None:
    simulated, real = getattr(driver, name), getattr(real_driver, name)
    assert {member.name: member.value for member in simulated} == {
        member.name: real.__members__[member.name].value for member in simulated
    }


def test_the_flags_for_pinning_are_the_driver_s() -> None:
    for name in ("CU_MEMHOSTREGISTER_PORTABLE", "CU_MEMHOSTREGISTER_DEVICEMAP"):
        assert getattr(driver, name) == getattr(real_driver, name)


def test_a_resource_is_read_as_the_driver_lays_it_out() -> None:
    assert real_driver.CUdevResource().sm.smCount == 0


def test_the_scope_of_work_queues_is_one_of_cuda_core_s() -> None:
    typing = pytest.importorskip("cuda.core.typing")
    assert "green_ctx_balanced" in set(typing.WorkqueueSharingScopeType)
    real_core.WorkqueueResourceOptions(sharing_scope="green_ctx_balanced", concurrency_limit=2)


def test_results_are_unpacked_and_raised_by_cuda_core_itself() -> None:
    assert parameters(real_errors.handle_return)[:1] == parameters(driver.handle_return)
    assert issubclass(real_errors.CUDAError, Exception)


def test_errors_that_lose_the_device_are_errors_of_the_driver() -> None:
    assert set(real_driver.CUresult.__members__) >= LOST
