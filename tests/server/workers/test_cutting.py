"""To how many rows batches are cut: over all that may be known, and on made-up devices whose times are those of a formula."""

from collections.abc import Callable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from server.link.cuts import BatchKey
from server.workers.cutting import HANDLING, WORTH, Cutting, Known, by_key, cut, untried
from server.workers.stretching import RETRY, SETTLED, Measured, Times, decide

MS = 1_000_000
LIMIT = 2 * MS
UNITS = (2, 8)
KEY: BatchKey = ("enc/1#1", ((16,),))
NS = st.one_of(st.just(0), st.integers(1, 20 * MS))
SIZES = st.dictionaries(st.integers(1, 64), st.builds(Known, NS, NS), max_size=8)
RESTS = st.floats(0, 1)


def a_row(rows: int, took: float) -> float:
    return (HANDLING + took) / rows


@given(SIZES, RESTS)
def test_batches_are_cut_only_to_a_size_that_goes_wide_and_where_rows_get_done_faster(
    sizes: Mapping[int, Known], rests: float
) -> None:
    rows = cut(sizes, LIMIT, rests)
    if rows:
        home, wide = sizes[rows]
        assert 0 < wide <= LIMIT
        assert wide < home
        assert rows < max(sizes)
        assert not 0 < sizes[max(sizes)].wide < min(LIMIT + 1, sizes[max(sizes)].home), "the whole batch goes wide"
        expected = a_row(rows, rests * wide + (1 - rests) * home)
        assert all(expected <= WORTH * a_row(each, known.home) * 1.000001 for each, known in sizes.items() if known.home)


@given(SIZES)
def test_nothing_is_cut_or_tried_while_the_lenders_never_rest(sizes: Mapping[int, Known]) -> None:
    assert cut(sizes, LIMIT, 0.0) == 0
    assert untried(sizes, LIMIT, *UNITS, 0.0) == []


@given(SIZES)
def test_nothing_is_cut_where_rows_take_as_long_in_a_piece_as_in_a_whole_batch(sizes: Mapping[int, Known]) -> None:
    proportional = {rows: Known(rows * MS, rows * MS) for rows in sizes}
    assert cut(proportional, LIMIT, 1.0) == 0


@given(SIZES, RESTS)
def test_only_sizes_that_are_not_measured_and_could_be_short_enough_are_tried(sizes: Mapping[int, Known], rests: float) -> None:
    found = untried(sizes, LIMIT, *UNITS, rests)
    assert found == sorted(found, reverse=True)
    for rows in found:
        known = sizes.get(rows, Known(0, 0))
        assert 1 <= rows <= max(sizes)
        assert not known.wide
        assert known.home * UNITS[0] <= LIMIT * UNITS[1]


