"""Which workers yield the GIL to which: decided from how often each has work, and whether it has some now."""

from server.workers.gil_priority import OFTEN, RARE, STEPS, GilPriorities, GilPriority

SECOND = 1_000_000_000
SETTLED = 200
"""Inferences after which the moving average of the gaps equals the gap."""


class Bench:
    """GIL priorities whose sleeps are counted instead of slept; `after` is called at the end of each."""

    def __init__(self) -> None:
        self.sleeps = 0
        self.waiting = False
        self.after = lambda: None
        self.priorities = GilPriorities(self.sleep)

    def sleep(self, _: float) -> None:
        self.sleeps += 1
        self.after()

    def priority(self, gap: int, until: int = SECOND) -> GilPriority:
        """The priority of a worker with inferences `gap` nanoseconds apart up to `until`, the last of which is in progress."""
        priority = self.priorities.make(lambda: self.waiting)
        self.priorities.join(priority)
        for nth in range(SETTLED):
            priority.start_enqueuing(until - (SETTLED - nth) * gap)
        return priority

    def slept(self, priority: GilPriority, now: int = SECOND) -> int:
        """How often the worker slept to yield the GIL."""
        before = self.sleeps
        priority.yield_gil(now)
        return self.sleeps - before


def test_a_busy_worker_yields_the_gil_to_a_rare_one_while_that_has_work() -> None:
    bench = Bench()
    greedy, modest = bench.priority(30_000), bench.priority(5_000_000)
    assert bench.slept(greedy) == STEPS
    assert bench.slept(modest) == 0
    modest.end_enqueuing()
    assert bench.slept(greedy) == 0


def test_an_unread_ticket_counts_as_work() -> None:
    """The other worker's thread may be waiting for the GIL to read it."""
    bench = Bench()
    greedy, modest = bench.priority(30_000), bench.priority(5_000_000)
    modest.end_enqueuing()
    bench.waiting = True
    assert bench.slept(greedy) == STEPS


def test_no_worker_yields_to_one_that_waits_for_the_device() -> None:
    bench = Bench()
    greedy, modest = bench.priority(30_000), bench.priority(5_000_000)
    modest.end_enqueuing()
    modest.start_waiting(unattended=True)
    bench.waiting = True
    assert bench.slept(greedy) == 0
    assert "away" in repr(modest)
    modest.start_completing()
    assert bench.slept(greedy) == STEPS


def test_a_busy_worker_yields_to_one_that_waits_and_listens_once_a_ticket_arrives() -> None:
    bench = Bench()
    greedy, modest = bench.priority(30_000), bench.priority(5_000_000)
    modest.end_enqueuing()
    modest.start_waiting(unattended=False)
    assert bench.slept(greedy) == 0
    assert "resting" in repr(modest)
    bench.waiting = True
    assert bench.slept(greedy) == STEPS


def test_enqueuing_and_completing_threads_of_a_worker_are_tracked_separately() -> None:
    bench = Bench()
    greedy, modest = bench.priority(30_000), bench.priority(5_000_000)
    modest.start_completing()
    modest.end_enqueuing()
    assert bench.slept(greedy) == STEPS
    modest.start_waiting(unattended=False)
    assert bench.slept(greedy) == 0


def test_yielding_ends_as_soon_as_the_other_worker_is_idle() -> None:
    bench = Bench()
    greedy, modest = bench.priority(30_000), bench.priority(5_000_000)
    bench.after = modest.end_enqueuing
    assert bench.slept(greedy) == 1


def test_a_rare_worker_yields_to_no_other() -> None:
    bench = Bench()
    priority, _ = bench.priority(RARE + 1000), bench.priority(OFTEN * RARE * 10)
    assert bench.slept(priority) == 0


def test_a_busy_worker_has_priority_for_a_while_after_a_long_rest() -> None:
    bench = Bench()
    later = SECOND + 20_000_000
    greedy, other = bench.priority(30_000, later), bench.priority(30_000, SECOND)
    other.start_enqueuing(later)
    assert bench.slept(greedy, later) == STEPS
    for nth in range(SETTLED):
        other.start_enqueuing(later + nth * 30_000)
    assert bench.slept(greedy, later + SETTLED * 30_000) == 0
