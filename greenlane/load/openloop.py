"""Requests sent when they are due, and their latency from then: what a client sees that does not slow down with the server.

Sockets in one thread. They are waited for by epoll, for which descriptors may have any number, and that by `select`, whose
timeouts are the only ones finer than a millisecond. Nothing is computed meanwhile that can be done afterwards.
"""

import select
from collections import deque
from collections.abc import Callable
from heapq import heappush, heappushpop
from time import perf_counter

from .jobs import OpenLoop, Seen, SlowAnswer
from .wire import Answer, Broken, Connection

FIRST = 60.0
"""Seconds for which the first answer on a connection is waited for."""
MOST_FAILURES = 5
"""How many failures are described; all are counted."""
SPINS = 0.02
"""Seconds before its first request from which a client that spins does so."""
SLOWEST = 40
"""How many of the slowest answers are described."""


class Generator:
    """One process's part of an open loop: `open`, then `run`."""

    def __init__(self, job: OpenLoop) -> None:
        self._job = job
        self._asks = (job.ask, *job.others)
        self.seen = Seen()
        self._poll = select.epoll()
        self._free: list[Connection] = []
        self._busy: dict[int, tuple[Connection, int, float]] = {}
        self._waiting: deque[int] = deque()
        self._start = 0.0
        self._stopped = False

    def open(self) -> None:
        """Make the connections and have one request answered on each, so that the first that counts is like the rest. Blocks.

        Raises RuntimeError if one is not answered with 200, and Broken if it is not within FIRST.
        """
        for _ in range(self._job.connections):
            connection = self._connect()
            self._free.append(connection)
            try:
                answer = connection.exchange((self._job.first or self._job.ask).data, keep=True, seconds=FIRST)
            except Broken:
                self._give_up()
                raise
            if answer.status != 200:
                self._give_up()
                said = (answer.body or b"").decode(errors="replace")[:300]
                raise RuntimeError(f"the first request was answered with {answer.status}: {said}")
        while self._job.fresh and self._free:
            self._free.pop().close()

    def stop(self) -> None:
        """Have `run` send nothing more, and return when the last answers are there. For a signal handler."""
        self._stopped = True

    def run(self, start: float) -> Seen:
        """Send everything, wait for the answers, and return what came of it. `start` is by `time.perf_counter`. Blocks."""
        self._start = start
        due = [start + arrival for arrival in self._job.arrivals]
        count, index = len(due), 0
        # A client that spins leaves its core to others for so long, which may be those of earlier phases.
        self._wait(max(0.0, due[0] - SPINS - perf_counter()) if due else 0.0)
        while index < count and not self._stopped:
            now = perf_counter()
            while index < count and due[index] <= now:
                self._begin(index, now)
                index += 1
            self._wait(0.0 if self._job.spin or index == count else max(0.0, due[index] - perf_counter()))
        end = perf_counter() + self._job.grace
        while (self._busy or self._waiting) and (left := end - perf_counter()) > 0:
            self._wait(left)
        self._give_up()
        return self.seen

    def _connect(self) -> Connection:
        connection = Connection(self._job.port, host=self._job.host)
        connection.open()
        self._poll.register(connection.socket, select.EPOLLET)
        self.seen.connections += 1
        return connection

    def _begin(self, index: int, now: float) -> None:
        """Send arrival `index`, on a connection that is free, on a new one, or on the next that becomes free."""
        if not self._free and len(self._busy) < self._job.most:
            self._free.append(self._connect())
        if not self._free:
            self.seen.waited += 1
            self._waiting.append(index)
            return
        self.seen.late.append((now - self._start - self._job.arrivals[index]) * 1e6)
        self._send(self._free.pop(), index, now)

    def _send(self, connection: Connection, index: int, now: float) -> None:
        number = connection.socket.fileno()
        self._busy[number] = (connection, index, now)
        try:
            connection.send(self._asks[index % len(self._asks)].data, keep=index % self._job.keep == 0)
        except Broken as broken:
            self._break(number, broken)
            return
        # Each change is reported once, and here what there is already: a server may have ended a connection that was free.
        self._poll.modify(number, select.EPOLLIN | select.EPOLLET | (select.EPOLLOUT if connection.unsent else 0))

    def _wait(self, seconds: float) -> None:
        if not select.select([self._poll], (), (), seconds)[0]:
            return
        for number, events in self._poll.poll(0):
            if number in self._busy and events & select.EPOLLOUT:
                self._attempt(number, self._busy[number][0].flush)
            if number in self._busy and (answer := self._attempt(number, self._busy[number][0].receive)):
                self._end(number, answer, perf_counter())

    def _attempt(self, number: int, step: Callable[[], Answer | None]) -> Answer | None:
        try:
            return step()
        except Broken as broken:
            self._break(number, broken)
            return None

    def _end(self, number: int, answer: Answer, now: float) -> None:
        connection, index, sent = self._busy.pop(number)
        self._note(index, now, answer.status, "" if answer.body is None else _printable(answer.body[:200]))
        self._describe(index, now, sent, answer)
        which = index % len(self._asks)
        if answer.status == 200 and self._asks[which].size not in (None, answer.size):
            self.seen.wrong += 1
        if answer.body is not None and answer.status == 200:
            self.seen.bodies.append(answer.body)
            self.seen.asked.append(which)
        if answer.last or self._job.fresh:
            connection.close()
            self._again(None if self._job.fresh else self._connect())
        else:
            self._again(connection)

    def _break(self, number: int, why: Broken) -> None:
        connection, index, _ = self._busy.pop(number)
        connection.close()
        self._note(index, perf_counter(), 0, str(why))
        self._again(None if self._job.fresh else self._connect())

    def _again(self, connection: Connection | None) -> None:
        """This connection is free for the next request; None: a place for a new one is."""
        if self._waiting:
            self._send(connection or self._connect(), self._waiting.popleft(), perf_counter())
        elif connection:
            self._free.append(connection)

    def _note(self, index: int, now: float, status: int, said: str) -> None:
        due = self._job.arrivals[index]
        if status != 200 and len(self.seen.failures) < MOST_FAILURES:
            self.seen.failures.append(f"{now - self._start:.3f} s: {status}, {said}")
        self.seen.samples.add(due, (now - self._start - due) * 1e6, status)

    def _describe(self, index: int, now: float, sent: float, answer: Answer) -> None:
        """Keep when and where this answer's time went, if it is one of the slowest."""
        due, slowest = self._job.arrivals[index], self.seen.slowest
        latency = (now - self._start - due) * 1e3
        if len(slowest) == SLOWEST and latency <= slowest[0].latency:
            return
        described = SlowAnswer(latency, due, (sent - self._start - due) * 1e3, *answer.times)
        if len(slowest) < SLOWEST:
            heappush(slowest, described)
        else:
            heappushpop(slowest, described)

    def _give_up(self) -> None:
        """Requests without an answer count as waiting until now."""
        now = perf_counter()
        for index in [*(index for _, index, _ in self._busy.values()), *self._waiting]:
            self._note(index, now, 0, "no answer until the end")
        for connection in [*self._free, *(connection for connection, *_ in self._busy.values())]:
            connection.close()
        self._poll.close()


def _printable(body: bytes) -> str:
    """As a text in one line."""
    return "".join(each if each.isprintable() else "?" for each in body.decode(errors="replace"))
