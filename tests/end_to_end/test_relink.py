"""A tenant's HTTP side gets new links while it serves; supervisor, runtime and workers are in the test's own process."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from partitions.cpu import open_cpu
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.device.runtime import Runtime
from server.link import ring as links
from server.link.ring import Link
from server.processes.children import spawn
from server.processes.remote.remote_frontend import RemoteFrontend, open_remote
from server.processes.supervision.listen import listen
from server.processes.supervision.supervisor import Supervisor

from .harness import PATIENCE, configuration, serving
from .processes import Load
from .wire import request, tensor

RELINKS = 8
SIZES = [1, 3, 9000]
"""Elements of requests; JSON of the last size is parsed and written in time slices."""
LOST = "the device's process has ended and is started again"


class Linked:
    """The tenant as a device side in the supervisor's own process sees it."""

    def __init__(self, http_side: RemoteFrontend) -> None:
        self.http_side = http_side
        self.open, self.close = http_side.open, http_side.close
        self._descriptors = http_side.descriptors
        self._link = links.attach(self._descriptors)

    @property
    def link(self) -> Link:
        if self._descriptors is not self.http_side.descriptors:
            self._descriptors = self.http_side.descriptors
            self._link = links.attach(self._descriptors, self._link.arena.memory)
        return self._link


class Site:
    """A server of one tenant, acme, whose HTTP process is a real one."""

    def __init__(self, root: Path) -> None:
        self.config = configuration(root, TenantConfig(name="acme", granules=1, models=("*",), queue=4, in_flight=2))
        self.frontend = open_remote(self.config.tenants["acme"])
        frontends = {"acme": self.frontend}
        self.listeners, _ = listen("127.0.0.1", 0, {})
        self.controller = controller = Controller(self.config, frontends, lambda state: self.supervisor.set_state(state))
        on_state = partial(controller.on_state, ("acme",))
        self.runtime = Runtime(self.config, open_cpu(), {"acme": Linked(self.frontend)}, on_state, controller.on_lost)
        controller.add({"acme": self.runtime})
        self.supervisor = Supervisor(self.config, frontends, self.listeners, {}, None, self.runtime.replace_link)
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.listeners[0].getsockname()[1]}", timeout=PATIENCE)

    @property
    def pid(self) -> int:
        process = self.supervisor.http.processes()[0]
        assert process
        assert process.pid
        return process.pid

    async def infer(self, value: int, size: int = 1) -> httpx.Response:
        document = request(tensor("x", "FP32", [1, size], [value] * size))
        return await self.http.post("/v2/models/identity/infer", json=document)

    async def relink(self) -> None:
        """As the tenant moves to another device side: its worker, on a new link."""
        await self.runtime.replace_link("acme", await self.frontend.relink(PATIENCE))


@asynccontextmanager
async def site(root: Path) -> AsyncIterator[Site]:
    await asyncio.to_thread(spawn.prepare)
    site = Site(root)
    try:
        await asyncio.gather(site.supervisor.start(), site.controller.start())
        await site.controller.loaded()
        async with site.http:
            yield site
        await site.supervisor.close()
        await site.controller.close()
    finally:
        site.supervisor.kill()


async def ask(site: Site, client: int, wrong: list[object], counts: list[int], stop: asyncio.Event) -> None:
    while not stop.is_set():
        value, size = counts[client] % 1000 + 1000 * client, SIZES[counts[client] % len(SIZES)]
        try:
            answer = await site.infer(value, size)
            if answer.status_code != 200 or answer.json()["outputs"][0]["data"] != [value] * size:
                wrong.append((answer.status_code, answer.text[:200]))
        except httpx.TransportError as error:
            wrong.append(repr(error))
        counts[client] += 1


async def reach(counts: list[int], more: int) -> None:
    """Wait until every client has had so many more answers."""
    enough = [count + more for count in counts]
    async with asyncio.timeout(PATIENCE):
        while any(count < least for count, least in zip(counts, enough, strict=True)):
            await asyncio.sleep(0.001)


async def test_a_process_gets_new_links_under_load_and_every_answer_is_right(standard: Path) -> None:
    async with site(standard) as served:
        pid, wrong, counts, stop = served.pid, list[object](), [0] * 6, asyncio.Event()
        clients = [asyncio.create_task(ask(served, client, wrong, counts, stop)) for client in range(6)]
        await reach(counts, 3)
        await served.relink()
        opened = len(os.listdir(f"/proc/{pid}/fd"))
        for _ in range(RELINKS):
            await reach(counts, 2)
            await served.relink()
        await reach(counts, 2)
        assert len(os.listdir(f"/proc/{pid}/fd")) == opened, "the links that were left are closed"
        stop.set()
        await asyncio.gather(*clients)
        assert wrong == []
        assert served.pid == pid
        report = await served.frontend.report()
        assert (report.slots.used, report.slots.nbytes) == (0, 0)


async def test_requests_that_a_lost_device_side_had_get_503_at_once_and_the_process_serves_again(standard: Path) -> None:
    async with site(standard) as served:
        pid = served.pid
        free = await served.frontend.relink(PATIENCE)  # To a device side that never answers.
        asked = [asyncio.create_task(served.infer(number)) for number in range(5)]
        while (await served.frontend.report()).lane[:2] != (3, 2):
            await asyncio.sleep(0.001)
        served.frontend.fail_in_flight(LOST)
        answers = await asyncio.gather(*asked)
        assert [(answer.status_code, answer.json()) for answer in answers] == [(503, {"error": LOST})] * 5
        assert (await served.infer(1)).status_code == 503
        await served.runtime.replace_link("acme", free)
        await served.relink()
        served.frontend.serve()
        assert "is loading" in (await served.infer(7)).json()["error"], "the next device side has published nothing yet"
        await served.controller.load("acme", "identity")
        assert (await served.infer(7)).json()["outputs"][0]["data"] == [7]
        assert served.pid == pid
        assert (await served.frontend.report()).slots.used == 0


async def test_a_process_killed_while_its_link_changes_is_replaced(standard: Path) -> None:
    async with site(standard) as served:
        pid = served.pid
        os.kill(pid, signal.SIGSTOP)  # So it does not answer.
        relinked = asyncio.create_task(served.frontend.relink())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        await served.runtime.replace_link("acme", await relinked)
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    answer = await served.infer(5)
                except httpx.TransportError:
                    continue
                if answer.status_code == 200:
                    break
        assert answer.json()["outputs"][0]["data"] == [5]
        assert served.pid != pid
        await served.relink()
        assert (await served.infer(6)).status_code == 200


def test_an_http_side_in_the_same_process_gets_new_links_under_load(standard: Path) -> None:
    with serving(configuration(standard), direct=True) as served:
        running: Any = served
        frontend: Any = served.runtime.frontends["acme"]
        with Load(running) as one, Load(running) as other:
            for _ in range(RELINKS):
                served.call(served.runtime.replace_link("acme", served.call(frontend.relink(PATIENCE))))
                one.more(3)
                other.more(3)
        assert (one.wrong, other.wrong) == ([], [])
        assert served.call(frontend.report()).slots[::2] == (0, 0)
