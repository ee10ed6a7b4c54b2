"""The change experiment: its verdicts, and a short run on CPU cores."""

import json
import math
from pathlib import Path
from time import sleep

import numpy as np
import onnxruntime
import pytest

from benchmarks import change, nets
from benchmarks.asks import TOLERANCE
from benchmarks.bench import WATCHER, Cores, deployment, opened, share_out
from benchmarks.goals import GOALS, MET, MISSED, NOT_EXERCISED, Felt, Goal, felt, judge
from benchmarks.outcomes import Outcome, as_json, table
from benchmarks.stalling import STALL
from greenlane.load.figures import Samples
from greenlane.load.jobs import SlowAnswer

OVER = Goal("p", "over", "slowest over quiet worst", 5)
READY = Goal("p", "ready", "part that got ready", 1, "", least=True)


def samples(*rows: tuple[float, float]) -> Samples:
    """Seconds at which requests were due, and milliseconds that they took."""
    found = Samples()
    for due, took in rows:
        found.add(due, took * 1e3, 200)
    return found


def a_felt(tenant: str = "tiny", worst: float = 9.0, errors: int = 0, wrong: int = 0) -> Felt:
    return Felt(tenant, 100, 1.0, 2.0, worst, 100, 2.0, 4.0, errors, wrong)


def verdicts(outcomes: dict[str, Outcome], quiet_worst: dict[str, float]) -> dict[tuple[str, str, str], str]:
    rows = change.judged(outcomes, quiet_worst)
    return {(row.goal.phase, row.goal.name, row.about): row.verdict for row in rows}


@pytest.mark.parametrize(
    ("goal", "value", "flaw", "skipped", "verdict"),
    [
        (OVER, 5.0, "", "", MET),
        (OVER, -1.0, "", "", MET),
        (OVER, 5.1, "", "", MISSED),
        (READY, 1.0, "", "", MET),
        (READY, 0.9, "", "", MISSED),
        (OVER, math.nan, "", "", NOT_EXERCISED),
        (OVER, 1.0, "3 errors", "", MISSED),
        (OVER, 1.0, "", "there was no time left", NOT_EXERCISED),
    ],
)
def test_a_goal_is_met_missed_or_not_exercised(goal: Goal, value: float, flaw: str, skipped: str, verdict: str) -> None:
    (row,) = judge([goal], {("p", goal.name): {"tiny": value}}, {"p": flaw} if flaw else {}, {"p": skipped} if skipped else {})
    assert row.verdict == verdict
    assert (flaw or skipped) in row.why


def test_a_goal_without_a_value_is_not_exercised_or_missed_by_a_flaw() -> None:
    assert [row.verdict for row in judge(GOALS, {}, {}, {})] == [NOT_EXERCISED] * len(GOALS)
    assert verdicts({"depth": Outcome(flaws=["DeviceUnavailable"])}, {})["depth", "ratio", ""] == MISSED


def test_an_answer_that_waited_during_the_change_counts_to_it() -> None:
    found = felt("tiny", samples((1.0, 2), (4.9, 300), (5.5, 3), (9.0, 1)), quiet=(0.5, 5.0), change=(5.0, 6.0), wrong=0)
    assert (found.count, found.worst) == (2, 300)
    assert (found.quiet_count, found.quiet_worst) == (1, 2)


def test_the_slowest_answers_of_a_change_are_kept_the_slowest_first() -> None:
    slow = [SlowAnswer(latency, due, 0.1, 0.2, 0.3) for latency, due in ((2.0, 1.0), (300.0, 4.9), (3.0, 5.5), (9.0, 9.0))]
    found = felt("tiny", samples(), quiet=(0.5, 5.0), change=(5.0, 6.0), wrong=0, slowest=slow)
    assert [each.latency for each in found.slowest] == [300.0, 3.0]
    assert found.slowest[1].due == 0.5
    text = table({}, {"reload": Outcome(felt=[found])}, [])
    assert "reload: tiny, slowest: 3.00 ms, due at 0.500 s, sent 0.10 ms later, queued 0.20, executed 0.30 ms" in text


def test_a_request_without_an_answer_is_an_error_with_the_time_it_was_waited_for() -> None:
    given = samples((1.0, 2))
    given.add(5.5, 30_000_000.0, 0)
    found = felt("tiny", given, quiet=(0.5, 5.0), change=(5.0, 6.0), wrong=0)
    assert (found.errors, found.worst) == (1, 30_000)


def test_latencies_are_compared_with_the_tenants_worst_quiet_phase() -> None:
    outcomes = {"repartition": Outcome(felt=[a_felt(worst=9.0), a_felt("mob", worst=900.0)], over=("tiny",))}
    assert verdicts(outcomes, {"tiny": 4.1, "mob": 1.0})["repartition", "over", "tiny"] == MET
    assert verdicts(outcomes, {"tiny": 3.9, "mob": 1.0})["repartition", "over", "tiny"] == MISSED
    assert ("repartition", "over", "mob") not in verdicts(outcomes, {"tiny": 3.9, "mob": 1.0})


