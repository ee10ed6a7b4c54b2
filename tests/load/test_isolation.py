"""A noisy neighbour does not move your tail: a short run of `python -m tests.load.isolation` on CPU cores.

The bound is generous, as load processes and server share what few cores there may be: it is there to notice a leak that is
opened again (with HTTP for all tenants in one process these tails grow tens to hundreds of times), not to measure.
"""

import os
from collections.abc import Iterator

import pytest

from .arrangement import Cores, deployments
from .deployment import Server
from .experiment import Experiment, Settings
from .overhttp import running
from .verdicts import Combination

pytestmark = pytest.mark.load
KINDS = ("compute", "json", "transfer", "slow")
BOUND = 10.0


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < 2:
        pytest.skip("needs two cores, a partition each")
    with running(deployments("cpu", len(cores), "mlp", KINDS, None, Cores(cores, cores)), "mlp", plans=False) as started:
        yield started


@pytest.fixture(scope="module")
def combinations(servers: list[Server]) -> dict[str, Combination]:
    """Three rounds of 36 phases in all, of half a second."""
    ports = {server.deployment.name: server.port for server in servers}
    settings = Settings(victim="mlp", kinds=KINDS, seconds=0.5, rounds=3, bound=BOUND)
    return {found.aggressor: found for found in Experiment(settings, ports, lambda *_: None).run()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tail_stays_in_bounds_under(kind: str, combinations: dict[str, Combination]) -> None:
    verdict = combinations[kind].verdict()

    assert verdict.word in ("isolated", "proves nothing", "too noisy"), verdict.why


def test_heavy_computation_on_one_partition_for_all_does_move_it(combinations: dict[str, Combination]) -> None:
    """Without that, the tests above would prove nothing."""
    assert combinations["compute"].verdict().control_ratio > BOUND
