"""The device processes of one GPU as clients of an MPS daemon: it is started before them, and its faults end all of them.

Which GPUs have such processes is chosen once, before any process of a device is started.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from partitions import DeviceUnavailable, PartitionError
from partitions.deposit import Deposit, open_deposit
from partitions.errors import MpsError
from partitions.mps import COMMAND, MOST_CLIENTS, PREFIX, MpsDaemon, Trouble, find_command, find_other

from ...config.schema import Config, DeviceConfig
from ...config.tables import ConfigError
from ...control.together import all_or_none, together

log = logging.getLogger("greenlane.processes")

_QUEUES = "2"
"""Hardware queues of each process, as the driver gives clients by itself: all share one number of them."""
_OWN = 1 << 30
"""Bytes that a process may have beside its tenant's models: 360 MiB from its start, up to 0.5 GB of green contexts, and kernels
that the driver keeps."""
_WIDE = 2 << 30
"""The same for green contexts of wide partitions: 450 of 4 MiB each in 10,000 random repartitions (computed)."""


def memory_limit(budget: int | None, borrows: bool = False) -> dict[str, str]:
    """The variable by which the driver refuses a client memory that a tenant with so many bytes of `device_memory` needs not.

    None without a budget. A move binds every model a second time, so twice the budget is allowed.
    """
    own = _OWN + _WIDE if borrows else _OWN
    return {} if budget is None else {f"{PREFIX}PINNED_DEVICE_MEM_LIMIT": f"0={(2 * budget + own) >> 20}M"}


async def hindrance(uuid: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """Why no daemon of ours can run for this GPU, and what to do; "" if that cannot be seen without starting it.

    `environ` says where a daemon of the operator's is looked for.
    """
    try:
        find_command(uuid)
    except MpsError as error:
        return str(error)
    if other := await find_other(environ):
        return (
            f"an MPS daemon of yours runs in {other}, whose clients would not be fenced from the tenants; end it "
            f"(echo quit | {COMMAND})"
        )
    return ""


class MpsGroup:
    """Belongs to the supervisor's event loop. `identify` returns the GPU's UUID, once it has checked it without MPS.

    The daemon runs while there are processes: it is started for the first, and closed after the last.
    """

    def __init__(self, device: str, identify: Callable[[], Awaitable[str]]) -> None:
        self.device = device
        self._identify = identify
        self._daemon: MpsDaemon | None = None
        self._deposit: Deposit | None = None
        self._end_all: Callable[[int], None] | None = None
        """Ends the processes; None before one has started."""
        self._changing = asyncio.Lock()
        """Held while the daemon starts or ends."""

    def __repr__(self) -> str:
        return f"<MpsGroup of device {self.device}, {self._daemon!r}>"

    @property
    def deposit(self) -> Deposit:
        """By which the processes that start now share memory of the GPU; another one after the end of all. Raises OSError."""
        self._deposit = self._deposit or open_deposit()
        return self._deposit

    async def environment(self, coming: bool = False) -> Mapping[str, str]:
        """The variables that a process starts with, once the daemon runs and a fault is over. Raises PartitionError.

        All processes are ended for the sake of one whose tenant has none while the daemon takes no more clients; of one that is
        `coming`, as its tenant is served elsewhere or not yet, only that one is refused.
        The first daemon is tried twice, as the server would not start. Calls of this and of `close` are served in turn.
        """
        async with self._changing:
            daemon = self._daemon
            if daemon and daemon.folder:
                if self._end_all and not daemon.ended:  # Or a process would wait for a daemon that hangs.
                    await (daemon.status() if coming else daemon.check())
                if daemon.ended:
                    await self._end(daemon, await daemon.trouble())
            if self._daemon is None or self._daemon.folder is None:
                if why := await hindrance():
                    raise DeviceUnavailable(f'device {self.device}: {why}, or set mps = "off"')
                first = self._daemon is None
                self._daemon = self._daemon or MpsDaemon(await self._identify())
                try:
                    await self._daemon.start()
                except MpsError as error:
                    if not first:
                        raise
                    log.warning("device %s: %s; starting it a second time", self.device, error)
                    await self._daemon.start()
            return {**self._daemon.environment, "CUDA_DEVICE_MAX_CONNECTIONS": _QUEUES}

    async def keep(self, end_all: Callable[[int], None]) -> None:
        """Call `end_all` whenever none of the processes can go on, with the one whose kernel failed, or 0, and see to it that
        others can start. It is called once one has started, and goes on until it is cancelled.
        """
        self._end_all = end_all
        while daemon := self._daemon:
            trouble, folder = await daemon.trouble(), daemon.folder
            async with self._changing:
                if not folder or daemon.folder != folder:  # It was closed meanwhile, and may have been started again.
                    continue
                await self._end(daemon, trouble)

    async def _end(self, daemon: MpsDaemon, trouble: Trouble) -> None:
        """End all processes, and the daemon, unless that takes others after a fault: the next process starts it again."""
        log.critical("device %s: %s; every process of it is started again", self.device, trouble.text)
        if self._end_all:
            self._end_all(trouble.process)
        self._forget_deposit()
        if not trouble.fault or not await self._is_over(daemon):
            await daemon.close()

    async def _is_over(self, daemon: MpsDaemon) -> bool:
        """Wait until the daemon takes clients again after a fault; False if it does not."""
        try:
            await daemon.wait_until_active()
        except MpsError as error:
            log.error("device %s: %s; starting its MPS daemon again", self.device, error)
            return False
        return True

    async def terminate(self, process: int) -> None:
        """End what this process has on the GPU, so that the others do not feel that it is killed next."""
        if self._daemon and self._daemon.folder:
            await self._daemon.terminate(process)

    async def close(self) -> None:
        """End the daemon, after its processes. Another one may start afterwards. Does nothing if none was started."""
        async with self._changing:
            if self._daemon:
                await self._daemon.close()
            self._forget_deposit()

    def _forget_deposit(self) -> None:
        """What was shared is of processes that have ended, and of a GPU that may have been lost."""
        deposit, self._deposit = self._deposit, None
        if deposit:
            deposit.close()


FEWEST = 2
"""Tenants of a GPU that feel each other; one alone gains nothing, and a connection of its own loses by it."""
Identify = Callable[[str, DeviceConfig, Mapping[str, str]], Awaitable[str]]
"""Looks at the GPU with this name in a process with these variables, which make it a client of MPS, and returns its UUID.
Raises PartitionError.
"""


async def open_groups(config: Config, hosted: Collection[str], identify: Identify) -> dict[str, MpsGroup]:
    """The processes under MPS, by device. `hosted` are the devices that are cores of this host.

    Of a device with `mps = "auto"` the daemon runs when this returns, and has had a client; if it cannot be so, the device is
    left out, and the log says why. Raises ConfigError where cores have `mps = "on"`. If it is cancelled no daemon is left.
    """
    named = config.named_devices
    if wrong := [name for name, each in named.items() if each.mps == "on" and name in hosted]:
        raise ConfigError(
            [f'{config.source}: device {name} is cores of this host: mps = "on" is for GPUs; leave it out' for name in wrong]
        )
    under = {name: each for name, each in named.items() if each.mps != "off" and name not in hosted}
    groups = {name: MpsGroup(name, partial(identify, name, each, {})) for name, each in under.items()}
    apart = dict(groups)

    async def choose(name: str) -> None:
        tenants, only = len(config.tenants_on(name)), named[name].model_copy(update={"index": 0})  # The GPU that a client sees.
        if why := await why_shared(config, name) or await _try(groups[name], partial(identify, name, only)):
            del apart[name]
            level = logging.WARNING if tenants >= FEWEST else logging.INFO
            log.log(
                level,
                'device %s: one device process for all tenants (mps = "auto"): %s',
                name,
                why.removeprefix(f"device {name}: "),
            )
        else:
            log.info('device %s: a device process for each of its %d tenants, under MPS (mps = "auto")', name, tenants)

    try:
        await all_or_none(choose(name) for name in groups if named[name].mps == "auto")
    except BaseException:
        await together(each.close() for each in groups.values())
        raise
    return apart


async def why_shared(config: Config, device: str, uuid: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """Why `mps = "auto"` has the tenants of a GPU share a process; "" if that cannot be seen without starting a daemon."""
    tenants = len(config.tenants_on(device))
    if tenants < FEWEST:
        return "it has fewer than two tenants"
    if tenants > MOST_CLIENTS:
        return f"it has {tenants} tenants, and a daemon takes the processes of {MOST_CLIENTS}"
    return await hindrance(uuid, environ)


async def _try(group: MpsGroup, look: Callable[[Mapping[str, str]], Awaitable[str]]) -> str:
    """Start the daemon, and have a client of it look at the GPU. Returns "", or why that cannot be, with no daemon left."""
    try:
        await look(await group.environment())
    except PartitionError as error:
        await group.close()
        return str(error)
    return ""
