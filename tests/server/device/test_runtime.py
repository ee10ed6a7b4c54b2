"""The runtime over fakes: faults at every step of a repartition, loading and unloading, draining."""

import asyncio
import gc
import logging
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from engines import DATATYPES, Engine, ModelRefused, RuntimeSettings, Signature, TensorSpec
from engines.base import COUNTS
from engines.build import BuildOptions
from partitions import DeviceLost, DoesNotFit, Misplaced, PartitionError
from partitions.base import Bandwidth
from partitions.strain import Strain
from server.admin.metrics import COUNTED, ServerCollector
from server.config.schema import Config, DeviceConfig, ModelsConfig
from server.config.server import ServerConfig
from server.config.tables import ConfigError
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.device.model_loader import Read
from server.device.runtime import Runtime
from server.errors import BadRequest, Conflict, Failed, NotFound, Unavailable
from server.link.activity import open_pages
from server.link.messages import Done, load_of
from server.observing.observers import Observers
from server.observing.overview import Details
from server.repository.model_config import ModelConfig, from_json
from server.tenants.catalog import IndexEntry, ModelVersion, ServedModel
from server.tenants.frontend import Report, State
from server.tenants.local_frontend import LocalFrontend
from server.tenants.service import Service, Tenant
from server.workers.narrow import NarrowPlacement, NarrowStatistics
from server.workers.pace import CATCH_UP, Pace
from server.workers.ticket_runner import TicketRunner
from server.workers.worker import Worker
from tests.fakes import PATIENCE, FakeDevice, FakeEngine, Gate, Script
from tests.lanes import submit
from tests.memory import MEMORY, open_link
from tests.server.workers.test_narrow import Neighbour
from tests.server.workers.test_worker import wait_until_stopping

T = TypeVar("T")
FP32 = DATATYPES["FP32"]
ALONE = TenantConfig(name="acme", granules=2, models=("*",))
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))


class PlacedFrontend(LocalFrontend):
    """Records the cores that it was given."""

    def __init__(self, config: TenantConfig, before: "PlacedFrontend | None" = None) -> None:
        """`before` is the frontend that this one replaces, with the same memory."""
        descriptors, link = open_link(32, before=before and before.link)
        super().__init__(config, descriptors, link)
        self.placed: list[frozenset[int] | None] = []
        self.refused = ""
        """What the HTTP side cannot be sent, as one model of this name has too much to say."""

    async def publish(self, name: str, served: list[ModelVersion], problems: list[IndexEntry]) -> bool:
        if served and name == self.refused:
            raise OverflowError(f"{name} cannot be sent")
        return await super().publish(name, served, problems)

    def set_cores(self, cores: frozenset[int] | None) -> None:
        super().set_cores(cores)
        self.placed.append(cores)

    async def infer(self, key: str) -> Done:
        """One inference, from slot to completion."""
        lane = self.tenant.lane
        slot = lane.take_slot()
        try:
            slot.lay_out(SIGNATURE, [4])
            slot.view[:4] = np.float32(7).tobytes()
            done = await submit(lane, slot, key, ((1,),))
            (extent,) = done.outputs
            assert np.frombuffer(slot.view[extent.offset : extent.offset + 4], np.float32) == [7]
        finally:
            lane.release(slot)
        return done


class Site:
    """A runtime of some tenants, two by default, on a fake device of eight granules, and the engines that it loaded."""

    def __init__(
        self,
        root: Path,
        acme: dict[str, Any] | None = None,
        tenants: Sequence[TenantConfig] = (),
        models: dict[str, Any] | None = None,
        moves: Bandwidth | None = None,
        **server: Any,
    ) -> None:
        """`acme` are more keys of that tenant; `tenants` are others in place of the two; `models` are more keys of models.

        `moves` is what the device moves.
        """
        self.script = Script()
        self.engines: list[FakeEngine] = []
        self.settings: list[RuntimeSettings] = []
        self.device = FakeDevice((1,) * 8, self.script)
        self.device.moves = moves
        tenants = tenants or [
            TenantConfig(name="acme", granules=2, models=("*",), **(acme or {})),
            TenantConfig(name="globex", granules=2, models=("b",)),
        ]
        config = Config(
            server=ServerConfig(default_tenant="acme", **server),
            device=DeviceConfig(copies="engine"),
            models=ModelsConfig(repository=root, **(models or {})),
            tenants={tenant.name: tenant for tenant in tenants},
            source="test",
        )
        self.frontends = {tenant.name: PlacedFrontend(tenant) for tenant in tenants}
        pages = open_pages(config.tenants)
        for name, page in pages.items():
            self.frontends[name].tenant.use_page(config.tenants, page)
        self.service = Service(config, [frontend.tenant for frontend in self.frontends.values()])
        self.states: list[State] = []
        self.controller = Controller(config, self.frontends, self.states.append)
        on_state = partial(self.controller.on_state, tuple(self.frontends))
        on_lost, on_loading = self.controller.on_lost, self.controller.on_loading
        self.stuck: list[str] = []
        read: Read = lambda *given: self.read(*given)  # noqa: E731 - Which tests replace.
        ways = on_state, on_lost, read, on_loading, pages, self.stuck.append
        self.runtime = Runtime(config, self.device, self.frontends, *ways)
        self.controller.add(dict.fromkeys(self.frontends, self.runtime))

    def read(self, path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        self.settings.append(settings)
        self.engines.append(FakeEngine(SIGNATURE, self.script))
        return self.engines[-1]

    @property
    def granules(self) -> dict[str, tuple[int, ...]]:
        return {name: partition.granules for name, partition in self.runtime.manager.held.items()}

    async def settled(self) -> None:
        """Wait until what the controller planned beside homes is made, or cannot be."""
        await self.controller.placements.carried_out()
        await self.runtime.placements.settled()

    def pins(self) -> list[tuple[int, int, bool]]:
        """The address and size of all memory that was ever pinned, and whether it was unpinned."""
        return [(pin.address, pin.nbytes, pin.closed) for pin in self.device.pins]

    def tenant(self, name: str) -> Tenant:
        return self.service.tenants[name]

    async def infer(self, name: str, model: str = "b") -> Done:
        """One inference of a tenant, from slot to completion."""
        return await self.frontends[name].infer(self.tenant(name).catalog.find(model).key)

    async def asked(self, count: int, name: str = "acme", model: str = "b") -> "list[asyncio.Task[Done]]":
        """Start so many inferences; the first has been submitted."""
        asking = [asyncio.ensure_future(self.infer(name, model)) for _ in range(count)]
        await asyncio.sleep(0)
        return asking

    async def held(self, count: int) -> "tuple[Gate, list[asyncio.Task[Done]]]":
        """Start so many inferences, of which those that run do not end before the gate is opened; one has been begun."""
        gate = self.script.hold("run")
        asking = await self.asked(count)
        await asyncio.to_thread(gate.wait_for_arrival)
        return gate, asking

    async def begun(self, point: str, what: Coroutine[Any, Any, T]) -> "tuple[Gate, asyncio.Task[T]]":
        """Start this, and wait until it is at this point of the script, where the gate holds it."""
        gate, task = self.script.hold(point), asyncio.ensure_future(what)
        await asyncio.to_thread(gate.wait_for_arrival)
        return gate, task


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("worker ")}