def test_of_two_measurements_of_a_tenant_the_worse_counts() -> None:
    outcomes = {"rows": Outcome(felt=[a_felt(worst=90.0), a_felt(worst=4.0)], over=("tiny",))}
    assert verdicts(outcomes, {"tiny": 4.0})["rows", "over", "tiny"] == MISSED


@pytest.mark.parametrize("flawed", [a_felt(worst=4.0, errors=1), a_felt(worst=4.0, wrong=1)])
def test_an_error_or_a_wrong_answer_misses_every_goal_of_the_phase(flawed: Felt) -> None:
    outcome = Outcome(felt=[flawed], over=("tiny",))
    outcome.value("put", "50 PUTs", 0.1)
    found = verdicts({"repartition": outcome}, {"tiny": 4.0})
    assert found["repartition", "over", "tiny"] == found["repartition", "put", "50 PUTs"] == MISSED


def test_under_mps_there_is_no_goal_for_what_has_no_server() -> None:
    rows = change.judged({}, {}, change.UNDER_MPS)
    assert {goal.phase for goal in GOALS} - {row.goal.phase for row in rows} == {"depth"}


def test_a_phase_that_the_device_does_not_support_is_not_exercised() -> None:
    outcome = Outcome(felt=[a_felt()], over=("tiny",), unexercised="nothing is built on a CPU")
    outcome.value("ratio", "tiny", 1.0)
    found = verdicts({"build": outcome}, {"tiny": 4.0})
    assert {verdict for (phase, *_), verdict in found.items() if phase == "build"} == {NOT_EXERCISED}


def test_a_refused_admin_request_is_a_flaw() -> None:
    outcome = Outcome()
    outcome.expect([200, 200], "orders")
    assert not outcome.flaws
    outcome.expect([200, 400, 0], "orders")
    assert outcome.flaws == ["2 of 3 orders were answered with [0, 400]"]


def test_on_sixteen_granules_some_are_free_and_each_mover_can_give_one_away() -> None:
    tenants = deployment("cuda", 16, Cores()).tenants
    assert [tenant.granules for tenant in tenants] == [5, 5, 4]
    with pytest.raises(ValueError, match="9 granules; moving two tenants"):
        deployment("cuda", 9, Cores())


def test_where_there_are_cores_enough_clients_and_server_have_their_own() -> None:
    assert share_out(range(16)) == Cores((12,), (13, 14, 15), tuple(range(12)))
    assert share_out(range(2)) == Cores()


def test_the_table_and_the_file_have_the_same_figures(tmp_path: Path) -> None:
    outcome = Outcome(felt=[a_felt()], over=("tiny",), figures={"PUTs": 50, "nothing": math.nan})
    rows = change.judged({"repartition": outcome}, {"tiny": 4.0})
    text = table({"GPU": "none"}, {"repartition": outcome}, rows)
    found = json.loads(json.dumps(as_json({"GPU": "none"}, {"repartition": outcome}, rows), allow_nan=False))
    assert "met           repartition  tiny             5 ms    <= 5 ms" in text
    assert found["verdicts"][0]["verdict"] == MET
    assert found["phases"]["repartition"]["figures"] == {"PUTs": 50, "nothing": None}


@pytest.mark.parametrize("name", nets.NETS["cpu"])
def test_a_network_answers_other_inputs_with_other_numbers(name: str) -> None:
    net = nets.NETS["cpu"][name]
    session = onnxruntime.InferenceSession(net.make(nets.SEEDS[name]), providers=["CPUExecutionProvider"])
    (one,), (other,) = (session.run(None, {"x": net.draw(2, seed)}) for seed in (0, 1))
    assert one.shape[0] == 2
    assert np.abs(one - other).max() > 4 * TOLERANCE * np.abs(one).max()


@pytest.mark.load
def test_a_short_run_on_cores_exercises_every_phase_with_right_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that it runs, not the measured times."""
    output = tmp_path / "change.json"
    status = change.main(["--device", "cpu", "--seconds", "1", "--puts", "4", "--colds", "1", "--output", str(output)])
    found = json.loads(output.read_text())
    assert status in (0, 1)
    assert list(found["phases"]) == list(change.PHASES)
    assert {name: phase["flaws"] for name, phase in found["phases"].items()} == {name: [] for name in change.PHASES}
    assert all(each["errors"] == each["wrong"] == 0 for phase in found["phases"].values() for each in phase["felt"])
    assert {row["phase"] for row in found["verdicts"] if row["verdict"] == NOT_EXERCISED} == {"build", "retrain", "stream"}
    assert found["phases"]["repartition"]["figures"]["PUTs"] == 4
    assert "python -m" in found["machine"]["command"]


@pytest.mark.load
def test_a_stall_of_the_gil_is_measured_for_every_tenant(tmp_path: Path) -> None:
    """The control: the experiment measures a stall, with its duration."""
    with opened("cpu", tmp_path, tmp_path / "models", 1.0, stalls=True) as bench:

        def change() -> None:
            for _ in range(3):
                bench.stall()
                sleep(2 * STALL)

        _, (found,) = bench.watch([WATCHER], change)
    assert (found.errors, found.wrong) == (0, 0)
    assert found.worst > 0.8 * STALL * 1e3
