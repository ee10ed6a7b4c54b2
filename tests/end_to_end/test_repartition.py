"""Repartition while serving: every answer right, none lost, nothing left behind."""

import asyncio
import gc
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engines.onnxruntime.engine import OnnxExecutor
from partitions.cpu import CpuPartition
from server.config.tenant import TenantConfig

from .harness import Served, configuration, serving
from .virtual import VirtualDevice
from .wire import client, until

GRANULES = 8
NAMES = ("acme", "globex", "initech")


def tenants() -> list[TenantConfig]:
    return [TenantConfig(name=name, granules=2, models=("identity", "rows"), queue=64) for name in NAMES]


@pytest.fixture
def device() -> VirtualDevice:
    return VirtualDevice(GRANULES)


@pytest.fixture
def moving(standard: Path, device: VirtualDevice) -> Iterator[Served]:
    with serving(configuration(standard, *tenants()), device) as served:
        yield served


@asynccontextmanager
async def session(served: Served) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(served.url, connector=connector) as client:
        yield client


def request(numbers: list[float]) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": numbers}]}


class Client:
    """A client of one tenant that sends requests until it is stopped, and checks every answer."""

    def __init__(self, tenant: str, seed: int) -> None:
        self.headers = {"X-Tenant": tenant}
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def run(self, http: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        kinds = [self.right, self.right, self.right, self.right, self.wrong, self.cancelled]
        while not stop.is_set():
            await self.random.choice(kinds)(http)

    async def right(self, http: aiohttp.ClientSession) -> None:
        numbers = [float(self.random.randrange(1000)) for _ in range(3)]
        async with http.post("/v2/models/rows/infer", json=request(numbers), headers=self.headers) as answer:
            document = json.loads(await answer.read())
            assert answer.status == 200, document
            assert document["outputs"][0]["data"] == [-number for number in numbers]
        self.outcomes["right"] += 1

    async def wrong(self, http: aiohttp.ClientSession) -> None:
        bad = self.random.choice([request([1.0]), request([]), {"inputs": 1}, {"inputs": [{"name": "nope"}]}])
        async with http.post("/v2/models/rows/infer", json=bad, headers=self.headers) as answer:
            assert answer.status == 400, await answer.text()
        self.outcomes["wrong"] += 1

    async def cancelled(self, http: aiohttp.ClientSession) -> None:
        """Disconnects at a random moment before the answer."""
        asking = asyncio.ensure_future(self.right(http))
        for _ in range(self.random.randrange(8)):
            await asyncio.sleep(0)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        self.outcomes["cancelled"] += 1


def check_plan(plan: dict[str, Any]) -> None:
    granules = [granule for partition in plan["partitions"].values() for granule in partition["granules"]]
    assert len(granules) == len(set(granules)) == GRANULES - plan["free"]
    assert set(granules) <= set(range(GRANULES))


async def repartition(http: aiohttp.ClientSession, counts: dict[str, int]) -> tuple[int, dict[str, Any]]:
    async with http.put("/admin/partitions", json=counts) as answer:
        return answer.status, json.loads(await answer.read())


async def shuffle(http: aiohttp.ClientSession, times: int, chance: random.Random) -> Counter[int]:
    """Request random plans, some of which do not fit, until `times` were put in force."""
    statuses: Counter[int] = Counter()
    while statuses[200] < times:
        counts = {name: chance.randint(1, 4) for name in chance.sample(NAMES, chance.randint(1, 3))}
        async with http.get("/admin/partitions") as answer:
            before = json.loads(await answer.read())["partitions"]
        wanted = {name: counts.get(name, len(before[name]["granules"])) for name in NAMES}
        status, plan = await repartition(http, counts)
        statuses[status] += 1
        assert status == (200 if sum(wanted.values()) <= GRANULES else 409), plan
        if status == 200:
            check_plan(plan)
            assert {name: len(partition["granules"]) for name, partition in plan["partitions"].items()} == wanted
            assert set(plan["moved"]) == {name for name in NAMES if len(before[name]["granules"]) != wanted[name]}
        else:
            assert f"= {sum(wanted.values())} granules, but the device has {GRANULES}" in plan["error"]
    return statuses


def leftovers() -> tuple[int, int, int]:
    gc.collect()
    live = gc.get_objects()
    executors = sum(isinstance(thing, OnnxExecutor) for thing in live)
    open_partitions = sum(isinstance(thing, CpuPartition) and "closed" not in repr(thing) for thing in live)
    workers = sum(thread.name.startswith("worker") for thread in threading.enumerate())
    return executors, open_partitions, workers


@pytest.mark.parametrize("times", [50, pytest.param(1000, marks=pytest.mark.load)])
def test_repartitions_under_load_lose_no_request_and_leak_nothing(moving: Served, times: int) -> None:
    clients = [Client(name, seed) for seed, name in enumerate(NAMES * 2)]

    async def run() -> Counter[int]:
        stop = asyncio.Event()
        async with session(moving) as http:
            load = [asyncio.ensure_future(client.run(http, stop)) for client in clients]
            try:
                return await shuffle(http, times, random.Random(7))
            finally:
                stop.set()
                await asyncio.gather(*load)

    before = leftovers()
    statuses = asyncio.run(run())
    moving.call(asyncio.wait_for(idle(moving), 30))
    assert statuses[409] > 0
    for each in clients:
        assert min(each.outcomes[kind] for kind in ("right", "wrong", "cancelled")) > times // 20, each.outcomes
    until(lambda: leftovers() == before)
    for tenant in moving.service.tenants.values():
        assert tenant.lane.slots.statistics().used == 0


async def idle(served: Served) -> None:
    for tenant in served.service.tenants.values():
        await tenant.lane.drained()


def test_a_tenant_whose_share_does_not_change_keeps_its_partition_and_worker(moving: Served) -> None:
    worker = moving.runtime.workers["acme"]
    with client(moving) as http:
        answer = http.put("/admin/partitions", json={"globex": 3}).json()
    assert answer["moved"] == ["globex"]
    assert moving.runtime.workers["acme"] is worker
    assert answer["partitions"]["acme"]["granules"] == [0, 1]


@pytest.mark.parametrize("nth", [1, 2])
def test_a_repartition_that_fails_half_way_keeps_the_old_plan(standard: Path, nth: int) -> None:
    device = VirtualDevice(GRANULES, failures=[len(NAMES) + nth])
    with serving(configuration(standard, *tenants()), device) as served, client(served) as http:
        before = http.get("/admin/partitions").json()
        answer = http.put("/admin/partitions", json={"acme": 1, "globex": 3})
        assert answer.status_code == 500
        assert "was scripted to fail" in answer.json()["error"]
        assert http.get("/admin/partitions").json() == before
        for name in NAMES:
            infer = http.post("/v2/models/rows/infer", json=request([1, 2, 3]), headers={"X-Tenant": name})
            assert infer.status_code == 200
        assert [p for p in device.carved if "closed" not in repr(p)] == [served.runtime.manager.held[name] for name in NAMES]


def test_a_repartition_completes_after_its_client_disconnected(moving: Served) -> None:
    async def ask_and_leave() -> None:
        async with session(moving) as http:
            asking = asyncio.ensure_future(repartition(http, {"acme": 1}))
            while not asking.done() and not moving.controller.moving:
                await asyncio.sleep(0)
            asking.cancel()

    async def changed() -> None:
        async with moving.controller.granules_change:
            pass

    asyncio.run(ask_and_leave())
    moving.call(changed())
    assert len(moving.runtime.manager.held["acme"].granules) == 1
