"""The HTTP process of a tenant on several devices, as the supervisor sees it: one process, and a link to each device.

To the rest of the supervisor each device's part of it is a frontend of its own (`MemberFrontend`), so a device process ends, is
started again and loads models as for a tenant that is on it alone.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...config.tenant import TenantConfig
from ...link import ring as links
from ...link.messages import ModelKey
from ...link.ring import Descriptors
from ...tenants.catalog import IndexEntry, ModelVersion
from ...tenants.frontend import DeviceSide
from ...tenants.merged_models import Merged, MergedModels
from ...tenants.service import slots
from ..channels.calls import proxy
from ..channels.http_protocols import Keys, ToTenant, Wanted
from ..channels.rpc import Channel
from .agreements import Agreements, Published
from .device_frontend import DeviceFrontend
from .remote_frontend import RemoteFrontend

log = logging.getLogger("greenlane.processes")


class SpreadFrontend(RemoteFrontend):
    """Belongs to the event loop. `members` has a frontend for each device, in the order of the configuration."""

    def __init__(self, config: TenantConfig, descriptors: Mapping[str, Descriptors]) -> None:
        super().__init__(config, next(iter(descriptors.values())))
        self.members = {name: MemberFrontend(self, name, each) for name, each in descriptors.items()}
        self._merged = MergedModels(list(descriptors))
        self.agreements = Agreements(self._publish_together, self.agree)
        self._keys_there: dict[str, dict[ModelKey, dict[str, ModelKey]]] = {}
        self._publishing: dict[str, asyncio.Lock] = {}
        self._ends = Counter[str]()
        """How often the process of each device has ended."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<SpreadFrontend {self._config.name} on {', '.join(self.members)}, {self._processes.lead!r}>"

    @property
    def spread(self) -> Mapping[str, Descriptors]:
        return {name: member.descriptors for name, member in self.members.items()}

    @property
    def parts(self) -> Collection[DeviceFrontend]:
        return self.members.values()

    def served_by(self, device: str) -> list[ModelVersion]:
        """What this device has published last."""
        return self._merged.of(device)

    async def publish_of(self, device: str, name: str, served: list[ModelVersion], problems: list[IndexEntry]) -> bool:
        """This device serves these versions; returns when no request is left for those that they replace.

        What was loaded on request is published once all devices have it.
        """
        if (settled := self.agreements.published(name, device, (served, problems))) is not None:
            return await settled
        return await self._publish_together(name, {device: (served, problems)})

    async def _publish_together(self, name: str, published: Mapping[str, Published]) -> bool:
        """One model's publications wait for each other: what one replaces is drained before the next one is sent. That of a
        process that ends meanwhile is dropped.
        """
        before = self._ends.copy()
        async with self._publishing.setdefault(name, asyncio.Lock()):
            there = {device: each for device, each in published.items() if self._ends[device] == before[device]}
            return bool(there) and await self._publish_merged(name, self._merged.put(there, name))

    async def _publish_merged(self, name: str, merged: Merged) -> bool:
        self._keys_there[name] = merged.keys
        return await self.publish(name, merged.served, merged.problems)

    def _keys(self, name: str) -> Keys:
        return self._keys_there.get(name, {})

    def stop(self, device: str, reason: str) -> None:
        """The process of this device has ended: what was launched there fails, and all else runs on the others."""
        if self._processes.lead:
            proxy(ToTenant, self._processes.lead).fail_in_flight(reason, True, device)
        self.follow()
        for keys in self._keys_there.values():
            for of_devices in keys.values():
                of_devices.pop(device, None)
        self._ends[device] += 1
        self.agreements.forget(device)
        for name in self._merged.drop(device):
            self._spawn(self._publish_again(name, reason))

    async def _publish_again(self, name: str, reason: str) -> None:
        """Versions that only a device has served whose process has ended are unavailable until it serves again."""
        async with self._publishing.setdefault(name, asyncio.Lock()):
            merged = self._merged.merged(name)
            lost = {each.version for each in self.served() if each.name == name} - {each.version for each in merged.served}
            problems = [IndexEntry(name, version, "UNAVAILABLE", reason) for version in sorted(lost)]
            await self._publish_merged(name, merged._replace(problems=[*merged.problems, *problems]))

    def follow(self) -> None:
        """A device takes requests again, or takes none any more."""
        self._want()

    def _wanted_of(self, channel: Channel) -> Wanted:
        """The lead learns which devices refuse requests, helpers only whether all do."""
        wanted = super()._wanted_of(channel)
        reasons = {name: member.refusing for name, member in self.members.items() if member.refusing}
        if channel is self._processes.lead:
            return wanted._replace(devices=reasons)
        none_serves = next(iter(reasons.values()), "") if len(reasons) == len(self.members) else ""
        return wanted._replace(suspended=wanted.suspended or none_serves)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class MemberFrontend(DeviceFrontend):
    """One device's part of it. Paging needs when models were used, which no tenant on several devices has."""

    def __init__(self, whole: SpreadFrontend, device: str, descriptors: Descriptors) -> None:
        self.device = device
        self.descriptors = descriptors
        self._whole = whole

    def __repr__(self) -> str:
        return f"<MemberFrontend {self.device} of {self._whole!r}>"

    def use(self, new: Descriptors) -> Descriptors:
        old = super().use(new)
        if self._whole.descriptors is old:  # Helpers' links are made like it.
            self._whole.descriptors = new
        return old

    async def relink(self, limit: float = math.inf) -> Callable[[], None]:
        return await asyncio.shield(self._whole.relink_part(self, limit, self.device))

    def served(self) -> list[ModelVersion]:
        return self._whole.served_by(self.device)

    def last_uses_known(self) -> Mapping[str, int]:
        return self._whole.last_uses_known()

    def announce(self, name: str) -> None:
        self._whole.announce(name)

    def listed(self) -> None:
        """Each device reads the same repository."""
        self._whole.listed()

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        agreements, error = self._whole.agreements, None
        agreements.begin(name, self.device)
        try:
            yield
        except Exception as raised:
            error = raised
            raise
        finally:
            agreements.end(name, self.device, error)

    async def agree(self, name: str, served: Sequence[ModelVersion]) -> str:
        return await self._whole.agreements.agree(name, self.device, served)

    def withdraw(self, name: str) -> None:
        self._whole.withdraw(name)

    async def publish(self, name: str, served: list[ModelVersion], problems: list[IndexEntry]) -> bool:
        return self._ignores(name, served, problems) or await self._whole.publish_of(self.device, name, served, problems)

    def _refuse(self, reason: str) -> None:
        self._whole.follow()

    def distrust(self, reason: str) -> None:
        self._whole.distrust(reason)

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        super().fail_in_flight(reason, queued)
        self._whole.stop(self.device, reason)


class DeviceSides:
    """The runtimes of a tenant on several devices, as its frontend sees them."""

    def __init__(self, sides: Sequence[DeviceSide]) -> None:
        self._sides = sides

    def __repr__(self) -> str:
        return f"<DeviceSides {self._sides!r}>"

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        """Cancel a ticket where it is: it has a serial that no other ticket of the tenant has."""
        for side in self._sides:
            side.cancel(tenant, slot, serial)


def open_spread(config: TenantConfig, devices: Sequence[str]) -> SpreadFrontend:
    """A frontend that has links but no process yet. Its `close` frees them."""
    first = links.create(slots(config), config.memory)
    others = {name: links.renew(first) for name in devices[1:]}
    return SpreadFrontend(config, {devices[0]: first, **others})
