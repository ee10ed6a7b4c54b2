"""A short process that looks at a GPU before its MPS daemon is started: which one it is, and whether its partitions are apart.

Under MPS the driver numbers the SMs of each partition again, so that it can be seen only here on which they run. Another one,
as a client of the daemon, sees whether a process can become one.
"""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from types import MappingProxyType
from typing import Any

from partitions import Device, DeviceUnavailable, PartitionError, probe

from ...config.schema import DeviceConfig
from ...config.server import ServerConfig
from ..children import spawn
from ..children.process_setup import set_up
from .device_process import as_client, enter

LIMIT = 60.0
"""Seconds that it may take: the driver starts, and the kernel that finds SMs may have to be compiled."""
_MOST = 1 << 16


async def identify(
    name: str,
    server: ServerConfig,
    config: DeviceConfig,
    opener: Callable[[DeviceConfig], Device],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The UUID of this device, which `opener` opens in a process of its own. Raises DeviceUnavailable; PartitionError if that
    process cannot be started, ends or hangs.

    With an environment that process has to become a client of MPS by it.
    """
    alone = config if environment else config.model_copy(update={"mps": "off"})
    try:
        answer = await _answer(name, server, alone, opener, dict(environment))
    except (OSError, EOFError) as error:  # No memory, descriptors or process ids may be left.
        why = str(error) or "the forkserver has ended"
        raise PartitionError(f"device {name}: no process that looks at it can be started: {why}") from error
    if not answer:
        raise PartitionError(f"device {name}: the process that looks at it has ended, or hangs; the log may say why")
    found = json.loads(answer)
    if refused := found.get("error"):
        raise DeviceUnavailable(f"device {name}: {refused}")
    if not found["uuid"]:
        raise DeviceUnavailable(f"device {name}: mps is for GPUs, and this is {found['description']}; leave it out")
    return str(found["uuid"])


async def _answer(*arguments: Any) -> bytes:
    """What the process answers that is started with these arguments; nothing if it ends or hangs. Raises OSError, EOFError."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        process = await spawn.start(main, *arguments, theirs)
        theirs.close()
        try:
            async with asyncio.timeout(LIMIT):
                return await asyncio.get_running_loop().sock_recv(ours, _MOST)
        except TimeoutError:
            return b""
        finally:
            spawn.kill(process)
            await asyncio.to_thread(process.join)


def main(
    name: str,
    server: ServerConfig,
    config: DeviceConfig,
    opener: Callable[[DeviceConfig], Device],
    environment: Mapping[str, str],
    answer: socket.socket,
) -> None:
    """The process: answers with one line of JSON. The supervisor ends it; it ends with the supervisor if that is killed."""
    enter(environment)
    set_up(f"gpu {name}", server.log_format, server.log_level, device=True)
    threading.Thread(target=_end_with_supervisor, args=(answer,), daemon=True).start()
    try:
        found = look(config, as_client(opener) if environment else opener)
    except PartitionError as error:
        found = {"error": str(error)}
    answer.sendall(json.dumps(found).encode())


def _end_with_supervisor(answer: socket.socket) -> None:
    """End this process, which may hang, with the other end of the socket, over which nothing comes. A thread of its own."""
    with suppress(ConnectionError):  # An answer that was not read.
        answer.recv(1)
    os._exit(1)


def look(config: DeviceConfig, opener: Callable[[DeviceConfig], Device]) -> dict[str, str]:
    """Open the device; outside MPS, run a probe on every granule. Blocks. Raises PartitionError, Misplaced if two overlap."""
    with closing(opener(config)) as device, ExitStack() as carved:
        if device.shared:
            return {"uuid": device.uuid, "description": device.describe()}
        each = {f"granule {index}": device.carve([index]) for index in range(len(device.granules))}
        for partition in each.values():
            carved.enter_context(closing(partition))
        probe.check(each, probe.locate(each))
        return {"uuid": device.uuid, "description": device.describe()}
