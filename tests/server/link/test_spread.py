"""A link over two devices: which one gets a ticket, and what becomes of tickets whose device ends."""

import math
import select
from collections.abc import Iterator

import pytest

from server.errors import BadRequest
from server.link import ring as links
from server.link.messages import Done, Extent, Failure, Ticket
from server.link.ring import Descriptors, Link
from server.link.spread import Spread, least_loaded
from tests.memory import MEMORY

SLOTS = 8
ENDED = "its process has ended"


@pytest.mark.parametrize(
    ("loads", "last", "chosen"),
    [
        ([2, 1, 3], 0, 1),
        ([1, 1, 1], 0, 1),
        ([1, 1, 1], 2, 0),
        ([0, 0], -1, 0),
        ([0, None], 0, 0),
        ([None, 5], 1, 1),
        ([3, None, 1], 2, 2),
        ([None, None], 0, -1),
        ([1, 0, 0], 1, 2),
    ],
)
def test_the_least_loaded_is_chosen_and_equals_in_turn(loads: list[int | None], last: int, chosen: int) -> None:
    assert least_loaded(loads, last) == chosen


class Two:
    """A spread over devices `a` and `b`, which call the models `m` and `n` by keys of their own; `b` does not serve `n`."""

    def __init__(self) -> None:
        first = links.create(SLOTS, MEMORY)
        self.descriptors = {"a": first, "b": links.renew(first)}
        self.memory = links.attach(first).arena.memory
        self.spread = Spread({name: links.attach(each, self.memory) for name, each in self.descriptors.items()})
        self.there = {name: self._far(each) for name, each in self.descriptors.items()}
        self.spread.serve({"m#1": {"a": "m#7", "b": "m#9"}, "n#1": {"a": "n#8"}})
        self.counts: list[int] = []
        self.spread.on_serving = self.counts.append

    def _far(self, descriptors: Descriptors) -> Link:
        link = links.attach(descriptors, self.memory)
        link.tickets.open()
        return link

    def close(self) -> None:
        self.spread.close()
        for each in self.descriptors.values():
            each.close()

    def restart(self, name: str) -> None:
        """As when a device process is replaced: its link is another one."""
        old, self.descriptors[name] = self.descriptors[name], links.renew(self.descriptors[name])
        self.spread.replace(name, links.attach(self.descriptors[name], self.memory))
        old.close()
        self.there[name] = self._far(self.descriptors[name])

    def send(self, *tickets: Ticket) -> None:
        for each in tickets:
            self.spread.link.tickets.write(each)
        self.spread.link.tickets.put(tickets)

    def taken(self, name: str) -> list[tuple[int, str]]:
        """The tickets that a device takes now, as their slots and models."""
        found = []
        while (ticket := self.there[name].tickets.poll()) is not None:
            found.append((ticket.slot, ticket.model))
        return found

    def end(self, name: str, *slots: int) -> None:
        for slot in slots:
            self.there[name].completions.put(Done(slot, (Extent((1,), 0, 4),), None, 1, 2))
        self.there[name].completions.ring()

    def arrived(self) -> list[tuple[int, Failure | None]]:
        """What the lane would be woken for."""
        looked = select.poll()
        looked.register(self.spread.link.completions.event, select.POLLIN)
        if not looked.poll(0):
            return []
        return [(done.slot, done.failure) for done in self.spread.link.completions.take()]


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.close()


def ticket(slot: int, model: str = "m#1", serial: int = 1, after: int = 0) -> Ticket:
    return Ticket(slot, serial, model, ((1,),), math.inf, 64, 0, after)


def test_tickets_go_in_turn_and_by_the_devices_own_keys(two: Two) -> None:
    two.send(*map(ticket, range(4)))
    assert (two.taken("a"), two.taken("b")) == ([(0, "m#7"), (2, "m#7")], [(1, "m#9"), (3, "m#9")])


