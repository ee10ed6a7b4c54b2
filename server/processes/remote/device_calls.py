"""Calls of the device process that serves now, if there is one."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ...errors import Unavailable
from ..channels.descriptors import DescriptorSender
from ..channels.rpc import Channel
from .device_tenants import DeviceTenants

log = logging.getLogger("greenlane.processes")


class DeviceCalls:
    """Belongs to the supervisor's event loop. `connect` gives it each new process."""

    def __init__(self, label: str, tenants: DeviceTenants) -> None:
        self.label = label
        self.channel: Channel | None = None
        self.sender: DescriptorSender | None = None
        """None while the process has no worker that could change links."""
        self.connected = asyncio.Event()
        self._tenants = tenants

    def connect(self, channel: Channel) -> None:
        """Call this process from now on."""
        self.channel = channel
        self.connected.set()

    def disconnect(self) -> None:
        """The process has ended."""
        self.channel = self.sender = None
        self.connected.clear()

    def gone(self, what: str = "") -> Unavailable:
        """The error for what a process that has ended cannot do any more."""
        return Unavailable(f"{self.label} has ended{what} and is being started again")

    def notify(self, method: str, arguments: Sequence[Any]) -> None:
        """Send the process this notification; without a process nothing is sent."""
        if self.channel:
            self.channel.notify(method, arguments)

    async def call(self, method: str, arguments: Sequence[Any], result: Any) -> Any:
        """The answer. Raises Unavailable if there is no process, it does not serve yet, or it ends before it answers."""
        channel = self.channel
        if channel and not self._tenants.away:
            try:
                return await channel.call(method, arguments, result)
            except Unavailable:
                if not channel.closed.is_set():
                    raise
        raise self.gone()

    def restart(self, why: str) -> None:
        """End the process, if there is one: the next one starts with the tenants of now."""
        if self.channel and not self.channel.closed.is_set():
            log.error("%s is started again: %s", self.label, why)
            self.channel.close()
