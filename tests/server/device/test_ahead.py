"""What other processes make of all models when a server starts, and in which order these are loaded."""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines import Builds, Engine, ModelRefused, RuntimeSettings
from engines.tensorrt.building.builder import BuildOptions
from partitions import Partition, open_cpu
from server.config.schema import Config, DeviceConfig, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.control.descriptions import AtStart
from server.device import ahead
from server.device.ahead import CHILD, CONTEXT, COPIES, MOST, Making, at_once, making_of
from server.device.model_loader import open_model_loader
from server.device.runtime import Runtime
from server.tenants.local_frontend import open_local
from tests.engines import as_simulated
from tests.engines.simulated import opened
from tests.fakes import PATIENCE, FakeDevice, FakeEngine, Script
from tests.server.device.test_model_lists import add_ensemble
from tests.server.device.test_runtime import SIGNATURE, Site, add_model

pytestmark = pytest.mark.usefixtures("forked_programs")
GIB = 1 << 30


class MakingSite(Site):
    """A site whose models other processes make: here, threads at the points "make" and "make NAME" of its script."""

    def __init__(self, root: Path, at_once: int = 8, **options: Any) -> None:
        super().__init__(root, **options)
        self.making: list[str] = []
        self.loading: list[str] = []
        self.largest = 0
        self.within = False
        self.error: Callable[[str], Exception | None] = lambda _: None
        self._at_once = at_once
        self.runtime.model_loader.making = Making(self.make, self.look, self.once)

    def make(self, path: Path, max_batch: int | None, settings: RuntimeSettings, partition: Partition) -> object:
        name = path.parent.parent.name
        assert self.within
        assert partition.granules
        assert settings.warm_up == "usual"
        self.making.append(name)
        self.script.reach("make")
        self.script.reach(f"make {name}")
        if error := self.error(name):
            raise error
        return name

    def look(self, largest: int) -> int:
        self.largest = largest
        return self._at_once

    @contextmanager
    def once(self) -> Iterator[None]:
        self.within = True
        yield
        self.within = False

    def read(self, path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        self.loading.append(path.parent.parent.name)
        return super().read(path, max_batch, settings)

    async def start(self) -> None:
        await self.controller.start()

    async def loaded(self) -> None:
        await asyncio.wait_for(self.controller.loaded(), PATIENCE)

    async def until_loaded(self, *names: str) -> None:
        """Wait until acme is served exactly these."""
        await until(lambda: {each.name for each in self.tenant("acme").catalog.served()} == set(names))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def sized(root: Path, **sizes: int) -> Path:
    """Models with files of these sizes."""
    for name, size in sizes.items():
        add_model(root, name)
        (root / name / "1" / "model.onnx").write_bytes(bytes(size))
    return root


def one(models: tuple[str, ...] = ("*",), **options: Any) -> list[TenantConfig]:
    return [TenantConfig(name="acme", granules=2, models=models, **options)]


async def test_all_models_are_made_at_once_and_loaded_in_the_order_in_which_they_are_made(tmp_path: Path) -> None:
    site = MakingSite(sized(tmp_path, a=1, b=1, c=1), tenants=one(("a", "b", "c")))
    gates = {name: site.script.hold(f"make {name}") for name in "abc"}
    said: list[str] = []
    site.controller.on_progress = said.append
    await site.start()
    await asyncio.to_thread(lambda: [gate.wait_for_arrival() for gate in gates.values()])
    assert site.loading == []
    await until(lambda: site.controller.progress == "0 of 3 models are ready; building or compiling a (acme)")
    assert said[-1] == "0 of 3 models are ready; building or compiling 1"
    for number, name in enumerate("cab", 1):
        gates[name].open()
        await site.until_loaded(*"cab"[:number])
    await site.loaded()
    assert site.loading == ["c", "a", "b"]
    assert not site.within
    await site.controller.close()


@pytest.mark.parametrize("count", [1, 2])
async def test_the_largest_come_first_and_no_more_at_once_than_there_is_room_for(tmp_path: Path, count: int) -> None:
    site, order = MakingSite(sized(tmp_path, a=10, b=30, c=20), at_once=count, tenants=one()), ["b", "c", "a"]
    gate = site.script.hold("make")
    await site.start()
    await asyncio.to_thread(gate.wait_for_arrival, count)
    assert set(site.making) == set(order[:count])
    assert site.largest == 30
    gate.open()
    await site.loaded()
    assert site.making == order or count > 1, "threads that begin at once do so in any order"
    assert site.making[-1] == "a"
    await site.controller.close()


async def test_a_model_of_several_tenants_is_made_once(tmp_path: Path) -> None:
    site = MakingSite(sized(tmp_path, a=1, b=1))
    await site.start()
    await site.loaded()
    assert Counter(site.making) == {"a": 1, "b": 1}
    assert [served.name for served in site.tenant("globex").catalog.served()] == ["b"]
    await site.controller.close()


async def test_an_ensemble_is_loaded_after_its_steps_however_late_they_are_made(tmp_path: Path) -> None:
    site = MakingSite(sized(tmp_path, a=1, b=1), tenants=one(("whole", "a", "b")))
    add_ensemble(tmp_path, "whole", "b")
    gate = site.script.hold("make b")
    await site.start()
    await site.until_loaded("a")
    gate.open()
    await site.loaded()
    assert {each.name for each in site.tenant("acme").catalog.served()} == {"a", "b", "whole"}
    await site.controller.close()


async def test_what_cannot_be_made_is_tried_when_it_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = MakingSite(sized(tmp_path, a=1, b=1), tenants=one())
    site.error = {"a": ModelRefused("no such operator"), "b": RuntimeError("an error of ours")}.get
    await site.start()
    await site.loaded()
    assert {each.name for each in site.tenant("acme").catalog.served()} == {"a", "b"}
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings] == ["unexpected error while making model b version 1 ahead"]
    await site.controller.close()


