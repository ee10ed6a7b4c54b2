"""Budgets and paging over fakes: what is refused, what goes and comes back, and faults at every step of that."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines import Engine, RuntimeSettings
from server.control.descriptions import TenantMemory
from server.device import pager
from server.errors import BadRequest, DeadlineExceeded, Unavailable
from server.launch_loop.structures import IN
from server.link.messages import Done
from server.workers.pace import CATCH_UP, Pace
from tests.lanes import submit
from tests.server.device.test_runtime import SIGNATURE, Site, add_model
from tests.server.workers.test_pace import page

TEN = {"weights": 6}, {"contexts": 4}
"""What each model takes: its engine, and its executor."""


class Budgeted(Site):
    """The tenant acme has room for `limit` bytes, each model takes ten; globex, with model b alone, has no budget."""

    def __init__(self, root: Path, limit: int, paging: bool) -> None:
        super().__init__(root, {"device_memory": limit, "paging": paging})

    def read(self, path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        engine = super().read(path, max_batch, settings)
        engine.memory, engine.executor_memory = TEN  # type: ignore[misc, attr-defined]
        return engine

    async def memory(self) -> TenantMemory:
        return (await self.controller.memory())[0]

    async def resident(self) -> list[str]:
        return [each.name for each in (await self.memory()).models if not each.paged]

    def open_bytes(self) -> int:
        """What acme's executors take that are open, and their engines, however the server counts."""
        held = [p for p in self.device.partitions if p.granules == self.granules["acme"]]
        return 10 * len([e for p in held for e in p.executors if not e.closed])

    def index(self) -> dict[str, tuple[str, str]]:
        return {entry.name: (entry.state, entry.reason) for entry in self.tenant("acme").catalog.index()}

    async def infer_within(self, model: str, seconds: float) -> Done:
        """As `infer`, with a deadline."""
        lane = self.tenant("acme").lane
        slot = lane.take_slot()
        try:
            slot.lay_out(SIGNATURE, [4])
            return await submit(lane, slot, self.tenant("acme").catalog.find(model).key, ((1,),), timeout=seconds)
        finally:
            lane.release(slot)


@asynccontextmanager
async def budgeted(root: Path, limit: int = 20, paging: bool = True, models: str = "abcd") -> AsyncIterator[Budgeted]:
    for name in models:
        add_model(root, name)
    site = Budgeted(root, limit, paging)
    await site.controller.start()
    await site.controller.loaded()
    try:
        yield site
    finally:
        await site.controller.close()
    assert all(executor.closed for engine in site.engines for executor in engine.executors)
    assert all(engine.closed for engine in site.engines)


async def test_without_paging_what_does_not_fit_is_left_out_with_the_arithmetic(tmp_path: Path) -> None:
    async with budgeted(tmp_path, 25, paging=False, models="abc") as site:
        reason = (
            "it needs 10 bytes of device memory (weights 6 bytes, contexts 4 bytes), but acme has 20 bytes of 25 bytes in use "
            "by a 1 10 bytes, b 1 10 bytes: 5 bytes too many; unload something, raise tenants.acme.device_memory, or set "
            "tenants.acme.paging"
        )
        assert site.index() == {"a": ("READY", ""), "b": ("READY", ""), "c": ("UNAVAILABLE", reason)}
        assert site.open_bytes() == 20
        with pytest.raises(BadRequest, match="failed to load 'c': it needs 10 bytes"):
            await site.controller.load("acme", "c")
        (tmp_path / "c" / "1" / "model.onnx").write_text("c" * 6)
        with pytest.raises(
            BadRequest, match=r"it needs at least 6 bytes of device memory \(file 6 bytes\), .* 1 bytes too many"
        ):
            await site.controller.load("acme", "c")
        assert len(site.engines) == 4, "it was not even read"
        await site.controller.unload("acme", "a")
        await site.controller.load("acme", "c")
        await asyncio.gather(site.infer("acme", "c"), site.infer("globex"))
        assert (await site.memory()).used == 20


async def test_an_engine_that_is_refused_or_unloaded_is_freed_at_once(tmp_path: Path) -> None:
    async with budgeted(tmp_path, 25, paging=False, models="abc") as site:
        assert [engine.closed for engine in site.engines].count(True) == 1
        await site.controller.unload("acme", "a")
        await site.controller.unload("acme", "b")
        assert [engine.closed for engine in site.engines].count(True) == 2, "globex has b"


