"""How large the batches of borrowers should be, passed on to their HTTP sides. `server.workers.cutting` decides it."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping

from ..link.messages import ModelKey
from ..workers.borrowing import Borrowing, BorrowingStatistics
from ..workers.cutting import LOOK, Cutting
from ..workers.stretching import LENDER_BUSY, LENDER_STOPPED, WHY_HOME
from ..workers.worker import Worker

INTERVAL = 0.5
"""Seconds between two looks at what works took, while nothing is tried."""
_NOT_RESTED = WHY_HOME[LENDER_BUSY - 1], WHY_HOME[LENDER_STOPPED - 1]


class _Borrower:
    """What is decided for one tenant, and what it is decided for."""

    def __init__(self, borrowing: Borrowing, statistics: BorrowingStatistics) -> None:
        self.borrowing = borrowing
        self.cutting = Cutting(borrowing.limit, *borrowing.sizes)
        self._statistics = statistics
        self._counted = 0, 0

    def look(self, worker: Worker, joined: Collection[ModelKey]) -> None:
        """See what works of the models that are `joined` took, and pass on to its HTTP side what follows; nothing if there were
        no works.
        """
        counted = self._count()
        if counted != self._counted or self.cutting.trying:
            self._counted = counted
            measured = [each for each in worker.measured() if each.model in joined]
            worker.cut(self.cutting.look(time.monotonic_ns(), measured, *counted))

    def forget(self, worker: Worker) -> None:
        """It runs on its home partition alone: nothing is cut."""
        worker.cut({})
        self._counted = 0, 0
        self.cutting.settled = {}

    def _count(self) -> tuple[int, int]:
        """The works that were to be launched so far while the lenders rested, and those while they did not."""
        why_home = self._statistics.why_home()
        not_rested = sum([why_home.pop(why) for why in _NOT_RESTED])
        return self._statistics.totals()[0] + sum(why_home.values()), not_rested


class BatchCuts:
    """Belongs to the event loop. `workers` are the current ones."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._borrowers: dict[str, _Borrower] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.joined: Callable[[str], Collection[ModelKey]] = lambda _: ()
        """The models that a tenant is served now and whose requests are joined into batches."""

    def __repr__(self) -> str:
        return f"<BatchCuts of {', '.join(self._borrowers) or 'no tenant'}>"

    def follow(self, name: str, borrowing: Borrowing, statistics: BorrowingStatistics) -> None:
        """The tenant has this wide partition now; nothing is cut until its works have been measured."""
        self._borrowers[name] = _Borrower(borrowing, statistics)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._look)

    def remove(self, name: str) -> None:
        """This tenant has gone."""
        self._borrowers.pop(name, None)

    def settled(self, name: str) -> dict[str, int]:
        """To how many rows the tenant's batches are cut, by model; of several shapes the fewest."""
        found: dict[str, int] = {}
        if borrower := self._borrowers.get(name):
            for (key, _), rows in borrower.cutting.settled.items():
                model = key.rpartition("#")[0]
                found[model] = min(rows, found.get(model, rows))
        return found

    def close(self) -> None:
        """Look no more."""
        if self._timer:
            self._timer.cancel()

    def look(self) -> bool:
        """See what works took since, and pass on to the HTTP sides what follows. Returns whether to look again soon."""
        soon = False
        for name, borrower in self._borrowers.items():
            if (worker := self._workers.get(name)) is None:
                continue
            if worker.borrowing is not borrower.borrowing or borrower.borrowing.suspended:
                borrower.forget(worker)
            else:
                borrower.look(worker, self.joined(name))
                soon = soon or borrower.cutting.trying
        return soon

    def _look(self) -> None:
        soon = self.look()
        self._timer = asyncio.get_running_loop().call_later(LOOK / 1e9 if soon else INTERVAL, self._look)
