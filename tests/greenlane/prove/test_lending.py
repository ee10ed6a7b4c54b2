"""`greenlane prove --lending`: when each phase is, the verdicts, and a short run on this machine's cores."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenlane.load.figures import Samples
from greenlane.load.jobs import Seen, Tally
from greenlane.load.rules import OTHERS, Word
from greenlane.prove import lend, lending, text
from greenlane.prove.command import main
from greenlane.prove.command_line import Options
from greenlane.prove.lending import FEWEST, LOADS, STATES, Borrowed, decide, decide_first, needed, rounds_in, turns
from greenlane.prove.page import render
from greenlane.prove.plan import AHEAD, Pair
from server.demo import build

LENT, UNLENT = "", Borrowed(3, 0, {"no_faster": 90}).lacks()
LIMIT = 1000.0
PAIR = Pair("lender", "borrower")


def phases(seed: int, scale: float, rounds: int = 8, failed: int = 0) -> list[Samples]:
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(rounds):
        due = np.sort(draw.uniform(0, 0.5, 150))
        found.append(Samples(due.tolist(), (scale * draw.lognormal(0, 0.1, 150)).tolist(), [200] * 150))
    found[0].status[:failed] = [503] * failed
    return found


@pytest.mark.parametrize(
    ("scale", "lacks", "busy", "failed", "word"),
    [
        (1.0, LENT, 0.0, (0, 0), "isolated"),
        (1.5, LENT, 0.0, (0, 0), "leaks"),
        (1.5, LENT, 2 * OTHERS, (0, 0), "too noisy"),
        (1.0, UNLENT, 0.0, (0, 0), "not exercised"),
        (1.5, UNLENT, 0.0, (0, 0), "leaks"),
        (1.0, LENT, 0.0, (0, 3), "leaks"),
        (1.0, LENT, 0.0, (3, 0), "not exercised"),
        (1.0, LENT, 2 * OTHERS, (3, 0), "too noisy"),
    ],
)
def test_a_lender_is_judged_by_what_lending_added(
    scale: float, lacks: str, busy: float, failed: tuple[int, int], word: Word
) -> None:
    ruling, _ = decide(phases(1, 1000, failed=failed[0]), phases(2, 1000 * scale, failed=failed[1]), lacks, busy)
    assert ruling.word == word


def test_lending_was_exercised_if_the_lender_came_back_during_inferences_on_its_share() -> None:
    before = Borrowed.of({"launches": 100, "returns": 50, "home_launches": {"no_faster": 5, "too_long": 1}})
    after = Borrowed.of({"launches": 120, "returns": 55, "home_launches": {"no_faster": 75, "too_long": 1}})
    assert after.since(before) == (20, 5, {"no_faster": 70, "too_long": 0})
    assert after.since(before).lacks() == ""
    assert Borrowed(20, 4).lacks() == (
        "20 inferences of the borrower ran on the lender's share, 4 of them when it had a request; at least 20 and 5 are needed"
    )
    short = Borrowed(3, 0, {"not_measured": 1}).lacks()
    assert short.endswith(" are needed; what takes less than 0.2 ms on cores stays on its own share, and is not counted")
    assert Borrowed(2, 0, {"no_faster": 70, "too_long": 1}).lacks().endswith(", as most stayed on its share: no_faster 70")
    assert Borrowed.of({}).lacks()
    assert Borrowed(3, 1).since(before) == (3, 1, {}), "the process that counts was replaced"


def test_few_requests_are_too_few_to_judge() -> None:
    few = [Samples([0.0], [1.0], [200])]
    assert decide(few, few, LENT, 0.0)[0].word == "too noisy"


def single(*latencies: float) -> Samples:
    return Samples([0.0] * len(latencies), list(latencies), [200] * len(latencies))


@pytest.mark.parametrize(
    ("on", "lacks", "word"),
    [
        (single(1100, 1110, 1120, 1130), LENT, "isolated"),
        (single(5000, 5100, 5200, 5300), LENT, "leaks"),
        (single(1100, 1200, 5200, 5300), LENT, "too noisy"),
        (single(1100, 1110, 1120, 1130), UNLENT, "not exercised"),
        (Samples([0.0], [1.0], [503]), LENT, "not exercised"),
        (single(), LENT, "too noisy"),
    ],
)
def test_the_first_request_may_be_as_late_as_is_lent(on: Samples, lacks: str, word: Word) -> None:
    assert decide_first(single(1000, 1010, 1020, 1030), on, LIMIT, lacks)[0].word == word


@given(st.integers(1, 12))
def test_phases_never_overlap_and_each_state_has_every_load_as_often(rounds: int) -> None:
    found = turns(rounds)
    assert all(later.begin - AHEAD > earlier.end for earlier, later in pairwise(found))
    for state in STATES:
        assert [sum(turn.load == load and turn.state == state for turn in found) for load in LOADS] == [rounds] * 3


@given(st.integers(1, 6))
def test_as_many_seconds_as_are_needed_give_every_pair_its_rounds(pairs: int) -> None:
    assert rounds_in(needed(pairs) + 0.01, pairs) >= FEWEST
    assert rounds_in(1.0, pairs) == 0


def test_what_came_of_a_pair_is_sorted_by_load_and_state() -> None:
    schedule = turns(5)
    seen = {state: Seen() for state in STATES}
    tallies: dict[lending.State, list[Tally]] = {state: [] for state in STATES}
    for turn in schedule:
        count = 60 if turn.load else 4
        for number in range(count):
            at = turn.begin + (turn.end - turn.begin) * number / count
            seen[turn.state].samples.add(at, 1000.0 + 1000 * turn.load + number, 200)
        tally = Tally("batches", 0.0)
        tally.statuses[200] = 130 if turn.state == "on" else 100
        tallies[turn.state].append(tally)

    found = lend.judged(PAIR, "m", 0.001, schedule, dict.fromkeys(LOADS, 5.0), seen, tallies, Borrowed(20, 5), 0.0)

    assert [level.load for level in found.levels] == list(LOADS)
    assert [level.gained for level in found.levels] == [pytest.approx(1.3)] * 3
    assert [level.ruling.word for level in found.levels] == ["isolated"] * 3
    assert [len(samples) for samples in found.levels[0].rounds["on"]] == [60] * 5
    assert found.first.word == "isolated"


def written(folder: Path, acme: str, globex: str) -> Path:
    build(folder / "models")
    core, other = sorted(os.sched_getaffinity(0))[:2]
    path = folder / "c.toml"
    device, models = f'[device]\nbackend = "cpu"\ncores = "{core},{other}"\n', '[models]\nrepository = "models"\n'
    lender = f'[tenants.acme]\ncores = 1\nmodels = ["identity"]\n{acme}\n'
    borrower = f'[tenants.globex]\ncores = 1\nmodels = ["stripes"]\n{globex}\n'
    path.write_text(device + models + lender + borrower)
    return path


def test_without_a_lender_and_a_borrower_nothing_can_be_lent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--lending", "--config", str(written(tmp_path, "lend = true", ""))], "greenlane prove") == 2
    assert "nothing can be lent" in capsys.readouterr().err
    assert main(["--lending", "--config", str(tmp_path / "absent.toml")], "greenlane prove") == 2
    assert "absent.toml" in capsys.readouterr().err
    monkeypatch.delenv("GREENLANE_CONFIG", raising=False)
    assert main(["--lending"], "greenlane prove") == 2
    assert "expected --config FILE" in capsys.readouterr().err


@pytest.mark.load
def test_a_lender_is_asked_on_two_servers_at_every_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lending, lend):
        monkeypatch.setattr(module, "IDLE", 0.1)
    monkeypatch.setattr(lending, "FIRST", 1.0)
    path = written(tmp_path, "lend = true", "burst = 2")

    found = lend.lending(Options(config=str(path), seconds=6.0), "c.toml", "greenlane prove", lambda _: None)

    (one,) = found.lending
    assert (one.pair, one.model, one.limit) == (Pair("acme", "globex"), "identity", 0.001)
    assert all(sum(map(len, level.rounds[state])) > 10 for level in one.levels for state in STATES)
    assert all(level.borrower[state] > 0 for level in one.levels for state in STATES)
    assert "acme lends to globex" in text.render(found)
    assert "acme lends to globex" in render(found)
    assert not found.untried
