"""A model that several devices of one tenant load on request: all of them publish it, or none."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ...tenants.catalog import IndexEntry, ModelVersion

Published = tuple[Sequence[ModelVersion], Sequence[IndexEntry]]
"""The versions that a device serves, and its problems."""


class _Load:
    """One load. `waiting` are devices that have not agreed to it, and `agreed` those that have and did not publish it yet."""

    def __init__(self) -> None:
        self.devices: set[str] = set()
        self.waiting: set[str] = set()
        self.agreed: set[str] = set()
        self.served: Sequence[ModelVersion] = ()
        self.published: dict[str, Published] = {}
        self.checking: asyncio.Task[None] | None = None
        self.decided: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[bool] | None = None
        self.settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class Agreements:
    """The loads of one tenant; belongs to the event loop. `publish` is called with what all devices publish of a model.

    `check` is called before that, with what one of them has loaded, and says why it cannot be served all the same, or "".

    A device calls `begin` before it loads a model, `agree` when it has loaded it, then `publish`, and `end` in any case. It
    waits in `agree` for all others that have begun. Loads of one model follow each other.
    """

    def __init__(
        self,
        publish: Callable[[str, Mapping[str, Published]], Awaitable[bool]],
        check: Callable[[str, Sequence[ModelVersion]], Awaitable[str]],
    ) -> None:
        self._publish = publish
        self._check = check
        self._loads: dict[str, _Load] = {}

    def __repr__(self) -> str:
        return f"<Agreements on {', '.join(self._loads) or 'nothing'}>"

    def begin(self, name: str, device: str) -> None:
        load = self._loads.setdefault(name, _Load())
        load.devices.add(device)
        load.waiting.add(device)

    async def agree(self, name: str, device: str, served: Sequence[ModelVersion]) -> str:
        """Wait until every device can serve the model, and it was checked; "" then, and the reason once one cannot.

        A model that is not loaded on request is only checked, as each device publishes it for itself.
        """
        load = self._loads.get(name)
        if load is None or device not in load.waiting:
            return await self._check(name, served)
        load.served = served
        load.waiting.discard(device)
        load.agreed.add(device)
        self._follow(name, load)
        return await asyncio.shield(load.decided)

    def published(self, name: str, device: str, what: Published) -> "asyncio.Future[bool] | None":
        """The device publishes what it has agreed to: done when all have, and `publish` has returned. None if it has not."""
        load = self._loads.get(name)
        if load is None or device not in load.agreed:
            return None
        load.agreed.discard(device)
        load.published[device] = what
        self._follow(name, load)
        return asyncio.shield(load.settled)

    def end(self, name: str, device: str, error: Exception | None) -> None:
        """The device's load has ended, with this error or none. One that did not agree refuses it for all."""
        load = self._loads[name]
        if error and device in load.waiting and not load.decided.done():
            load.decided.set_result(f"device {device}: {error}")
            load.agreed.clear()  # They publish nothing, or that they do not serve it.
        load.waiting.discard(device)
        load.agreed.discard(device)
        load.devices.discard(device)
        self._follow(name, load)
        if not load.devices:
            del self._loads[name]
            if load.task is None and not load.settled.done():  # All that published it have ended.
                load.settled.set_result(False)

    def forget(self, device: str) -> None:
        """The device's process has ended: what it published, and not all others yet, is not published."""
        for load in self._loads.values():
            load.published.pop(device, None)

    def _follow(self, name: str, load: _Load) -> None:
        if not load.waiting and not load.decided.done() and load.checking is None:
            load.checking = asyncio.ensure_future(self._decide(name, load))
        if load.published and not load.waiting and not load.agreed and load.task is None:
            load.task = asyncio.ensure_future(self._settle(name, load))

    async def _decide(self, name: str, load: _Load) -> None:
        """Every device has loaded it."""
        why = await self._check(name, load.served)
        if why:
            load.agreed.clear()
        load.decided.set_result(why)

    async def _settle(self, name: str, load: _Load) -> bool:
        settled = False
        try:
            settled = await self._publish(name, load.published)
        finally:
            load.settled.set_result(settled)
        return settled