async def test_an_engine_is_not_freed_while_another_tenant_is_loading_it(tmp_path: Path) -> None:
    async with budgeted(tmp_path, paging=False, models="ab") as site:
        await site.controller.unload("globex", "b")

        async def agree(name: str, served: object) -> str:
            await site.controller.unload("acme", "b")
            return ""

        site.frontends["globex"].agree = agree  # type: ignore[method-assign, assignment]
        await site.controller.load("globex", "b")
        (executor,) = site.runtime.workers["globex"].executors.values()
        assert not executor.engine.closed  # type: ignore[attr-defined]
        await site.infer("globex", "b")
        await site.controller.repartition({"globex": 3})


async def test_an_engine_is_not_freed_while_another_tenant_brings_it_back(tmp_path: Path) -> None:
    async with budgeted(tmp_path, models="ab") as site:
        pages = site.runtime.tenant_models.pager
        with pages.keeping("acme", "a"), pages.reserving("acme", "another") as reservation:
            await pages.make_room("acme", reservation, {"weights": 1})
        assert await site.resident() == ["a"]
        reserve = pages._reserve

        async def reserve_again(tenant: str, reservation: Any, memory: Any, least: bool = False) -> None:
            await reserve(tenant, reservation, memory, least)
            if len(engine.executors) > before:  # It is bound, and its budget is looked at once more.
                await site.controller.unload("globex", "b")
                await asyncio.to_thread(site.runtime.model_loader.free, engine, pager.bound_executors(site.runtime.workers))

        (engine,) = [executor.engine for executor in site.runtime.workers["globex"].executors.values()]
        before = len(engine.executors)  # type: ignore[attr-defined]
        pages._reserve = reserve_again  # type: ignore[method-assign]
        await site.infer("acme", "b")
        assert not engine.closed  # type: ignore[attr-defined]
        await site.infer("acme", "b")


async def test_a_model_that_is_unloaded_while_others_are_paged_out_is_in_nobodys_way(tmp_path: Path) -> None:
    async with budgeted(tmp_path, 30) as site:
        served = site.runtime.tenant_models.served
        (stand_in,) = [e for e in site.runtime.workers["acme"].executors.values() if isinstance(e, pager.PagedExecutor)]
        stand_in.taken = {"weights": 20}
        frontend, gone, unloading = site.frontends["acme"], [], []
        page_out = frontend.page_out

        async def page_out_slowly(model: str) -> bool:
            gone.append(model)
            if not unloading:
                unloading.append(asyncio.ensure_future(site.controller.unload("acme", "c")))
                while served.serves("acme", "c"):
                    await asyncio.sleep(0)
            return await page_out(model)

        frontend.page_out = page_out_slowly  # type: ignore[method-assign]
        await site.infer("acme", "a")
        assert [model.partition("/")[0] for model in gone[:2]] == ["b", "c"]
        await unloading[0]
        assert sorted(await site.resident()) == ["a", "d"]


