"""What a work moves, fitted to synthetic traffic of which the truth is known."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.accounts.traffic import FITS, MOST, Ran, Traffic, TrafficFit, prior
from server.accounts.usage import NS, Moved

SECONDS = 2.0
NOISE = 0.02
Mix = Callable[[int, np.random.Generator], Sequence[float]]
seeds = st.integers(0, 2**32 - 1)
some = settings(max_examples=25, deadline=None)


class Device:
    """Moves what its works move, and a background, and says so with noise."""

    def __init__(self, seed: int, works: Sequence[float], background: float = 0.0, guesses: Sequence[int] = ()) -> None:
        self.random = np.random.default_rng(seed)
        self.works = np.array(works, float)
        self.background = background
        self.guesses = guesses or (0,) * len(works)
        self.fit: TrafficFit[int] = TrafficFit()
        self.moved = 0.0
        self.ran: dict[int, Ran] = {}

    def run(self, windows: int, mix: Mix) -> TrafficFit[int]:
        for window in range(windows):
            counts = np.array(mix(window, self.random), int)
            noise = 1 + NOISE * self.random.standard_normal()
            self.moved = float(counts @ self.works + self.background * SECONDS) * noise
            self.ran = {at: Ran(int(count), int(count), self.guesses[at]) for at, count in enumerate(counts)}
            self.fit.add(self.moved, SECONDS, self.ran)
        return self.fit

    def errors(self) -> list[float]:
        """Of each model's figure, as a part of it."""
        return [abs(self.fit.bytes_of(at) / each - 1) for at, each in enumerate(self.works)]


def varying(means: Sequence[float]) -> Mix:
    """Each model's rate changes by itself, and now and then it rests."""
    return lambda _, random: (
        random.poisson(np.array(means) * random.lognormal(0, 0.5, len(means))) * (random.random(len(means)) < 0.9)
    )


@some
@given(seeds, st.integers(2, 6), st.sampled_from([0.0, 0.1, 0.5]))
@example(4889, 2, 0.0)
def test_what_a_work_moves_is_found_where_mixes_vary(seed: int, count: int, background: float) -> None:
    """Within 10 %; of models that move next to nothing, within 2 % of all that is moved."""
    random = np.random.default_rng(seed)
    works, parts = 10 ** random.uniform(5, 9, count), random.dirichlet(np.ones(count) * 3)
    means = np.maximum(1, 1e12 * parts / works)
    device = Device(seed, works, background * 1e12 / SECONDS)
    fit = device.run(200, varying(means))
    assert fit.residual <= FITS
    whole = float(means @ works)
    for at, error in enumerate(device.errors()):
        assert error <= 0.1 or error * works[at] * means[at] <= 0.02 * whole
    assert fit.bytes_of(None) * SECONDS == pytest.approx(background * 1e12, rel=0.1, abs=0.02 * whole)


def test_it_says_how_well_it_fits_and_that_figures_are_measured() -> None:
    fit = Device(0, [4e8, 1e8, 1e6]).run(300, varying([1000, 3000, 1e5]))
    assert fit.residual < 2 * NOISE
    assert [fit.measured(at) for at in range(3)] == [True] * 3


@some
@given(seeds, st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e12), st.integers(0, 1000)), max_size=30))
def test_nothing_is_ever_negative_and_parts_make_the_whole(seed: int, windows: list[tuple[int, float, int]]) -> None:
    """Whatever the traffic is: here it has nothing to do with the works."""
    fit: TrafficFit[int] = TrafficFit()
    random = np.random.default_rng(seed)
    for count, moved, most in windows:
        ran = {at: Ran(int(random.integers(0, most + 1)), int(random.integers(0, 10**9))) for at in range(count)}
        fit.add(moved, SECONDS, ran)
        assert min(fit.bytes_of(key) for key in (None, *range(4))) >= 0
        shares = fit.shares(moved, SECONDS, ran)
        assert min(shares.values()) >= 0
        assert sum(shares.values()) == pytest.approx(moved)
        assert np.isfinite(fit.residual)


