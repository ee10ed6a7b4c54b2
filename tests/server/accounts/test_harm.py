"""Which models slow neighbours, found on synthetic loads of which the truth is known."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.accounts.harm import KEEPS, TIMES, Harm
from server.accounts.usage import NS, DeviceTotals, ModelTotals, Row, TenantTotals

SHARE = 8
NARROW = 1
"""Units of a tenant, and of its narrow placement."""
MS = 10**6
HOG, VICTIM = ("acme", "hog/1"), ("globex", "net/1")
seeds = st.integers(0, 2**32 - 1)
some = settings(max_examples=15, deadline=None)
Load = Callable[[int, np.random.Generator], float]


@dataclass
class Model:
    """`busy` is the part of a window that it wants to run alone, window by window; `slows` how much longer others take beside
    it; `noise` the deviation of the logarithm of what batches of a window take.
    """

    busy: Load
    slows: float = 1.0
    each: float = 1.0 * MS
    noise: float = 0.02
    fenced: bool = False
    slower: float = 7.0
    """How many times as long its own works take narrow."""
    works: int = 0
    used: int = 0
    borrowed: int = 0
    was_held: list[bool] = field(default_factory=list)


class Device:
    """Runs models for windows of a second, and holds what is to be held."""

    def __init__(self, seed: int, together: Callable[[list[float]], float] = math.prod, **models: Model) -> None:
        self.models = {row(name): model for name, model in models.items()}
        self.together = together
        """How much longer works take beside several."""
        self.random = np.random.default_rng(seed)
        self.harm = Harm(Random(seed))
        self.now = 0
        self.share = SHARE
        self.lent: dict[str, int] = {}
        self.before: Mapping[Row, bool] = {}
        self.several: set[str] = set()
        """Tenants whose narrow placements have more than one granule where they may, on which models slow others as at home."""
        self.single = {tenant for tenant, _ in self.models}
        self.making = self.left = 1
        """Windows in which there is none while it gets more or fewer granules."""
        self.made: Mapping[str, int] = {}
        self.look()

    @property
    def narrow(self) -> dict[Row, bool]:
        there = {tenant for tenant, count in self.granules.items() if count}
        return {row: row in self.harm.held for row, model in self.models.items() if model.fenced and row[0] in there}

    @property
    def granules(self) -> dict[str, int]:
        """While a narrow placement gets more or fewer, there is none."""
        made = {tenant: (tenant in self.wanted) is (tenant in self.single) for tenant, _ in self.models}
        return {tenant: (1 if tenant in self.single else 2) * each for tenant, each in made.items()}

    @property
    def wanted(self) -> set[str]:
        return {tenant for tenant, _ in self.models} - (self.several - self.harm.single)

    def look(self) -> None:
        tenants: dict[str, dict[str, ModelTotals]] = {}
        for (tenant, name), model in self.models.items():
            tenants.setdefault(tenant, {})[name] = ModelTotals(model.works, model.used, model.borrowed)
        found = {name: TenantTotals(0, self.lent.get(name, 0), self.share, each) for name, each in tenants.items()}
        self.harm.look(DeviceTotals("SM", 64, self.now, found), self.now, self.before, self.made)

    def run(self, windows: int) -> Harm:
        for window in range(self.now // NS, self.now // NS + windows):
            held = self.harm.held
            apart = {each for each in held if each[0] in self.single}
            wanted = {each: model.busy(window, self.random) for each, model in self.models.items()}
            others = any(each for row, each in wanted.items() if row not in held)
            for row, model in self.models.items():
                slow = self.together(
                    [
                        1 + (beside.slows - 1) * min(1.0, wanted[other])
                        for other, beside in self.models.items()
                        if other[0] != row[0] and other not in apart
                    ]
                    or [1.0]
                )
                narrow = row in held and others
                each = model.each * slow * np.exp(model.noise * self.random.standard_normal())
                works = int(self.random.poisson(max(0.0, wanted[row]) * NS / model.each)) if wanted[row] else 0
                works = min(works, int(NS / (each * (model.slower if narrow else 1))))
                model.works += works
                model.used += int(works * each * (model.slower * NARROW if narrow else SHARE))
                model.was_held.append(row in held)
            self.before, self.made = self.narrow, self.granules
            self.left = self.making if self.single == self.wanted else self.left - 1
            self.single = self.single if self.left else self.wanted
            self.now += NS
            self.look()
        return self.harm

    def seconds_held(self, row: Row) -> int:
        return sum(self.models[row].was_held)


def row(name: str) -> Row:
    tenant, _, model = name.partition("_")
    return tenant, f"{model}/1"


def always(part: float) -> Load:
    return lambda *_: part


def now_and_then(part: float, windows: int = 20) -> Load:
    """It runs for so many windows, and rests for as many."""
    return lambda window, _: part if window // windows % 2 else 0.0


def whenever(part: float) -> Load:
    """Each window by itself."""
    return lambda _, random: part * float(random.random() < 0.7) * float(random.uniform(0.5, 1.5))


def hog(busy: Load, slows: float = 3.0, **more: float) -> Model:
    return Model(busy, slows, each=8 * MS, fenced=True, **more)


@some
@given(seeds, st.floats(1.8, 20), st.sampled_from([now_and_then(1.0, 30), now_and_then(0.9, 60)]))
def test_a_model_that_slows_a_neighbour_is_found_and_held(seed: int, slows: float, busy: Load) -> None:
    device = Device(seed, acme_hog=hog(busy, slows), globex_net=Model(always(0.2)))
    found = device.run(300).found
    assert found.keys() == {HOG}
    assert TIMES <= found[HOG] <= 1.1 * slows
    before = device.seconds_held(HOG)
    device.run(300)
    assert device.seconds_held(HOG) - before == 300


@some
@pytest.mark.parametrize(("period", "most"), [(30, 10), (3, 1)])
@given(seed=seeds)
def test_it_is_found_beside_a_neighbour_that_works_now_and_then(seed: int, period: int, most: int) -> None:
    burst = Model(lambda window, _: 0.3 * (window % period < most))
    device = Device(seed, acme_hog=hog(now_and_then(1.0, 100)), globex_net=burst, initech_net=Model(always(0.01)))
    assert device.run(600).found.keys() == {HOG}


@some
@given(seeds)
def test_it_is_found_beside_a_neighbour_that_was_never_seen_without_it(seed: int) -> None:
    device = Device(seed, acme_hog=hog(always(1.0)), globex_net=Model(always(0.2)))
    assert device.run(150).found.keys() == {HOG}


@some
@given(seeds, st.sampled_from([0.02, 0.1, 0.3]), st.sampled_from([1.0, 1.3]))
def test_an_innocent_model_is_not_held_for_noise_or_a_lower_clock(seed: int, noise: float, slows: float) -> None:
    """For an hour; it is tried now and then, if the neighbour's works vary much."""
    models = {f"globex_n{at}": Model(whenever(0.2), noise=noise) for at in range(3)}
    device = Device(seed, acme_hog=hog(now_and_then(0.8, 40), slows), **models)
    assert device.run(3600).found == {}
    assert device.seconds_held(HOG) < 60


