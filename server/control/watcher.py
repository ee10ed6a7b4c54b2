"""Looks at the model repository while it is served, and has tenants served what has changed there."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from engines import EngineError
from partitions import PartitionError

from ..errors import RequestError, Unavailable
from ..repository.changes import Settling, Stamp, stamps
from ..repository.model_repository import Repository, some
from .controller import Controller

if TYPE_CHECKING:
    from ..repository.mirror import Mirror

log = logging.getLogger("greenlane.control")

_SERVING = ("serving", "incomplete")
_LATE = 60.0
"""Seconds after which the log says that a look at the repository, or a copy of it, has not ended."""

T = TypeVar("T")


class Watcher:
    """Belongs to the event loop. It looks every `models.watch` seconds, on a thread; 0: never. A reload may change that.

    A model is acted on when two looks found the same files there and others than before. It is refreshed for each tenant that
    may call it: tenants at the same time, one tenant's models one after another. What failed is tried again when its files
    change, and what a device process could not do because it was away at the next look.

    During a reload nothing is begun: for the tenants and models that it adds, a change is acted on after it.

    A remote repository is copied before each look, so a change there is acted on when two copies found the same.

    Used as a context: enter it before models are loaded, since what changes afterwards is compared with what is there then,
    also where it begins to look later.

    A look that takes longer than `late` seconds is logged: that of a disk in the network may never end.
    """

    def __init__(self, controller: Controller, late: float = _LATE) -> None:
        self._controller = controller
        self._late = late
        models = controller.models
        self._root: Path = models.repository
        self._period = models.watch
        self._other_period = asyncio.Event()
        self._repository = Repository(self._root, models.options)
        self._mirror: Mirror | None = None
        if models.remote:
            from ..repository import mirror

            self._mirror = mirror.Mirror(models)
        self._settling = Settling({})
        self._unreadable = ""
        self._changed: set[str] = set()
        """Models that have changed, and that are due for no tenant yet."""
        self._due: dict[str, set[str]] = {}
        """Models that are to be refreshed, by tenant."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Watcher of {self._repository!r} every {self._period:g} s, {len(self._running)} tenants under way>"

    async def __aenter__(self) -> "Watcher":
        self._settling = Settling(await self._look() or {})
        self._controller.on_reconfigured = self._follow
        self._looking = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Look no more. What has begun is completed by the device side."""
        if self._mirror:
            await asyncio.to_thread(self._mirror.close)
        for task in filter(None, (self._looking, *self._running.values())):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def poll(self) -> None:
        """Look once, and begin what is to be done; `settled` waits for that."""
        if self._mirror:
            await self._on_thread("copying the repository to", self._mirror.fetch)
        if (now := await self._look()) is None:
            return
        if changed := await asyncio.to_thread(self._settling.settled, now):
            log.info("watch: changed in the repository: %s", some(changed))
        self._changed.update(changed)
        if self._controller.reconfiguring:  # Models that it adds may have been read before they changed.
            return
        for name, tenant in self._controller.tenants.items():
            self._due.setdefault(name, set()).update(filter(tenant.may_call, self._changed))
        self._changed.clear()
        if self._controller.state in _SERVING:
            for name, due in self._due.items():
                if due and name not in self._running and name in self._controller.tenants:
                    self._running[name] = task = asyncio.create_task(self._refresh(name))
                    task.add_done_callback(lambda _, name=name: self._running.pop(name))  # type: ignore[misc]

    async def settled(self) -> None:
        """Wait until everything that has begun is done."""
        await asyncio.gather(*self._running.values())

    def _follow(self) -> None:
        """The configuration may be another one."""
        if self._period != self._controller.models.watch:
            self._period = self._controller.models.watch
            self._other_period.set()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period or None):
                    await self._other_period.wait()
                self._other_period.clear()
                continue
            try:
                await self.poll()
            except Exception:  # It goes on: a server that does not look any more would serve old models unnoticed.
                log.exception("watch: failed; it goes on")

    async def _look(self) -> Mapping[str, Stamp] | None:
        """What is there now; None if the repository cannot be read, which is logged once."""
        try:
            found = await self._on_thread("looking at", lambda: stamps(self._root, self._repository.names()))
        except OSError as error:
            if str(error) != self._unreadable:
                log.error("watch: the model repository cannot be read, so what is served stays: %s", error)
            self._unreadable = str(error)
            return None
        self._unreadable = ""
        return found

    async def _on_thread(self, doing: str, work: Callable[[], T]) -> T:
        """What this returns, which blocks. The log says when it takes long, as nothing that changes is noticed meanwhile."""
        text = "watch: %s %s has taken %g s; what has changed there is not served before it ends"
        begun = time.monotonic()
        late = asyncio.get_running_loop().call_later(self._late, log.warning, text, doing, self._root, self._late)
        try:
            return await asyncio.to_thread(work)
        finally:
            late.cancel()
            if (took := time.monotonic() - begun) >= self._late:
                log.warning("watch: %s %s has ended, after %.0f s", doing, self._root, took)

    def _in_order(self, names: list[str]) -> list[str]:
        """Ensembles last, as their steps have to be loaded before them. Blocks."""
        return sorted(names, key=self._repository.may_be_ensemble)

    async def _refresh(self, tenant: str) -> None:
        """Refresh the models that are due for a tenant."""
        due, self._due[tenant] = self._due[tenant], set()
        try:
            names = await self._on_thread("looking for ensembles in", lambda: self._in_order(sorted(due)))
        except Exception:  # All that has changed is refreshed nevertheless.
            log.exception("watch: which models are ensembles could not be seen")
            names = sorted(due)
        for name in names:
            try:
                if reason := await self._controller.refresh(tenant, name):
                    log.error("watch: %s cannot be served to %s as it is in the repository now: %s", name, tenant, reason)
            except Unavailable as error:
                log.warning("watch: %s for %s: tried again at the next look: %s", name, tenant, error)
                self._due[tenant].add(name)
            except (RequestError, EngineError, PartitionError) as error:
                if tenant not in self._controller.tenants:  # It has gone meanwhile.
                    return
                log.error("watch: %s cannot be served to %s: %s", name, tenant, error)
            except Exception:
                log.exception("watch: %s for %s failed", name, tenant)
