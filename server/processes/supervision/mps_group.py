"""The device processes of one GPU as clients of an MPS daemon: it is started before them, and its faults end all of them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from partitions import DeviceUnavailable
from partitions.errors import MpsError
from partitions.mps import MpsDaemon, find_other

log = logging.getLogger("greenlane.processes")


_QUEUES = "2"
"""Hardware queues of each process, as the driver gives clients by itself: all share one number of them."""
_PAUSE = 5.0
"""Seconds between two attempts to start a daemon again."""


class MpsGroup:
    """Belongs to the supervisor's event loop. `identify` returns the GPU's UUID, once it has checked it without MPS."""

    def __init__(self, device: str, identify: Callable[[], Awaitable[str]]) -> None:
        self.device = device
        self._identify = identify
        self._daemon: MpsDaemon | None = None
        self._recovering = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<MpsGroup of device {self.device}, {self._daemon!r}>"

    async def environment(self) -> Mapping[str, str]:
        """As `supervised.Group.environment`: starts the daemon, and waits until a fault is over."""
        async with self._recovering:
            if self._daemon is None:
                if other := await find_other():
                    raise DeviceUnavailable(
                        f"device {self.device}: an MPS daemon of yours runs in {other}, whose clients would not be fenced from "
                        'the tenants; end it (echo quit | nvidia-cuda-mps-control), or set mps = "off"'
                    )
                self._daemon = MpsDaemon(await self._identify())
            if self._daemon.folder is None:
                await self._daemon.start()
            return {**self._daemon.environment, "CUDA_DEVICE_MAX_CONNECTIONS": _QUEUES}

    async def keep(self, end_all: Callable[[], None]) -> None:
        """As `supervised.Group.keep`."""
        while daemon := self._daemon:
            trouble = await daemon.trouble()
            async with self._recovering:
                log.critical("device %s: %s; every process of it is started again", self.device, trouble.text)
                end_all()
                await self._recover(daemon, trouble.fault)

    async def _recover(self, daemon: MpsDaemon, fault: bool) -> None:
        """Return when the daemon takes clients again: one with a fault of itself, once all have ended, any other by a start."""
        while True:
            try:
                if not fault:
                    await daemon.close()
                    await daemon.start()
                await daemon.wait_until_active()
                return
            except MpsError as error:
                log.error("device %s: %s; starting its MPS daemon again", self.device, error)
                if not fault:
                    await asyncio.sleep(_PAUSE)
                fault = False

    async def terminate(self, process: int) -> None:
        """As `supervised.Group.terminate`."""
        if self._daemon and self._daemon.folder:
            await self._daemon.terminate(process)

    async def close(self) -> None:
        """As `supervised.Group.close`."""
        daemon, self._daemon = self._daemon, None
        if daemon:
            await daemon.close()