@some
@given(seeds)
def test_a_neighbour_whose_batches_are_larger_while_the_model_runs_is_no_reason(seed: int) -> None:
    """The loads of both rise together, and holding the one does not change the other."""
    device = Device(seed, acme_hog=hog(now_and_then(0.9, 30), 1.0), globex_net=Model(always(0.2)))
    victim = device.models[VICTIM]
    for at in range(60):
        victim.each = (4.0 if at % 2 else 1.0) * MS
        assert device.run(30).found == {}
    assert 0 < device.seconds_held(HOG) < 60


@some
@given(seeds, st.booleans())
def test_of_two_that_run_together_the_guilty_one_is_found(seed: int, other_tenant: bool) -> None:
    second = "initech_second" if other_tenant else "acme_second"
    models = {"acme_hog": hog(now_and_then(1.0, 40), 4.0), second: hog(now_and_then(1.0, 40), 1.0)}
    device = Device(seed, **models, globex_net=Model(always(0.2)))
    assert device.run(400).found.keys() == {HOG}
    assert device.seconds_held(row(second)) < 60


@some
@given(seeds)
def test_two_that_slow_neighbours_and_each_other_are_both_found(seed: int) -> None:
    device = Device(
        seed, acme_hog=hog(now_and_then(1.0, 60)), initech_hog=hog(now_and_then(1.0, 45)), globex_net=Model(always(0.2))
    )
    assert device.run(900).found.keys() == {HOG, ("initech", "hog/1")}
    device = Device(seed, acme_hog=hog(now_and_then(1.0, 60)), initech_hog=hog(now_and_then(1.0, 45)))
    assert device.run(900).found.keys() == {HOG, ("initech", "hog/1")}, "it would not be fair to hold one"