async def test_what_is_left_out_or_has_no_room_is_not_made_and_an_order_is_kept(tmp_path: Path) -> None:
    """As in a process that replaces one which was ended by a model: that comes last."""
    site = MakingSite(sized(tmp_path, a=1, b=1, c=99, d=1), tenants=one(device_memory=50))
    gate = site.script.hold("make a")
    at_start = AtStart({}, {("acme", "d"): "it ends its process"}, {"acme": {"b": 1, "a": -1}})
    granules = {"acme": (0, 1)}
    site.frontends["acme"].open(site.runtime)
    await site.runtime.start(granules, at_start=at_start)
    await asyncio.to_thread(gate.wait_for_arrival)
    await asyncio.to_thread(site.script.wait_for, "make b", 1)
    gate.open()
    await asyncio.wait_for(site.runtime.loaded(), PATIENCE)
    assert sorted(site.making) == ["a", "b"]
    assert [name for name in site.loading if name in "ab"] == ["a", "b"]
    await site.runtime.close()


async def test_where_memory_is_not_known_models_are_made_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = MakingSite(sized(tmp_path, a=1, b=2), tenants=one())

    def look(largest: int) -> int:
        raise OSError("no /proc/meminfo")

    site.runtime.model_loader.making = Making(site.make, look, site.once)
    await site.start()
    await site.loaded()
    assert site.making == ["b", "a"]
    assert (
        "models are made one after the other, as it is not known how much memory is left: no /proc/meminfo" in caplog.messages
    )
    await site.controller.close()


async def test_the_end_of_the_server_ends_what_is_being_made(tmp_path: Path) -> None:
    site = MakingSite(sized(tmp_path, a=1, b=1), tenants=one())
    builds = site.runtime.builds = Builds(command=(sys.executable, "-c", "import time; time.sleep(600)"))
    begun = site.script.hold("make")
    options = BuildOptions()

    def build(path: Path, *_: object) -> object:
        begun.open()
        return builds.plan(path, options, "tensorrt_rtx", "1.6.1.120")

    site.runtime.model_loader.making = Making(build, lambda _: 2, builds.once)
    await site.start()
    await asyncio.to_thread(begun.hold, lambda: True)
    await asyncio.wait_for(site.controller.close(), PATIENCE)
    assert site.loading == []


async def test_a_model_that_is_loaded_on_request_is_not_made_ahead(tmp_path: Path) -> None:
    site = MakingSite(sized(tmp_path, a=1), tenants=one())
    await site.start()
    await site.loaded()
    add_model(tmp_path, "later")
    await site.controller.load("acme", "later")
    assert site.making == ["a"]
    await site.controller.close()


