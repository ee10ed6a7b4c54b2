"""The launch loop of one worker: runs tickets of captured graphs in C, so that nothing that holds the GIL delays them.

The worker's own thread is in `run` while only tickets come that the loop knows. For any other ticket `run` returns, with that
ticket and all behind it left in the ring; the worker runs it, and has the loop `learn` its model and shapes for the next time.
Worker and loop take turns and never have works in flight at the same time, so tickets stay in order.
"""

import ctypes
from collections.abc import Mapping
from ctypes import c_char_p, c_void_p
from itertools import count
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from engines import Recipe
from engines.signature import Signature, align

from ..accounts.meter import Counter
from ..link.arena import MESSAGE
from ..link.encoding import encode_outcome
from ..link.messages import NOWHERE, Extent, Failure, ModelKey, Shape, Ticket
from ..link.ring import Link
from .library import open_library
from .structures import (
    FAILED,
    HOME,
    MOST_AHEAD,
    MOST_TENSORS,
    NARROW,
    UNKNOWN,
    WIDE,
    Demand,
    Entry,
    Fence,
    Loop,
    Pace,
    Times,
    Wide,
    view_link,
)

MOST_ENTRIES = 128
"""Models and shapes that a loop knows; beyond that it forgets all, and learns again what comes."""
MOST_DECLINED = 256
"""Models and shapes remembered as not launchable."""
_PATIENCE = 16
"""Works that the worker runs itself until the executors on its other placements have what launching takes, too."""
_FIRST_WAIT = 1_000_000_000
"""RETRY in stretching.h."""


class Broken(NamedTuple):
    """An error of the driver, and the slots whose tickets it has failed."""

    error: Exception
    slots: list[int]


class Known(NamedTuple):
    """A kind of ticket that a loop runs: `body`, the bytes behind the head, the same in all such tickets, and what these say:
    the model, the shapes, and which outputs are not asked for.
    """

    body: bytes
    model: ModelKey
    shapes: tuple[Shape, ...]
    unasked: int


class Twin(NamedTuple):
    """The executor of the same model on another placement of the worker, and what its works are counted by. On the narrow one
    also what works of the model need, which decides where they go.
    """

    executor: Any
    counter: Counter | None
    demand: Demand | None = None


def open_loop(
    link: Link, bundle: int, expired: Failure, withdrawn: Failure, cancelled: Mapping[int, int]
) -> "LaunchLoop | None":
    """A loop for a worker that begins to serve this link; None where there is none: it was not compiled, or both ends of the
    link are in one process. `cancelled` has the serial that was last cancelled in each slot; the rest is as for `LaunchLoop`.
    """
    library = open_library() if link.tickets.in_pages else None
    if library is None:
        return None
    loop = LaunchLoop(library, link, bundle, expired, withdrawn)
    for slot, serial in list(cancelled.items()):
        loop.cancel(slot, serial)
    return loop


