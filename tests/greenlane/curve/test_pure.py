"""What `greenlane curve` decides: intervals of a p99, the knee, the smallest share, the search for it, and what fits."""

import math
import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenlane.curve.curve import Curve, Impossible, shares
from greenlane.curve.options import Share, Target
from greenlane.curve.points import (
    LEAST,
    LESS,
    P99,
    AtRate,
    Drawn,
    Point,
    best,
    candidate,
    doubling,
    judge,
    knee,
    p99,
    smallest,
    tolerated,
)
from greenlane.curve.text import DRAWN, as_json, busy_cores, conclusions, heading, row, toml, toml_duration
from server.accounts.usage import Moved
from tests.fakes import FakeDevice

latencies = st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=1200)


def point(granules: int, throughput: float = 100.0, at_rate: AtRate | None = None) -> Point:
    return Point(granules, granules, throughput, 0.001, 0.002, at_rate)


def at_rate(word: str, value: float = 0.003) -> AtRate:
    return AtRate(800.0, word, value / 2, P99(value, 0.9 * value, 1.1 * value, 1000))  # type: ignore[arg-type]


@given(latencies)
def test_a_p99_is_one_of_the_latencies_and_inside_its_interval(values: list[float]) -> None:
    found = p99(values)
    assert found.value in values
    assert min(values) <= found.low <= found.value <= found.high <= max(values)
    assert sum(value > found.value for value in values) <= 0.01 * len(values)


@given(latencies, st.floats(1e-5, 1.0), st.floats(1.0, 10.0))
def test_who_keeps_a_target_keeps_a_larger_one(values: list[float], target: float, times: float) -> None:
    assert judge(values, target) != "keeps" or judge(values, target * times) == "keeps"
    assert judge(values, target * times) != "misses" or judge(values, target) == "misses"


@given(latencies)
def test_few_latencies_say_nothing_and_no_target_is_neither_kept_nor_missed(values: list[float]) -> None:
    expected = "too few" if len(values) < LEAST else "measured"
    assert judge(values, None) == expected
    assert (judge(values, 2.0) == "too few") == (len(values) < LEAST)


def test_a_target_inside_the_interval_is_too_noisy() -> None:
    chance = random.Random(1)
    values = [chance.expovariate(1000) for _ in range(1000)]
    found = p99(values)
    assert found.low < found.value < found.high
    assert judge(values, found.value) == "too noisy"
    assert judge(values, found.high) == "keeps"
    assert judge(values, found.low * 0.999) == "misses"


def test_slow_requests_in_groups_make_the_interval_wider_than_the_same_apart() -> None:
    """The same values: sixty slow requests one after another, or spread evenly."""
    grouped = [0.1 + number / 1e6 if 500 <= number < 560 else 0.001 + number / 1e9 for number in range(2000)]
    spread = sorted(grouped, key=lambda value: random.Random(repr(value)).random())
    assert p99(grouped).value == p99(spread).value
    assert p99(grouped).low < 0.01 < p99(spread).low


@given(st.integers(1, 10**6))
def test_more_than_a_hundredth_is_tolerated_and_not_much_more(most: int) -> None:
    assert most * 0.01 < tolerated(most) <= most * 0.01 + 3 * math.sqrt(most * 0.01) + 1


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=20))
def test_no_share_above_the_knee_has_much_more_throughput_and_none_below_is_one(throughputs: list[float]) -> None:
    points = [point(index + 1, throughput) for index, throughput in enumerate(throughputs)]
    found = knee(points)
    at = points.index(found) if found else len(points) - 1
    assert all(other.throughput <= points[at].throughput * (1 + LESS) for other in points[at + 1 :])
    for lower in range(at):
        assert any(other.throughput > points[lower].throughput * (1 + LESS) for other in points[lower + 1 :])
    assert (found is None) == (at == len(points) - 1 and len(points) > 1)


@given(st.lists(st.sampled_from(["keeps", "misses", "overloaded", "too noisy"]), min_size=1, max_size=12))
def test_the_smallest_share_keeps_the_target_and_no_smaller_one_does(words: list[str]) -> None:
    points = [point(index + 1, at_rate=at_rate(word)) for index, word in enumerate(words)]
    found = smallest(points)
    assert (found is None) == ("keeps" not in words)
    assert found is None or found.granules == words.index("keeps") + 1


