"""The account adds up, in integers, whatever moves, runs, ends and is replaced."""

import ctypes
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from server.accounts.account import Account, History, IdlePower
from server.accounts.meter import Meter, Place
from server.accounts.traffic import divide
from server.accounts.usage import NS, Moved, Report, TenantUsages, Totals, Usage, total_of

UNITS = 16
TENANTS = ("acme", "globex", "initech")
MODELS = ("mob/1", "enc/2")
amounts = st.integers(1, 10**12)


class Server(RuleBasedStateMachine):
    """A device, a process for each tenant, and a model of what is true: plain sums of what was done."""

    @initialize()
    def open(self) -> None:
        self.now, self.account = 1000, Account()
        self.shares = dict.fromkeys(TENANTS, 2)
        self.account.hold("0", "SM", UNITS, self.shares, self.now)
        self.meters = {name: Meter() for name in TENANTS}
        self.epochs = dict.fromkeys(TENANTS, 1)
        self.granted: dict[str, int] = defaultdict(int)
        self.reported: dict[str, int] = defaultdict(int)
        self.pending: dict[str, int] = defaultdict(int)
        self.lent: dict[str, int] = defaultdict(int)
        self.pending_lent: dict[tuple[str, str], int] = defaultdict(int)
        self.before = self.account.totals(self.now, 0)
        self.began = self.now

    @rule(ns=amounts)
    def pass_time(self, ns: int) -> None:
        self.now += ns
        for name, share in self.shares.items():
            self.granted[name] += share * ns

    @rule(shares=st.lists(st.integers(0, 5), min_size=3, max_size=3))
    def repartition(self, shares: list[int]) -> None:
        self.shares = {name: share for name, share in zip(TENANTS, shares, strict=True) if share}
        self.account.hold("0", "SM", UNITS, self.shares, self.now)

    @rule(tenant=st.sampled_from(TENANTS), model=st.sampled_from(MODELS), home=st.integers(1, 8), ns=amounts)
    def run(self, tenant: str, model: str, home: int, ns: int) -> None:
        self.meters[tenant].counter(f"{model}#7", Place(home)).add(ns)
        self.pending[tenant] += home * ns

    @rule(tenant=st.sampled_from(TENANTS), home=st.integers(1, 8), lent=st.integers(1, 8), ns=amounts)
    def run_wide(self, tenant: str, home: int, lent: int, ns: int) -> None:
        lenders = tuple((other, lent + i) for i, other in enumerate(TENANTS) if other != tenant)
        self.meters[tenant].counter("mob/1#7", Place(home, lenders)).add(ns)
        self.pending[tenant] += home * ns
        for lender, units in lenders:
            self.pending_lent[tenant, lender] += units * ns

    @rule(tenant=st.sampled_from(TENANTS))
    def report(self, tenant: str) -> None:
        usages = self.meters[tenant].usages()
        self.account.report(TENANTS.index(tenant), "0", Report(self.epochs[tenant], [TenantUsages(tenant, usages)]))
        self.reported[tenant] += self.pending.pop(tenant, 0)
        for (borrower, lender), amount in list(self.pending_lent.items()):
            if borrower == tenant:
                self.lent[lender] += amount
                del self.pending_lent[borrower, lender]

    @rule(tenant=st.sampled_from(TENANTS))
    def crash(self, tenant: str) -> None:
        """What it had not reported is lost; nothing else is. A late report of it changes nothing."""
        late = Report(self.epochs[tenant], [TenantUsages(tenant, self.meters[tenant].usages())])
        self.meters[tenant], self.epochs[tenant] = Meter(), self.epochs[tenant] + 1
        self.pending.pop(tenant, None)
        for key in [key for key in self.pending_lent if key[0] == tenant]:
            del self.pending_lent[key]
        self.report(tenant)
        self.account.report(TENANTS.index(tenant), "0", late)

    @invariant()
    def it_adds_up(self) -> None:
        totals = self.account.totals(self.now, 0)
        device = totals.devices["0"]
        assert device.total == UNITS * (self.now - self.began)
        assert sum(each.granted for each in device.tenants.values()) + device.free == device.total
        assert sum(each.lent for each in device.tenants.values()) == sum(each.borrowed for each in device.tenants.values())
        for name, tenant in device.tenants.items():
            assert tenant.granted == tenant.used + tenant.idle + tenant.lent
            assert (tenant.granted, tenant.used, tenant.lent) == (self.granted[name], self.reported[name], self.lent[name])

    @invariant()
    def nothing_goes_backwards(self) -> None:
        totals = self.account.totals(self.now, 0)
        added = totals.less(self.before).devices["0"]
        for tenant in added.tenants.values():
            assert min(tenant.granted, tenant.used, tenant.lent, tenant.borrowed) >= 0
        self.before = totals


