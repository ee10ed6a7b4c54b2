"""Hours of random faults by seed: a whole runtime on a simulated GPU, and a clock that jumps (`virtual_time`).

Calls of the driver fail, and some of these lose the device, upon which the server is started again; models take minutes to be
read; disks are full, and descriptors have run out; the machine stands still for minutes, and the wall clock jumps by years.
Meanwhile both tenants ask, and an operator repartitions, loads and unloads. One tenant, `globex`, is asked for nothing that may
fail: each of its requests has to be answered rightly, at once, unless the GPU failed while it was asked. Longer by hand:
`FAULT_HOURS=24 FAULT_SEEDS=20 python -m pytest tests/simulation/test_hours.py`.
"""

import asyncio
import csv
import errno
import io
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import Engine, EngineError, RuntimeSettings, load_engine
from partitions import DeviceLost, PartitionError
from server.config.schema import Config, DeviceConfig, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.device import runtime
from server.device.runtime import Runtime
from server.errors import RequestError
from server.observing import accountant
from server.observing.accountant import Accountant
from server.observing.observers import Observers
from server.observing.usage_files import UsageFiles
from server.tenants.local_frontend import LocalFrontend, open_local
from server.workers import supervision
from tests.engines.small import model
from tests.lanes import submit

from . import Gpu, installed
from .plans import make_plan
from .tensorrt import library
from .virtual_time import YEAR, VirtualClock, run

HOURS = float(os.environ.get("FAULT_HOURS", "1"))
SEEDS = range(int(os.environ.get("FAULT_SEEDS", "3")))
TEXT = "affine{0} (float[n, 3] x) => (float[n, 3] y) <float by = {{{0}}}> {{ y = Mul(x, by) }}"
MODELS = 1, 2, 3
"""m1 is both tenants', the others are acme's."""
MEMORY = 8 << 20
"""Bytes for each tenant's tensors; what a lost device has pinned is not freed before the process ends."""
SOON = 1.0
"""Seconds in which a request is answered while nothing is wrong with the GPU; a move of the tenant takes its share of them."""
LATE = 600.0
"""Seconds in which every request is answered, whatever happens."""
SURE = "destroy", "close", "free", "unregister", "ctx", "set_current"
"""Words of calls that fail only once the device is lost."""
SELDOM = 10.0
"""Seconds between two looks of what looks every second or so, to save this machine's time."""


