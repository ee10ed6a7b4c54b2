"""A noisy neighbour does not raise a tenant's p99: a short run of `python -m benchmarks.isolation` on CPU cores.

The bound is generous, as load processes and server share what few cores there may be: it is there to notice a leak that is
opened again, not to measure; `test_cores` has a tighter one, of cores alone. What is not exercised or too noisy is measured
once more, and fails if it is so again, but for kinds that do not move the tail without partitions either. The last test opens
the largest leak, so that the others are known to be able to fail.
"""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.arrangement import SPLIT, Cores, deployments
from benchmarks.clients import place
from benchmarks.costs import TURNS
from benchmarks.experiment import Experiment, Settings
from benchmarks.isolation import main
from benchmarks.overhttp import models, running
from benchmarks.verdicts import ALONE, OWN, UNDER, Combination, Verdict

pytestmark = pytest.mark.load
KINDS = ("compute", "json", "transfer", "slow", "invalid")
HEAVY_TO_READ = ("json", "transfer", "invalid")
LEAKING = ("compute",)
"""Kinds that are known to move the tail on one partition for all: of these the control has to leak."""
BOUND = 10.0


def measured(kinds: tuple[str, ...], program: str = "server", control: bool = True) -> dict[str, Combination]:
    """By aggressor, three rounds of phases of half a second."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < 2:
        pytest.skip("needs two cores, a partition each")
    found = deployments("cpu", len(cores), ["mlp"], kinds, Cores(cores, cores))
    servers = {name: replace(each, program=(program,)) for name, each in found.items()}
    settings = Settings(
        victims={"mlp": 400.0},
        kinds=kinds,
        seconds=0.5,
        bound=BOUND,
        control=control,
        clients=place("cpu", cores, len(cores), (), None),
    )
    servers = servers if control else {SPLIT: servers[SPLIT]}
    experiment = Experiment(settings, lambda *_: None)
    with models(servers, plans=False) as folder, running(servers.values(), folder) as started:
        experiment.run({server.deployment.name: server.port for server in started})
    return {found.aggressor: found for found in experiment.combinations()}


@pytest.fixture(scope="module")
def combinations() -> dict[str, Combination]:
    return measured(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_p99_stays_within_bounds_under(kind: str, combinations: dict[str, Combination]) -> None:
    verdict = settled(kind, combinations[kind].verdict())

    assert verdict.word == "isolated" or (verdict.word == "not exercised" and kind not in LEAKING), verdict.why


def settled(kind: str, verdict: Verdict) -> Verdict:
    """The verdict, or another one where it says nothing."""
    return measured((kind,))[kind].verdict() if verdict.word in ("not exercised", "too noisy") else verdict


def test_heavy_computation_on_a_shared_partition_raises_p99(combinations: dict[str, Combination]) -> None:
    """Without that, the tests above would prove nothing."""
    assert combinations["compute"].verdict().control_ratio > BOUND


def test_a_shared_event_loop_is_a_leak() -> None:
    found = measured(HEAVY_TO_READ, program="tests.benchmarks.one_process", control=False)
    verdicts = [combination.verdict() for combination in found.values()]

    assert "leaks" in {verdict.word for verdict in verdicts}, [f"{one.aggressor}: {one.why}" for one in verdicts]


def test_a_fence_is_tried_on_one_server_and_then_none_on_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing holds anything here but where there is resctrl; a GPU run has as many steps."""
    words = "--memory --fence 0.4 --only memory-read,pcie-out --victim tiny --seconds 0.4 --rounds 2 --arrivals fixed"
    file = tmp_path / "found.json"

    assert main([*words.split(), "--json", str(file)]) in (0, 1)

    found = json.loads(file.read_text())
    rounds = [each["rounds"] for each in found["combinations"]]
    once = dict.fromkeys(rounds[0], 1)
    counted = [{kind: len(phases) for kind, phases in each.items()} for each in rounds]
    assert counted == [once | {ALONE: 2, UNDER: 2}, once], "pcie-out is beside a victim in one round"
    assert [(each["model"], len(each["ratios"])) for each in found["costs"]] == [("tiny", TURNS // 2)]
    assert all(phase["busy"][0]["rate"] > 0 for each in rounds for kind in (OWN, UNDER) for phase in each[kind])
    assert "unfenced" in "".join(found["held"]["notes"])
    printed = capsys.readouterr().out
    assert "p50 / p99 over alone, all rounds together" in printed
    assert "its memory_bandwidth holds nothing back" in printed


def test_a_fence_s_run_that_is_cut_shows_the_phases_that_were_over() -> None:
    """As a limit of time does it: SIGINT to all of its processes, here in a round with the fence and before any without."""
    words = "--memory --fence 0.4 --only memory-read --victim tiny --seconds 0.4 --rounds 3 --arrivals fixed"
    command = [sys.executable, "-u", "-m", "benchmarks.isolation", *words.split()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            assert any("round 2" in line for line in process.stderr), "a round is over"
            os.killpg(process.pid, signal.SIGINT)
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()

    assert process.returncode in (0, 1)
    assert "p50 / p99 over alone, all rounds together" in printed
    assert re.search(r"^memory-read +- / - -> [\d.,]+ / [\d.,]+$", printed, re.MULTILINE), printed