@some
@given(seeds)
def test_a_model_that_leaves_is_known_when_it_comes_again(seed: int) -> None:
    device = Device(seed, [4e8, 1e8])
    device.run(150, varying([1000, 3000]))
    device.run(300, varying([0, 3000]))
    assert max(device.errors()) < 0.1
    fit = device.run(1, varying([1000, 3000]))
    assert max(device.errors()) < 0.1
    assert fit.measured(0)


@some
@given(seeds, st.floats(0.2, 5))
def test_what_never_varies_against_each_other_is_shared_by_the_guesses(seed: int, factor: float) -> None:
    device = Device(seed, [4e8, 1e8], guesses=[int(4e8 * factor), int(1e8 * factor)])
    fit = device.run(100, lambda *_: (1000, 3000))
    assert max(device.errors()) < 0.05
    assert not fit.measured(0)
    assert not fit.measured(1)


@some
@given(seeds)
def test_without_guesses_it_is_shared_by_what_works_used(seed: int) -> None:
    device = Device(seed, [4e8, 1e8])  # A work of each uses as much.
    fit = device.run(100, lambda *_: (1000, 3000))
    assert fit.bytes_of(0) == pytest.approx(fit.bytes_of(1), rel=0.01)
    assert fit.bytes_of(0) * 4000 == pytest.approx(7e11, rel=0.05)
    assert not fit.measured(0)


@some
@given(seeds)
def test_a_model_that_always_runs_as_often_and_the_background_are_not_measured(seed: int) -> None:
    """Until the background was seen while nothing ran."""
    device = Device(seed, [4e8], background=2e11)
    fit = device.run(50, lambda *_: (1000,))
    assert not fit.measured(0)
    assert not fit.measured(None)
    device.run(10, lambda *_: (0,))
    device.run(60, varying([1000]))
    assert fit.measured(0)
    assert fit.measured(None)
    assert max(device.errors()) < 0.1


@some
@given(seeds, st.sampled_from([0.3, 0.7, 1.5, 4.0]))
def test_rates_that_change_are_followed(seed: int, factor: float) -> None:
    device = Device(seed, [4e8, 1e8])
    device.run(150, varying([1000, 3000]))
    device.works[0] *= factor
    fit = device.run(60, varying([1000, 3000]))
    assert device.errors()[0] < 0.2
    device.run(200, varying([1000, 3000]))
    assert max(device.errors()) < 0.1
    assert fit.measured(0)


@some
@given(seeds)
def test_what_a_hog_certainly_moves_is_known_after_two_windows(seed: int) -> None:
    """Beside a model that was there before, which is certain of no more than a hundredth of the hog's bytes."""
    device = Device(seed, [2e7, 1e9], background=1e10)
    fit = device.run(5, lambda _, random: (random.poisson(400), 0))
    assert fit.at_least(1) == 0
    device.run(2, lambda _, random: (random.poisson(400), random.poisson(5000)))
    assert 0.8 * 1e9 < fit.at_least(1) < 1.1 * 1e9
    assert 0.9 * 1e9 < fit.at_most(1) < 1.3 * 1e9
    assert 400 * fit.at_least(0) < 0.01 * 5000e9


def test_what_another_model_moved_is_not_certain_of_one_that_always_ran_beside_it() -> None:
    device = Device(3, [2e7, 1e9])
    fit = device.run(10, lambda *_: (5000, 5000))
    assert fit.bytes_of(0) > 1e8
    assert fit.at_least(0) < 1e8
    assert fit.at_most(1) > 1e9
    assert fit.at_most(2) == 0, "it never ran"


def test_traffic_of_others_is_said_not_to_fit() -> None:
    device = Device(1, [4e8])
    fit = device.run(50, varying([1000]))
    for moved in np.random.default_rng(2).uniform(0, 1e13, 100):
        fit.add(float(moved), SECONDS, {0: Ran(1000, 1000)})
    assert fit.residual > FITS
    assert not fit.measured(0)