@some
@given(seeds)
def test_two_of_which_one_slows_as_much_as_both_are_found(seed: int) -> None:
    """Neighbours are no quicker while one of them is held, so the other one is held meanwhile, too."""
    two = {"acme_hog": hog(now_and_then(1.0, 200)), "acme_second": hog(now_and_then(1.0, 200))}
    device = Device(seed, max, **two, globex_net=Model(always(0.2)))
    assert device.run(1000).found.keys() == {HOG, ("acme", "second/1")}


@some
@given(seeds)
def test_a_model_of_the_same_tenant_is_no_victim(seed: int) -> None:
    device = Device(seed, acme_hog=hog(now_and_then(1.0)), acme_net=Model(always(0.2)), globex_net=Model(always(0.0)))
    device.models["acme", "net/1"].each = 3 * MS
    assert device.run(300).found == {}
    assert device.seconds_held(HOG) == 0


@some
@given(seeds, st.floats(1.0, 3.0))
def test_a_model_that_was_found_is_let_go_for_seconds_now_and_then(seed: int, later: float) -> None:
    """And goes free if it slows no neighbour any more."""
    device = Device(seed, acme_hog=hog(always(1.0)), globex_net=Model(always(0.2)))
    assert device.run(150).found.keys() == {HOG}
    before, windows = device.seconds_held(HOG), KEEPS // NS + 60
    device.models[HOG].slows = later
    found = device.run(windows).found
    assert found.keys() == ({HOG} if later > 1.1 * TIMES else set() if later < 0.9 * TIMES else found.keys())
    if later > 1.1 * TIMES:
        assert windows - 5 <= device.seconds_held(HOG) - before < windows, "it costs neighbours some seconds"


def test_a_neighbour_with_few_works_is_not_taken_to_be_asked_less_by_chance() -> None:
    """Else the model was found a minute later, or went free for a minute once it was tried again."""
    for seed in range(30):
        device = Device(seed, acme_hog=hog(always(1.0)), globex_net=Model(always(0.2), each=8.0 * MS))
        assert device.run(150).found.keys() == {HOG}
        before, windows = device.seconds_held(HOG), KEEPS // NS + 60
        device.run(windows)
        assert device.seconds_held(HOG) - before > windows - 20


@some
@given(seeds)
def test_neighbours_that_are_asked_less_while_a_model_is_held_are_no_reason(seed: int) -> None:
    """As where clients ask the one with what the other has answered, and smaller batches take less."""
    device = Device(seed, acme_hog=hog(always(1.0), 1.0), globex_net=Model(always(0.2)))
    victim = device.models[VICTIM]
    for _ in range(600):
        held = HOG in device.harm.held
        victim.each, victim.busy = (1.0 * MS, always(0.03)) if held else (4.0 * MS, always(0.2 * 4))
        assert device.run(1).found == {}