TestServer = Server.TestCase
TestServer.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_reloads_of_a_model_are_one_row_and_its_versions_are_several() -> None:
    meter = Meter()
    for key in ("mob/1#1", "mob/1#2", "mob/2#3"):
        meter.counter(key, Place(2)).add(10)
    assert [(each.model, each.used) for each in meter.usages()] == [("mob/1", 40), ("mob/2", 20)]


def test_what_the_launch_loop_adds_counts_too() -> None:
    counter = Meter().counter("mob/1#1", Place(2))
    (ctypes.c_uint64 * 2).from_address(counter.address)[:] = [5, 1]
    counter.add(3)
    assert counter.read() == (8, 2)


def test_what_the_device_measured_stays_when_an_executor_is_closed() -> None:
    first, second = SimpleNamespace(ns=5, works=1, closed=False), SimpleNamespace(ns=7, works=2, closed=False)
    counter = Meter().counter("mob/1#1", Place(2))
    counter.device_times += [first, second]
    assert counter.read() == (12, 3)
    first.closed = True
    assert counter.read() == counter.read() == (12, 3)
    assert counter.device_times == [second]


def test_a_count_that_falls_takes_nothing_back() -> None:
    """As one of a device may, for which the executor was closed after an error."""
    account = Account()
    account.hold("0", "SM", 4, {"acme": 4}, 0)
    for used in (400, 360, 440):
        account.report(7, "0", Report(1, [TenantUsages("acme", [Usage("mob/1", 1, used, {})])]))
    assert account.totals(100, 0).devices["0"].tenants["acme"].used == 440


