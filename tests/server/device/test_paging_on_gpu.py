"""Budgets and paging over a simulated GPU: the real engines, executors and workers, and the library's own numbers."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from engines import Engine, RuntimeSettings, load_engine
from server.config.schema import Config, DeviceConfig, ModelOptions, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.control.descriptions import TenantMemory
from server.control.fence import FencedTenant
from server.device.runtime import Runtime
from server.errors import Unavailable
from server.link.activity import open_pages
from server.tenants.local_frontend import open_local
from tests.engines.small import model
from tests.lanes import submit
from tests.simulation import Gpu, installed
from tests.simulation.gpu import DRIVER_STEP, MIB
from tests.simulation.plans import make_plan
from tests.simulation.tensorrt import library

COUNT = 20
TEXT = "affine{0} (float[n, 3] x) => (float[n, 3] y) <float by = {{{0}}}> {{ y = Mul(x, by) }}"
CONTEXT = 4096
BUFFERS = 2 * 8 * 3 * 4


def taken(number: int) -> int:
    """What model m{number} takes: the simulation's weights are as large as the model's file."""
    return len(model(TEXT.format(number))) + CONTEXT + BUFFERS


class OnGpu:
    def __init__(self, gpu: Gpu, controller: Controller, runtime: Runtime, frontends: dict[str, object]) -> None:
        self.gpu = gpu
        self.controller = controller
        self.runtime = runtime
        self.frontends = frontends

    async def infer(self, number: int, name: str = "acme") -> None:
        """One inference, whose result is checked."""
        tenant = self.frontends[name].tenant  # type: ignore[attr-defined]
        served, lane = tenant.catalog.find(f"m{number}"), tenant.lane
        slot = lane.take_slot()
        try:
            slot.lay_out(served.signature, [12])
            slot.view[:12] = np.array([1, 2, 3], np.float32).tobytes()
            (extent,) = (await submit(lane, slot, served.key, ((1, 3),))).outputs
            found = np.frombuffer(bytes(slot.view[extent.offset : extent.offset + 12]), np.float32)
            assert found.tolist() == [number, 2 * number, 3 * number]
        finally:
            lane.release(slot)

    async def memory(self, name: str = "acme") -> TenantMemory:
        return next(each for each in await self.controller.memory() if each.tenant == name)


ARENA = 16 << 20
"""Bytes of host memory of each tenant, all of which are populated when they are pinned."""


@asynccontextmanager
async def on_gpu(
    root: Path,
    limit: int,
    paging: bool = True,
    count: int = COUNT,
    gpu: Gpu | None = None,
    copies: str = "engine",
    lends: float = 0.0,
    **options: object,
) -> AsyncIterator[OnGpu]:
    """`options` are acme's, and `lends` is for how long globex does."""
    gpu = gpu or Gpu()
    for number in range(1, count + 1):
        path = root / f"m{number}" / "1" / "model.plan"
        path.parent.mkdir(parents=True)
        path.write_bytes(make_plan(model(TEXT.format(number)), {"x": [(1, 3), (2, 3), (8, 3)]}))
    tenants = [
        TenantConfig(name="acme", granules=2, models=("*",), device_memory=limit, paging=paging, memory=ARENA, **options),  # type: ignore[arg-type]
        TenantConfig(name="globex", granules=2, models=("m1",), memory=ARENA, lend=lends),
    ]
    # Memory is what is measured here, and verifying runs a model more often.
    by_name = {f"m{number}": ModelOptions(verify="off") for number in range(1, count + 1)}
    config = Config(
        server=ServerConfig(default_tenant="acme"),
        device=DeviceConfig(copies=copies),
        models=ModelsConfig(repository=root, options=by_name),
        tenants={tenant.name: tenant for tenant in tenants},
        source="test",
    )
    with installed(gpu, library(gpu)) as cuda:
        frontends = {tenant.name: open_local(tenant) for tenant in tenants}
        controller = Controller(config, frontends, lambda _: None)
        on_state = partial(controller.on_state, tuple(frontends))
        device = cuda.open_cuda(Gpu.index)

        def read(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
            return load_engine(path, device, settings, max_batch)  # Kernels are compiled here: a child has no simulation.

        pages = open_pages(config.tenants)
        for name, page in pages.items():
            frontends[name].tenant.use_page(config.tenants, page)
        runtime = Runtime(config, device, frontends, on_state, controller.on_lost, read, pages=pages)
        controller.add(dict.fromkeys(frontends, runtime))
        await controller.start()
        await controller.loaded()
        yield OnGpu(gpu, controller, runtime, dict(frontends))
        await controller.close()


async def test_twenty_models_in_a_third_of_their_memory(tmp_path: Path) -> None:
    limit = sum(map(taken, range(1, COUNT + 1))) // 3
    async with on_gpu(tmp_path, limit) as site:
        choose, most, contexts = random.Random(3), 0, 0

        async def client() -> None:
            nonlocal most, contexts
            for _ in range(15):
                await site.infer(choose.randint(1, COUNT))
                most, contexts = max(most, (await site.memory()).used), max(contexts, len(site.gpu.executions))

        async def neighbour() -> None:
            for _ in range(30):
                await site.infer(1, "globex")

        await asyncio.gather(client(), client(), neighbour())
        memory = await site.memory()
        assert 0 < most <= limit
        assert contexts <= 1 + COUNT // 3, "one of globex's"
        assert memory.page_ins > 10
        assert {each.name: sum(each.memory.values()) for each in memory.models} == {
            f"m{number}": taken(number) for number in range(1, COUNT + 1)
        }


async def test_a_model_comes_back_after_a_repartition_and_after_its_plan_was_lost(tmp_path: Path) -> None:
    async with on_gpu(tmp_path, 7 * taken(COUNT)) as site:
        await site.controller.repartition({"acme": 3})
        await site.infer(1)
        (tmp_path / "m2" / "1" / "model.plan").rename(tmp_path / "kept")
        with pytest.raises(Unavailable, match="m2 1 is paged out and could not be brought back: its file cannot be read"):
            await site.infer(2)
        (tmp_path / "kept").rename(tmp_path / "m2" / "1" / "model.plan")
        await site.infer(2)
        for number in (3, 1, 4):
            await site.infer(number)


# What the driver takes.

SETS = 4
"""How many sets of shapes a model is warmed up with."""
KERNELS = SETS * 4 * MIB
GRAPHS = SETS * 2 * MIB
BOTH = KERNELS + GRAPHS


def visible() -> Gpu:
    """A GPU whose driver takes memory for each kernel and each graph that shows."""
    gpu = Gpu()
    gpu.kernel_bytes, gpu.graph_bytes, gpu.driver_uses = KERNELS // SETS, GRAPHS // SETS, DRIVER_STEP
    return gpu


async def settled(site: OnGpu) -> None:
    """Wait until the ladder is as it is to be."""
    await site.controller.placements.carried_out()
    await site.runtime.placements.settled()


def by_kind(memory: TenantMemory) -> dict[str, dict[str, int]]:
    return {each.name: {kind: each.memory.get(kind, 0) for kind in ("kernels", "graphs")} for each in memory.models}


async def test_kernels_and_graphs_are_shown_for_each_tenant(tmp_path: Path) -> None:
    async with on_gpu(tmp_path, 100 * MIB, count=2, gpu=visible(), copies="sm") as site:
        whole = {"kernels": KERNELS, "graphs": GRAPHS}
        memory = await site.memory()
        assert by_kind(memory) == {"m1": whole, "m2": whole}
        assert memory.used == taken(1) + taken(2) + 2 * BOTH
        assert by_kind(await site.memory("globex")) == {"m1": whole}, "in full, though it is acme's too"


async def test_a_model_is_refused_for_its_kernels_and_graphs_with_the_arithmetic(tmp_path: Path) -> None:
    async with on_gpu(tmp_path, taken(1) + taken(2) + BOTH + MIB, paging=False, count=2, gpu=visible(), copies="sm") as site:
        memory = await site.memory()
        (served,) = by_kind(memory)
        (refused,) = {"m1", "m2"} - {served}
        (report,) = [entry for entry in site.frontends["acme"].tenant.catalog.index() if entry.name == refused]  # type: ignore[attr-defined]
        assert "kernels 16 MiB" in report.reason
        assert "graphs 8 MiB" in report.reason
        assert f"in use by {served} 1 24 MiB: 23 MiB too many" in report.reason


async def test_models_that_are_paged_out_and_come_back_take_as_much_as_before(tmp_path: Path) -> None:
    async with on_gpu(tmp_path, taken(1) + taken(2) + BOTH + MIB, count=2, gpu=visible(), copies="sm") as site:
        for number in (1, 2, 1, 2):
            await site.infer(number)
            memory = await site.memory()
            assert by_kind(memory) == {name: {"kernels": KERNELS, "graphs": GRAPHS} for name in ("m1", "m2")}
            assert [each.name for each in memory.models if not each.paged] == [f"m{number}"]
            assert memory.used == taken(number) + BOTH
        assert memory.page_ins > 2


async def test_graphs_of_a_ladder_count_and_are_not_made_beyond_the_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with on_gpu(tmp_path / "room", 100 * MIB, count=1, gpu=visible(), copies="sm", ladder=(2, 4)) as site:
        await settled(site)
        assert by_kind(await site.memory()) == {"m1": {"kernels": KERNELS, "graphs": 2 * GRAPHS}}
    async with on_gpu(tmp_path / "none", taken(1) + BOTH + MIB, count=1, gpu=visible(), copies="sm", ladder=(2, 4)) as site:
        await settled(site)
        assert by_kind(await site.memory()) == {"m1": {"kernels": KERNELS, "graphs": GRAPHS}}
        assert "it needs 8 MiB of device memory (graphs 8 MiB), but acme has 24 MiB of 25 MiB in use" in caplog.text


async def test_a_model_is_on_a_wide_and_a_ready_placement_until_it_is_paged_out_or_moves(tmp_path: Path) -> None:
    limit, shares = taken(2) + BOTH + 2 * GRAPHS + MIB, {"burst": 4, "ladder": (2, 3)}
    async with on_gpu(tmp_path, limit, count=2, gpu=visible(), copies="sm", lends=1.0, **shares) as site:
        await settled(site)
        await site.infer(1)
        await settled(site)
        assert by_kind(await site.memory())["m1"] == {"kernels": KERNELS, "graphs": 3 * GRAPHS}
        state = (await site.controller.placements.states())["acme"].wide
        assert (state.granules, state.problems) == ((0, 1, 2, 3), [])
        for _ in range(20):
            await site.infer(1)
        state = (await site.controller.placements.states())["acme"].wide
        assert state.launches + sum(state.home_launches.values()) >= 20
        await site.controller.repartition({"acme": 3, "globex": 1})
        assert next(iter(site.controller.moves)).paused["acme"].ladder
        await site.infer(1)
        await settled(site)
        assert by_kind(await site.memory())["m1"]["graphs"] == 3 * GRAPHS
        await site.infer(2)
        await settled(site)
        assert [each.name for each in (await site.memory()).models if each.paged] == ["m1"]
        assert by_kind(await site.memory())["m2"]["graphs"] == 3 * GRAPHS


async def test_a_fenced_model_is_narrow_beside_others_and_counts_there_until_it_is_paged_out(tmp_path: Path) -> None:
    limit, shares = taken(2) + BOTH + 2 * GRAPHS + MIB, {"memory_bandwidth": 0.4, "burst": 4}
    async with on_gpu(tmp_path, limit, count=2, gpu=visible(), copies="sm", lends=1.0, **shares) as site:
        await settled(site)
        await site.infer(1)
        await settled(site)
        (granule, *_) = site.controller.devices[0].held["acme"].granules
        assert by_kind(await site.memory())["m1"] == {"kernels": KERNELS, "graphs": 3 * GRAPHS}
        assert (await fence(site)).granules == (granule,)
        for shares_now in ({}, {"acme": 3, "globex": 1}):
            await site.controller.repartition(shares_now)
            await settled(site)
            await site.runtime.placements.moved({"acme": {"m1/1": 10**15}})
            await site.infer(1)
            before, admission = (await fence(site)).launches, site.frontends["globex"].tenant.lane.admission  # type: ignore[attr-defined]
            kind = admission.admit()
            for _ in range(20):
                await site.infer(1)
            admission.leave(kind, "", 0)
            assert (await fence(site)).launches == before + 20
        await site.infer(2)
        await settled(site)
        assert [each.name for each in (await site.memory()).models if each.paged] == ["m1"]
        assert by_kind(await site.memory())["m2"]["graphs"] == 3 * GRAPHS
        await site.infer(1)


async def fence(site: OnGpu) -> FencedTenant:
    return (await site.controller.placements.states())["acme"].fence


async def test_a_load_of_what_is_served_has_the_shapes_in_use_ready_before_it_takes_over(tmp_path: Path) -> None:
    async with on_gpu(tmp_path, 100 * MIB, paging=False, count=1) as site:
        tenant = site.frontends["acme"].tenant  # type: ignore[attr-defined]
        served, lane = tenant.catalog.find("m1"), tenant.lane
        slot = lane.take_slot()
        slot.lay_out(served.signature, [36])
        slot.view[:36] = np.arange(9, dtype=np.float32).tobytes()
        await submit(lane, slot, served.key, ((3, 3),))
        lane.release(slot)

        async def ready() -> list[list[list[int]]]:
            (said,) = [each for each in await site.controller.executions() if each.tenant == "acme"]
            found: list[list[list[int]]] = said.description["shapes"]  # type: ignore[assignment]
            return sorted(found)

        learnt = await ready()
        assert [[3, 3]] in learnt
        await site.controller.load("acme", "m1")
        assert tenant.catalog.find("m1").key != served.key
        assert await ready() == learnt