async def test_what_a_model_takes_in_truth_is_checked_after_it_was_bound_and_undone(tmp_path: Path) -> None:
    async with budgeted(tmp_path, paging=False, models="ab") as site:
        await site.controller.unload("acme", "b")
        before = site.read

        def read(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
            engine: Any = before(path, max_batch, settings)
            bind = engine.bind

            def grow(partition: Any) -> Any:
                executor = bind(partition)
                engine.executor_memory = {"contexts": 40}
                return executor

            engine.bind = grow
            return engine  # type: ignore[no-any-return]

        add_model(tmp_path, "c")
        site.read = read  # type: ignore[method-assign]
        with pytest.raises(BadRequest, match=r"46 bytes of device memory \(weights 6 bytes, contexts 40 bytes\), but acme may"):
            await site.controller.load("acme", "c")
        assert site.open_bytes() == 10
        assert site.engines[-1].closed
        await site.infer("acme", "a")


async def test_models_beyond_the_budget_are_served_one_after_the_other(tmp_path: Path) -> None:
    async with budgeted(tmp_path) as site:
        assert await site.resident() == ["c", "d"], "those that were loaded last"
        assert site.index() == {
            "a": ("READY", "paged out"), "b": ("READY", "paged out"), "c": ("READY", ""), "d": ("READY", ""),
        }  # fmt: skip
        for model in "abcdba":
            await site.infer("acme", model)
            assert site.index()[model] == ("READY", "")
            assert site.open_bytes() <= 20
        assert sorted(await site.resident()) == ["a", "b"]
        memory = await site.memory()
        assert (memory.used, memory.limit, memory.page_ins, memory.page_outs) == (20, 20, 6, 8)
        assert {each.name: each.memory for each in memory.models} == {name: {**TEN[0], **TEN[1]} for name in "abcd"}
        assert memory.page_in_seconds > 0 < memory.page_out_seconds


async def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    async with budgeted(tmp_path, limit=30) as site:
        catalog = site.tenant("acme").catalog
        for model in "dcb":  # As requests over HTTP are counted.
            catalog.find(model).statistics.last = time.monotonic_ns()
        await site.infer("acme", "a")
        assert sorted(await site.resident()) == ["a", "b", "c"]


async def test_a_model_with_requests_is_not_paged_out_and_the_other_waits(tmp_path: Path) -> None:
    async with budgeted(tmp_path, limit=10) as site:
        await site.infer("acme", "a")
        gate, running = await site.begun("run", site.infer("acme", "a"))
        waiting = asyncio.ensure_future(site.infer("acme", "b"))
        while not site.frontends["acme"].link.completions.deferred():
            await asyncio.sleep(0)
        assert await site.resident() == ["a"]
        gate.open()
        await asyncio.gather(running, waiting)
        assert await site.resident() == ["b"]


@asynccontextmanager
async def waiting_for_room(site: Budgeted) -> AsyncIterator["asyncio.Task[Done]"]:
    """A request for model b, which waits as long as model a has one that is prepared elsewhere, in this block."""
    await site.infer("acme", "a")
    lane = site.tenant("acme").lane
    slot = lane.take_slot()
    lane.hold(slot, site.tenant("acme").catalog.find("a").key, (), lambda _: None)
    waiting = asyncio.ensure_future(site.infer("acme", "b"))
    while not site.frontends["acme"].link.completions.deferred():
        await asyncio.sleep(0)
    try:
        yield waiting
    finally:
        lane.release(slot)


async def test_a_model_that_waits_for_room_is_in_the_way_of_no_change(tmp_path: Path) -> None:
    async with budgeted(tmp_path, limit=10) as site:
        async with waiting_for_room(site) as waiting, asyncio.timeout(5.0):
            await site.controller.unload("acme", "c")
            await site.controller.repartition({"acme": 4})
        await waiting
        assert await site.resident() == ["b"]


@pytest.mark.parametrize("change", ["release", "close"])
async def test_a_model_that_waits_for_room_holds_up_no_end(tmp_path: Path, change: str) -> None:
    async with budgeted(tmp_path, limit=10) as site:
        async with waiting_for_room(site) as waiting, asyncio.timeout(5.0):
            bound = site.script.reached["bind"]
            site.tenant("acme").suspend("the tenant goes")
            with pytest.raises(Unavailable, match="the tenant goes"):
                await waiting
            if change == "release":
                await site.runtime.release("acme")
                del site.frontends["acme"]
            await site.controller.close()
        assert site.script.reached["bind"] == bound


async def test_a_small_model_does_not_take_the_room_that_a_large_one_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with budgeted(tmp_path, limit=20) as site:
        await asyncio.gather(site.infer("acme", "a"), site.infer("acme", "c"))
        stand_in = site.runtime.workers["acme"].executors[site.tenant("acme").catalog.find("b").key]
        assert isinstance(stand_in, pager.PagedExecutor)
        stand_in.taken = {"weights": 20}
        caplog.set_level(logging.INFO)
        async with waiting_for_room(site) as waiting:
            caplog.clear()
            other = asyncio.ensure_future(site.infer("acme", "d"))
            while site.frontends["acme"].link.completions.deferred() < 2:
                await asyncio.sleep(0)
            for _ in range(100):  # In which it could be paged in.
                await asyncio.to_thread(int)
        await asyncio.gather(waiting, other)
        said = [message.partition(",")[0] for message in caplog.messages if "paged in" in message]
        assert said == ["paged in for acme: b 1", "paged in for acme: d 1"]


async def test_a_model_that_takes_more_than_before_is_bound_again_once_there_is_room_for_that(tmp_path: Path) -> None:
    async with budgeted(tmp_path, limit=20) as site:
        (engine,) = [executor.engine for executor in site.runtime.workers["globex"].executors.values()]
        await asyncio.gather(site.infer("acme", "a"), site.infer("acme", "c"))
        bound = site.script.reached["bind"]
        engine.executor_memory = {"contexts": 14}  # type: ignore[attr-defined]
        async with waiting_for_room(site) as waiting, asyncio.timeout(5.0):
            while site.script.reached["bind"] == bound:
                await asyncio.sleep(0)
            for model in "dc":
                await site.controller.unload("acme", model)
            assert site.open_bytes() == 10
        await waiting
        assert await site.resident() == ["b"]
        assert site.script.reached["bind"] == bound + 2


async def test_without_room_for_too_long_the_request_gets_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pager, "PATIENCE", 0.0)
    async with budgeted(tmp_path, limit=10) as site:
        await site.infer("acme", "a")
        gate, running = await site.begun("run", site.infer("acme", "a"))
        with pytest.raises(Unavailable, match=r"model b 1 is paged out and could not .* could be paged out have requests"):
            await site.infer("acme", "b")
        gate.open()
        await running
        monkeypatch.undo()  # The worker may not be idle yet.
        await site.infer("acme", "b")


