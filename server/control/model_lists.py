"""A change of the models that tenants may call, and of their options, over all devices: all of it is made, or nothing."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from ..config.schema import Config, ModelOptions
from ..errors import Conflict, RequestError
from .controlled_device import ControlledDevice
from .device_runtime import DeviceRuntime

log = logging.getLogger("greenlane.control")

Lists = Mapping[str, Sequence[str]]
"""The models that a tenant may call, as the configuration's `models`, by tenant."""


def changed(old: Config, new: Config) -> dict[str, Sequence[str]]:
    """The lists of the new configuration that are others than in the old one, of tenants that stay."""
    stay = {name: each for name, each in new.tenants.items() if name in old.tenants}
    return {name: each.models for name, each in stay.items() if each.models != old.tenants[name].models}


def concerned(old: Config, new: Config, options: Mapping[str, ModelOptions]) -> dict[str, Sequence[str]]:
    """The lists of tenants that stay and may call one of these models, before or after."""
    found: dict[str, Sequence[str]] = {}
    for name, tenant in new.tenants.items():
        before = old.tenants.get(name)
        if before and any(before.may_call(model) or tenant.may_call(model) for model in options):
            found[name] = tenant.models
    return found


class ModelChange:
    """One change to these lists, and of the options of models that are to be loaded again: `prepare`, then `use` or `discard`.

    `lists` has all tenants that may call one of these, and nothing else changes their models meanwhile. Device sides that only
    have tenants that are `gone` are not asked.
    """

    def __init__(
        self,
        devices: Sequence[ControlledDevice],
        lists: Lists,
        options: Mapping[str, ModelOptions] = MappingProxyType({}),
        gone: Collection[str] = (),
    ) -> None:
        self._options = options
        self._parts: list[tuple[str, DeviceRuntime, Lists]] = []
        for device in devices:
            for runtime in device.distinct():
                own = device.of(runtime, lists)
                others = any(each is runtime and name not in gone for name, each in device.runtimes.items())
                if own or (options and (others or runtime is device.process)):
                    self._parts.append((device.name, runtime, own))

    async def prepare(self) -> None:
        """Have every device load what is added, and what is to be loaded again; nothing of it is served yet.

        Raises Conflict with everything that cannot be loaded; nothing is left of it then.
        """
        try:
            found = await asyncio.gather(*(self._prepare(*part) for part in self._parts))
        except BaseException:
            await asyncio.shield(self.discard())
            raise
        if problems := dict.fromkeys(problem for each in found for problem in each):
            await self.discard()
            lines, what = "\n".join(problems), "added or changed" if self._options else "added"
            raise Conflict(f"nothing has changed, as not every model that is {what} can be loaded:\n{lines}")

    async def _prepare(self, device: str, runtime: DeviceRuntime, own: Lists) -> list[str]:
        try:
            return await runtime.models.prepare(own, self._options)
        except RequestError as error:  # Such as one whose process has ended.
            return [f"tenants.{name}.models: {error}" for name in own] or [f"device {device}: {error}"]

    async def use(self) -> None:
        """Serve what was added, and take the rest away; returns when no request for that is left."""
        await asyncio.gather(*(runtime.models.use(own, self._options) for _, runtime, own in self._parts))

    async def discard(self) -> None:
        """Free what was prepared, on every device."""
        found = await asyncio.gather(*(runtime.models.discard() for _, runtime, _ in self._parts), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                log.error("models that were not added are not all freed: %s", error)
