"""Random faults by seed: the controller and the runtime over a fake device.

What is asked for comes in random order, and some calls into the device fail: carving, attaching, binding, enqueuing, running
and page-locking; the wall clock jumps by years. Whatever fails is answered, nothing of it leaks, and once nothing fails any
more, everybody is served. Longer by hand: `FAULT_SEEDS=1000 python -m pytest tests/server/device/test_faults.py`.
"""

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from engines import EngineError
from partitions import PartitionError
from server.errors import RequestError, Unavailable
from server.link.messages import Done

from .test_runtime import Site, add_model, serving

SEEDS = range(int(os.environ.get("FAULT_SEEDS", "10")))
STEPS = 80
POINTS = ("carve", "attach", "locate", "bind", "enqueue", "run")
YEAR = 365 * 86400.0


class Faults:
    """One run: what it does is drawn from its seed."""

    def __init__(self, site: Site, seed: int) -> None:
        self.site = site
        self.chance = random.Random(seed)
        self.asked: list[asyncio.Task[Done]] = []
        self.ended: Counter[str] = Counter()

    async def step(self) -> None:
        """Script a fault now and then, and do something."""
        if self.chance.random() < 0.4:
            self.site.script.fail(self.chance.choice(POINTS), self.chance.randint(1, 4))
        act = self.chance.choice([self.repartition, self.load, self.unload, self.ask, self.ask])
        try:
            await act()
            self.ended[f"{act.__name__}: done"] += 1
        except (RequestError, EngineError, PartitionError) as error:
            self.ended[f"{act.__name__}: {type(error).__name__}"] += 1
        self.check()

    async def repartition(self) -> None:
        acme = self.chance.randint(1, 6)
        await self.site.controller.repartition({"acme": acme, "globex": self.chance.randint(1, 8 - acme)})

    async def load(self) -> None:
        await self.site.controller.load("acme", self.chance.choice("ab"))

    async def unload(self) -> None:
        await self.site.controller.unload("acme", "a")

    async def ask(self) -> None:
        """Some requests; what they are answered is looked at while other things are done."""
        for _ in range(self.chance.randint(1, 5)):
            name = self.chance.choice(["acme", "globex"])
            self.asked.append(asyncio.ensure_future(self.site.infer(name)))
        await asyncio.sleep(0)

    def check(self) -> None:
        """No partition but those of tenants is open, and no granule has two tenants."""
        held = self.site.runtime.manager.held
        assert set(self.site.device.open) == set(held.values())
        granules = [granule for partition in held.values() for granule in partition.granules]
        assert len(granules) == len(set(granules))

    async def served(self, tenant: str, model: str) -> None:
        """Its worker may be starting again, which is said until it has; then it answers."""
        async with asyncio.timeout(30):
            while True:
                try:
                    assert (await self.site.infer(tenant, model)).failure is None
                    return
                except Unavailable:
                    await asyncio.sleep(0)

    async def answers(self) -> None:
        """Every request has ended, rightly or with the fault."""
        for result in await asyncio.wait_for(asyncio.gather(*self.asked, return_exceptions=True), 30):
            if isinstance(result, BaseException):
                assert isinstance(result, (RequestError, EngineError)), repr(result)
                self.ended[f"request: {type(result).__name__}"] += 1
            else:
                self.ended["request: failed" if result.failure else "request: right"] += 1


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_faults_leak_nothing_and_every_tenant_is_served_again(tmp_path: Path, seed: int) -> None:
    for name in ("a", "b"):
        add_model(tmp_path, name)
    chance, real = random.Random(seed), time.time
    async with serving(tmp_path) as site:
        faults = Faults(site, seed)
        with patch("time.time", lambda: real() + chance.uniform(-YEAR, YEAR)):
            for _ in range(STEPS):
                await faults.step()
            await faults.answers()
        site.script.mend()
        await site.controller.repartition({"acme": 2, "globex": 2})
        await site.controller.load("acme", "a")
        for tenant, model in (("acme", "b"), ("acme", "a"), ("globex", "b")):
            await faults.served(tenant, model)
        faults.check()
    assert faults.ended["request: right"] > 0, faults.ended
    assert sum(count for what, count in faults.ended.items() if not what.endswith((": done", ": right"))) > 3, faults.ended
