"""When the event loop stays awake after an answer, over a clock and a loop of the test's own."""

from collections.abc import Callable

from server.scheduling.launcher import PATIENCE, Awake

SHORT = PATIENCE // 4
TURN = 3_000


class Bench:
    """An event loop whose iterations take TURN, and the `Awake` on it."""

    def __init__(self) -> None:
        self.now = 1
        self.soon: list[Callable[[], None]] = []
        self.awake = Awake(self.soon.append, lambda: self.now)

    def idle(self, nanoseconds: int) -> int:
        """Nothing arrives for so long; for how much of that the loop was awake."""
        until, awake = self.now + nanoseconds, 0
        while self.soon and self.now < until:
            self.soon.pop()()
            self.now += TURN
            awake += TURN
        self.now = until
        return awake

    def ask(self, pause: int, times: int = 1) -> int:
        """Requests with such a pause before each, each answered at once; for how long the loop was awake meanwhile."""
        awake = 0
        for _ in range(times):
            awake += self.idle(pause)
            self.awake.arrived()
            self.awake.answered()
        return awake


def test_a_loop_sleeps_until_several_requests_have_come_soon_after_an_answer() -> None:
    bench = Bench()
    assert bench.ask(SHORT, 5) == 0
    assert repr(bench.awake).startswith("<Awake resting, ")
    bench.ask(SHORT, 20)
    assert bench.ask(SHORT, 10) >= 10 * SHORT
    assert repr(bench.awake).startswith("<Awake looking, ")


def test_it_sleeps_when_nothing_came_for_long_enough() -> None:
    bench = Bench()
    bench.ask(SHORT, 30)
    assert PATIENCE <= bench.idle(50 * PATIENCE) <= PATIENCE + 2 * TURN
    assert not bench.soon


def test_one_long_pause_has_the_next_answers_followed_by_sleep_until_they_are_short_again() -> None:
    bench = Bench()
    bench.ask(SHORT, 30)
    bench.ask(50 * PATIENCE)
    assert bench.idle(PATIENCE) == 0
    bench.ask(SHORT, 10)
    assert bench.ask(SHORT, 5) >= 5 * SHORT


def test_it_never_stays_awake_for_requests_that_come_further_apart() -> None:
    bench = Bench()
    assert bench.ask(2 * PATIENCE, 100) == 0


def test_it_stops_looking_while_a_request_is_served() -> None:
    bench = Bench()
    bench.ask(SHORT, 30)
    bench.awake.arrived()
    assert bench.idle(10 * PATIENCE) <= TURN
    bench.awake.answered()
    assert bench.soon
    bench.awake.answered()
    assert len(bench.soon) == 1, "it is asked to look once in an iteration"