def test_the_best_share_has_the_lowest_p99_of_those_that_have_one() -> None:
    points = [point(1, at_rate=AtRate(800.0, "overloaded")), point(2, at_rate=at_rate("misses", 0.02)), point(3)]
    assert best(points) == points[1]
    assert best(points[:1]) is None


@given(st.integers(1, 200).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most + 1))))
def test_the_search_finds_the_threshold_with_few_measurements(case: tuple[int, int]) -> None:
    most, threshold = case
    known: dict[int, bool] = {}
    while (share := candidate(known, most)) is not None:
        assert 1 <= share <= most
        assert share not in known
        known[share] = share >= threshold
    assert min((share for share, keeps in known.items() if keeps), default=most + 1) == threshold
    assert len(known) <= 2 * math.log2(most) + 2


@given(st.integers(1, 10**4))
def test_shares_double_up_to_the_whole_device(most: int) -> None:
    found = doubling(most)
    assert found[0] == 1
    assert found[-1] == most
    assert all(b <= 2 * a for a, b in pairwise(found))
    assert list(found) == sorted(set(found))


def test_shares_in_units_are_rounded_up_to_granules_and_it_is_said() -> None:
    device = FakeDevice((8, 8, 8, 8))
    asked = [Share(8, False), Share(12, False), Share(4, True), Share(16, False)]
    assert shares(asked, device) == ((1, 2, 4), ("12 units were rounded to 16: shares are whole granules of 8 units",))
    assert shares([], device) == ((1, 2, 4), ())


@pytest.mark.parametrize(("share", "said"), [(Share(33, False), "33 units, but the device has 32"), (Share(5, True), "5 gran")])
def test_shares_beyond_the_device_are_refused_with_the_numbers(share: Share, said: str) -> None:
    with pytest.raises(Impossible, match=said):
        shares([share], FakeDevice((8, 8, 8, 8)))


def curve(*points: Point, target: Target | None = None) -> Curve:
    return Curve("conv", 1, "a fake", "core", 4, points, target)


KEPT = curve(point(1, at_rate=at_rate("misses")), point(2, at_rate=at_rate("keeps")), target=Target(800.0, 0.005))


def test_the_lines_to_paste_name_the_smallest_share_and_the_target() -> None:
    text = '[tenants.NAME]\ncores = 2\nmodels = ["conv"]\ntarget_p99 = "5ms"\ntarget_rate = 800'
    assert toml(KEPT) == text
    assert toml(curve(point(1), point(2))) == '[tenants.NAME]\ncores = 1\nmodels = ["conv"]'
    assert toml(curve(point(1, at_rate=at_rate("misses")), target=Target(800.0, 0.005))) == ""


def test_conclusions_have_the_numbers_that_they_rest_on() -> None:
    said = list(conclusions(KEPT))
    assert said[0] == "the knee is at 1 core: no larger share has over 10% more throughput"
    assert said[1] == (
        "2 cores of 4: the smallest share that keeps a p99 of 5 ms at 800 requests a second; it was 3.00 ms of 1000 requests, "
        "with 95 % at most 3.30 ms"
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (at_rate("misses", 0.02), "keeps a p99 of 5 ms at 800 requests a second; the best was 20.0 ms on 1 core"),
        (AtRate(800.0, "misses", 0.01, P99(0.02, 0.02, 0.02, 15)), "20.0 ms on 1 core (of 15 requests, after which so many"),
        (AtRate(800.0, "overloaded"), "all are overloaded: 1 core answered 100 a second at most"),
        (at_rate("too noisy", 0.005), "1 core: too noisy to say (p99 4.50 to 5.50 ms); raise --seconds"),
    ],
)  # fmt: skip
def test_no_share_that_keeps_the_target_is_explained(found: AtRate, said: str) -> None:
    assert said in list(conclusions(curve(point(1, at_rate=found), target=Target(800.0, 0.005))))[-1]


