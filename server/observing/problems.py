"""The last things that went wrong, for people: warnings and errors of this process's log, and requests that failed."""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Annotated

from ..facts import Fact

MOST = 64
"""Problems that are kept."""
_MOST_TEXT = 2000
"""Characters of one."""
_TOGETHER = 60.0
"""Seconds: one that comes again within that is the same one, once more."""


class Problem(Fact):
    """A warning or an error of the log, or requests that were refused or failed."""

    tenant: Annotated[str, "Empty for one that concerns the server."]
    text: str
    first: Annotated[float, "Seconds since 1970."]
    last: float
    count: int


class Problems(logging.Handler):
    """Keeps the last of them. Any thread. As a handler of a logger it keeps that logger's warnings and errors.

    `wall` is in seconds since 1970.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        super().__init__(logging.WARNING)
        self._wall = wall
        self._kept: OrderedDict[tuple[str, str], Problem] = OrderedDict()
        self._changing = threading.Lock()

    def newest(self) -> list[Problem]:
        """All that are kept, the newest first."""
        with self._changing:
            return list(reversed(self._kept.values()))

    def add(self, text: str, tenant: str = "", count: int = 1) -> None:
        """Something went wrong so many times."""
        now, text = round(self._wall(), 3), text[:_MOST_TEXT]
        with self._changing:
            found = self._kept.pop((tenant, text), None)
            if found is None or now - found.last > _TOGETHER:
                found = Problem(tenant, text, now, now, 0)
            self._kept[tenant, text] = found
            found.last, found.count = now, found.count + count
            if len(self._kept) > MOST:
                self._kept.pop(self._least_missed())

    def _least_missed(self) -> tuple[str, str]:
        """The oldest of the tenant with the most, so that one tenant's do not take the place of others'."""
        counts = Counter(tenant for tenant, _ in self._kept)
        most = max(counts.values())
        return next(key for key in self._kept if counts[key[0]] == most)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's lines as one: what follows the first are reasons, as of a refused reload. Never raises."""
        try:
            first, *reasons = record.getMessage().splitlines() or [""]
        except Exception:
            self.handleError(record)
        else:
            text = f"{first} {'; '.join(map(str.strip, reasons))}".rstrip()
            self.add(text, str(getattr(record, "tenant", "")))
