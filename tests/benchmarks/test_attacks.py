"""The attacks: each reaches the server and gets the expected answers; the verdicts; and a short run."""

import json
import math
import os
from pathlib import Path

import pytest

from benchmarks import attacks
from benchmarks.attacked import KEPT, NEW, build, opened
from benchmarks.attacks import GOALS, PHASES, STOPPED, judged, unreached
from benchmarks.goals import MET, MISSED, Felt
from benchmarks.hostile import ATTACKS, Crowd
from benchmarks.outcomes import Outcome
from greenlane.load.jobs import Ask, Tally

needs_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two tenants")


def tally(opened: int = 0, **statuses: int) -> Tally:
    return Tally("test", 1.0, {int(status[1:]): number for status, number in statuses.items()}, opened=opened)


def test_an_attack_with_unexpected_answers_is_a_flaw() -> None:
    crowd = Crowd((Ask(b""),), 4, frozenset({400}))
    assert unreached([crowd], [tally(4, s400=3, s200=1)]) == []
    (flaw,) = unreached([crowd], [tally(4, s200=3)])
    assert flaw.endswith("4 connections, answers by status {200: 3}")


def test_an_attack_without_answers_has_to_make_its_connections() -> None:
    crowd = Crowd((Ask(b""),), 4)
    assert unreached([crowd], [tally(4)]) == []
    assert unreached([crowd], [tally(3)]) != []


def test_verdicts_use_the_medians_of_the_rounds() -> None:
    outcome = Outcome()
    for p99, worst in ((1.0, 2.0), (90.0, 99.0), (1.4, 20.0)):
        outcome.felt.append(Felt(KEPT, 100, 1.0, p99, worst, 100, 1.0, 1.0, 0, 0))
    attacks.note_felt(outcome)
    assert outcome.values == {"ratio": {KEPT: 1.4}, "over": {KEPT: 19.0}}


def test_one_delayed_kind_of_connection_misses_the_goal() -> None:
    outcome = Outcome()
    for way, ratio in ((KEPT, 1.0), (NEW, 1.6)):
        outcome.value("ratio", way, ratio)
    found = {row.about: row.verdict for row in judged({"garbage": outcome}) if row.goal.name == "ratio"}
    assert found == {KEPT: MET, NEW: MISSED}


def test_replacement_is_a_goal_only_for_stopped_processes() -> None:
    assert {goal.phase for goal in GOALS if goal.name == "replaced"} == set(STOPPED)
    assert {goal.phase for goal in GOALS if goal.name == "end"} == set(PHASES)


def test_a_server_that_did_not_end_misses_every_goal() -> None:
    outcome = Outcome(flaws=["SIGTERM did not end the server in 30 s"])
    outcome.value("end", "server", math.nan)
    assert {row.verdict for row in judged({"garbage": outcome})} == {MISSED}


@needs_cores
def test_attacks_reach_the_server_and_it_ends_while_one_is_on(tmp_path: Path) -> None:
    build(tmp_path / "models")
    with opened(tmp_path, tmp_path / "models", 0.8) as attacked:
        for name in ("upgrade", "empty-lines", "byte-at-a-time", "empty-connections", "most-configurations"):
            crowds = ATTACKS[name]()
            for _ in range(5):  # Beside other tests an attack may not get through in 0.8 s.
                found, tallies, _ = attacked.beside(name, crowds, new=True)
                if not unreached(crowds, tallies):
                    break
            assert unreached(crowds, tallies) == []
            assert [each.tenant for each in found] == [KEPT, NEW]
            assert all(each.count and not each.errors and not each.wrong for each in found)
        took, flaws = attacked.ended(crowds)
    assert took > 0
    assert flaws == []


@needs_cores
def test_a_short_run_shows_that_a_stopped_process_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "attacks.json"
    status = attacks.main(["--only", "stopped-dispatcher", "--seconds", "0.2", "--rounds", "1", "--output", str(output)])
    found = json.loads(output.read_text())
    assert status in (0, 1)
    assert found["phases"]["stopped-dispatcher"]["flaws"] == []
    (replaced,) = (row for row in found["verdicts"] if row["limit"] == "<= 5 s")
    assert 3 < replaced["value"] < 30
    assert "until another process answers, most" in capsys.readouterr().out


@needs_cores
@pytest.mark.load
def test_a_run_of_every_attack_has_no_flaw(tmp_path: Path) -> None:
    """Checks that each attack is carried out, not the measured times."""
    output = tmp_path / "attacks.json"
    assert attacks.main(["--seconds", "3", "--rounds", "1", "--output", str(output)]) in (0, 1)
    found = json.loads(output.read_text())
    assert {name: phase["flaws"] for name, phase in found["phases"].items()} == {name: [] for name in PHASES}