def test_a_device_at_rest_has_a_background_only() -> None:
    fit: TrafficFit[str] = TrafficFit()
    assert fit.shares(5.0, SECONDS, {}) == {None: 5.0}
    assert not fit.measured("mob")
    for _ in range(30):
        fit.add(1e9, SECONDS, {"mob": Ran(0, 0)})
    assert fit.bytes_of("mob") == 0
    assert fit.bytes_of(None) == pytest.approx(5e8, rel=0.01)
    fit.add(1e9, 0.0, {})
    fit.add(-1.0, SECONDS, {})
    assert fit.bytes_of(None) == pytest.approx(5e8, rel=0.01)


def test_models_that_always_run_together_stay_distinct_whatever_came_before() -> None:
    """Next to works of a billion times as many bytes, what little is known of each would be lost among a double's digits."""
    fit: TrafficFit[int] = TrafficFit()
    for moved, works in ((1e12, 5), (0.0, 10**9), (1e9, 10**9)):
        ran = {at: Ran(works, 1) for at in range(3)}
        fit.add(moved, SECONDS, ran)
        assert sum(fit.shares(moved, SECONDS, ran).values()) == pytest.approx(moved)
    assert not any(fit.measured(at) for at in range(3))


def test_models_that_ran_long_ago_are_forgotten_for_new_ones() -> None:
    fit: TrafficFit[int] = TrafficFit()
    for at in range(MOST + 5):
        fit.add(1e9, SECONDS, {at: Ran(10, 10)})
    assert fit.bytes_of(0) == 0
    assert fit.bytes_of(MOST + 4) > 0


def test_a_model_that_always_runs_is_not_forgotten_for_new_ones() -> None:
    fit: TrafficFit[int] = TrafficFit()
    for at in (*range(1, MOST), *range(1, MOST), MOST, MOST + 1):
        fit.add(1e9, SECONDS, {0: Ran(10, 10), at: Ran(10, 10)})
    assert [at for at in range(MOST + 2) if not fit.bytes_of(at)] == [1, 2]


