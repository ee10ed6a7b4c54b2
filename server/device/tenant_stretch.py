"""What one tenant borrows: its wide placement, made as planned, and which models take too long to run there."""

import asyncio
import logging

from engines import Executor
from partitions import Partition

from ..control.stretch import LentGranules, Wide, WidePartition
from ..link.activity import LenderPage
from ..link.messages import ModelKey, label_of
from ..workers.placement import Refusal
from ..workers.stretching import Measured
from ..workers.wide import WidePlacement, WideStatistics
from ..workers.worker import Worker
from .side import Means, Side


class TenantStretch(Side[Wide, WidePlacement]):
    """Belongs to the event loop. `pause` comes before a move of granules that the tenant borrows."""

    role = "wide"
    log = logging.getLogger("greenlane.lending")
    called = "wide partition"
    without = "and runs on its share only"
    over = "on its wide partition "
    where = "on granules of others"

    def __init__(self, name: str, means: Means) -> None:
        super().__init__(name, means)
        self._threads = None
        self._statistics = WideStatistics()
        self._too_long: dict[ModelKey, str] = {}
        self._logged: set[ModelKey] = set()

    def state(self) -> WidePartition | None:
        """The wide placement, made or planned; None for none."""
        tried, made = self._tried, self.used
        if tried is None or self.worker is None:
            return None
        return WidePartition(
            tuple(made.partition.granules) if made else (),
            [LentGranules(*each) for each in tried.lent.items()] if made else [],
            self._statistics.launches,
            self._statistics.returns,
            self._statistics.why_home(),
            list(self._too_long.values()),
            self.problems,
        )

    def look(self) -> None:
        """Find the models that take too long to run on lent granules. One that was among them the last time too is logged."""
        before, self._too_long = self._too_long, {}
        if (worker := self.worker) and (made := worker.wide):
            for each in worker.too_long():
                self._too_long[each.model] = text = _too_long(each, *made.sizes, made.limit)
                if each.model in before and each.model not in self._logged:
                    self._logged.add(each.model)
                    self.log.warning("tenant %s: model %s", self._name, text)

    def _wants(self, key: ModelKey, executor: Executor, refusal: Refusal | None) -> bool:
        """Not for answers in parts. What had no room there has none until the next plan, as it would not give way."""
        return refusal is None and not executor.engine.signature.in_parts

    async def _open(self, worker: Worker, plan: Wide) -> WidePlacement:
        means, sizes, limit = self._means, self._means.device.granules, int(plan.limit * 1e9)
        pages = [LenderPage(means.pages[lender], means.numbers[self._name]) for lender in plan.lent]
        units = tuple((lender, sum(sizes[each] for each in granules)) for lender, granules in plan.lent.items())
        lent = sorted(granule for granules in plan.lent.values() for granule in granules)

        def make(partition: Partition) -> WidePlacement:
            return WidePlacement(worker.partition, partition, pages, limit, self._statistics, units)

        made = await asyncio.to_thread(means.place, plan.granules, lent, make)
        lenders = "; ".join(f"{list(granules)} of {lender}" for lender, granules in plan.lent.items())
        self.log.info("tenant %s may borrow granules %s for up to %g ms a work", self._name, lenders, plan.limit * 1e3)
        return made


def _too_long(measured: Measured, home: int, wide: int, limit: int) -> str:
    """A text with the model, how long it takes and for how long granules are lent, and what to do."""
    least = measured.least(home, wide)
    took = f"takes {_ms(measured.wide)} ms there" if measured.wide else ""
    took = took or f"takes {_ms(measured.home)} ms on its share, so {_ms(least)} ms there at best"
    return (
        f"{label_of(measured.model)} does not run on granules of others: the shortest inference seen {took}, and "
        f"they are lent for {_ms(limit)} ms. Have the lenders lend for more than {_ms(least)} ms (`lend`), or limit its "
        "batches (`max_batch`)"
    )


def _ms(nanoseconds: int) -> str:
    return f"{round(nanoseconds / 1e6, 2 if nanoseconds < 10**8 else 0):g}"