async def freeable(site: Site) -> bool:
    """Whether nothing holds engines of acme's `a` but executors; it is unloaded for that."""
    await site.controller.unload("acme", "a")
    idle = [engine for engine in site.engines if all(executor.closed for executor in engine.executors)]
    for engine in idle:
        site.runtime.model_loader.free(engine, ())
    return bool(idle) and all(engine.closed for engine in idle)


def add_model(root: Path, name: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.onnx").write_text(name)


@asynccontextmanager
async def serving(root: Path, **options: Any) -> AsyncIterator[Site]:
    """A site that serves; `options` are those of `Site`."""
    site = Site(root, **options)
    await site.controller.start()
    await site.controller.loaded()
    yield site
    await site.controller.close()
    assert site.device.closed
    assert all(executor.closed for engine in site.engines for executor in engine.executors)
    assert all(engine.forgotten == 0 for engine in site.engines)


async def test_a_model_that_cannot_be_published_keeps_no_other_one_from_being_served(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(root)
    site.frontends["acme"].refused = "a"
    await site.controller.start()
    await site.controller.loaded()
    assert site.controller.ready
    assert [s.name for s in site.tenant("acme").catalog.served()] == ["b"]
    assert [s.name for s in site.tenant("globex").catalog.served()] == ["b"]
    (problem,) = [each for each in site.tenant("acme").catalog.index() if each.name == "a"]
    assert (problem.state, problem.reason) == ("UNAVAILABLE", "a cannot be sent")
    assert "model a of acme could not be published" in caplog.text
    await site.infer("acme", "b")
    await site.controller.close()
    assert all(executor.closed for engine in site.engines for executor in engine.executors)


async def test_a_library_that_times_kernels_builds_nothing_once_the_device_serves(root: Path) -> None:
    """What it would build with is not installed here; what a real child says first is that it may not."""
    request = root / "a" / "1" / "model.onnx", BuildOptions(), "tensorrt", "11.4"
    async with serving(root) as site:
        with pytest.raises(ModelRefused, match=r"model\.onnx: TensorRT builds it by timing kernels on the GPU"):
            await asyncio.to_thread(site.runtime.builds.plan, *request)


async def test_a_worker_keeps_nothing_of_models_that_were_loaded_again(site: Site) -> None:
    for _ in range(3):
        await site.infer("acme", "a")
        await site.controller.load("acme", "a")
    await site.infer("acme", "a")
    assert len(site.runtime.workers["acme"].metering._counters) == 1


async def test_executions_describe_the_current_executors(site: Site) -> None:
    (engine,) = [engine for engine in site.engines if len(engine.executors) == 2]
    engine.description = {"graphs": "captured"}
    graphs = [(each.tenant, each.name, each.version, each.description["graphs"]) for each in await site.controller.executions()]
    assert sorted(graphs) == [("acme", "a", "1", "none"), ("acme", "b", "1", "captured"), ("globex", "b", "1", "captured")]
    await site.controller.repartition({"acme": 5})
    engine.description = {"graphs": "native"}
    assert [each.description["graphs"] for each in await site.controller.executions() if each.name == "b"] == ["native"] * 2
    await site.controller.unload("acme", "b")
    assert [each.tenant for each in await site.controller.executions()] == ["acme", "globex"]


async def families_of(site: Site, whose: str = "") -> dict[str, Any]:
    """The metrics by name; with `whose`, those of this tenant's executors alone."""
    executions = [each for each in await site.controller.executions() if whose in ("", each.tenant)]
    collector = ServerCollector(site.controller, Observers(site.controller), [], Details(executions))
    return {each.name: each for each in collector.collect()}


async def test_metrics_have_the_graph_mode_and_the_counts_of_executors(site: Site) -> None:
    for engine in site.engines:
        counts = {"captures": 3, "staged": 0, "of a newer kind": 1}
        engine.description = {"graphs": "captured", "why": "x", "counts": counts}
    families = await families_of(site)
    graphs, captures = families["greenlane_model_graphs"], families["greenlane_graph_captures"]
    assert {tuple(sample.labels.values()) for sample in graphs.samples} == {
        (model, "1", tenant, "captured") for model, tenant in (("a", "acme"), ("b", "acme"), ("b", "globex"))
    }
    assert captures.type == "counter"
    assert [(sample.name, sample.value) for sample in captures.samples] == [("greenlane_graph_captures_total", 3)] * 3
    assert [sample.value for sample in families["greenlane_staged_inferences"].samples] == [0] * 3
    assert families["greenlane_padded_inferences"].samples == [], "it is not known to occur"


KERNELS = {"kernels": {"found": 300, "saved": 400, "refused": True}}
SHAPES = {"right": 5, "others": [{"verdict": "wrong"}, {"verdict": "unverified"}, {"verdict": "wrong"}]}


@pytest.mark.parametrize(
    ("description", "name", "found"),
    [
        (KERNELS, "kernel_cache_bytes", {"found": 300, "saved": 400}),
        (KERNELS, "kernel_cache_refused", {"acme": 1}),
        ({"driver_memory": {"graphs": 8, "unmeasured": 3}}, "model_memory_unmeasured", {"acme": 3}),
        ({"missing_sms": 40}, "model_missing_sms", {"acme": 40}),
        ({"verified": SHAPES}, "model_shapes", {"right": 5, "wrong": 2, "unverified": 1}),
    ],
)
async def test_metrics_have_what_an_executor_says_of_itself(
    site: Site, description: dict[str, Any], name: str, found: dict[str, int]
) -> None:
    """By the last label, which is the tenant's where there is no other."""
    one, other = site.engines
    one.description, other.description = {"graphs": "none", **description}, {"graphs": "none"}
    samples = (await families_of(site, "acme"))[f"greenlane_{name}"].samples
    assert {tuple(sample.labels.values())[:3] for sample in samples} <= {("a", "1", "acme"), ("b", "1", "acme")}
    assert {[*sample.labels.values()][-1]: sample.value for sample in samples} == found


def test_metrics_have_every_count_of_executors() -> None:
    assert tuple(COUNTED) == COUNTS


async def test_a_start_with_more_granules_than_the_device_has_is_refused(root: Path) -> None:
    site = Site(root)
    site.device.granules = (1, 1, 1)
    with pytest.raises(ConfigError, match=r"acme.granules 2 \+ tenants.globex.granules 2 = 4 units, but the device has 3"):
        await site.controller.start()


async def test_a_repartition_moves_only_tenants_whose_share_changes(site: Site) -> None:
    stayed = site.runtime.manager.held["globex"]
    moved = await site.controller.repartition({"acme": 5})
    assert moved == ("acme",)
    assert site.granules == {"acme": (0, 1, 4, 5, 6), "globex": (2, 3)}
    assert site.runtime.manager.held["globex"] is stayed
    assert [partition.granules for partition in site.device.open] == [(2, 3), (0, 1, 4, 5, 6)]
    await asyncio.gather(site.infer("acme"), site.infer("acme", "a"), site.infer("globex"))


async def test_a_repartition_is_logged_with_every_tenants_granules(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "greenlane")
    async with serving(root) as site:
        await site.controller.repartition({"acme": 5, "globex": 1})
    (line,) = (message for message in caplog.messages if message.startswith("repartitioned: "))
    assert re.fullmatch(r"repartitioned: acme has 5 \(granules \d(, \d){4}\), globex has 1 \(granule \d\); .*", line)


async def test_a_repartition_waits_for_requests_in_flight_and_loses_none(site: Site) -> None:
    gate, asking = await site.held(5)
    changing = asyncio.ensure_future(site.controller.repartition({"acme": 1}))
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
async def test_a_repartition_that_fails_at_any_step_keeps_the_old_plan(site: Site, point: str, nth: int) -> None:
    before, held = site.granules, site.runtime.manager.held
    site.script.fail(point, nth)
    with pytest.raises(Exception, match=f"scripted to fail at {point}"):
        await site.controller.repartition({"acme": 1, "globex": 4})
    assert site.granules == before
    assert site.device.open == list(held.values())
    await asyncio.gather(site.infer("acme"), site.infer("globex"))
    await site.controller.repartition({"acme": 1, "globex": 4})
    assert site.granules == {"acme": (0,), "globex": (2, 3, 6, 7)}


async def test_a_repartition_onto_overlapping_units_is_refused_as_misplaced(site: Site) -> None:
    site.device.lie = lambda partition: frozenset({0})
    with pytest.raises(Misplaced, match="acme and globex both ran on 0"):
        await site.controller.repartition({"acme": 1, "globex": 4})
    assert site.granules == {"acme": (0, 1), "globex": (2, 3)}


async def test_a_repartition_cancelled_while_workers_halt_resumes_them(site: Site) -> None:
    gate, asking = await site.held(5)
    changing = asyncio.ensure_future(site.controller.repartition({"acme": 1}))
    await asyncio.to_thread(wait_until_stopping, site.runtime.workers["acme"])
    threads = worker_threads()
    changing.cancel()
    for _ in range(9):
        await asyncio.sleep(0)
    assert worker_threads() <= threads, "another serves before this one has stopped"
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await changing
    assert all(done.failure is None for done in await asyncio.gather(*asking))
    assert site.granules["acme"] == (0, 1)
    assert site.device.open == list(site.runtime.manager.held.values())
    await site.infer("acme")
    await site.controller.repartition({"acme": 1})
    await site.infer("acme")


async def test_a_repartition_that_fails_on_commit_keeps_the_old_plan_and_answers_all(site: Site) -> None:
    before, running, locating = site.granules, site.script.hold("run"), site.script.hold("locate")
    asking = [*await site.asked(5), *await site.asked(5, "globex")]
    changing = asyncio.ensure_future(site.controller.repartition({"acme": 1, "globex": 3}))
    await asyncio.to_thread(locating.wait_for_arrival)
    another = site.runtime.manager.plan({"initech": 1})  # So that the partitions changed when the plan is committed.
    site.runtime.manager.commit(another, site.runtime.manager.carve(another))
    locating.open()
    await asyncio.to_thread(wait_until_stopping, site.runtime.workers["acme"])
    await asyncio.to_thread(wait_until_stopping, site.runtime.workers["globex"])
    running.open()
    with pytest.raises(RuntimeError, match="the partitions changed since"):
        await changing
    assert site.granules == {**before, "initech": (4,)}
    assert all(done.failure is None for done in await asyncio.gather(*asking))
    assert len(site.device.open) == 3


async def test_waiting_requests_are_answered_from_the_new_partition(site: Site) -> None:
    gate, asking = await site.held(9)
    changing = asyncio.ensure_future(site.controller.repartition({"acme": 5}))
    await asyncio.to_thread(wait_until_stopping, site.runtime.workers["acme"])
    asking += await site.asked(9)
    gate.open()
    await changing
    assert all(done.failure is None for done in await asyncio.gather(*asking))
    old, new = (partition for partition in site.device.partitions if partition.granules[0] == 0)
    assert old.closed
    assert await asyncio.to_thread(site.runtime.workers["acme"].wait_until_started)
    workers = {thread.name for thread in new.threads if thread.name.startswith("worker")}
    assert workers == {f"worker {new!r}", f"worker {new!r}, second"}
    assert 9 <= new.stream.ran <= 18


async def test_every_frontend_gets_the_cores_of_its_new_partition(root: Path) -> None:
    site = Site(root)
    site.device.on_host_cores = True
    await site.controller.start()
    await site.controller.loaded()
    await site.controller.repartition({"acme": 1})
    await site.controller.close()
    assert site.frontends["acme"].placed == [frozenset({0, 1}), frozenset({0})]
    assert site.frontends["globex"].placed == [frozenset({2, 3})]


async def test_an_abandoned_request_is_cancelled_on_the_device(site: Site) -> None:
    _, (asking,) = await site.held(1)
    asking.cancel()
    await site.frontends["acme"].drained()
    assert asking.cancelled()
    assert site.engines[-1].computed == []


async def test_a_tenants_memory_is_pinned_at_the_start_and_none_while_it_is_served(site: Site) -> None:
    memories = [frontend.link.arena.memory for frontend in site.frontends.values()]
    expected = [(memory.address, memory.nbytes, False) for memory in memories]
    assert site.pins() == expected
    for nbytes in (10, 1 << 20, 30 << 20, 10):
        lane = site.tenant("acme").lane
        slot = lane.take_slot()
        slot.reserve(nbytes)
        slot.lay_out(SIGNATURE, [4])
        await submit(lane, slot, site.tenant("acme").catalog.find("b").key, ((1,),))
        lane.release(slot)
        await site.infer("globex")
    await site.controller.repartition({"acme": 4})
    await site.infer("acme")
    assert site.pins() == expected


async def test_memory_that_cannot_be_pinned_is_a_configuration_error(root: Path) -> None:
    site = Site(root)
    refusal = "pinning: CUDA_ERROR_OUT_OF_MEMORY"
    site.script.fail("pin", nth=2, error=PartitionError(refusal))
    text = rf"^test: tenants.globex.memory: {MEMORY} bytes of memory cannot be page-locked for the device; lower it: {refusal}$"
    with pytest.raises(ConfigError, match=text):
        await site.controller.start()
    await site.controller.close()
    assert [pin.closed for pin in site.device.pins] == [True]


async def test_replace_link_serves_the_new_link_once_requests_of_the_old_one_ended(site: Site) -> None:
    old, key = site.frontends["acme"], site.tenant("acme").catalog.find("b").key
    gate = site.script.hold("run")
    begun = await site.asked(1)
    await asyncio.to_thread(gate.wait_for_arrival)
    begun += await site.asked(5)  # The device side has read one of these, and may have enqueued it.
    pins = site.pins()
    new = site.frontends["acme"] = PlacedFrontend(site.controller.config.tenants["acme"], old)
    new.open(site.runtime)
    reopening = asyncio.ensure_future(site.runtime.replace_link("acme"))
    await asyncio.to_thread(wait_until_stopping, site.runtime.workers["acme"])
    gate.open()
    await reopening
    waiting = [asyncio.ensure_future(new.infer(key)) for _ in range(3)]
    assert all(done.failure is None for done in await asyncio.gather(*waiting))
    assert site.pins() == pins, "the memory is the same"
    with pytest.raises(Failed, match="cancelled"):  # The frontend that wanted it is gone.
        await begun[0]
    for asking in begun[1:]:  # Those that the device side had read fail, the others get no answer.
        asking.cancel()
    await asyncio.gather(*begun[1:], return_exceptions=True)
    old.close()


async def test_a_replaced_link_survives_a_repartition_and_is_unpinned_on_close(root: Path) -> None:
    async with serving(root) as site:
        key = site.tenant("acme").catalog.find("b").key
        await site.infer("acme")
        old = site.frontends["acme"]
        new = site.frontends["acme"] = PlacedFrontend(site.controller.config.tenants["acme"], old)
        new.open(site.runtime)
        await site.runtime.replace_link("acme")
        old.close()
        await new.infer(key)
        await site.controller.repartition({"acme": 4})
        await new.infer(key)
        assert [pin.closed for pin in site.device.pins] == [False, False]
    assert [pin.closed for pin in site.device.pins] == [True, True]


async def test_a_lost_device_fails_all_requests_and_sets_device_gone(root: Path) -> None:
    async with serving(root) as site:
        gate = site.script.hold("run")
        asking = [*await site.asked(6), *await site.asked(6, "globex")]
        await asyncio.to_thread(gate.wait_for_arrival, 2)
        for nth in range(-1, 12):
            site.script.fail("run", nth, DeviceLost("CUDA error 700: illegal address"))
            site.script.fail("enqueue", nth, DeviceLost("CUDA error 700: illegal address"))
        assert not site.controller.device_gone.is_set()
        gate.open()
        await asyncio.wait_for(site.controller.device_gone.wait(), 30)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        errors = {(type(answer), str(answer)) for answer in answers if isinstance(answer, Exception)}
        assert errors == {(Unavailable, "the device is lost: CUDA error 700: illegal address")}
        assert sum(isinstance(answer, Exception) for answer in answers) >= 10
        assert (site.controller.state, site.states[-1], site.controller.ready) == ("lost", "lost", False)
        for name in ("acme", "globex"):
            with pytest.raises(Unavailable, match="the device is lost: CUDA error 700"):
                await site.infer(name)
        await site.controller.drain(0)
        assert site.states.count("lost") == 1, "the state becomes lost once, and no other after that"
    assert site.states == ["serving", "lost", "closed"]


async def test_a_device_lost_while_models_load_is_never_ready(root: Path) -> None:
    site = Site(root)
    gate = site.script.hold("bind")
    await site.controller.start()
    await asyncio.to_thread(gate.wait_for_arrival)
    site.runtime.on_device_lost(DeviceLost("gone"))
    await site.controller.device_gone.wait()
    gate.open()
    await site.controller.loaded()
    assert site.controller.state == "lost"
    await site.controller.close()


async def test_a_start_on_a_gpu_says_whose_kernels_it_compiles(root: Path) -> None:
    site = Site(root, tenants=[ALONE])
    said: list[str] = []
    site.controller.on_progress = said.append
    gate = site.script.hold("bind")
    await site.controller.start()
    await asyncio.to_thread(gate.wait_for_arrival)
    doing = "0 of 2 models are ready; compiling or loading the kernels of"
    assert (site.controller.progress, said[-1]) == (f"{doing} a (acme)", f"{doing} 1")
    gate.open()
    await site.controller.loaded()
    assert (site.controller.progress, said[-1]) == ("", "2 of 2 models are ready")
    await site.controller.close()


async def test_a_device_lost_by_a_load_is_lost_for_all(site: Site) -> None:
    """No other model can be bound there, so that its tenants would be refused for ever, and nothing would be replaced."""
    site.script.fail("bind", error=DeviceLost("CUDA error 700"))
    with pytest.raises(BadRequest, match="CUDA error 700"):
        await site.controller.load("acme", "a")
    await asyncio.wait_for(site.controller.device_gone.wait(), 30)
    assert site.controller.state == "lost"


async def test_reports_have_each_tenants_models_lane_slots_and_index(site: Site) -> None:
    gate, asking = await site.held(5)
    (acme, one), (globex, other) = await site.controller.reports()
    assert (acme.name, globex.name) == ("acme", "globex")
    assert [(item.name, item.version, item.pending) for item in one.served] == [("a", "1", 0), ("b", "1", 3)]
    assert (one.lane.waiting, one.lane.in_flight, one.slots.used) == (3, 2, 5)
    assert [(entry.name, entry.state) for entry in other.index] == [("b", "READY")]
    assert (other.lane.waiting, other.slots.slots) == (0, 0)
    gate.open()
    await asyncio.gather(*asking)


async def test_close_during_a_repartition_closes_everything(root: Path) -> None:
    async with serving(root) as site:
        gate, changing = await site.begun("locate", site.controller.repartition({"acme": 1}))
        closing = asyncio.ensure_future(site.controller.close())
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(closing, changing)
    assert site.device.open == []


async def test_a_reload_serves_the_new_model_and_keeps_its_statistics(site: Site, root: Path) -> None:
    acme = site.tenant("acme")
    before = acme.catalog.find("a")
    before.statistics.failed(1, "OTHER")
    (root / "a" / "1" / "model.onnx").write_text("another")
    await site.controller.load("acme", "a")
    after = acme.catalog.find("a")
    assert after.key != before.key
    assert after.statistics is before.statistics
    await site.infer("acme", "a")


def add_version(root: Path, name: str, version: str) -> None:
    """Beside the others, which are all to be served."""
    (root / name / version).mkdir()
    (root / name / version / "model.onnx").write_text(version)
    (root / name / "config.pbtxt").write_text("version_policy { all {} }")


@pytest.mark.parametrize("nth", [1, 2])
async def test_a_reload_with_one_failing_version_changes_nothing(root: Path, nth: int) -> None:
    add_version(root, "a", "2")
    async with serving(root) as site:
        before = site.tenant("acme").catalog.served()
        bound = sum(len(engine.executors) for engine in site.engines)
        site.script.fail("bind", nth)
        with pytest.raises(BadRequest, match=f"failed to load 'a': version {nth}: scripted to fail at bind"):
            await site.controller.load("acme", "a")
        assert site.tenant("acme").catalog.served() == before
        assert (before[0].version, len(before)) == ("2", 3)
        await site.infer("acme", "a")
        made = [executor for engine in site.engines for executor in engine.executors]
        assert len(made) == bound + nth - 1
        assert sum(not executor.closed for executor in made) == bound, "what was bound in vain is closed"
        site.runtime.model_loader.release_unused([], quiet=True)
        await site.controller.load("acme", "a")
        await site.infer("acme", "a")


async def test_a_reload_that_another_device_cannot_serve_changes_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    before, asked = site.tenant("acme").catalog.served(), []

    async def agree(name: str, served: Sequence[ServedModel]) -> str:
        asked.append((name, [each.version for each in served]))
        return "device 1: no memory"

    monkeypatch.setattr(site.frontends["acme"], "agree", agree)
    bound = sum(len(engine.executors) for engine in site.engines)
    with pytest.raises(BadRequest, match="failed to load 'a': device 1: no memory"):
        await site.controller.load("acme", "a")
    assert asked == [("a", ["1"])]
    assert site.tenant("acme").catalog.served() == before
    made = [executor for engine in site.engines for executor in engine.executors]
    assert (len(made), sum(not executor.closed for executor in made)) == (bound + 1, bound), "what was bound is closed"
    await site.infer("acme", "a")


async def test_a_version_without_a_model_fails_the_load_before_others_are_bound(site: Site, root: Path) -> None:
    add_version(root, "a", "2")
    (root / "a" / "2" / "model.onnx").unlink()
    bound = sum(len(engine.executors) for engine in site.engines)
    with pytest.raises(BadRequest, match=r"failed to load 'a': version 2: no model\.onnx or model\.plan in a/2"):
        await site.controller.load("acme", "a")
    assert [each.version for each in site.tenant("acme").catalog.served() if each.name == "a"] == ["1"]
    assert sum(len(engine.executors) for engine in site.engines) == bound
    assert await freeable(site), "also what was read for it"


async def test_a_version_that_does_not_fit_the_tenants_memory_fails_the_load(root: Path) -> None:
    big = Signature((TensorSpec("x", FP32, (1 << 30,)),), ())
    async with serving(root) as site:
        read = site.read

        def mixed(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
            return FakeEngine(big, site.script) if path.parent.name == "2" else read(path, max_batch, settings)

        site.read = mixed  # type: ignore[method-assign]
        add_version(root, "a", "2")
        with pytest.raises(BadRequest, match="failed to load 'a': version 2: its smallest request takes"):
            await site.controller.load("acme", "a")
        assert [each.version for each in site.tenant("acme").catalog.served() if each.name == "a"] == ["1"]
        await site.infer("acme", "a")


async def test_a_first_load_with_one_failing_version_serves_none_and_gives_the_reason(site: Site, root: Path) -> None:
    add_model(root, "c")
    add_version(root, "c", "2")
    site.script.fail("bind", 2)
    with pytest.raises(BadRequest, match="version 2: scripted to fail at bind"):
        await site.controller.load("acme", "c")
    with pytest.raises(Unavailable, match="scripted to fail at bind"):
        site.tenant("acme").catalog.find("c", "1")


async def test_at_startup_working_versions_are_served_and_broken_ones_are_in_the_index(root: Path) -> None:
    add_version(root, "b", "2")
    (root / "b" / "2" / "model.onnx").unlink()
    async with serving(root) as site:
        index = site.tenant("globex").catalog.index()
        assert [(entry.version, entry.state) for entry in index] == [("1", "READY"), ("2", "UNAVAILABLE")]


async def test_a_failed_reload_is_logged_as_such(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.script.fail("bind")
    with pytest.raises(BadRequest):
        await site.controller.load("acme", "a")
    lines = [record.getMessage() for record in caplog.records if record.name == "greenlane.models"]
    text = "model a 1 could not be loaded, the versions loaded before stay: scripted to fail at bind"
    assert [line for line in lines if line.startswith("model a")] == [text]


async def test_a_move_under_way_is_neither_moved_nor_refused(site: Site) -> None:
    gate, moving = await site.begun("bind", site.controller.repartition({"acme": 3}))
    (record,) = site.controller.moves
    assert (record.outcome, record.error) == ("moving", "")
    gate.open()
    await moving
    assert record.outcome == "moved"
    with pytest.raises(DoesNotFit):
        await site.controller.repartition({"acme": 99})
    assert next(iter(site.controller.moves)).outcome == "refused"


async def test_the_line_at_the_start_says_what_is_served_though_a_process_answers_late(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(root)
    frontend, ages = site.frontends["acme"], iter([1.0, 2.0])
    report = frontend.report

    async def late() -> Report:
        age = next(ages, 0.0)
        return replace(await report(), served=(), age=age) if age else await report()

    frontend.report = late  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, "greenlane.control"):
        await site.controller.start()
        await site.controller.loaded()
        while not (lines := [each for each in caplog.messages if "is served" in each]):
            await asyncio.sleep(0)
    assert lines == ["ready: acme is served a 1 and b 1; globex is served b 1"]
    await site.controller.close()


async def test_with_strict_readiness_the_server_is_ready_only_without_failed_models(root: Path) -> None:
    (root / "a" / "config.pbtxt").write_text("max_batch_size: -1")
    async with serving(root, strict_readiness=True) as site:
        assert (site.controller.ready, site.states) == (False, ["incomplete"])
        (root / "a" / "config.pbtxt").write_text("")
        await site.controller.load("acme", "a")
        assert site.controller.ready
        site.script.fail("bind")
        with pytest.raises(BadRequest):
            await site.controller.load("acme", "a")
        assert site.controller.ready, "what was served before goes on"
        (root / "c" / "1").mkdir(parents=True)
        with pytest.raises(BadRequest):
            await site.controller.load("acme", "c")
        assert not site.controller.ready
        for name in ("c", "a"):
            await site.controller.unload("acme", name)
        assert site.states == ["incomplete", "serving", "incomplete", "serving"], "what was asked to go is not missed"
        await site.controller.drain(0)
        with pytest.raises(BadRequest):
            await site.controller.load("acme", "c")
        assert site.controller.state == "draining"


async def test_without_strict_readiness_the_server_is_ready_once_every_model_was_tried(root: Path) -> None:
    (root / "a" / "config.pbtxt").write_text("max_batch_size: -1")
    async with serving(root) as site:
        assert (site.controller.ready, site.states) == (True, ["serving"])
        (root / "c" / "1").mkdir(parents=True)
        with pytest.raises(BadRequest):
            await site.controller.load("acme", "c")
        assert (site.controller.ready, site.states) == (True, ["serving"])


def held_builds(site: Site) -> tuple[threading.Event, threading.Event]:
    """Events around every engine that is read from now on: the first is set when it begins, and it waits for the second."""
    building, built, read = threading.Event(), threading.Event(), site.read

    def build(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        building.set()
        assert built.wait(PATIENCE)
        return read(path, max_batch, settings)

    site.read = build  # type: ignore[method-assign]
    return building, built


@asynccontextmanager
async def changes_behind_a_load(site: Site, root: Path) -> AsyncIterator[list["asyncio.Future[None]"]]:
    """A load and an unload of `b` that wait for a load of `a`, which ends with the block."""
    building, built = held_builds(site)
    (root / "a" / "1" / "model.onnx").write_text("another")
    first = asyncio.ensure_future(site.controller.load("acme", "a"))
    assert await asyncio.to_thread(building.wait, PATIENCE)
    waiting = [asyncio.ensure_future(change("acme", "b")) for change in (site.controller.load, site.controller.unload)]
    await asyncio.sleep(0)
    try:
        yield waiting
    finally:
        built.set()
        await first


async def test_a_load_cancelled_while_it_waits_loads_nothing(site: Site, root: Path) -> None:
    async with changes_behind_a_load(site, root) as waiting:
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        before, engines = site.tenant("acme").catalog.find("b"), len(site.engines)
    assert len(site.engines) == engines + 1
    assert site.tenant("acme").catalog.find("b") is before


async def test_a_load_that_waits_when_the_server_stops_is_refused(site: Site, root: Path) -> None:
    async with changes_behind_a_load(site, root) as waiting:
        closing = asyncio.ensure_future(site.controller.close())
        await asyncio.sleep(0)
    for each in waiting:
        with pytest.raises(Unavailable, match="the server is stopping"):
            await each
    await closing


async def test_the_config_parameter_of_a_load_is_parsed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because it is parsed in the device's process, whose GIL all tenants share."""
    read: list[str] = []

    def remember(text: str) -> ModelConfig:
        read.append(text)
        return from_json(text)

    monkeypatch.setattr("server.repository.model_repository.from_json", remember)
    async with serving(root) as site:
        await site.controller.load("acme", "a", '{"max_batch_size": 0}')
        assert read == ['{"max_batch_size": 0}']


async def test_a_load_cancelled_while_it_runs_completes_and_holds_no_engine(site: Site, root: Path) -> None:
    building, built = held_builds(site)
    before = site.tenant("acme").catalog.find("a")
    (root / "a" / "1" / "model.onnx").write_text("another")
    loading = asyncio.ensure_future(site.controller.load("acme", "a"))
    assert await asyncio.to_thread(building.wait, PATIENCE)
    loading.cancel()
    await asyncio.wait([loading])
    assert loading.cancelled()
    after = asyncio.ensure_future(site.controller.load("acme", "b"))
    await asyncio.sleep(0)
    assert site.tenant("acme").catalog.find("a") is before
    built.set()
    await after
    assert site.tenant("acme").catalog.find("a").key != before.key, "it came before the load that was asked for later"
    assert await freeable(site)


async def test_a_failed_first_load_is_in_the_index_with_the_reason(site: Site, root: Path) -> None:
    acme = site.tenant("acme")
    with pytest.raises(BadRequest, match=r"failed to load 'c': not in the repository$"):
        await site.controller.load("acme", "c")
    assert not [entry for entry in acme.catalog.index() if entry.name == "c"]
    (root / "c" / "one").mkdir(parents=True)
    with pytest.raises(BadRequest, match="failed to load 'c'"):
        await site.controller.load("acme", "c")
    assert [(entry.name, entry.state) for entry in acme.catalog.index() if entry.name == "c"] == [("c", "UNAVAILABLE")]


async def test_a_model_outside_the_tenants_list_cannot_be_loaded_or_unloaded(site: Site) -> None:
    for change in (site.controller.load, site.controller.unload):
        with pytest.raises(NotFound):
            await change("globex", "a")


async def test_an_unexpected_error_of_a_library_makes_only_its_model_unavailable(root: Path) -> None:
    site = Site(root)
    site.script.fail("bind", error=RuntimeError("out of order"))
    await site.controller.start()
    await site.controller.loaded()
    assert site.controller.ready
    names = [served.name for tenant in site.service.tenants.values() for served in tenant.catalog.served()]
    assert len(names) == 2
    await site.controller.close()


async def test_draining_refuses_new_requests_and_finishes_accepted_ones(site: Site) -> None:
    gate, asking = await site.held(4)
    draining = asyncio.ensure_future(site.controller.drain(0))
    while not site.tenant("acme").lane.admission.refusing:
        await asyncio.sleep(0)
    assert not site.controller.ready
    with pytest.raises(Unavailable, match="draining"):
        await site.infer("globex")
    assert not draining.done()
    gate.open()
    await draining
    assert all(done.failure is None for done in await asyncio.gather(*asking))


async def test_a_drain_that_follows_another_has_no_grace_of_its_own(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """As a signal after POST /admin/drain: new requests are refused already."""
    caplog.set_level("INFO", "greenlane.control")
    await site.controller.drain(0)
    async with asyncio.timeout(60):
        await site.controller.drain(3600)
    assert [line for line in caplog.messages if "new requests are refused in" in line] == [
        "draining: not ready, new requests are refused in 0 s"
    ]


async def test_close_during_startup_loads_no_more_models(root: Path) -> None:
    site = Site(root)
    gate = site.script.hold("bind")
    await site.controller.start()
    await asyncio.to_thread(gate.wait_for_arrival)
    closing = asyncio.ensure_future(site.controller.close())
    await asyncio.sleep(0)
    gate.open()
    await closing
    await site.controller.drain(0)
    assert site.controller.state == "closed"
    assert site.device.closed


async def test_a_tenant_is_repartitioned_and_served_while_its_model_is_being_built(root: Path, site: Site) -> None:
    """A build takes minutes, so it must hold no lock that a repartition or a new HTTP process waits for."""
    building, built = held_builds(site)
    os.utime(root / "a" / "1" / "model.onnx", ns=(1, 1))
    loading = asyncio.ensure_future(site.controller.load("acme", "a"))
    assert await asyncio.to_thread(building.wait, PATIENCE)
    try:
        async with asyncio.timeout(PATIENCE):
            assert await site.controller.repartition({"acme": 3}) == ("acme",)
            await site.infer("acme")
            await site.runtime.replace_link("acme")
            unloading = asyncio.ensure_future(site.controller.unload("acme", "a"))
    finally:
        built.set()
    await loading
    await unloading
    assert site.tenant("acme").catalog.index()[0].state == "UNAVAILABLE", "it was unloaded after it was loaded"
    assert site.runtime.workers["acme"].executors.keys() == {site.tenant("acme").catalog.find("b").key}


async def test_a_worker_that_cannot_start_suspends_its_tenant_and_is_restarted(root: Path) -> None:
    async with serving(root) as site, asyncio.timeout(PATIENCE):
        site.script.fail("attach", 1)
        site.script.fail("attach", 2)
        lane = site.tenant("acme").lane
        await site.runtime.replace_link("acme")
        while not lane.admission.suspended:
            await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="the worker of tenant acme failed and is being restarted: scripted to fail"):
            await site.infer("acme")
        await site.infer("globex")
        while lane.admission.suspended:
            await asyncio.sleep(0.001)
        await site.infer("acme")


async def test_waiting_requests_fail_when_the_worker_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(root) as site, asyncio.timeout(PATIENCE):
        monkeypatch.setattr(TicketRunner, "_start_all", _fail)
        asking = await site.asked(3)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(answer) for answer in answers} == {Unavailable}
        monkeypatch.undo()
        while site.tenant("acme").lane.admission.suspended:
            await asyncio.sleep(0.001)


def _fail(*_: object) -> None:
    raise RuntimeError("a bug")


async def test_a_tenant_whose_work_cannot_be_stopped_is_suspended_and_others_are_served(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a kernel on a GPU, which cannot be stopped."""
    async with serving(root, max_execution=0.01, max_pause=1.0) as site:
        monkeypatch.setattr("tests.fakes.FakeWork.cancel", lambda work: None)
        monkeypatch.setattr("server.workers.supervision.CANCEL_TIMEOUT", 0.01)
        gate, lane = site.script.hold("run"), site.tenant("acme").lane
        asking = await site.asked(4)
        with pytest.raises(Unavailable, match=r"an inference of tenant acme has been running for \d+ s and cannot be stopped"):
            await asking[0]
        await asyncio.gather(*asking, return_exceptions=True)
        with pytest.raises(Conflict, match="tenant acme: an inference has been running for 1 s"):
            await site.controller.repartition({"acme": 1, "globex": 3})
        assert site.granules == {"acme": (0, 1), "globex": (2, 3)}
        assert site.stuck == [], "the process has another tenant"
        with pytest.raises(Conflict, match="tenant acme: one of its models is being loaded"):
            await site.controller.repartition({"acme": 1})
        await site.controller.repartition({"globex": 3})
        gate.open()
        while lane.admission.suspended:
            await asyncio.sleep(0.001)
        await site.infer("acme")
        await site.infer("globex")


async def test_a_process_with_one_tenant_whose_work_cannot_be_stopped_is_to_be_ended(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(root, tenants=[ALONE], max_execution=0.01) as site, asyncio.timeout(PATIENCE):
        monkeypatch.setattr("tests.fakes.FakeWork.cancel", lambda work: None)
        monkeypatch.setattr("server.workers.supervision.CANCEL_TIMEOUT", 0.01)
        gate = site.script.hold("run")
        asking = await site.asked(2)
        await asyncio.gather(*asking, return_exceptions=True)
        while not site.stuck:
            await asyncio.sleep(0.001)
        gate.open()
    (reason,) = site.stuck
    assert re.fullmatch(r"an inference of tenant acme has been running for \d+ s and cannot be stopped", reason)


@pytest.mark.parametrize("shared", [False, True])
async def test_a_partition_on_which_an_inference_does_not_end_is_looked_at_for_as_long_as_a_pause(
    root: Path, shared: bool
) -> None:
    async with serving(root, tenants=[ALONE], max_pause=0.05) as site, asyncio.timeout(PATIENCE):
        site.device.shared = shared
        gate = site.script.hold("hold" if shared else "locate")
        for _ in range(3):
            with pytest.raises(Conflict, match=r"^tenant acme: an inference keeps its partition from being looked at"):
                await site.runtime.probe(0)
        gate.wait_for_arrival()
        assert gate.arrived == 1, "what waits keeps one thread, not one each time"
        gate.open()
        assert set(await site.runtime.probe(0.01)) == {"acme"}


async def test_a_strain_goes_on_to_its_end_before_the_device_is_closed(root: Path) -> None:
    async with serving(root, tenants=[ALONE]) as site, asyncio.timeout(PATIENCE):
        gate, straining = await site.begun("strain", site.controller.strain("acme", "memory read", 0.5))
        assert site.controller.granules_change.locked(), "granules stay where they are meanwhile"
        closing = asyncio.ensure_future(site.runtime.close())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not closing.done()
        gate.open()
        assert (await straining).nbytes == 10**9
        await closing


async def test_the_end_of_a_server_waits_for_no_strain_that_has_not_begun(root: Path) -> None:
    async with serving(root, tenants=[ALONE]) as site, asyncio.timeout(PATIENCE):
        gate = site.script.hold("strain")
        first, *later = [asyncio.ensure_future(site.controller.strain("acme", "memory read", 0.5)) for _ in range(4)]
        await asyncio.to_thread(gate.wait_for_arrival)
        draining = asyncio.ensure_future(site.controller.drain(0))
        closing = asyncio.ensure_future(site.controller.close())
        await asyncio.sleep(0)
        gate.open()
        assert (await first).nbytes == 10**9
        for each in later:
            with pytest.raises(Conflict, match=r"^tenant acme: its share is not strained while the server drains"):
                await each
        await asyncio.gather(draining, closing)


async def test_no_more_strains_wait_than_a_few(root: Path) -> None:
    async with serving(root, tenants=[ALONE]) as site, asyncio.timeout(PATIENCE):
        gate = site.script.hold("strain")
        asked = [asyncio.ensure_future(site.controller.strain("acme", "L2", 0.1)) for _ in range(4)]
        await asyncio.to_thread(gate.wait_for_arrival)
        with pytest.raises(Conflict, match=r"^tenant acme: 4 strains run or wait already, one after another; ask again"):
            await site.controller.strain("acme", "L2", 0.1)
        gate.open()
        await asyncio.gather(*asked)
        await site.controller.strain("acme", "L2", 0.1)


async def test_what_a_strain_used_is_its_tenant_s_and_no_model_s(site: Site) -> None:
    await site.controller.strain("acme", "memory read", 0.1)
    (acme,) = [each for each in (await site.runtime.usage()).tenants if each.tenant == "acme"]
    used = {each.model: (each.works, each.used > 0) for each in acme.usages}
    assert used.pop("strain/memory read") == (2, True)
    assert set(used.values()) == {(0, False)}


async def test_passes_of_a_strain_run_narrow_while_neighbours_are_at_work(site: Site) -> None:
    """Two passes of half the bytes each, here at a gigabyte a second by each of two units, or of one."""
    neighbour = Neighbour()
    narrow = NarrowPlacement(site.device.carve([0]), [neighbour.page], 1, NarrowStatistics())
    site.runtime.workers["acme"].narrow = narrow
    narrow.resume()
    neighbour.activity.begin()
    assert (await site.controller.strain("acme", "memory read", 0.1)).nbytes == 10**8
    neighbour.activity.begin()
    neighbour.rest()
    assert (await site.controller.strain("acme", "memory read", 0.1)).nbytes == 2 * 10**8


@pytest.mark.parametrize(("kind", "path"), [("PCIe out", 1), ("PCIe in", 0), ("memory read", 2), ("L2", None)])
async def test_passes_of_a_strain_are_paid_for_while_neighbours_are_at_work(site: Site, kind: Strain, path: int | None) -> None:
    neighbour = Neighbour()
    worker = site.runtime.workers["acme"]
    worker.narrow = NarrowPlacement(site.device.carve([0, 1]), [neighbour.page], 1, NarrowStatistics())
    worker.narrow.resume()
    pace = worker.pace = Pace([neighbour.page], 10**12, 10**12)
    began = time.monotonic_ns()
    await site.controller.strain("acme", kind, 0.1)
    assert not any(pace.shared.free_at)
    neighbour.activity.begin()
    await site.controller.strain("acme", kind, 0.1)
    assert [at for at, free in enumerate(pace.shared.free_at) if free] == ([] if path is None else [path])
    if path is not None:
        assert pace.shared.free_at[path] >= began - CATCH_UP + 10**8 * 10**9 // 10**12, "two passes of 10 ** 8 bytes"
        pace.set_rate(path, 1)
        await site.controller.strain("acme", kind, 0.01)
        assert time.monotonic_ns() - began < PATIENCE * 10**9, "it ends, whatever it may have"
    worker.pace = None


async def test_a_strain_of_a_tenant_that_is_not_there_is_not_found(root: Path) -> None:
    async with serving(root, tenants=[ALONE]) as site:
        for strain in (site.controller.strain, site.runtime.strain):
            with pytest.raises(NotFound, match="globex"):
                await strain("globex", "L2", 0.1)
        site.script.fail("strain")
        with pytest.raises(PartitionError, match="scripted"):
            await site.controller.strain("acme", "L2", 0.1)


def workers() -> list[Worker]:
    """All that anything refers to."""
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Worker)]


async def test_supervision_keeps_no_reference_to_replaced_workers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = asyncio.Event()

    def look(*_: object) -> None:
        monkeypatch.setattr("server.workers.supervision.INTERVAL", 3600.0)
        looked.set()

    monkeypatch.setattr("server.workers.supervision.INTERVAL", 0.001)
    monkeypatch.setattr("server.workers.supervision.Supervision._check", look)
    before = workers()  # Kept, or a new one could have the address of one of these.
    async with serving(root) as site, asyncio.timeout(PATIENCE):
        await looked.wait()
        await site.controller.repartition({"globex": 3})
        while sorted(worker.partition.size for worker in workers() if worker not in before) != [2, 3]:
            await asyncio.sleep(0)  # The thread that closed it lets go of it a moment after the loop has heard of that.


async def test_a_new_link_is_served_while_a_model_of_its_tenant_is_being_bound(site: Site, root: Path) -> None:
    gate = site.script.hold("bind")
    os.utime(root / "a" / "1" / "model.onnx", ns=(1, 1))
    loading = asyncio.ensure_future(site.controller.load("acme", "a"))
    await asyncio.to_thread(gate.wait_for_arrival)
    async with asyncio.timeout(PATIENCE):
        await site.runtime.replace_link("acme")
        await site.infer("acme")
    gate.open()
    await loading


async def test_a_tenant_of_another_device_comes_is_served_and_goes_again(root: Path) -> None:
    site = Site(root)
    config, frontends = site.controller.config, site.frontends
    frontends.pop("globex").close()
    runtime = Runtime(config, site.device, frontends, lambda _: None, lambda _: None, site.read)
    await runtime.start({"acme": (0, 1)})
    await runtime.loaded()
    stays = len(site.pins())
    for granules in ((2, 3), (4,)):
        late = frontends["globex"] = PlacedFrontend(config.tenants["globex"])
        await runtime.adopt("globex", granules, 70, None, config.tenants["globex"])
        (served,) = late.tenant.catalog.served()
        assert load_of(served.key) > 70, "no key of the other device means another model here"
        assert granules_of(runtime) == {"acme": (0, 1), "globex": granules}
        runtime.name_models("globex", {"b/1#7": served.key})
        await late.infer("b/1#7")
        await late.infer(served.key)
        runtime.forget_keys("globex", ["b/1#7"])
        assert list(runtime.workers["globex"].executors) == [served.key]
        await runtime.release("globex")
        del frontends["globex"]
        await runtime.release("globex")  # It is not here.
        assert granules_of(runtime) == {"acme": (0, 1)}
        assert all(closed for _, _, closed in site.pins()[stays:])
        assert [each.tenant for each in await runtime.models.executions()] == ["acme", "acme"]
    assert not any(closed for _, _, closed in site.pins()[:stays])
    await runtime.close()


async def test_a_tenant_that_comes_to_a_runtime_which_just_began_without_tenants_is_loaded_once(root: Path) -> None:
    site = Site(root)
    config = site.controller.config
    for frontend in site.frontends.values():
        frontend.close()
    frontends, states = dict[str, PlacedFrontend](), list[State]()
    runtime = Runtime(config, site.device, frontends, states.append, lambda _: None, site.read)
    await runtime.start({})
    frontends["globex"] = PlacedFrontend(config.tenants["globex"])
    await runtime.adopt("globex", (2, 3), 0, None, config.tenants["globex"])
    await runtime.loaded()
    assert len(site.engines) == 1
    assert states
    await runtime.release("globex")
    del frontends["globex"]
    await runtime.close()


def granules_of(runtime: Runtime) -> dict[str, tuple[int, ...]]:
    return {name: partition.granules for name, partition in runtime.manager.held.items()}