def test_a_batch_is_cut_to_the_size_that_gets_most_rows_done() -> None:
    sizes = {8: Known(8 * MS, 3 * MS), 4: Known(4 * MS, 3 * MS // 2), 2: Known(2 * MS, MS), 1: Known(MS, MS)}
    assert cut(sizes, LIMIT, 1.0) == 4
    assert cut({**sizes, 4: Known(4 * MS, 0)}, LIMIT, 1.0) == 2
    assert cut({**sizes, 8: Known(8 * MS, LIMIT)}, LIMIT, 1.0) == 0, "the whole batch goes wide"


def test_a_small_batch_that_is_slow_at_home_pays_only_if_the_lenders_rest_often_enough() -> None:
    """As on a GPU, where a batch of half the rows takes nearly as long."""
    sizes = {8: Known(4 * MS, 3 * MS), 4: Known(3 * MS, 3 * MS // 2)}
    assert cut(sizes, LIMIT, 1.0) == 4
    assert cut(sizes, LIMIT, 0.5) == 0


def test_halves_are_tried_down_to_one_that_goes_wide() -> None:
    whole = {8: Known(8 * MS, 0)}
    assert untried(whole, LIMIT, *UNITS, 1.0) == [8, 4, 2, 1]
    assert untried(whole, LIMIT // 2, *UNITS, 1.0) == [4, 2, 1]
    assert untried({8: Known(8 * MS, 3 * MS)}, LIMIT, *UNITS, 1.0) == [4, 2, 1]
    assert untried({8: Known(8 * MS, 3 * MS), 2: Known(2 * MS, MS)}, LIMIT, *UNITS, 1.0) == [4]
    assert untried({8: Known(8 * MS, 3 * MS), 5: Known(5 * MS, 2 * MS)}, LIMIT, *UNITS, 1.0) == []
    assert untried({}, LIMIT, *UNITS, 1.0) == []
    assert untried({8: Known(0, 0)}, LIMIT, *UNITS, 1.0) == []


def test_nothing_smaller_is_tried_than_the_handling_of_a_work_allows() -> None:
    assert untried({64: Known(8 * MS, 3 * MS)}, LIMIT, *UNITS, 1.0) == [32, 16, 8, 4, 2]


@given(st.lists(st.tuples(st.integers(1, 8), NS, NS, NS), max_size=8), st.integers(0, 20 * MS))
def test_what_is_known_of_a_key_is_what_was_measured_last_and_is_not_forgotten(
    drawn: list[tuple[int, int, int, int]], now: int
) -> None:
    measured = [Measured("m", home, wide, ((rows, 3), (rows,)), retry_at) for rows, home, wide, retry_at in drawn]
    found = by_key(measured, now)
    assert set(found) == ({("m", ((3,), ()))} if drawn else set())
    for rows, known in found.get(("m", ((3,), ())), {}).items():
        mine = [each for each in measured if each.shapes[0][0] == rows]
        assert known.home == next((each.home for each in mine if each.home), 0)
        assert known.wide == next((each.known(now) for each in mine if each.known(now)), 0)


def test_a_model_whose_inputs_have_no_rows_has_no_key() -> None:
    none: list[tuple[tuple[int, ...], ...]] = [(), ((),), ((0,),), ((0, 16),)]
    assert by_key([Measured("m", MS, MS, shapes) for shapes in none], 0) == {}


class Borrower:
    """Works of one key on a made-up device: batches as large as the cut allows, of requests of one row that never end.

    `home` and `wide` say what so many rows take. The clock goes on by what works take, and between looks as `look` says.
    """

    def __init__(self, home: Callable[[int], int], wide: Callable[[int], int], most: int = 8, limit: int = LIMIT) -> None:
        self.cutting = Cutting(limit, *UNITS)
        self.now = 0
        self.rows: list[int] = []
        self.done = 0
        self.launched_wide = 0
        self.rests = True
        self._took = home, wide
        self._most, self._limit = most, limit
        self._times: dict[int, Times] = {}
        self._counts = [0, 0]
        self._next = 0

    def run(self, seconds: float) -> None:
        until = self.now + int(seconds * 1e9)
        while self.now < until:
            if self.now >= self._next:
                self.look()
            self.work(self.rows[0] if self.rows else self._most)

    def look(self) -> None:
        measured = [Measured(KEY[0], each.home, each.wide, ((n, 16),), each.retry_at) for n, each in self._times.items()]
        found = self.cutting.look(self.now, measured, *self._counts)
        assert set(found) <= {KEY}
        self.rows = list(found.values())
        self._next = self.now + (50 * MS if self.cutting.trying else 500 * MS)

    def work(self, rows: int) -> None:
        times = self._times.setdefault(rows, Times())
        since = 0 if self.rests else -1
        why = decide(times, self.now, self._limit, *UNITS, False, since)
        self._counts[0 if self.rests else 1] += 1
        took = self._took[1 if why == 0 else 0](rows)
        self.now += took + HANDLING
        self.done += rows
        if why == 0:
            self.launched_wide += 1
            times.learn_wide(took, self._limit, self.now)
        else:
            times.learn_home(took)


def started(borrower: Borrower) -> Borrower:
    borrower.now = borrower._next = 2 * SETTLED
    return borrower


def test_batches_that_are_too_long_are_cut_and_run_wide() -> None:
    borrower = started(Borrower(lambda rows: rows * MS, lambda rows: rows * MS // 3))
    borrower.run(20)
    before, at = borrower.done, borrower.now
    borrower.run(20)
    assert borrower.cutting.settled == {KEY: 4}
    whole = 8 / (8 * MS + HANDLING)
    assert (borrower.done - before) / (borrower.now - at) > 2 * whole


def test_cutting_costs_little_where_it_pays_nothing() -> None:
    """On the wide partition a row takes as long in a small batch as at home: nothing but the trials is cut, later and later."""
    borrower = started(Borrower(lambda rows: 4 * MS + rows * MS, lambda rows: 4 * MS + rows * MS * 3 // 4, limit=6 * MS))
    borrower.run(120)
    assert borrower.cutting.settled == {}
    whole = 8 / (12 * MS + HANDLING)
    assert borrower.done / (borrower.now - 2 * SETTLED) > 0.98 * whole


def test_when_the_lenders_stop_resting_batches_are_whole_again() -> None:
    borrower = started(Borrower(lambda rows: rows * MS, lambda rows: rows * MS // 3))
    borrower.run(20)
    assert borrower.cutting.settled == {KEY: 4}
    borrower.rests = False
    borrower.run(1.1)
    assert borrower.rows == []
    borrower.rests = True
    borrower.run(2)
    assert borrower.rows == [4]


def test_a_trial_ends_by_itself_where_no_batch_can_be_cut() -> None:
    """Each request has as many rows as a whole batch."""
    cutting, now, tried = Cutting(LIMIT, *UNITS), 0, []
    whole = Measured(KEY[0], 8 * MS, 3 * MS, ((8, 16),), 2**62)
    for count in range(1, 4000):
        now += 50 * MS
        found = cutting.look(now, [whole], count, 0)
        tried.append(found.get(KEY, 0))
    assert set(tried) == {0, 4, 2, 1}
    assert sum(1 for each in tried if each) < 0.05 * len(tried)


def test_a_size_that_is_seen_to_be_too_long_is_tried_no_further() -> None:
    cutting = Cutting(LIMIT, *UNITS)
    whole = Measured(KEY[0], 8 * MS, 3 * MS, ((8, 16),), 2**62)
    assert cutting.look(0, [whole], 1, 0) == {KEY: 4}
    assert cutting.look(MS, [whole], 2, 0) == {KEY: 4}
    half = Measured(KEY[0], 4 * MS, LIMIT + 1, ((4, 16),), 2**62)
    assert cutting.look(2 * MS, [whole, half], 3, 0) == {}
    assert cutting.look(2 * MS + RETRY, [whole, half], 4, 0) == {KEY: 2}
    assert not cutting.settled


def test_keys_whose_batches_are_cut_go_before_those_of_which_a_size_is_tried() -> None:
    """There are words for few keys: the first."""
    cutting = Cutting(LIMIT, *UNITS)
    tried = [Measured(KEY[0], 8 * MS, 3 * MS, ((8, each),), 2**62) for each in range(1, 5)]
    known = [Measured(KEY[0], rows * MS, rows * MS // 3, ((rows, 16),)) for rows in (1, 2, 4)]
    found = cutting.look(0, [*tried, Measured(KEY[0], 8 * MS, 3 * MS, ((8, 16),), 2**62), *known], 1, 0)
    assert next(iter(found.items())) == (KEY, 4)
    assert len(found) == 5