@some
@given(seeds, st.sampled_from([now_and_then(1.0, 60), always(1.0)]))
def test_where_several_granules_would_not_hold_it_it_is_tried_on_one_and_held_there(seed: int, busy: Load) -> None:
    device = Device(seed, acme_hog=hog(busy), globex_net=Model(always(0.2)))
    device.several = {"acme"}
    assert device.run(300).found.keys() == {HOG}
    assert device.single == {"acme", "globex"}
    device.models[HOG].slows = 1.0
    assert device.run(KEEPS // NS + 100).found == {}
    assert device.single == {"globex"}, "it may have several again"


def test_it_is_tried_on_one_granule_however_long_that_takes_to_be_made() -> None:
    device = Device(1, acme_hog=hog(always(1.0)), globex_net=Model(always(0.2)))
    device.several, device.making = {"acme"}, 100
    assert device.run(400).found.keys() == {HOG}


@some
@given(seeds)
def test_one_granule_is_seldom_asked_for_where_a_model_is_innocent(seed: int) -> None:
    """Each time its placement is made again, which is not to make the trials come sooner."""
    device, changes = Device(seed, acme_hog=hog(now_and_then(0.9, 30), 1.0), globex_net=Model(always(0.2))), 0
    device.several, victim = {"acme"}, device.models[VICTIM]
    for at in range(3600):
        before = device.single
        victim.each = (4.0 if at // 30 % 2 else 1.0) * MS
        assert device.run(1).found == {}
        changes += device.single != before
    assert changes <= 2 * 8


def found(seed: int = 1) -> Device:
    """A device of which one model was found."""
    device = Device(seed, acme_hog=hog(always(1.0)), globex_net=Model(always(0.2)))
    assert device.run(150).found.keys() == {HOG}
    return device


def test_another_share_or_a_model_that_goes_is_another_model() -> None:
    device = found()
    device.share = 2 * SHARE
    assert device.run(1).found == {}
    device = found()
    device.models[HOG].fenced = False
    assert device.run(1).found == {}
    assert device.harm.held == set()


def test_a_trial_ends_with_what_is_tried() -> None:
    for end in ("share", "fenced"):
        device = Device(1, acme_hog=hog(always(1.0)), globex_net=Model(always(0.2)))
        while HOG not in device.harm.held:
            device.run(1)
        device.share *= 1 + (end == "share")
        device.models[HOG].fenced = end != "fenced"
        device.run(1)
        assert device.harm.held == set()


def test_while_neighbours_or_the_model_rest_no_verdict_is_reached() -> None:
    for resting in (HOG, VICTIM):
        device = Device(1, acme_hog=hog(always(1.0)), globex_net=Model(always(0.2)))
        while HOG not in device.harm.held:
            device.run(1)
        device.models[resting].busy = always(0.0)
        assert device.run(100).found == {}
        assert device.harm.held == set(), resting


def test_a_neighbour_that_seldom_works_says_nothing() -> None:
    device = Device(1, acme_hog=hog(now_and_then(1.0)), globex_net=Model(always(0.0003)))
    assert device.run(400).found == {}
    assert device.seconds_held(HOG) == 0


@pytest.mark.parametrize("lends", [True, False])
def test_works_of_a_tenant_that_lends_or_borrows_meanwhile_say_nothing(lends: bool) -> None:
    """What borrows runs on the same units; what runs on granules of others takes another time."""
    device = Device(1, acme_hog=hog(now_and_then(1.0)), globex_net=Model(always(0.2)))
    for second in range(400):
        device.lent = {"globex": second if lends else 0}
        device.models[VICTIM].borrowed = 0 if lends else second
        assert device.run(1).found == {}
    assert device.seconds_held(HOG) == 0


def test_strains_say_nothing() -> None:
    device = Device(1, acme_hog=hog(now_and_then(1.0)), globex_net=Model(always(0.2)))
    device.models["globex", "strain"] = device.models.pop(VICTIM)
    assert device.run(200).found == {}
    assert device.seconds_held(HOG) == 0


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_whatever_is_counted_only_models_that_could_be_held_are(seed: int) -> None:
    """Tenants come and go, shares change, works take nothing, and what is said of who runs narrow is wrong."""
    random, harm, now = Random(seed), Harm(Random(seed)), 0
    rows = [(tenant, model) for tenant in ("acme", "globex", "initech") for model in ("a/1", "b/1")]
    counts = dict.fromkeys(rows, (0, 0, 0))
    shares = {tenant: SHARE for tenant, _ in rows}
    narrow = dict.fromkeys(rows[:4], False)
    for _ in range(300):
        now += random.choice([0, NS // 2, NS, NS, NS, 3 * NS])
        for each, (works, used, borrowed) in counts.items():
            more = random.choice([0, 1, 30, 30, 30])
            took = more * random.choice([0, MS, MS, 9 * MS]) * SHARE
            counts[each] = works + more, used + took, borrowed + random.choice([0] * 30 + [MS])
        if random.random() < 0.02:
            shares[random.choice(list(shares))] = random.choice([0, SHARE, 2 * SHARE])
        if random.random() < 0.05:
            narrow = {each: random.random() < 0.5 for each in rows if random.random() < 0.8}
        narrow |= {each: each in harm.held for each in narrow if random.random() < 0.9}
        there = [tenant for tenant in shares if random.random() < 0.99]
        models = {t: {each[1]: ModelTotals(*counts[each]) for each in rows if each[0] == t} for t in there}
        totals = {t: TenantTotals(0, 0, shares[t], models[t]) for t in there}
        harm.look(DeviceTotals("SM", 64, now, totals), now, narrow, {tenant: random.randint(0, 2) for tenant in shares})
        assert all(times >= TIMES for times in harm.found.values())
        assert harm.held <= set(rows)