async def test_a_request_waits_while_the_memory_that_it_needs_is_reserved_for_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being loaded counts, and can be paged out only once it is there."""
    async with budgeted(tmp_path, limit=10) as site:
        gate, loading = await site.begun("bind", site.controller.load("acme", "a"))
        bound = site.script.reached["bind"]
        with pytest.raises(DeadlineExceeded):
            await site.infer_within("b", 0.2)
        assert site.script.reached["bind"] == bound, "both at once are more than acme may have"
        waiting = asyncio.ensure_future(site.infer("acme", "b"))
        gate.open()
        await asyncio.gather(loading, waiting)
        assert await site.resident() == ["b"]
        gate, loading = await site.begun("bind", site.controller.load("acme", "a"))
        monkeypatch.setattr(pager, "PATIENCE", 0.0)
        with pytest.raises(Unavailable, match="in use by a 10 bytes"):
            await site.infer("acme", "c")
        gate.open()
        await loading


async def test_other_models_and_tenants_go_on_while_one_comes_back(tmp_path: Path) -> None:
    async with budgeted(tmp_path, limit=30) as site:
        gate, waiting = await site.begun("bind", site.infer("acme", "a"))
        for _ in range(3):
            await asyncio.gather(site.infer("acme", "c"), site.infer("acme", "d"), site.infer("globex"))
        assert not waiting.done()
        gate.open()
        await waiting


async def test_a_deadline_that_passes_meanwhile_is_kept_and_the_model_comes_back_all_the_same(tmp_path: Path) -> None:
    async with budgeted(tmp_path) as site:
        gate = site.script.hold("bind")
        with pytest.raises(DeadlineExceeded):
            await site.infer_within("a", 0.05)
        gate.open()
        await site.infer("acme", "a")
        assert (await site.memory()).page_ins == 1


async def test_all_requests_that_wait_get_503_if_it_cannot_be_bound_and_the_next_tries_again(tmp_path: Path) -> None:
    async with budgeted(tmp_path) as site:
        site.script.fail("bind")
        gate = site.script.hold("bind")
        asked = [asyncio.ensure_future(site.infer("acme", "a")) for _ in range(3)]
        while site.frontends["acme"].link.completions.deferred() < 3:
            await asyncio.sleep(0)
        gate.open()
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(end, Unavailable) and "could not be brought back: scripted" in str(end) for end in ends)
        assert site.index()["a"] == ("READY", "paged out")
        await site.infer("acme", "a")
        assert site.open_bytes() == 20


async def test_a_file_that_has_changed_is_not_served_in_its_place(tmp_path: Path) -> None:
    async with budgeted(tmp_path) as site:
        (tmp_path / "a" / "1" / "model.onnx").write_text("another")
        with pytest.raises(Unavailable, match="its file has changed since it was loaded; load the model again"):
            await site.infer("acme", "a")
        await site.controller.load("acme", "a")
        await site.infer("acme", "a")
        (tmp_path / "b" / "1" / "model.onnx").unlink()
        with pytest.raises(Unavailable, match="its file cannot be read: No such file or directory; load the model again"):
            await site.infer("acme", "b")


@pytest.mark.parametrize("change", ["unload", "load"])
async def test_a_change_meanwhile_waits_for_the_requests_that_wait(tmp_path: Path, change: str) -> None:
    async with budgeted(tmp_path, limit=30) as site:
        gate, waiting = await site.begun("bind", site.infer("acme", "a"))
        changing = asyncio.ensure_future(getattr(site.controller, change)("acme", "a"))
        for _ in range(50):
            await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(waiting, changing)
        if change == "unload":
            with pytest.raises(Unavailable, match="unloaded"):
                await site.infer("acme", "a")
            assert site.open_bytes() <= 20
        else:
            await site.infer("acme", "a")


async def test_a_model_that_is_paged_out_can_be_unloaded_and_loaded(tmp_path: Path) -> None:
    async with budgeted(tmp_path) as site:
        await site.controller.unload("acme", "a")
        assert site.index()["a"] == ("UNAVAILABLE", "unloaded")
        await site.controller.load("acme", "a")
        await site.controller.load("acme", "b")
        assert sorted(await site.resident()) == ["a", "b"]
        await asyncio.gather(*(site.infer("acme", model) for model in "abcd"))


async def test_a_repartition_waits_for_a_model_that_comes_back_and_keeps_what_is_paged_out(tmp_path: Path) -> None:
    async with budgeted(tmp_path) as site:
        gate, waiting = await site.begun("bind", site.infer("acme", "a"))
        moving = asyncio.ensure_future(site.controller.repartition({"acme": 4}))
        gate.open()
        await asyncio.gather(waiting, moving)
        assert len(site.granules["acme"]) == 4
        for model in "abcd":
            await site.infer("acme", model)
        assert site.open_bytes() == 20


async def test_a_request_that_comes_during_a_repartition_is_answered_after_it(tmp_path: Path) -> None:
    async with budgeted(tmp_path) as site:
        gate, moving = await site.begun("bind", site.controller.repartition({"acme": 4}))
        waiting = asyncio.ensure_future(site.infer("acme", "a"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.open()
        await asyncio.gather(waiting, moving)
        assert len(site.granules["acme"]) == 4


async def test_an_engine_that_another_tenant_uses_stays(tmp_path: Path) -> None:
    async with budgeted(tmp_path, limit=10) as site:
        await site.infer("acme", "b")  # While both loaded, each may have read a file that the other had freed or not read yet.
        (shared,) = [engine for engine in site.engines if not engine.closed and len(engine.executors) >= 2]
        await asyncio.gather(site.infer("acme", "a"), site.infer("globex"))
        assert not shared.closed
        reads = len(site.engines)
        await site.infer("acme", "b")
        assert len(site.engines) == reads, "it was still there"


async def test_a_server_that_ends_meanwhile_ends(tmp_path: Path) -> None:
    async with budgeted(tmp_path) as site:
        gate, waiting = await site.begun("bind", site.infer("acme", "a"))
        site.tenant("acme").suspend("the server is stopping")
        closing = asyncio.ensure_future(site.controller.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        with pytest.raises(Unavailable):
            await waiting


async def test_twenty_models_in_a_third_of_their_memory(tmp_path: Path) -> None:
    names = "abcdefghijklmnopqrst"
    async with budgeted(tmp_path, limit=66, models=names) as site:
        choose = random.Random(7)
        most = 0

        async def client() -> None:
            nonlocal most
            for _ in range(60):
                await site.infer("acme", choose.choice(names))
                most = max(most, site.open_bytes(), (await site.memory()).used)

        await asyncio.gather(*(client() for _ in range(4)))
        assert most == 60
        memory = await site.memory()
        assert memory.page_outs - memory.page_ins == 20 - 6
        assert memory.page_ins > 50


async def test_loads_and_page_ins_wait_for_the_tenant_s_share_of_pcie(tmp_path: Path) -> None:
    """At a byte a millisecond: what is read counts as its file is large."""
    async with budgeted(tmp_path, limit=10, models="ab") as site:
        pace = site.runtime.workers["acme"].pace = Pace([page()], 1000)
        (tmp_path / "c" / "1").mkdir(parents=True)
        (tmp_path / "c" / "1" / "model.onnx").write_bytes(b"model")
        (tmp_path / "c" / "config.pbtxt").touch()
        began = time.monotonic_ns()
        await site.controller.load("acme", "c")
        assert pace.shared.free_at[IN] >= began + 5_000_000 - CATCH_UP
        for name in "ac":  # Each makes room by paging the other out.
            await site.infer("acme", name)
        assert pace.shared.free_at[IN] >= began + 2 * (5_000_000 - CATCH_UP)
