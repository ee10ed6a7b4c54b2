"""The runtime over fakes: faults at every step of a repartition, loading and unloading, draining."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from engines import DATATYPES, Engine, Signature, TensorSpec
from partitions import DoesNotFit, Misplaced
from server.config import Config, ModelsConfig, ServerConfig, TenantConfig
from server.errors import BadRequest, NotFound, Unavailable
from server.runtime import Runtime
from server.tenancy import Tenant
from server.ticket import Done
from tests.fakes import FakeDevice, FakeEngine, Script

FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))


class Site:
    """A runtime of two tenants on a fake device of eight granules, with every engine that it read."""

    def __init__(self, root: Path) -> None:
        self.script = Script()
        self.engines: list[FakeEngine] = []
        self.device = FakeDevice((1,) * 8, self.script)
        tenants = [TenantConfig(name="acme", granules=2, models=("*",)), TenantConfig(name="globex", granules=2, models=("b",))]
        config = Config(
            server=ServerConfig(default_tenant="acme"),
            models=ModelsConfig(repository=root),
            tenants={tenant.name: tenant for tenant in tenants},
            source="test",
        )
        self.runtime = Runtime(config, self.device, self.read)

    def read(self, path: Path) -> Engine:
        self.engines.append(FakeEngine(SIGNATURE, self.script))
        return self.engines[-1]

    @property
    def granules(self) -> dict[str, tuple[int, ...]]:
        return {name: partition.granules for name, partition in self.runtime.manager.held.items()}

    def tenant(self, name: str) -> Tenant:
        return self.runtime.tenancy.tenants[name]

    async def infer(self, name: str, model: str = "b") -> Done:
        """One inference of a tenant, from slot to completion."""
        tenant = self.tenant(name)
        slot = tenant.lane.admit()
        try:
            slot.place(SIGNATURE, [4])
            slot.view[:4] = np.float32(7).tobytes()
            done = await tenant.lane.submit(slot, tenant.catalog.find(model).key, ((1,),))
            (extent,) = done.outputs
            assert np.frombuffer(slot.view[extent.offset : extent.offset + 4], np.float32) == [7]
        finally:
            tenant.lane.release(slot)
        return done


def add_model(root: Path, name: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.onnx").write_text(name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        add_model(tmp_path, name)
    return tmp_path


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[Site]:
    site = Site(root)
    await site.runtime.start()
    await site.runtime.loaded()
    yield site
    await site.runtime.close()
    assert site.device.closed
    assert all(executor.closed for engine in site.engines for executor in engine.executors)


async def test_every_tenant_gets_its_partition_and_its_models(root: Path) -> None:
    site = Site(root)
    await site.runtime.start()
    assert not site.runtime.ready
    await site.runtime.loaded()
    assert site.runtime.ready
    assert site.granules == {"acme": (0, 1), "globex": (2, 3)}
    assert [s.name for s in site.tenant("acme").catalog.served()] == ["a", "b"]
    assert [s.name for s in site.tenant("globex").catalog.served()] == ["b"]
    assert repr(site.runtime).startswith("<Runtime serving, ")
    await site.runtime.close()


async def test_a_start_that_does_not_fit_says_so(root: Path) -> None:
    site = Site(root)
    site.device.granules = (1, 1, 1)
    with pytest.raises(DoesNotFit, match="acme 2 \\+ globex 2 = 4 granules, but the device has 3"):
        await site.runtime.start()


async def test_the_movers_move_and_the_others_stay(root: Path) -> None:
    async with serving(root) as site:
        stayed = site.runtime.manager.held["globex"]
        move = await site.runtime.repartition({"acme": 5})
        assert move.movers == ("acme",)
        assert site.granules == {"acme": (0, 1, 4, 5, 6), "globex": (2, 3)}
        assert site.runtime.manager.held["globex"] is stayed
        assert [partition.granules for partition in site.device.open] == [(2, 3), (0, 1, 4, 5, 6)]
        await asyncio.gather(site.infer("acme"), site.infer("acme", "a"), site.infer("globex"))


async def test_a_change_waits_for_what_is_in_flight_and_loses_nothing(root: Path) -> None:
    async with serving(root) as site:
        gate = site.script.hold("run")
        asking = [asyncio.ensure_future(site.infer("acme")) for _ in range(5)]
        await asyncio.to_thread(gate.wait_for_arrival)
        changing = asyncio.ensure_future(site.runtime.repartition({"acme": 1}))
        before = site.granules
        while site.script.reached["bind"] < 3 + 2:
            await asyncio.sleep(0)
        assert site.granules == before
        gate.open()
        await changing
        assert all(done.failure is None for done in await asyncio.gather(*asking))
        assert site.granules["acme"] == (0,)


@pytest.mark.parametrize("point", ["carve", "locate", "attach", "bind"])
@pytest.mark.parametrize("nth", [1, 2])
async def test_a_fault_at_any_step_leaves_the_old_plan_in_force(root: Path, point: str, nth: int) -> None:
    async with serving(root) as site:
        before, held = site.granules, site.runtime.manager.held
        site.script.fail(point, nth)
        with pytest.raises(Exception, match=f"told to fail at {point}"):
            await site.runtime.repartition({"acme": 1, "globex": 4})
        assert site.granules == before
        assert site.device.open == list(held.values())
        await asyncio.gather(site.infer("acme"), site.infer("globex"))
        await site.runtime.repartition({"acme": 1, "globex": 4})
        assert site.granules == {"acme": (0,), "globex": (1, 2, 3, 4)}


async def test_partitions_that_ran_on_the_same_units_are_not_put_in_force(root: Path) -> None:
    async with serving(root) as site:
        site.device.lie = lambda partition: frozenset({0})
        with pytest.raises(Misplaced, match="acme and globex both ran on 0"):
            await site.runtime.repartition({"acme": 1, "globex": 4})
        assert site.granules == {"acme": (0, 1), "globex": (2, 3)}


async def test_a_change_that_is_given_up_while_the_movers_pause_lets_them_go_on(root: Path) -> None:
    async with serving(root) as site:
        gate = site.script.hold("run")
        asking = asyncio.ensure_future(site.infer("acme"))
        await asyncio.to_thread(gate.wait_for_arrival)
        site.script.hold("locate").open()
        changing = asyncio.ensure_future(site.runtime.repartition({"acme": 1}))
        while not site.tenant("acme").lane._scheduler.paused:
            await asyncio.sleep(0)
        changing.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await changing
        assert (await asking).failure is None
        assert site.granules["acme"] == (0, 1)
        await site.infer("acme")


@pytest.mark.parametrize(
    ("counts", "text"),
    [({"nobody": 1}, "nobody: there is no such tenant"), ({"acme": 0}, "acme: 0 granules"), ({"acme": True}, "acme: True")],
)
async def test_counts_that_mean_nothing_are_refused(root: Path, counts: dict[str, int], text: str) -> None:
    async with serving(root) as site:
        with pytest.raises(BadRequest, match=text):
            await site.runtime.repartition(counts)


async def test_two_changes_at_once_come_one_after_the_other(root: Path) -> None:
    async with serving(root) as site:
        await asyncio.gather(site.runtime.repartition({"acme": 4}), site.runtime.repartition({"globex": 4}))
        assert site.runtime.manager.statistics().free == 0


async def test_a_model_is_loaded_later_and_unloaded_again(root: Path) -> None:
    async with serving(root) as site:
        add_model(root, "c")
        acme = site.tenant("acme")
        await site.runtime.load(acme, "c")
        await site.infer("acme", "c")
        (executor,) = site.engines[-1].executors
        await site.runtime.unload(acme, "c")
        assert executor.closed
        with pytest.raises(Unavailable, match="unloaded"):
            acme.catalog.find("c")


async def test_unloading_waits_for_the_requests_that_are_in(root: Path) -> None:
    async with serving(root) as site:
        gate = site.script.hold("run")
        asking = [asyncio.ensure_future(site.infer("acme", "a")) for _ in range(3)]
        await asyncio.to_thread(gate.wait_for_arrival)
        unloading = asyncio.ensure_future(site.runtime.unload(site.tenant("acme"), "a"))
        await asyncio.sleep(0)
        assert not unloading.done()
        gate.open()
        await unloading
        assert all(done.failure is None for done in await asyncio.gather(*asking))


async def test_a_reload_serves_the_new_and_keeps_the_counts(root: Path) -> None:
    async with serving(root) as site:
        acme = site.tenant("acme")
        before = acme.catalog.find("a")
        before.statistics.inferences = 5
        (root / "a" / "1" / "model.onnx").write_text("another")
        await site.runtime.load(acme, "a")
        after = acme.catalog.find("a")
        assert after.key != before.key
        assert after.statistics.inferences == 5
        await site.infer("acme", "a")


async def test_a_reload_that_fails_keeps_what_is_served(root: Path) -> None:
    async with serving(root) as site:
        acme = site.tenant("acme")
        site.script.fail("bind")
        with pytest.raises(BadRequest, match="failed to load 'a': told to fail at bind"):
            await site.runtime.load(acme, "a")
        await site.infer("acme", "a")


async def test_a_first_load_that_fails_stands_in_the_index_with_the_reason(root: Path) -> None:
    async with serving(root) as site:
        acme = site.tenant("acme")
        with pytest.raises(BadRequest, match="failed to load 'c': not in the repository"):
            await site.runtime.load(acme, "c")
        assert not acme.catalog.knows("c")
        (root / "c" / "one").mkdir(parents=True)
        with pytest.raises(BadRequest, match="failed to load 'c'"):
            await site.runtime.load(acme, "c")
        assert [(entry.name, entry.state) for entry in acme.catalog.index() if entry.name == "c"] == [("c", "UNAVAILABLE")]


async def test_a_model_of_others_can_be_neither_loaded_nor_unloaded(root: Path) -> None:
    async with serving(root) as site:
        for change in (site.runtime.load, site.runtime.unload):
            with pytest.raises(NotFound):
                await change(site.tenant("globex"), "a")


async def test_a_library_that_goes_wrong_makes_its_model_unavailable_and_no_other(root: Path) -> None:
    site = Site(root)
    site.script.fail("bind", error=RuntimeError("out of order"))
    await site.runtime.start()
    await site.runtime.loaded()
    assert site.runtime.ready
    names = [served.name for tenant in site.runtime.tenancy for served in tenant.catalog.served()]
    assert len(names) == 2
    await site.runtime.close()


async def test_draining_refuses_new_requests_and_finishes_those_that_are_in(root: Path) -> None:
    async with serving(root) as site:
        gate = site.script.hold("run")
        asking = [asyncio.ensure_future(site.infer("acme")) for _ in range(4)]
        await asyncio.to_thread(gate.wait_for_arrival)
        draining = asyncio.ensure_future(site.runtime.drain(0))
        while not site.tenant("acme").lane.refusing:
            await asyncio.sleep(0)
        assert not site.runtime.ready
        with pytest.raises(Unavailable, match="draining"):
            await site.infer("globex")
        assert not draining.done()
        gate.open()
        await draining
        assert all(done.failure is None for done in await asyncio.gather(*asking))


async def test_a_server_that_is_stopped_while_it_loads_loads_no_more(root: Path) -> None:
    site = Site(root)
    gate = site.script.hold("bind")
    await site.runtime.start()
    await asyncio.to_thread(gate.wait_for_arrival)
    closing = asyncio.ensure_future(site.runtime.close())
    await asyncio.sleep(0)
    gate.open()
    await closing
    await site.runtime.drain(0)
    assert site.runtime.state == "closed"
    assert site.device.closed


async def test_the_probe_says_where_everyone_ran(root: Path) -> None:
    async with serving(root) as site:
        assert await site.runtime.probe() == {"acme": {0, 1}, "globex": {2, 3}}
