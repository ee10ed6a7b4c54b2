"""Launches tickets when nothing is in flight: on this thread where the device side can run them there, else by the ring."""

from collections.abc import Callable

from ..link.messages import Done, Ticket
from ..link.ring import Tickets
from .scheduler import Scheduler


def run_or_put(link: Tickets, tickets: list[Ticket], scheduler: Scheduler, end: Callable[[Done], None]) -> bool:
    """Run these tickets, the only ones in flight, one after the other, and then call `end` with each completion.

    The first that cannot run now is put, and all behind it. Returns whether any was put.
    """
    run_now = link.run_now
    ran = 0
    ended: list[Done] = []
    if run_now is not None:
        for ticket in tickets:
            done = run_now(ticket)
            if done is None:
                break
            ran += 1
            ended.append(done)
        for done in ended:
            scheduler.finish(done.slot, done.ended - done.began)
        for done in ended:
            end(done)
    left = tickets[ran:] if ran else tickets
    link.put(left)
    return bool(left)