class Site:
    """One start of the server, until its device is lost."""

    def __init__(self, config: Config, clock: VirtualClock, faults: "Faults") -> None:
        self.gpu = Gpu()
        self.faults = faults
        self.frontends: dict[str, LocalFrontend] = {}
        self.controller = Controller(config, self.frontends, lambda _: None)
        self._config = config
        self._clock = clock

    async def start(self, cuda: Any) -> None:
        self.frontends |= {name: open_local(tenant) for name, tenant in self._config.tenants.items()}
        self.controller = controller = Controller(self._config, self.frontends, lambda _: None)
        usage = self._config.server.usage_dir
        assert usage
        clock = lambda: round(self._clock.now * 1e9)  # noqa: E731
        self.observers = Observers(controller)
        self.observers.accountant = Accountant(
            controller.devices, UsageFiles(usage), clock, lambda: round((self._clock.now + self._clock.offset) * 1e9)
        )
        device, loop = cuda.open_cuda(Gpu.index), asyncio.get_running_loop()

        def read(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
            if self.faults.slow():
                self._clock.sleep(loop, self.faults.chance.uniform(1, 600))
            return load_engine(path, device, settings, max_batch)

        on_state = partial(controller.on_state, tuple(self.frontends))
        runtime = Runtime(self._config, device, self.frontends, on_state, controller.on_lost, read)
        controller.add(dict.fromkeys(self.frontends, runtime))
        self._clock.busy = lambda: (
            not self.gpu.lost and any(each.tenant.lane.statistics().in_flight > 0 for each in self.frontends.values())
        )
        await controller.start()
        await controller.loaded()

    async def infer(self, name: str, number: int) -> str:
        """One inference, whose result is checked: "right", or how it failed. Raises RequestError."""
        tenant = self.frontends[name].tenant
        served, lane = tenant.catalog.find(f"m{number}"), tenant.lane
        slot = lane.take_slot()
        try:
            slot.lay_out(served.signature, [12])
            slot.view[:12] = np.array([1, 2, 3], np.float32).tobytes()
            done = await submit(lane, slot, served.key, ((1, 3),), timeout=LATE / 2)
            if done.failure:
                return str(done.failure.kind)
            (extent,) = done.outputs
            found = np.frombuffer(bytes(slot.view[extent.offset : extent.offset + 12]), np.float32)
            assert found.tolist() == [number, 2 * number, 3 * number]
            return "right"
        finally:
            lane.release(slot)


class Faults:
    """What goes wrong, by seed. Files fail in all threads while `full` or `out_of_descriptors`."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.full = self.out_of_descriptors = False
        self.calm = False
        self.broken = 0
        """How often something of the GPU was broken, so that who was asked meanwhile may be answered with an error."""

        self.stood = 0.0
        """For how many seconds the machine has stood still."""

    def slow(self) -> bool:
        return not self.calm and self.chance.random() < 0.2

    def install(self, patch: pytest.MonkeyPatch) -> None:
        write, open_, make = os.write, io.open, os.memfd_create

        def guarded(real: Callable[..., Any], refuses: Callable[..., int]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                if number := refuses(*args):
                    raise OSError(number, os.strerror(number))
                return real(*args, **options)

            return call

        def of_open(_: Any, mode: str = "r", *rest: Any) -> int:
            return errno.ENOSPC if self.full and set("wax+") & set(mode) else errno.EMFILE * self.out_of_descriptors

        patch.setattr(os, "write", guarded(write, lambda *_: errno.ENOSPC * self.full))
        patch.setattr(io, "open", guarded(open_, of_open))
        patch.setattr(os, "memfd_create", guarded(make, lambda *_: errno.EMFILE * self.out_of_descriptors))


class Hours:
    """One run."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.clock = VirtualClock()
        self.faults = Faults(seed)
        self.chance = self.faults.chance
        self.ended: Counter[str] = Counter()
        self.site: Site | None = None
        self.seconds = 0.0
        """Of an SM, that there were while it was served."""
        self._config = config_of(folder)
        self._usage = folder / "usage"

    async def run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self.faults.install(patch)
            patch.setattr(accountant, "INTERVAL", SELDOM)
            patch.setattr(runtime, "CHECK_INTERVAL", SELDOM)
            patch.setattr(supervision, "INTERVAL", SELDOM)
            until = self.clock.now + HOURS * 3600
            while self.clock.now < until:
                async with self._serving() as site:
                    await self._hour(site, until)
            self.faults.calm = True
            self.faults.full = self.faults.out_of_descriptors = False
            async with self._serving() as site:
                assert site.controller.ready
                await site.controller.load("acme", "m2")
                for name, number in (("acme", 1), ("acme", 2), ("globex", 1)):
                    assert await site.infer(name, number) == "right"

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Site]:
        """A server that has started, in as many attempts as it takes."""
        while True:
            site, began = Site(self._config, self.clock, self.faults), self.clock.now
            with installed(site.gpu, library(site.gpu)) as cuda:
                try:
                    await site.start(cuda)
                except (OSError, RequestError, EngineError, PartitionError) as error:
                    self.ended[f"start: {type(error).__name__}"] += 1
                    await self._end(site)
                    await asyncio.sleep(10)
                    self.faults.full = self.faults.out_of_descriptors = False
                    continue
                self.ended["start"] += 1
                yield site
                await self._end(site)
                self._check_account(site, self.clock.now - began)
                return

    async def _end(self, site: Site) -> None:
        """As the end of the process; the device may be lost, which only a new process can mend."""
        site.gpu.faults.clear()
        self.faults.full = self.faults.out_of_descriptors = False
        try:
            await asyncio.wait_for(site.controller.close(), LATE)
        except DeviceLost:
            assert site.gpu.lost

    def _check_account(self, site: Site, seconds: float) -> None:
        """All that there was is granted or free; no tenant used more than was granted; and the files have all of it."""
        (device,) = site.observers.accountant.totals().devices.values()
        assert abs(device.elapsed / 1e9 - seconds) < 2 * SOON
        assert sum(each.granted for each in device.tenants.values()) + device.free == device.total
        assert all(0 <= each.used <= each.granted for each in device.tenants.values())
        rows = [row for path in self._usage.glob("*.csv") for row in csv.DictReader(path.read_text().splitlines())]
        self.seconds += device.total / 1e9
        written = sum(float(row["granted"]) for row in rows if row["granted"])
        assert abs(written - self.seconds) < device.units * 2 * SOON * self.ended["start"], (written, self.seconds)
        works = sum(int(row["works"]) for row in rows if row["works"])
        assert works >= self.ended["acme: right"] + self.ended["globex: right"]

    async def _hour(self, site: Site, until: float) -> None:
        """Until the device is lost, or the time is up."""
        clients = [asyncio.create_task(self._ask(site, name)) for name in ("acme", "globex", "globex")]
        try:
            while self.clock.now < until and not site.controller.device_gone.is_set():
                await asyncio.sleep(self.chance.expovariate(1 / 60))
                await self._act(site)
                site.gpu.log.clear()
                site.gpu.freed.clear()  # It keeps the memory that was freed, to tell who still uses it.
        finally:
            for each in clients:
                each.cancel()
            for found in await asyncio.gather(*clients, return_exceptions=True):
                if not isinstance(found, asyncio.CancelledError):
                    raise AssertionError(found) from (found if isinstance(found, BaseException) else None)

    async def _act(self, site: Site) -> None:
        faults, controller, gpu = self.faults, site.controller, site.gpu
        acme = self.chance.randint(1, 8)
        what: list[tuple[str, Callable[[], Any]]] = [
            ("repartition", lambda: controller.repartition({"acme": acme, "globex": self.chance.randint(1, 15 - acme)})),
            ("load", lambda: controller.load("acme", f"m{self.chance.choice(MODELS)}")),
            ("unload", lambda: controller.unload("acme", f"m{self.chance.choice(MODELS)}")),
            ("disk", lambda: setattr(faults, "full", not faults.full)),
            ("descriptors", lambda: setattr(faults, "out_of_descriptors", not faults.out_of_descriptors)),
            ("wall clock", lambda: setattr(self.clock, "offset", self.clock.offset + self.chance.uniform(-YEAR, YEAR))),
            ("standstill", lambda: self._stand(self.chance.uniform(1, 300))),
            ("driver", lambda: self._break(gpu)),
        ]
        name, act = self.chance.choice(what)
        try:
            found = act()
            if asyncio.iscoroutine(found):
                await asyncio.wait_for(found, 4 * LATE)
            self.ended[f"{name}: done"] += 1
        except (RequestError, EngineError, PartitionError, OSError) as error:
            self.ended[f"{name}: {type(error).__name__}"] += 1

    def _stand(self, seconds: float) -> None:
        self.clock.now += seconds
        self.faults.stood += seconds

    def _break(self, gpu: Gpu) -> None:
        """Have a call of the driver fail soon. One in four loses the device."""
        calls = sorted(call for call in gpu.calls if call != "Device" and not any(word in call.lower() for word in SURE))
        lost = self.chance.random() < 0.25
        self.faults.broken += 1
        gpu.fail(self.chance.choice(calls), error="CUDA_ERROR_LAUNCH_FAILED" if lost else "CUDA_ERROR_OUT_OF_MEMORY")

    async def _ask(self, site: Site, name: str) -> None:
        """A client: one request after another."""
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / 10))
            number = 1 if name == "globex" else self.chance.choice(MODELS)
            quiet = site.controller.ready and not site.gpu.faults and not site.gpu.lost
            broken, began, stood = self.faults.broken, self.clock.now, self.faults.stood
            try:
                async with asyncio.timeout(LATE):
                    outcome = await site.infer(name, number)
            except RequestError as error:
                outcome = type(error).__name__
            self.ended[f"{name}: {outcome}"] += 1
            if name == "globex" and quiet and broken == self.faults.broken:
                assert outcome == "right", self.ended
                took = self.clock.now - began - (self.faults.stood - stood)
                assert took < SOON, (took, self.ended)


def config_of(folder: Path) -> Config:
    for number in MODELS:
        path = folder / "models" / f"m{number}" / "1" / "model.plan"
        path.parent.mkdir(parents=True)
        path.write_bytes(make_plan(model(TEXT.format(number)), {"x": [(1, 3), (2, 3), (8, 3)]}))
    tenants = [
        TenantConfig(name="acme", granules=4, models=("*",), memory=MEMORY),
        TenantConfig(name="globex", granules=4, models=("m1",), memory=MEMORY),
    ]
    return Config(
        server=ServerConfig(default_tenant="acme", usage_dir=folder / "usage"),
        device=DeviceConfig(copies="engine"),
        models=ModelsConfig(repository=folder / "models"),
        tenants={tenant.name: tenant for tenant in tenants},
        source="test",
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_hours_of_faults(tmp_path: Path, seed: int) -> None:
    hours = Hours(tmp_path, seed)
    run(hours.clock, hours.run())
    assert hours.ended["globex: right"] > 100 * HOURS, hours.ended
    assert sum(count for what, count in hours.ended.items() if "right" not in what and "done" not in what) > HOURS, hours.ended