def test_what_requests_draw_is_in_every_form_and_says_the_shares_that_hold_nothing_back() -> None:
    """A tenth more than they drew, in hundredths, of at least 0.01 and at most 1."""
    little = Drawn(Moved(2_000_000, 0, 0), Moved(200_000_000), 0.0001, 0.0)
    much = Drawn(Moved(512_345_678, 1_500_000, 24), Moved(1_340_928_000_000, 12_600_000_000, 2400), 0.4, 0.2)
    found = curve(point(1), replace(point(2), throughput=200.0, drawn=little), replace(point(4), throughput=900.0, drawn=much))
    assert list(conclusions(found))[-1] == (
        "on 4 cores requests back to back draw 1.341 TB/s of the memory (40%), 12.6 GB/s of PCIe in, 0.0024 MB/s out: "
        "memory_bandwidth = 0.44 and pcie = 0.22 would not hold them back"
    )
    lower = replace(found, points=found.points[1:2])
    assert toml(lower) == '[tenants.NAME]\ncores = 2\nmodels = ["conv"]\nmemory_bandwidth = 0.01'
    assert list(conclusions(lower))[-1].endswith("memory_bandwidth = 0.01 would not hold them back")
    whole = replace(found, points=(replace(point(4), drawn=much._replace(memory=0.97)),))
    assert "memory_bandwidth = 1\n" in toml(whole) + "\n"
    assert "drawn" not in as_json(found)["points"][0]
    assert as_json(found)["points"][2]["drawn"] == {
        "moved": {"memory": 512_345_678, "pcie_in": 1_500_000, "pcie_out": 24},
        "bytes_per_second": {"memory": 1_340_928_000_000, "pcie_in": 12_600_000_000, "pcie_out": 2400},
        "memory_bandwidth": 0.4,
        "pcie": 0.2,
    }


@pytest.mark.parametrize("target", [None, Target(800.0, 0.005)])
def test_rows_are_below_their_headings(target: Target | None) -> None:
    drawn = Drawn(Moved(512_345_678, 1_500_000, 24), Moved(1_340_928_000_000, 12_600_000_000, 2400), 0.4, 0.2)
    shown = replace(point(4, at_rate=at_rate("keeps") if target else None), drawn=drawn)
    head, line = ([*re.finditer(r"\S+(?: \S+)*", text)] for text in (heading(target, "SM", bandwidth=True), row(shown)))
    assert [each.end() for each in head] == [each.end() for each in line[: len(head)]]
    cells = dict(zip(DRAWN[:4], ("512", "1341", "40.0%", "1.50/0.000"), strict=True))
    assert [(name[0], cell[0]) for name, cell in zip(head, line, strict=False)][4:8] == list(cells.items())
    assert [each[0] for each in line[len(head) :]] == ["keeps"] * bool(target)


def test_the_document_has_every_point() -> None:
    found = as_json(KEPT)
    assert found["smallest"] == 2
    assert [each["units"] for each in found["points"]] == [1, 2]
    assert found["points"][1]["at_rate"]["verdict"] == "keeps"
    assert found["target"] == {"rate": 800.0, "p99": 0.005}


@given(st.integers(1, 10**6))
def test_durations_are_written_as_they_are_read(microseconds: int) -> None:
    from greenlane.curve.options import duration

    assert duration(toml_duration(microseconds / 1e6)) == pytest.approx(microseconds / 1e6)


@pytest.mark.parametrize(("p99", "said"), [(0.002, False), (0.0029, False), (0.05, True)])
def test_a_machine_that_is_not_quiet_is_said(p99: float, said: bool) -> None:
    found = list(conclusions(curve(Point(1, 1, 100.0, 0.001, p99))))
    assert (
        any(line.startswith("something else was running on this machine: one request alone on 1 core") for line in found)
        == said
    )


@pytest.mark.parametrize(("others", "said"), [(0.0, False), (0.1, False), (0.84, True)])
def test_what_other_programs_used_of_the_cores_is_said(others: float, said: bool) -> None:
    """A p99 that they made longer looks like a share that is too small."""
    assert bool(busy_cores(others)) == said
    assert not said or "other programs used 84% of the cores meanwhile" in busy_cores(others)[0]