class LaunchLoop:
    """One worker's loop over one link. The worker's thread that is not parked calls `learn` and `run`; the rest is for any.

    `bundle` is in nanoseconds, as in the worker. `expired` and `withdrawn` are reported for tickets whose deadline has passed,
    and for cancelled ones.
    """

    def __init__(self, library: Any, link: Link, bundle: int, expired: Failure, withdrawn: Failure) -> None:
        self._library = library
        self._link = link
        self._entries = (Entry * (3 * MOST_ENTRIES))()  # At home, then the same on the wide and on the narrow placement.
        self.took = (Times * MOST_ENTRIES)()
        """What works of each of `known` take, in nanoseconds; the loop in C writes it."""
        self._known: list[Known] = []
        self._asked: dict[bytes, int] = {}
        self._wide: Wide | None = None
        self._fence: Fence | None = None
        self._pace: Pace | None = None
        self._recipes: dict[bytes, list[Recipe | None]] = {}
        """At home, on the wide and on the narrow placement."""
        self._declined: set[bytes] = set()
        self._launchable: dict[type, bool] = {}
        self._kept: list[Any] = []
        self._refusals = [encode_outcome((), failure) for failure in (expired, withdrawn)]
        self._cancelled = np.zeros(link.arena.count, np.uint64)
        self._loop = Loop(link=view_link(link, link.tickets.wakes), bundle=bundle, entries=ctypes.addressof(self._entries))
        self._loop.expired, self._loop.cancelled = (_pointer(data) for data in self._refusals)
        self._loop.expired_length, self._loop.cancelled_length = (len(data) for data in self._refusals)
        self._loop.cancelled_serials = self._cancelled.ctypes.data
        self._wakes = count(1)
        self._turn = Lock()
        self._closing = Lock()
        self._running = False
        self._revocations = self._heeded_revocations = 0
        self.left_one = False
        """The loop has left the next ticket to the worker, which sets this back when it takes it."""

    @property
    def wakes(self) -> int:
        """Changes with each `wake`."""
        return int(self._loop.wakes)

    @property
    def oldest(self) -> int | None:
        """The serial of the oldest work in flight in the loop."""
        return self._loop.oldest or None

    @property
    def holds(self) -> bool:
        """Whether the next ticket waits until what is in flight elsewhere has ended."""
        return bool(self._loop.held)

    @property
    def idle(self) -> bool | None:
        """Whether nothing runs or waits while the loop runs; None if it does not run."""
        if not self._running:
            return None
        return not self._loop.oldest and self._link.arena.total_put[0] == self._loop.read & 0xFFFFFFFF

    @property
    def link(self) -> Link:
        """The link that it serves."""
        return self._link

    @property
    def known(self) -> list[Known]:
        """The tickets that it runs. Any thread, while it runs too."""
        return list(self._known)

    @property
    def knows_any(self) -> bool:
        """Whether there is any ticket that the loop would run."""
        return bool(self._recipes) and self._revocations == self._heeded_revocations

    def takes_next(self, look: bool) -> bool:
        """Whether the next ticket is one that the loop runs. `look` is as for `Tickets.poll`."""
        if not self.knows_any:
            return False
        body = self._link.tickets.peek(look)
        if body is not None and self.left_one:  # The loop has left this one, whatever it says.
            self.left_one = False
            return False
        return body in self._recipes

    def learn(
        self, ticket: Ticket, executor: Any, counter: Counter | None, wide: Twin | None = None, narrow: Twin | None = None
    ) -> None:
        """Have the loop run tickets like this one from now on, if the executor has a recipe for it.

        The ticket was enqueued, so its page still has what the HTTP side wrote. What such tickets take is added to `counter`.
        With twins the loop decides for each which of them runs it.
        """
        if self._is_launchable(executor):
            known = Known(self._link.tickets.body(ticket.slot), ticket.model, ticket.shapes, ticket.unasked)
            self._learn(known, [Twin(executor, counter), wide, narrow], _PATIENCE)

    def take_over(self, known: Known, executor: Any, counter: Counter | None, narrow: Twin | None = None) -> None:
        """As `learn`, of what another loop of this link runs, before this one runs for the first time."""
        if self._is_launchable(executor):
            self._learn(known, [Twin(executor, counter), None, narrow], 0)

    def _is_launchable(self, executor: Any) -> bool:
        """Whether the executor has a `recipe`; cached by type, because a failed `hasattr` takes half a microsecond."""
        kind = type(executor)
        if kind not in self._launchable:
            self._launchable[kind] = hasattr(executor, "recipe")
        return self._launchable[kind]

    def _learn(self, known: Known, twins: list[Twin | None], patience: int) -> None:
        """`twins` are on home, wide and narrow placement."""
        body = known.body
        if body in self._recipes or body in self._declined:
            return
        revocations = self._revocations
        made: list[Recipe | None] = []
        for twin in twins:  # Without a recipe at home the others need none.
            made.append(twin.executor.recipe(known.shapes, self.revoke) if twin and all(made[:1]) else None)
        if (narrow := twins[NARROW]) and made[NARROW] is None and body not in self._asked:
            _prepare(narrow.executor, known.shapes)
        lacks = made[0] and any(twin and recipe is None for twin, recipe in zip(twins, made, strict=True))
        if lacks and self._asked.get(body, 0) < patience:
            self._asked[body] = self._asked.get(body, 0) + 1
            return
        with self._turn:
            if revocations != self._revocations:  # The recipe may be of before that; the next ticket asks again.
                return
            if made[0] is None or not self._add(known, twins, made):
                if len(self._declined) >= MOST_DECLINED:
                    self._declined.clear()
                self._declined.add(body)

    def run(self, seen: int) -> Broken | None:
        """Serve until `wakes` is not `seen` any more, a ticket comes that the loop does not know, or the driver fails. Blocks.

        The link's ends in Python continue where the loop stops. Raises Malformed.
        """
        loop, tickets, completions = self._loop, self._link.tickets, self._link.completions
        with self._turn:
            self._running = True
            try:
                if not self.knows_any:  # Revoked meanwhile. Any later revocation finds that it runs, and wakes it.
                    return None
                loop.seen, loop.entry_count = seen, len(self._recipes)
                wide, fence, pace = self._wide, self._fence, self._pace
                loop.wide = ctypes.addressof(wide) if wide is not None else None
                loop.fence = ctypes.addressof(fence) if fence is not None else None
                loop.pace = ctypes.addressof(pace) if pace is not None else None
                loop.read, loop.unread = tickets.hand_over()
                loop.put = completions.hand_over()
                why = self._library.launch_loop_run(ctypes.byref(loop))
                tickets.take_back(loop.read, loop.unread)
                completions.take_back(loop.put)
                self.left_one = why == UNKNOWN
                return self._broken() if why == FAILED else None
            finally:
                self._running = False

    def wake(self) -> None:
        """Make `run` return soon, once what is in flight has ended; wakes a listening worker too."""
        self._loop.wakes = next(self._wakes)
        self._link.tickets.wake()

    def use(self, wide: Wide | None, fence: Fence | None) -> None:
        """Decide by these which works go to the wide and to the narrow placement, from the next `run` on; with None none do."""
        self._wide, self._fence = wide, fence

    def use_pace(self, pace: Pace | None) -> None:
        """Keep the shares of this pace from the next `run` on; with None there is none to keep."""
        self._pace = pace

    def times(self) -> list[tuple[ModelKey, int, int]]:
        """What works took at home and on the wide partition, in nanoseconds, 0 if unknown. Any thread, while it runs too."""
        return [(known.model, int(each.home), int(each.wide)) for known, each in zip(self.known, self.took, strict=False)]

    def cancel(self, slot: int, serial: int) -> None:
        """Refuse this ticket if it was not launched yet."""
        self._cancelled[slot] = serial

    def revoke(self) -> None:
        """Forget all recipes. Blocks until nothing is in flight by them. Executors call it with locks held."""
        with self._closing:
            self._revocations += 1
            if self._running:
                self.wake()
        with self._turn:
            self._forget()

    def close(self) -> None:
        """Forget everything, and do not touch the link any more; the loop must not run."""
        with self._closing:  # A revocation may be waking it. Later ones find that it does not run.
            pass
        with self._turn:
            self._forget()

    def _add(self, known: Known, twins: list[Twin | None], recipes: list[Recipe | None]) -> bool:
        """Fill in the next entry, and those of its twins; False if the first cannot be. With `_turn` held."""
        if len(self._recipes) == MOST_ENTRIES:
            self._forget()
        index = len(self._recipes)
        times, narrow = self.took[index], twins[NARROW]
        entries = [self._entries[placement * MOST_ENTRIES + index] for placement in (HOME, WIDE, NARROW)]
        addresses: list[int | None] = []
        for placement, (entry, twin, recipe) in enumerate(zip(entries, twins, recipes, strict=True)):
            filled = twin is not None and recipe is not None and self._fill(entry, known, recipe, twin)
            addresses.append(ctypes.addressof(entry) if filled else None)
            entry.placement, entry.times = placement, ctypes.addressof(times)
            entry.demand = ctypes.addressof(narrow.demand) if narrow and narrow.demand else None
        if addresses[HOME] is None:
            return False
        times.home = times.wide = times.retry_at = 0
        times.wait = _FIRST_WAIT
        _, entries[HOME].wide, entries[HOME].narrow = addresses
        self._recipes[known.body] = recipes
        self._known.append(known)
        self._kept.append(narrow)
        return True

    def _fill(self, entry: Entry, known: Known, recipe: Recipe, runs: Twin) -> bool:
        """Fill in an entry; False if there are too many tensors, or too large shapes."""
        body, _, shapes, unasked = known
        executor, counter, _ = runs
        place, extents, count = 0, [], len(shapes)
        signature: Signature = executor.engine.signature
        if len(recipe.addresses) > MOST_TENSORS:
            return False
        sizes = [spec.nbytes(shape) for spec, shape in zip(signature.inputs, shapes, strict=True)]
        sizes += [spec.nbytes(shape) for spec, shape in zip(signature.outputs, recipe.outputs, strict=True)]
        entry.needed = entry.moved_in = entry.moved_out = 0
        for index, (size, device) in enumerate(zip(sizes, recipe.addresses, strict=True)):
            if index >= count and unasked >> index - count & 1:
                entry.offset[index], entry.address[index], entry.nbytes[index] = 0, device, 0
                extents.append(NOWHERE)
                continue
            entry.offset[index], entry.address[index], entry.nbytes[index] = place, device, size
            if index >= count:
                extents.append(Extent(recipe.outputs[index - count], place, size))
                entry.moved_out += size
            else:
                entry.moved_in += size
            entry.needed = place + size
            place = align(place + size)
        done = encode_outcome(tuple(extents), None)
        if len(done) > MESSAGE - 64:
            return False
        events = (c_void_p * len(recipe.events))(*recipe.events)
        entry.launch, entry.record, entry.query, entry.pending = recipe.launch, recipe.record, recipe.query, recipe.pending
        entry.graph, entry.stream, entry.events = recipe.graph, recipe.stream, ctypes.addressof(events)
        entry.tables, entry.counted, entry.launched = recipe.tables, recipe.counted, recipe.launched
        entry.body, entry.body_length, entry.hash = _pointer(body), len(body), self._library.launch_loop_hash(body, len(body))
        entry.done, entry.done_length = _pointer(done), len(done)
        entry.length, entry.rows, entry.inputs, entry.expected = len(recipe.events), len(sizes), count, 0
        entry.used = counter.address if counter else None
        self._kept.append((body, done, events, executor, counter))
        return True

    def _forget(self) -> None:
        """With `_turn` held."""
        self._heeded_revocations = self._revocations
        self._recipes.clear()
        self._known.clear()
        self._asked.clear()
        self._declined.clear()
        self._kept.clear()

    def _broken(self) -> Broken:
        """After an error of the driver: what it was, once nothing is in flight any more, and the slots of the works."""
        loop = self._loop
        end = loop.launched + (1 if loop.refused else 0)
        flights = [loop.flights[number % MOST_AHEAD] for number in range(loop.finished, end)]
        entry = ctypes.addressof(flights[0].entry.contents)
        index = (entry - ctypes.addressof(self._entries)) // ctypes.sizeof(Entry)
        placement, index = divmod(index, MOST_ENTRIES)
        recipe = list(self._recipes.values())[index][placement]
        assert recipe
        try:
            error = recipe.failure(loop.error)
        except Exception as failed:
            error = failed
        return Broken(error, [flight.slot for flight in flights])


def _prepare(executor: Any, shapes: tuple[Shape, ...]) -> None:
    """Have an executor get ready for these shapes; when it is, it revokes what the loop knows. What fails its works show."""
    if (preparing := getattr(executor, "preparing", None)) is not None:
        preparing(shapes)


def _pointer(data: bytes) -> int:
    """Where these bytes are. They must be kept."""
    return ctypes.cast(c_char_p(data), c_void_p).value or 0