def test_of_more_models_than_are_kept_those_that_used_the_most_are_known() -> None:
    fit: TrafficFit[int] = TrafficFit()
    for first in (0, MOST // 2, 0):
        ran = {at: Ran(10, at) for at in range(first, first + MOST + 5)}
        fit.add(1e9, SECONDS, ran)
        assert [fit.bytes_of(at) > 0 for at in (first, first + MOST + 4)] == [False, True]
        assert sum(fit.shares(1e9, SECONDS, ran).values()) == pytest.approx(1e9)


def test_the_prior_is_by_guesses_only_where_all_have_one() -> None:
    assert prior({"a": Ran(2, 0, 30), "b": Ran(1, 99, 40)}) == {"a": 0.6, "b": 0.4}
    assert prior({"a": Ran(2, 2, 30), "b": Ran(1, 0)}) == {"a": 0.75, "b": 0.25}


@pytest.mark.parametrize("windows", [4, 40])
def test_a_guess_counts_only_as_far_as_the_meter_is_not_certain(windows: int) -> None:
    """As of a table of which a work reads a few rows."""
    traffic, row, meter = Traffic(), ("acme", "table/1"), 0
    for window in range(windows):
        traffic.ran(row, works := window % 3 * 100, works)
        meter += works * 10**6
        traffic.read(Moved(meter, 0, 0), window * NS, {row: Moved(10**10, 0, 0)})
    assert 10**6 <= traffic.memory_of(row, 10**10) < 2 * 10**6
    assert 0.5 * 10**6 < traffic.memory_of(row, 1) <= 10**6
    assert traffic.memory_of(("acme", "new/1"), 800) == 800, "nothing is known of it"


def test_a_meter_that_stands_still_says_nothing_of_works_that_ran() -> None:
    """They move something, and would be held to nothing if they were known to move nothing."""
    traffic, row, meter = Traffic(), ("acme", "table/1"), 0
    for window in range(300):
        traffic.ran(row, works := 50 + window % 3 * 100, works)
        meter += works * 10**6 if 50 < window < 150 else 0
        traffic.read(Moved(meter, 0, 0), window * NS)
        if window == 50:
            assert traffic.memory_of(row, 800) == 800
    assert traffic.memory_of(row, 800) == pytest.approx(10**6, rel=0.05)


def test_works_that_are_said_in_pieces_between_two_readings_count_together() -> None:
    traffic, row, meter = Traffic(), ("acme", "mob/1"), 0
    for window in range(60):
        works = 10 + window % 3 * 20
        for _ in range(2):
            traffic.ran(row, works, works)
        meter += 2 * works * 10**6
        traffic.read(Moved(meter, 0, 0), window * NS)
    assert traffic.memory_of(row) == pytest.approx(10**6, rel=0.05)


def test_what_goes_over_pcie_is_shared_by_the_guesses_of_each_way() -> None:
    traffic, one, other = Traffic(), ("acme", "in/1"), ("globex", "out/1")
    guesses = {one: Moved(100, 30, 10), other: Moved(100, 10, 30)}
    for window in range(20):
        for row in (one, other):
            traffic.ran(row, 1000, 1000)
        found = traffic.read(Moved(window * 10**9, window * 10**8, window * 10**8), window * NS, guesses)
    for row, pcie_in in ((one, 3), (other, 1)):
        moved, estimated = found[row]
        assert (moved.pcie_in / 10**8, moved.pcie_out / 10**8) == pytest.approx((pcie_in / 4, 1 - pcie_in / 4), rel=0.1)
        assert estimated == moved
    assert traffic.rates.keys() == {one, other}


@pytest.mark.parametrize("again", [Moved(1, 10**9, 10**9), Moved(10**9, 1, 10**9), Moved(10**9, 10**9, 1)])
def test_a_meter_that_begins_again_or_is_read_twice_says_nothing_then(again: Moved) -> None:
    traffic, row = Traffic(), ("acme", "mob/1")
    for window in range(1, 4):
        traffic.ran(row, 10, 10)
        said = traffic.read(Moved(*[window * 10**8] * 3), window * NS)
    assert said
    assert traffic.read(Moved(*[10**9] * 3), 3 * NS) == {}
    assert row in traffic.rates
    traffic.ran(row, 10, 10)
    assert row in traffic.read(Moved(*[10**9] * 3), 4 * NS)
    assert traffic.read(again, 5 * NS) == {}
    assert traffic.rates == {}
    traffic.ran(row, 10, 10)
    found = traffic.read(again.plus(Moved(5, 6, 7)), 6 * NS)
    assert [sum(moved[path] for moved, _ in found.values()) for path in range(3)] == [5, 6, 7]


@some
@given(seeds, st.sampled_from([0, 2]))
def test_of_other_models_is_known_what_was_known_when_one_is_forgotten(seed: int, gone: int) -> None:
    """Two always run together, so that it is not known which of them moves how much, also once there is only one of them."""
    device = Device(seed, [3e8, 4e8, 1e8])
    fit = device.run(100, lambda _, random: (random.poisson(1000) * (random.random() < 0.8), 1000, 3000))
    known = {at: (fit.bytes_of(at), fit.measured(at), fit.at_least(at), fit.at_most(at)) for at in range(3) if at != gone}
    fit.forget(gone)
    assert fit.bytes_of(gone) == fit.at_most(gone) == 0
    for at, before in known.items():
        assert (fit.bytes_of(at), fit.measured(at), fit.at_least(at), fit.at_most(at)) == before
    fit.add(0, SECONDS, {})
    assert not fit.measured(1)
    assert fit.at_least(1) <= 4e8 <= fit.at_most(1)
