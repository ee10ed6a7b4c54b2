"""Slots, and links to have both ends of, for tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

from server import arena
from server import link as links
from server.arena import Arena
from server.link import Descriptors, Link, Tickets
from server.slots import Slot

PATIENCE = 30


class Watched(Tickets):
    """The tickets of a link whose tests want to know when somebody has woken the reader, as who asks it to stop does."""

    def __init__(self, arena: Arena, event: int) -> None:
        super().__init__(arena, event)
        self._woken = Event()

    def wake(self) -> None:
        super().wake()
        self._woken.set()

    def wait_for_wake(self) -> None:
        """Block until it was woken, since the last time that this was asked."""
        assert self._woken.wait(PATIENCE), "nobody woke the worker"
        self._woken.clear()


def arena_of(count: int) -> Arena:
    """Fresh memory of so many slots, which lives as long as somebody refers to it."""
    descriptor = arena.create(count)
    try:
        return arena.attach(descriptor, count)
    finally:
        os.close(descriptor)


def slot_of(index: int = 0) -> Slot:
    """A fresh slot with this number."""
    return arena_of(index + 1).slot(index)


def watched(slots: int) -> tuple[Descriptors, Link, Watched]:
    """A link, to be closed by its descriptors, and its tickets."""
    descriptors = links.create(slots)
    link = links.attach(descriptors)
    tickets = Watched(link.arena, descriptors.tickets)
    return descriptors, link._replace(tickets=tickets), tickets


@contextmanager
def linked(slots: int = 8) -> Iterator[Link]:
    """Both ends of a link, which is closed afterwards."""
    descriptors, link, _ = watched(slots)
    try:
        yield link
    finally:
        descriptors.close()