@pytest.mark.parametrize(
    ("cores", "memory", "device", "largest", "count"),
    [
        (12, 512 * GIB, 40 * GIB, 0, 12),
        (128, 512 * GIB, 40 * GIB, 0, MOST),
        (12, 3 * CHILD, 40 * GIB, 0, 3),
        (12, 3 * (CHILD + COPIES * GIB), 40 * GIB, GIB, 3),
        (12, 512 * GIB, 4 * CONTEXT, 0, 4),
        (12, 512 * GIB, 4 * (CONTEXT + COPIES * GIB), GIB, 4),
        (1, 0, 0, 70 * GIB, 1),
    ],
)
def test_as_many_are_made_at_once_as_there_are_cores_and_memory_for(
    cores: int, memory: int, device: int, largest: int, count: int
) -> None:
    assert at_once(cores, memory, device, largest) == count


class FakeGpu(FakeDevice):
    kind = "cuda"

    def memory(self) -> int | None:
        return 80 * GIB


@pytest.mark.parametrize(("part", "count"), [(1.0, 12), (0.5, 6), (1 / 15, 1)])
def test_a_process_that_starts_beside_others_takes_its_part_of_cores_and_memory(part: float, count: int) -> None:
    builds = Builds()
    builds.set_affinity(range(12))
    making = making_of(FakeGpu(), builds, part, lambda: 512 * GIB)
    assert making is not None
    assert making.at_once(0) == count
    scarce = making_of(FakeGpu(), builds, part, lambda: 4 * CHILD)
    assert scarce is not None
    assert scarce.at_once(0) == max(1, int(4 * part))


def test_models_for_a_gpu_are_made_ahead_and_none_for_cores_or_by_another_library(tmp_path: Path) -> None:
    config = Config(
        server=ServerConfig(),
        device=DeviceConfig(),
        models=ModelsConfig(repository=tmp_path),
        tenants={"acme": TenantConfig(name="acme", granules=1, models=("*",))},
        source="test",
    )
    builds, gpu, cores = Builds(), FakeGpu(), open_cpu()
    making = making_of(gpu, builds)
    assert making is not None
    assert 1 <= making.at_once(0) <= MOST
    assert open_model_loader(config, gpu, builds=builds).making is not None
    assert open_model_loader(config, cores, builds=builds).making is None
    assert open_model_loader(config, gpu).making is None
    assert open_model_loader(config, gpu, read=lambda *_: FakeEngine(SIGNATURE, Script()), builds=builds).making is None


async def test_on_a_gpu_children_compile_each_network_once_and_the_server_compiles_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated GPU here and in the children. `p` and `q` are one network that was trained twice."""
    caplog.set_level(logging.INFO, "greenlane.engines")
    monkeypatch.setattr(ahead, "Builds", partial(Builds, command=as_simulated.COMMAND))
    with opened(tmp_path) as bench:
        for name, structure in (("p", "one"), ("q", "one"), ("r", "another")):
            (tmp_path / "models" / name / "1").mkdir(parents=True)
            bench.artifact(structure=structure).rename(tmp_path / "models" / name / "1" / "model.plan")
        acme, globex = (TenantConfig(name=name, granules=2, models=("*",), memory=16 << 20) for name in ("acme", "globex"))
        config = Config(
            server=ServerConfig(default_tenant="acme"),
            device=DeviceConfig(copies="engine"),
            models=ModelsConfig(repository=tmp_path / "models"),
            tenants={tenant.name: tenant for tenant in (acme, globex)},
            source="test",
        )
        frontends = {tenant.name: open_local(tenant) for tenant in (acme, globex)}
        controller = Controller(config, frontends, lambda _: None)
        on_state = partial(controller.on_state, tuple(frontends))
        runtime = Runtime(config, bench.cuda.open_cuda(bench.device.index), frontends, on_state, controller.on_lost)
        controller.add(dict.fromkeys(frontends, runtime))
        await controller.start()
        await asyncio.wait_for(controller.loaded(), PATIENCE)
        for frontend in frontends.values():
            assert {each.name for each in frontend.tenant.catalog.served()} == {"p", "q", "r"}
        await controller.close()
        assert bench.gpu.compiled == []
    assert len([text for text in caplog.messages if ": compiled its kernels in " in text]) == 2
