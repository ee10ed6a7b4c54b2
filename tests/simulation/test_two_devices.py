"""Tests of two GPUs in tests/gpu, of which none is about times, on two simulated ones, with both sizes of the set."""

import os
from collections.abc import Iterator

import pytest

from tests.gpu import test_two_devices as real
from tests.gpu.networks import add
from tests.gpu.process import Served

from .mps import size_of_sets
from .plans import make_plan

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    """As there; nothing is measured."""
    return {}


@pytest.fixture(scope="module", params=["off", "on"], autouse=True)
def mps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with size_of_sets(request.param, tmp_path_factory.mktemp("mps") / "fake"):
        yield


@pytest.fixture(scope="module")
def server(mps: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("two")
    for name, network in real.NETWORKS.items():
        (add(folder / "models", name) / "model.plan").write_bytes(make_plan(network().onnx, network().ranges))
    os.mkfifo(folder / "lose")
    command = ("tests.simulation.losing", {"LOSE": str(folder / "lose")})
    tenants = real.TENANTS.replace("granules", 'memory = "32MiB"\ngranules')  # All of it is populated.
    with real.serving(folder / "models", folder, real.devices(), tenants, *command) as served:
        yield served


test_answers = real.test_each_tenant_gets_right_answers_from_its_own_gpu
test_repartitions = real.test_tenants_of_both_gpus_are_repartitioned_at_once
test_strains = real.test_a_tenant_s_share_is_strained_while_it_and_its_neighbour_are_served
test_a_move_and_a_kill = real.test_a_tenant_that_moved_is_served_there_again_when_that_process_was_killed
