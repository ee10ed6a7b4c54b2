"""What a unit draws where models are held, as seen of synthetic ones: placements grow until these fill their share."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitions.base import Bandwidth
from server.accounts.drawn import REST, SETTLES, Drawn
from server.accounts.usage import NS, Row
from server.config.tenant import TenantConfig
from server.control.fence import Narrowing, plan_fences

MOVES = Bandwidth(memory=4_800 * 10**9, unit=127 * 10**9, pcie=63 * 10**9)
SIZES = [8] * 16
HOME = tuple(range(8))
COPY, WRITE = ("acme", "copy/1"), ("acme", "write/1")


class Site:
    """A fenced tenant whose models each draw so much of a unit, wherever they are held, and a look each second."""

    def __init__(self, rate: float, **each: int) -> None:
        self.tenants = {
            "acme": TenantConfig(name="acme", granules=8, models=("*",), memory_bandwidth=rate),
            "globex": TenantConfig(name="globex", granules=1, models=("*",)),
        }
        self.share = rate * MOVES.memory
        self.draws: dict[Row, int] = {("acme", f"{name}/1"): rate for name, rate in each.items()}
        self.unmeasured: set[Row] = set()
        self.unheld: set[Row] = set()
        self.noise, self.random = 0.0, Random(1)
        self.drawn = Drawn()
        self.now = 0
        self.changes = 0
        self.count = self.planned()

    def planned(self) -> int:
        seen = {name: Narrowing(unit) for name, unit in self.drawn.units.items()}
        homes = {"acme": HOME, "globex": (8,)}
        return len(plan_fences(self.tenants, homes, SIZES, "SM", MOVES, seen=seen)["acme"].granules)

    def run(self, seconds: int) -> int:
        """How many granules the narrow placement has then."""
        for _ in range(seconds):
            units = 8 * self.count
            off = {row: math.exp(self.noise * self.random.gauss(0, 1)) for row in self.draws}
            draws = {row: 0.0 if row in self.unmeasured else each * units * off[row] for row, each in self.draws.items()}
            held = {row: each for row, each in draws.items() if row not in self.unheld}
            self.drawn.look(self.now, {"acme": units}, held, self.draws.keys())
            self.now += NS
            before, self.count = self.count, self.planned()
            self.changes += self.count != before
        return self.count

    @property
    def most(self) -> float:
        """What its models draw at most there, as a part of its share."""
        return max(self.draws.values()) * 8 * self.count / self.share


def test_a_placement_has_as_many_granules_as_its_models_may_fill() -> None:
    site = Site(0.5, copy=59 * 10**9)
    assert site.count == 2, "by what a unit can draw"
    assert site.run(SETTLES - 1) == 2, "a figure that has just begun is an average still"
    assert site.run(1) == 5
    assert 0.9 < site.most < 1, "of a unit a tenth more is taken than was seen"
    site.run(600)
    assert site.changes == 1


def test_the_model_that_draws_the_most_counts_and_a_new_one_may_draw_all_it_can() -> None:
    site = Site(0.5, copy=59 * 10**9)
    assert site.run(60) == 5
    site.draws[WRITE] = 65 * 10**9
    assert site.run(1) == 2
    assert site.run(2 * REST // NS) == 5
    site.draws[WRITE] = 110 * 10**9
    assert site.run(SETTLES + 2) == 3, "it draws more than before"
    site.draws.pop(WRITE)
    assert site.run(2 * REST // NS) == 5


def test_what_is_not_measured_makes_nothing_wider() -> None:
    site = Site(0.5, copy=59 * 10**9)
    site.unmeasured = {COPY}
    assert site.run(100) == 2
    site.unmeasured = set()
    assert site.run(10) == 5


def test_a_model_that_never_ran_where_it_is_held_makes_nothing_narrower_and_a_rare_one_does_until_it_is_seen() -> None:
    site = Site(0.5, copy=59 * 10**9)
    site.draws[WRITE], site.unmeasured = 65 * 10**9, {WRITE}
    assert site.run(10) == 5
    site.unmeasured = set()
    assert site.run(1) == 2, "it runs there"
    site.unmeasured = {WRITE}
    assert site.run(300) == 2, "on this placement it did not run again yet"
    site.unmeasured = set()
    assert site.run(SETTLES) == 5
    site.unmeasured = {WRITE}
    assert site.run(300) == 5


def test_what_was_seen_of_a_model_counts_when_it_is_held_again_before_it_runs_there() -> None:
    site = Site(0.5, copy=59 * 10**9, write=110 * 10**9)
    assert site.run(SETTLES + 2) == 3
    site.unmeasured = site.unheld = {WRITE}
    site.run(1)
    site.unheld = set()
    assert site.run(2 * REST // NS) == 3


def looked(drawn: Drawn, second: int, units: int, **rates: float) -> dict[str, int]:
    """What is known after a look at the model of each of these tenants, which draws so much on so many units."""
    held = {(tenant, "copy/1"): rate * units for tenant, rate in rates.items()}
    drawn.look(second * NS, dict.fromkeys(rates, units), held, held.keys())
    return drawn.units


def test_each_tenant_has_a_figure_of_its_own_which_goes_with_it() -> None:
    drawn = Drawn()
    for second in range(SETTLES + 2):
        looked(drawn, second, 8, acme=50, globex=100)
    assert drawn.units == {"acme": 55, "globex": 110}
    assert looked(drawn, 60, 8, globex=100) == {"globex": 110}


def test_what_is_seen_on_another_placement_counts_there_once_it_is_no_average_of_before() -> None:
    drawn = Drawn()
    for second in range(SETTLES + 2):
        looked(drawn, second, 8, acme=100)
    for second in range(100, 100 + SETTLES):
        assert looked(drawn, second, 16, acme=300) == {"acme": 110}
    assert looked(drawn, 200, 16, acme=300) == {"acme": 330}


def test_more_than_was_taken_counts_at_once_and_less_after_a_while() -> None:
    """As a placement that gets wider is made, and nothing is held meanwhile."""
    drawn, changed = Drawn(), 2 * REST // NS
    for second in range(changed):
        looked(drawn, second, 8, acme=100)
    for second in range(changed, changed + 30):
        more = looked(drawn, second, 8, acme=112)["acme"]
    assert more == pytest.approx(1.1 * 112, rel=0.02)
    drawn, seconds = Drawn(), iter(range(10**6))
    while not looked(drawn, changed := next(seconds), 8, acme=100):
        pass
    while looked(drawn, now := next(seconds), 8, acme=20)["acme"] == 110:
        pass
    assert (now - changed) * NS >= REST


@pytest.mark.parametrize("each", [50, 59, 70, 95])
def test_noise_hardly_changes_placements(each: int) -> None:
    """In an hour, a tenth of each figure."""
    site = Site(0.5, copy=each * 10**9)
    site.noise = 0.1
    site.run(3600)
    assert site.changes <= 4


@given(st.floats(0.05, 0.95), st.lists(st.integers(5, 127), min_size=1, max_size=4))
def test_a_model_fills_the_share_with_no_granule_too_many_and_the_placement_comes_to_rest(rate: float, each: list[int]) -> None:
    site = Site(rate, **{f"m{at}": draws * 10**9 for at, draws in enumerate(each)})
    exceed = {row for row, draws in site.draws.items() if draws * 64 > site.share}
    site.draws = {row: draws for row, draws in site.draws.items() if row in exceed}
    if site.draws and site.count:
        site.run(600)
        changes = site.changes
        assert site.most > 0.8 or site.count == len(HOME) - 1
        assert (site.count - 1) * site.most <= site.count, "the last granule is what its works are paced for"
        site.run(600)
        assert site.changes == changes <= 2
