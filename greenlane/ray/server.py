"""A replica: one Greenlane, as a child process, on the GPU or the cores that the replica was given."""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_urlsafe
from tempfile import TemporaryDirectory
from typing import Protocol

import aiohttp

from greenlane.load.server_process import terminate

from .coordinator import Listed, Shares

log = logging.getLogger("greenlane.ray")

REPORT_EVERY = 0.5
"""Seconds between two reports to the coordinator."""
HEALTH_TIMEOUT = 5.0
"""Seconds for an answer about its health."""
FORGET_TIMEOUT = 10.0
"""Seconds for the coordinator to take a server off the list."""
UNLISTED = 1.0
"""Seconds between the end of being listed and SIGTERM, in which every ingress has noticed."""
PATIENCE = 90.0
"""Seconds until a child that drains is killed."""
_CHILD = ("-P", "-m", "greenlane.ray.child")


class ServerEnded(Exception):
    """The child process has ended, or does not answer; Ray Serve replaces the replica."""


class CoordinatorLink(Protocol):
    """The coordinator, as a server sees it."""

    async def shares(self) -> Shares:
        """Those in force."""

    async def report(self, server: Listed, shares: Shares) -> Shares:
        """List this server, which has these shares; those in force."""

    async def forget(self, id: str) -> None:
        """Take this server off the list."""


class ServerProcess:
    """The child: started, ready, asked, and ended. Belongs to the event loop, whose thread has to last as long as the child."""

    def __init__(self, toml: str, host: str, port: int, cores: Sequence[int], child: Sequence[str] = _CHILD) -> None:
        self.url = f"http://{host}:{port}"
        self.key = token_urlsafe()
        self._folder = TemporaryDirectory(prefix="greenlane-ray-")
        self._config = Path(self._folder.name, "greenlane.toml")
        self._config.touch(0o600)
        self._config.write_text(toml)
        self._given = {"config": str(self._config), "host": host, "port": port, "key": self.key, "cores": list(cores)}
        self._child = child
        self._popen: subprocess.Popen[bytes] | None = None

    async def start(self, shares: Shares) -> None:
        """Start it and wait until it is ready, however long its models take. Raises ServerEnded."""
        given = {**self._given, "parent": os.getpid(), "shares": dict(shares.granules or {})}
        self._popen = subprocess.Popen([sys.executable, *self._child], stdin=subprocess.PIPE)  # noqa: ASYNC220
        assert self._popen.stdin
        with self._popen.stdin as pipe:
            pipe.write(json.dumps(given).encode())
        while await self.status("ready") != 200:
            self.check()
            await asyncio.sleep(0.1)

    def check(self) -> None:
        """Raises ServerEnded once it has."""
        if self._popen is None or (status := self._popen.poll()) is not None:
            raise ServerEnded(f"the server at {self.url} ended with status {status}; its log is the replica's")

    async def status(self, health: str) -> int | None:
        """What it answers to this question of /v2/health, or None where it does not answer."""
        with suppress(aiohttp.ClientError, TimeoutError):
            timeout = aiohttp.ClientTimeout(HEALTH_TIMEOUT)
            async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{self.url}/v2/health/{health}") as answer:
                return answer.status
        return None

    async def repartition(self, granules: dict[str, int]) -> str | None:
        """Give its tenants these granules; why it refused, or None."""
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            address = self.url + "/admin/partitions"
            async with aiohttp.ClientSession(headers=headers) as http, http.put(address, json=granules) as answer:
                return None if answer.status == 200 else await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            return repr(error)

    def end(self) -> None:
        """Have it drain, wait until it has ended, and remove its files. Blocks."""
        if self._popen:
            terminate(self._popen, PATIENCE)
        self._folder.cleanup()


class Server:
    """Starts its process, reports to the coordinator that it serves, and ends it. Belongs to the event loop.

    `version`: of the configuration that it was given.
    """

    def __init__(self, id: str, number: int, process: ServerProcess, coordinator: CoordinatorLink, version: str) -> None:
        self._listed = Listed(id, number, process.url, process.key)
        self._process = process
        self._coordinator = coordinator
        self._shares = Shares(version)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve with the shares that are in force elsewhere. Raises ServerEnded."""
        in_force = await self._coordinator.shares()
        if in_force.version == self._shares.version:
            self._shares = in_force
        await self._process.start(self._shares)
        await self._coordinator.report(self._listed, self._shares)  # Before Ray Serve ends the server that this one replaces.
        self._task = asyncio.create_task(self._report())
        log.info("server %d serves at %s", self._listed.number, self._listed.url)

    async def check_health(self) -> None:
        """Raises ServerEnded if the process has ended or does not answer. That it is not ready is no reason to replace it."""
        self._process.check()
        if await self._process.status("live") != 200:
            raise ServerEnded(f"the server at {self._process.url} does not answer")

    async def stop(self) -> None:
        """Have requests go elsewhere, then drain."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            with suppress(Exception):  # When all of the application ends, there may be no coordinator any more.
                await asyncio.wait_for(self._coordinator.forget(self._listed.id), FORGET_TIMEOUT)
            await asyncio.sleep(UNLISTED)
        await asyncio.to_thread(self._process.end)

    async def _report(self) -> None:
        """Say that this server serves, until its process ends, and take over shares that were changed elsewhere."""
        while True:
            try:
                self._process.check()
                if await self._process.status("ready") == 503:
                    await self._coordinator.forget(self._listed.id)
                else:
                    in_force = await self._coordinator.report(self._listed, self._shares)
                    if in_force.version == self._shares.version and in_force.revision > self._shares.revision:
                        await self._take_over(in_force)
            except ServerEnded as error:
                log.error("server %d: %s", self._listed.number, error)
                await self._coordinator.forget(self._listed.id)
                return
            except Exception as error:  # Such as a coordinator that is being replaced.
                log.warning("server %d could not report: %s", self._listed.number, error)
            await asyncio.sleep(REPORT_EVERY)

    async def _take_over(self, shares: Shares) -> None:
        refused = await self._process.repartition(dict(shares.granules or {}))
        if refused is None:
            self._shares = shares
        else:
            log.warning("server %d does not take over the shares of the others: %s", self._listed.number, refused)
