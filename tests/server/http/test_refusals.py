import heapq
from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from server.http.connection_limits import MAX_REFUSAL_WAIT, REFUSAL_RATE, Refusals
from tests.passing_time import Clock


def test_a_second_of_answers_goes_at_once_and_the_others_one_after_the_other() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    assert [refusals.wait() for _ in range(REFUSAL_RATE)] == [0.0] * REFUSAL_RATE
    assert [round(refusals.wait(), 6) for _ in range(3)] == [1 / REFUSAL_RATE, 2 / REFUSAL_RATE, 3 / REFUSAL_RATE]


def test_after_a_pause_as_many_go_at_once_again_and_no_more() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    for _ in range(REFUSAL_RATE + 10):
        refusals.wait()
    clock.now += 60.0
    assert sum(refusals.wait() == 0.0 for _ in range(3 * REFUSAL_RATE)) == REFUSAL_RATE


@given(
    st.integers(1, int(REFUSAL_RATE * MAX_REFUSAL_WAIT)),
    st.lists(st.sampled_from([0.0, 0.001, 0.3, 2.0]), min_size=1, max_size=20),
)
def test_any_second_has_the_rate_and_one_burst_at_most(connections: int, pauses: list[float]) -> None:
    """Of connections that ask again a pause after each answer, as many as may wait at a time."""
    clock, sent = Clock(), list[float]()
    refusals, asked = Refusals(clock), [(clock.now, number) for number in range(connections)]
    for turn in range(800):
        clock.now, number = heapq.heappop(asked)
        sent.append(clock.now + refusals.wait())
        heapq.heappush(asked, (sent[-1] + pauses[turn % len(pauses)], number))
    sent.sort()
    most = max(bisect_right(sent, first + 1.0 - 1e-6) - number for number, first in enumerate(sent))
    assert most <= 2 * REFUSAL_RATE