def test_energy_is_divided_by_use_and_idle_power_is_separate() -> None:
    account, acme, globex = Account(), Meter(), Meter()
    account.hold("0", "SM", 4, {"acme": 2, "globex": 2}, 0)
    account.measure("0", 500, 0)
    account.measure("0", 500 + 60_000_000, NS)  # A second in which nothing ran: 60 W.
    acme.counter("mob/1#1", Place(2)).add(NS // 2)
    globex.counter("enc/1#1", Place(2)).add(NS // 4)
    account.report(7, "0", Report(1, [TenantUsages("acme", acme.usages()), TenantUsages("globex", globex.usages())]))
    account.measure("0", 500 + 60_000_000 + 90_000_001, 2 * NS)
    found = account.totals(2 * NS, 0).devices["0"]
    assert (found.energy, found.idle_energy) == (150_000_001, 120_000_000)
    assert [found.tenants[name].energy for name in ("acme", "globex")] == [20_000_001, 10_000_000]


def test_a_device_without_a_meter_has_no_energy() -> None:
    account = Account()
    account.hold("0", "core", 4, {"acme": 2}, 0)
    assert account.totals(5, 0).devices["0"].energy is None


def test_what_a_device_moved_is_divided_by_what_works_move_and_parts_make_the_whole() -> None:
    account, acme, globex, random = Account(), Meter(), Meter(), np.random.default_rng(0)
    account.hold("0", "SM", 4, {"acme": 2, "globex": 2}, 0)
    mob, enc = acme.counter("mob/1#1", Place(2)), globex.counter("enc/1#1", Place(2))
    meter, truth = Moved(7, 7, 7), {"acme": Moved(), "globex": Moved()}
    account.move("0", meter, 0)
    assert account.totals(0, 0).devices["0"].moved == Moved()
    for window in range(1, 120):
        counts = random.poisson([1000, 300]) * random.integers(0, 2, 2)
        works = Moved(10**9, 10**6, 2000), Moved(10**8, 10**6, 0)
        for counter, count, each, name in zip((mob, enc), counts, works, truth, strict=True):
            for _ in range(count):
                counter.add(10**6)
            moved = Moved(*(int(count) * path for path in each))
            truth[name], meter = truth[name].plus(moved), meter.plus(moved)
        meter = meter.plus(Moved(10**9, 0, 5))
        reports = [TenantUsages("acme", acme.usages()), TenantUsages("globex", globex.usages())]
        account.report(7, "0", Report(1, reports))
        account.move("0", meter, 2 * window * NS)
        if window == 60:
            before = account.totals(2 * window * NS, 0).devices["0"]
    device = account.totals(240 * NS, 0).devices["0"]
    assert device.moved == meter.less(Moved(7, 7, 7))
    assert device.moved_in == 238 * NS
    parts = device.background
    for name, each in truth.items():
        found = device.tenants[name]
        assert found.moved
        parts = parts.plus(found.moved)
        assert list(found.moved) == pytest.approx(list(each), rel=0.05, abs=1000)
        late = found.less(before.tenants[name])
        assert late.moved
        assert late.moved.memory > 0
        assert late.estimated == Moved(), "by then all is measured"
    assert device.less(before).estimated == Moved()
    assert parts == device.moved
    traffic = account.traffic("0")
    assert traffic
    assert all(fit.residual < 0.1 for fit in traffic.fits)
    assert device.less(device).moved == Moved()


def test_what_was_moved_while_nothing_ran_is_no_estimate() -> None:
    account = Account()
    account.hold("0", "SM", 4, {"acme": 2}, 0)
    for second in range(3):
        account.move("0", Moved(100 * second), second * NS)
    device = account.totals(5 * NS, 0).devices["0"]
    assert (device.background, device.estimated) == (Moved(200), Moved())


def test_a_meter_that_begins_again_counts_from_there() -> None:
    account, acme = Account(), Meter()
    account.hold("0", "SM", 4, {"acme": 2}, 0)
    assert account.totals(0, 0).devices["0"].moved is None, "it has no meter"
    counter = acme.counter("mob/1#1", Place(2))
    for at, meter in enumerate((Moved(500), Moved(900), Moved(40), Moved(40), Moved(100))):
        counter.add(10)
        account.report(7, "0", Report(1, [TenantUsages("acme", acme.usages())]))
        account.move("0", meter, at * NS)
        account.move("0", meter, at * NS)
    device = account.totals(5 * NS, 0).devices["0"]
    assert (device.moved, device.moved_in) == (Moved(460), 3 * NS)
    assert device.estimated == device.background, "after so few windows"
    acme_s = device.tenants["acme"]
    assert acme_s.moved
    assert acme_s.moved.has_much(acme_s.estimated), "too little was seen"
    account.move("no such device", Moved(), 0)
    assert account.traffic("no such device") is None


def test_what_a_tenants_cores_moved_is_the_tenants_whatever_its_models_parts_are() -> None:
    account, acme, globex, random = Account(), Meter(), Meter(), np.random.default_rng(0)
    account.hold("0", "core", 4, {"acme": 2, "globex": 1, "initech": 1}, 0)
    mob, enc, tiny = (acme.counter(f"{name}/1#1", Place(2)) for name in ("mob", "enc", "tiny"))
    other = globex.counter("mob/1#1", Place(1))
    account.count("0", {"acme": 500, "globex": 70}, 0)
    first = account.totals(0, 0).devices["0"]
    assert (first.moved, first.tenants["acme"].moved, first.tenants["initech"].moved) == (Moved(), Moved(), None)
    acmes, globexs = 500, 70
    for window in range(1, 120):
        for counter, count, each in zip((mob, enc), random.integers(0, 1000, 2), (10**9, 10**7), strict=True):
            for _ in range(count):
                counter.add(10**6)
            acmes += int(count) * each
        tiny.add(1)
        other.add(10**6)
        acmes, globexs = acmes + 3 * 10**9, globexs + 10**9
        reports = [TenantUsages("acme", acme.usages()), TenantUsages("globex", globex.usages())]
        account.report(7, "0", Report(1, reports))
        account.count("0", {"acme": acmes, "globex": globexs}, 2 * window * NS)
        if window == 60:
            before = account.totals(2 * window * NS, 0).devices["0"]
    device = account.totals(240 * NS, 0).devices["0"]
    found = device.tenants["acme"]
    assert (found.moved, found.estimated) == (Moved(acmes - 500), Moved())
    assert device.tenants["globex"].moved == Moved(globexs - 70)
    assert device.tenants["initech"].moved is None
    assert device.moved == Moved(acmes - 500 + globexs - 70)
    assert (device.background, device.moved_in) == (Moved(), 238 * NS)
    late = found.less(before.tenants["acme"])
    assert late.models["mob/1"].moved.memory == pytest.approx(late.models["mob/1"].works * 10**9, rel=0.02)
    assert late.models["mob/1"].estimated == Moved()
    assert late.rest.memory == pytest.approx(59 * 3 * 10**9, rel=0.2), "what works move is known apart from that"
    assert late.moved == late.rest.plus(total_of(each.moved for each in late.models.values()))
    assert account.traffic("0") is None, "it has no meter of its own"
    assert account.rates("0")["globex", "mob/1"][0].memory == pytest.approx(10**9 / 2, rel=0.05)
    account.count("no such device", {"acme": 7}, 0)
    assert account.rates("no such device") == {}


def test_what_a_borrower_moves_is_its_own_also_where_its_own_cores_are_not_counted() -> None:
    account = Account()
    account.hold("0", "core", 2, {"acme": 1, "globex": 1}, 0)
    account.count("0", {"globex": 0}, 0)
    for window in range(1, 10):
        works = Usage("mob/1", 10 * window, 0, {"globex": 10**9 * window})
        account.report(7, "0", Report(1, [TenantUsages("acme", [works]), TenantUsages("globex", [])]))
        account.count("0", {"globex": 10**9 * window}, 2 * window * NS)
    device = account.totals(20 * NS, 0).devices["0"]
    acme, globex = device.tenants["acme"].moved, device.tenants["globex"].moved
    assert acme
    assert globex
    assert acme.plus(globex) == device.moved == Moved(9 * 10**9)
    assert acme.memory > globex.memory


def test_what_a_borrower_moves_on_a_lenders_cores_is_the_borrowers_by_an_estimate() -> None:
    account = Account()
    account.hold("0", "core", 2, {"acme": 1, "globex": 1}, 0)
    account.count("0", {"acme": 0, "globex": 0}, 0)
    for window in range(1, 60):
        ours = Usage("mob/1", 10 * window, 10**9 * window, {"globex": 10**9 * window})
        theirs = Usage("enc/1", window // 2, 10**6 * (window // 2), {})
        account.report(7, "0", Report(1, [TenantUsages("acme", [ours]), TenantUsages("globex", [theirs])]))
        moved = {"acme": 10**9 * window, "globex": 10**9 * window + 10**8 * (window // 2)}
        account.count("0", moved, 2 * window * NS)
    device = account.totals(240 * NS, 0).devices["0"]
    acme, globex = device.tenants["acme"], device.tenants["globex"]
    assert acme.moved
    assert globex.moved
    assert acme.moved.plus(globex.moved) == device.moved == Moved(moved["acme"] + moved["globex"])
    assert acme.models["mob/1"].moved.memory == pytest.approx(2 * moved["acme"], rel=0.1)
    assert 0 < globex.moved.memory < 0.1 * moved["globex"]
    assert acme.estimated == globex.estimated, "what one did not move the other one did"
    assert globex.moved.has_much(globex.estimated)


def test_what_a_tenants_cores_moved_on_another_device_is_not_counted_again_when_it_is_back() -> None:
    account, meter = Account(), 0
    for turn, there in enumerate(("0", "1", "0")):
        for device in ("0", "1"):
            account.hold(device, "core", 1, {"acme": 1} if device == there else {}, 100 * turn * NS)
        for second in (10, 20, 30):
            meter += 10**9
            account.count(there, {"acme": meter}, (100 * turn + second) * NS)
    totals = account.totals(400 * NS, 0)
    assert [totals.devices[name].moved for name in ("0", "1")] == [Moved(4 * 10**9), Moved(2 * 10**9)]
    acme = totals.devices["0"].tenants["acme"]
    assert acme.moved == Moved(4 * 10**9)


def test_what_a_tenants_cores_moved_while_its_share_became_another_one_counts() -> None:
    account = Account()
    account.hold("0", "core", 4, {"acme": 1}, 0)
    account.count("0", {"acme": 1000}, NS)
    account.hold("0", "core", 4, {"acme": 2, "globex": 1}, 2 * NS)
    account.count("0", {"acme": 3500}, 3 * NS)
    assert account.totals(4 * NS, 0).devices["0"].tenants["acme"].moved == Moved(2500)


def test_a_device_of_which_no_cores_are_counted_says_as_little_as_before() -> None:
    account = Account()
    account.hold("0", "SM", 1, {"acme": 1}, 0)
    account.count("0", {}, 2 * NS)
    assert account.totals(4 * NS, 0).devices["0"].moved is None
    account.move("0", Moved(), 4 * NS)
    account.count("0", {}, 5 * NS)
    account.move("0", Moved(7), 6 * NS)
    assert account.totals(6 * NS, 0).devices["0"].moved_in == 2 * NS


def test_idle_power_is_unknown_until_nothing_runs() -> None:
    idle = IdlePower()
    assert idle.part(100, NS, True) == 0
    assert idle.part(50, NS, False) == 50
    assert idle.part(100, NS, True) == 50
    assert idle.part(80, NS, False) == 80
    assert idle.part(100, NS, True) == 50, "not the least that was seen"
    assert idle.part(20, NS, True) == 20


def test_parts_make_the_whole() -> None:
    assert divide(10, {"a": 1, "b": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}


def test_history_keeps_seconds_of_late_and_minutes_of_long_ago() -> None:
    history = History(fine=10 * NS, step=60 * NS, coarse=600 * NS)
    assert history.before(0) is None
    for second in range(1000):
        history.add(Totals(second * NS, (5000 + second) * NS, {}))
    found = {since: (history.before((5000 + since) * NS) or Totals(0, 0, {})).at // NS for since in (0, 700, 995, 2000)}
    assert found == {0: 420, 700: 660, 995: 995, 2000: 999}


def test_history_is_found_by_a_clock_of_the_day_that_was_set_back() -> None:
    """As on a machine that starts with a wrong clock, and then hears the time."""
    history = History()
    for second in range(60):
        history.add(Totals(second * NS, (3600 * (second < 10) + second) * NS, {}))
    found = {since: (history.before(since * NS) or Totals(0, 0, {})).at // NS for since in (5, 10, 12, 25, 59)}
    assert found == {5: 0, 10: 10, 12: 12, 25: 25, 59: 59}