def test_a_device_with_more_in_flight_gets_the_next_ones_later(two: Two) -> None:
    two.send(*map(ticket, range(4)))
    two.end("b", 1, 3)
    assert two.arrived() == [(1, None), (3, None)]
    two.send(ticket(4), ticket(5))
    assert two.taken("b")[2:] == [(4, "m#9"), (5, "m#9")]


def test_deferred_tickets_do_not_count_as_in_flight(two: Two) -> None:
    two.send(ticket(0))
    two.there["a"].completions.report_deferred(1)
    assert two.arrived() == []
    assert two.spread.link.completions.deferred() == 1
    two.send(ticket(1), ticket(2))
    assert [len(two.taken(name)) for name in ("a", "b")] == [2, 1]


def test_a_model_runs_where_it_is_served(two: Two) -> None:
    two.send(ticket(0, "n#1"), ticket(1, "n#1"))
    assert two.taken("a") == [(0, "n#8"), (1, "n#8")]
    two.spread.forget(["n#1"])
    two.send(ticket(2, "n#1"))
    assert two.arrived() == [(2, Failure("stopped", "no device of the tenant serves this model now"))]


def test_what_is_in_flight_where_the_process_ends_fails_and_the_rest_goes_on(two: Two) -> None:
    two.send(*map(ticket, range(4)))
    two.end("a", 0)
    two.spread.stop("a", ENDED)
    assert two.arrived() == [(0, None), (2, Failure("stopped", ENDED))], "what had ended before is answered"
    two.send(ticket(4), ticket(5))
    assert [slot for slot, _ in two.taken("b")] == [1, 3, 4, 5]
    assert (two.spread.refusing, two.counts) == ("", [1])
    two.restart("a")
    two.spread.serve({"m#2": {"a": "m#17", "b": "m#9"}})
    two.send(ticket(6, "m#2"))
    assert two.taken("a") == [], "not before it serves again"
    two.spread.refuse("a", "")
    two.send(ticket(7, "m#2"))
    assert (two.taken("a"), two.counts) == ([(7, "m#17")], [1, 2])
    two.end("a", 7)
    assert two.arrived() == [(7, None)]


def test_without_any_device_every_ticket_fails_with_the_reason(two: Two) -> None:
    two.spread.stop("a", ENDED)
    two.spread.stop("b", ENDED)
    two.send(ticket(0))
    assert two.arrived() == [(0, Failure("stopped", ENDED))]
    assert two.spread.refusing == ENDED


def test_a_device_that_refuses_keeps_what_it_has(two: Two) -> None:
    two.send(ticket(0))
    assert two.spread.refuse("a", "an inference cannot be stopped") == [0]
    two.send(ticket(1))
    assert two.taken("b") == [(1, "m#9")]
    two.end("a", 0)
    assert two.arrived() == [(0, None)]


def test_an_answer_in_parts_stays_where_it_began(two: Two) -> None:
    two.send(ticket(0, serial=1, after=1))
    two.end("a", 0)
    assert two.arrived() == [(0, None)]
    two.send(ticket(1))
    two.end("b", 1)
    two.send(ticket(0, serial=2, after=1))
    assert [slot for slot, _ in two.taken("a")] == [0, 0]
    two.end("a", 0)
    two.arrived()
    two.spread.stop("a", ENDED)
    two.restart("a")
    two.spread.refuse("a", "")
    two.spread.serve({"m#1": {"a": "m#7"}})
    two.send(ticket(0, serial=3, after=2))
    [(slot, failure)] = two.arrived()
    assert slot == 0
    assert failure
    assert "the device that began this answer was started again" in failure.text


def test_shapes_that_do_not_fit_are_refused_before_a_device_is_chosen(two: Two) -> None:
    with pytest.raises(BadRequest, match="shapes too long to send"):
        two.spread.link.tickets.write(ticket(0)._replace(shapes=tuple((1,) * 64 for _ in range(200))))
