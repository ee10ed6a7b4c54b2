"""Answers over gRPC that their clients have not read.

gRPC takes an answer as a whole and keeps it until its client has given room for all of it. It says when that is so: the call's
task is done then, or `write` returns. But it can end no call whose answer it has begun to write, so the connection is closed.
"""

import asyncio
from typing import Any

from ..errors import MemoryFull
from ..tenants.unread import UnreadAnswers
from . import sockets

LARGE = 64 * 1024
"""Answers of more bytes count at once; a client gives room for others before it asks, and they are finished in one go."""
LOOK_INTERVAL = 1.0
"""Seconds between two looks at answers that are being written."""
PATIENCE = 2.0
"""Seconds after which an answer may be ended to make room for another. One that is read takes less."""


class KeptAnswer:
    """An answer that gRPC has been given, as `UnreadAnswers` sees it: a connection of which so much is unread."""

    __slots__ = ("_answers", "_context", "_first", "nbytes", "peer", "taken")

    def __init__(self, answers: "KeptAnswers", context: Any, nbytes: int) -> None:
        self._answers = answers
        self._context = context
        self.nbytes = nbytes
        self.peer = ""
        """The client's address, once the answer is found unread after some time."""
        self._first: int | None = None
        self.taken = 0
        """Bytes that the connection has taken since then, of this answer or others."""

    def identify(self) -> str:
        """Find out whose it is."""
        if not self.peer:
            self.peer = self._context.peer()
        return self.peer

    def look(self, acknowledged: int | None) -> None:
        """The client's system has acknowledged so many bytes by now; None if that is not known."""
        if acknowledged is not None:
            self._first = acknowledged if self._first is None else self._first
            self.taken = acknowledged - self._first

    def unread(self) -> int:
        """Bytes of it that the client has not read, at least."""
        return max(0, self.nbytes - self.taken)

    def abort(self) -> None:
        """Close the connection, with all its calls."""
        self._answers.close(self.identify())

    def done(self, _: object = None) -> None:
        """It was written, or its call has ended."""
        self._answers.forget(self)


class KeptAnswers:
    """Those of one port. Belongs to the event loop."""

    def __init__(self, unread: UnreadAnswers, port: int, most: int) -> None:
        """`most`: how many may be unread for longer than a moment; others find no place among the calls otherwise."""
        self._unread = unread
        self.most = most
        self._port = port
        self._kept: dict[KeptAnswer, bool] = {}
        """Oldest first, and whether it was there at the last look."""
        self._looking = False

    @property
    def answers(self) -> tuple[KeptAnswer, ...]:
        """What gRPC was given and has not written yet, oldest first."""
        return tuple(self._kept)

    def keep(self, context: Any, nbytes: int) -> KeptAnswer:
        """Count an answer that is given to gRPC now, until it is done. Raises MemoryFull if it does not fit beside others."""
        answer = KeptAnswer(self, context, nbytes)
        if nbytes > LARGE:
            if not self._unread.fits(nbytes, PATIENCE):
                text = f"the answer has {nbytes} bytes and does not fit beside those that clients have not read yet"
                raise MemoryFull(f"{text}; {self._unread.together}")
            self._unread.add(answer, nbytes)
        self._kept[answer] = False
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(LOOK_INTERVAL, self._look)
        return answer

    def keep_until_done(self, context: Any, nbytes: int) -> None:
        """The same, until gRPC has written what the current task returns. Raises MemoryFull."""
        task = asyncio.current_task()
        assert task
        task.add_done_callback(self.keep(context, nbytes).done)

    def forget(self, answer: KeptAnswer) -> None:
        """Count it no more."""
        self._kept.pop(answer, None)
        self._unread.discard(answer)

    def close(self, peer: str) -> None:
        """Close a client's connection."""
        for answer in self._kept:
            if answer.identify() == peer:
                self._unread.discard(answer)  # It ends with this connection, which is counted once.
        sockets.shut_down(self._port, peer)

    def _end_oldest(self, old: list[KeptAnswer]) -> None:
        """Close connections, the oldest first, until few enough answers are unread; those that are closed leave `old`."""
        before = len(old)
        while len(old) > self.most:
            oldest = old[0]
            self._unread.close(oldest, f"{before} answers are unread; {self.most} may be")
            old[:] = [answer for answer in old if answer.identify() != oldest.peer]

    def _look(self) -> None:
        """See how far the clients are that have not read their answers since the last look."""
        old = [answer for answer, was_there in self._kept.items() if was_there]
        if old:
            self._end_oldest(old)
            for answer in old:
                if not answer.peer and answer.nbytes <= LARGE:
                    self._unread.add(answer, answer.nbytes)
            acknowledged = sockets.acknowledged(self._port, {answer.identify() for answer in old})
            for answer in old:
                answer.look(acknowledged.get(answer.peer))
        self._kept = dict.fromkeys(self._kept, True)
        self._looking = bool(self._kept)
        if self._looking:
            asyncio.get_running_loop().call_later(LOOK_INTERVAL, self._look)
