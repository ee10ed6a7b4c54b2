"""What is kept of a victim's requests, and what an aggressor got done."""

import json
from dataclasses import replace

import pytest

from greenlane.load.figures import Samples
from greenlane.load.jobs import Ask, OpenLoop, Seen, Tally
from greenlane.prove import measure
from greenlane.prove.access import Access, ServerEnded
from greenlane.prove.attacks import Attack, strain
from greenlane.prove.inputs import Form
from greenlane.prove.measure import FASTEST, USED, Beside, Places, Victim, rate_of
from greenlane.prove.plan import AHEAD, Pair, Step, by_phase, steps
from greenlane.prove.survey import Timed

KINDS = ("batches", "small")
ATTACK = Attack("batches", (Ask(b""),), 4, frozenset({200}), "m", seconds=0.01)
RATE, QUICK, SLOW = 400, 1000.0, 9000.0
LONG = 700_000.0


def answered(phases: list[Step], last_of_control: float = QUICK) -> Seen:
    """A victim that is slower in controls, and whose last request of each control takes this many microseconds."""
    seen = Seen()
    for step in phases:
        count = round(RATE * (step.end - step.begin))
        for number in range(count):
            took = SLOW if step.which == "control" else QUICK
            if step.which == "control" and number == count - 1:
                took = last_of_control
            seen.samples.add(step.begin + number / RATE, took, 200)
    return seen


def tallies(phases: list[Step], answers: int) -> list[Tally]:
    loud = [step for step in phases if step.which != "alone"]
    return [Tally(step.kind, 1.0, {200: answers, 429: 1000}) for step in loud]


def results(phases: list[Step], seen: Seen, answers: int) -> list[measure.Result]:
    quiet = {(step.round, step.kind): 0.0 for step in phases}
    one = measure.Pass(phases, seen, [tallies(phases, answers)], quiet)
    return [measure.judged(kind, Beside(ATTACK, ATTACK), [one]) for kind in KINDS]


def disturbed(noisy: set[int], others: float = 0.5) -> measure.Pass:
    """A pass in which other programs used so much of the cores in some rounds, and every other request beside was slow then."""
    phases = steps(["batches"], 4)
    seen = Seen()
    for step in phases:
        for number in range(round(RATE * (step.end - step.begin))):
            met = step.which == "beside" and step.round in noisy and number % 2
            seen.samples.add(step.begin + number / RATE, SLOW if met or step.which == "control" else QUICK, 200)
    shares = {(step.round, step.kind): others if step.round in noisy else 0.02 for step in phases}
    return measure.Pass(phases, seen, [tallies(phases, 60)], shares)


def test_rounds_that_other_programs_disturbed_are_left_out_where_all_rounds_decide_nothing() -> None:
    beside = Beside(ATTACK, ATTACK)
    found = measure.judged("batches", beside, [disturbed({1, 2})])
    assert found.ruling.word == "isolated"
    assert "in the 2 of 4 rounds in which other programs used at most 10%" in found.ruling.why
    assert len(found.rounds["beside"]) == 2
    assert measure.judged("batches", beside, [disturbed({0, 1, 2})]).undecided
    assert measure.judged("batches", beside, [disturbed({0, 1, 2, 3})]).undecided


def test_passes_count_together_until_enough_rounds_were_quiet() -> None:
    beside, noisy = Beside(ATTACK, ATTACK), disturbed({0, 1, 2})
    found = measure.judged("batches", beside, [noisy, noisy])
    assert (found.ruling.word, len(found.rounds["alone"])) == ("isolated", 2)


def test_requests_are_sorted_by_phase_and_round_and_those_alone_count_for_every_kind() -> None:
    phases = steps(KINDS, 3)
    for result in results(phases, answered(phases), answers=60):
        assert [len(samples) for samples in result.rounds["alone"]] == [400] * 3
        assert [len(samples) for samples in result.rounds["beside"]] == [200] * 3
        assert [len(samples) for samples in result.rounds["control"]] == [100] * 3
        assert (result.ruling.word, result.busy) == ("isolated", 1.0)


def test_requests_that_wait_for_the_control_before_them_are_left_out() -> None:
    phases = steps(KINDS, 3)
    for result in results(phases, answered(phases, last_of_control=LONG), answers=60):
        assert all(0 < len(samples) < 400 for samples in result.rounds["alone"])
        assert [len(samples) for samples in result.rounds["beside"]] == [200] * 3


def test_an_aggressor_is_busy_for_as_long_as_its_expected_answers_take() -> None:
    phases = steps(KINDS, 3)
    (result, _) = results(phases, answered(phases), answers=12)
    beside = phases[1]
    assert result.busy == pytest.approx(12 * ATTACK.seconds / (beside.end - beside.begin + AHEAD))
    assert result.ruling.word == "not exercised"
    assert result.statuses == {200: 36, 429: 3000}
    assert result.ruling.why.endswith(
        ", as 3000 of its 3036 requests were refused (429), such as for a limit of its tenant, which is lifted without --url"
    )


def test_a_strain_is_asked_for_once_in_each_phase_for_as_long_as_that_is_and_its_rates_are_read() -> None:
    attack = strain("memory read", "acme/x", Access(1, admin_key="secret"))
    (job,) = attack.jobs(1, 0.1, 0.7, 4, None)
    head, _, body = job.asks[0].data.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /admin/tenants/acme%2Fx/strain HTTP/1.1")
    assert b"Authorization: Bearer secret" in head
    assert (json.loads(body), job.behaviour, job.connections) == ({"kind": "memory read", "seconds": 0.58}, "once", 1)

    phases = steps(["memory read"], 2)
    loud = [step for step in phases if step.which != "alone"]
    answers = [
        [b'{"gigabytes_per_second": 10}'],
        [b'{"gigabytes_per_second": 3}'],
        [b'{"error": "no"}'],
        [b"<html>502</html>", b"[]", b""],
    ]
    said = [Tally(step.kind, 1.0, {200: 1}, bodies=bodies) for step, bodies in zip(loud, answers, strict=True)]
    one = measure.Pass(phases, answered(phases), [said], {(step.round, step.kind): 0.0 for step in phases})
    beside = Beside(replace(attack, seconds=0.58, rate=12.0), attack)
    result = measure.judged("memory read", beside, [one])
    assert result.moved == {"beside": 10, "control": 3}
    assert result.busy == pytest.approx(0.58 / 0.6)


def test_models_move_nothing_that_is_known() -> None:
    assert measure.judged("batches", Beside(ATTACK, ATTACK), [disturbed(set())]).moved == {}


def test_a_victims_rate_uses_a_part_of_its_share() -> None:
    assert rate_of(Timed(Form(), 0.01)) == pytest.approx(USED / 0.01)
    assert rate_of(Timed(Form(), 1e-6)) == FASTEST


def test_a_load_process_that_cannot_begin_is_the_servers_end() -> None:
    job = OpenLoop(port=9, ask=Ask(b"x"), arrivals=[], connections=1, most=1)
    victim, beside = Victim("a", "m", job, 10.0), {"batches": Beside(ATTACK, ATTACK)}
    with pytest.raises(ServerEnded, match="gone"):
        measure.measure(Pair("a", "b"), victim, beside, 1, Places(), object, lambda: "gone", lambda _: None)  # type: ignore[arg-type]


def test_no_request_is_in_no_phase() -> None:
    phases = steps(KINDS, 1)
    seen = Seen(Samples([0.0, 1e6], [1.0, 1.0], [200, 200]))
    assert all(not len(samples) for samples in by_phase(phases, seen.samples))
