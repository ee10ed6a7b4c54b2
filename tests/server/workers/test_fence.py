"""When a work goes to the narrow placement: over all states of neighbours, and over what a model may draw."""

from hypothesis import example, given
from hypothesis import strategies as st

from server.link.activity import ENDED, OPEN
from server.workers.fence import SECOND, at_work, could_exceed, exceeds
from server.workers.stretching import SETTLED

WORD = st.integers(0, 2**64 - 1)
NOW = st.integers(0, 2**62)


def words(opened: int = 0, ended: int = 0) -> memoryview:
    """Of a process with so many requests open, whose last one ended then."""
    made = memoryview(bytearray(64)).cast("Q")
    made[OPEN], made[ENDED] = opened, ended
    return made


NEIGHBOURS = st.lists(st.builds(words, WORD, WORD), max_size=4)
RESTING = st.lists(st.builds(words, st.just(0), st.integers(0, 2**62)), max_size=4)


@given(NEIGHBOURS, NOW, st.integers(1, 2**63 - 1))
def test_a_neighbour_with_an_open_request_is_at_work_whatever_else_its_pages_say(
    others: list[memoryview], now: int, opened: int
) -> None:
    assert at_work([*others, words(opened)], now)


@given(RESTING, NOW)
def test_neighbours_without_a_request_are_at_work_until_the_last_has_rested_for_a_while(
    neighbours: list[memoryview], now: int
) -> None:
    last = max([int(each[ENDED]) for each in neighbours], default=0)
    assert at_work(neighbours, now) == (last > max(0, now - SETTLED))
    assert not at_work(neighbours, max(now, last + SETTLED))


def test_a_process_that_has_never_had_a_request_or_was_reset_rests() -> None:
    """However little time has passed since the machine started."""
    assert not at_work([words()], 1)
    assert not at_work([], 0)


@given(st.integers(0, 2**40), st.integers(1, 2**40), st.integers(1, 2**44), st.integers(1, 1000))
def test_a_model_draws_too_much_if_it_moves_its_bytes_faster_than_its_tenant_may(
    moved: int, home: int, rate: int, times: int
) -> None:
    assert exceeds(moved, home, rate) == (moved * SECOND / home > rate or moved * SECOND > rate * home)
    assert not exceeds(rate * home // SECOND, home, rate)
    assert exceeds(rate * home // SECOND + 1, home, rate)
    assert exceeds(moved, home, rate) == exceeds(moved * times, home * times, rate)


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 2**44), st.integers(1, 132), st.integers(0, 132))
@example(moved=7, home=21, rate=SECOND, units=1, more=2)  # As much as its tenant may.
def test_what_draws_too_much_at_home_does_so_wide_and_what_could_there_is_faster(
    moved: int, home: int, rate: int, units: int, more: int
) -> None:
    could = could_exceed(moved, home, rate, units, units + more)
    assert could >= exceeds(moved, home, rate)
    assert could == exceeds(moved * (units + more), home * units, rate)


@given(st.integers(0, 2**40), st.integers(1, 2**44))
def test_what_is_not_known_stays_home(figure: int, rate: int) -> None:
    assert not exceeds(0, figure, rate)
    assert not exceeds(figure, 0, rate)
    assert not exceeds(-figure, 0, rate)


@given(st.integers(-(2**40), -1), st.integers(1, 2**40), st.integers(1, 2**44), st.integers(1, 132), st.integers(1, 132))
def test_what_is_held_anyway_draws_too_much_whatever_it_moves(moved: int, home: int, rate: int, units: int, wide: int) -> None:
    assert exceeds(moved, home, rate)
    assert could_exceed(moved, home, rate, units, wide)
