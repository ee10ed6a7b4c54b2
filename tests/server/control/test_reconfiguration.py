"""A reload that changes who has what: its steps in order, all of them undone when one is refused, and the arithmetic."""

import asyncio
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from partitions import PartitionError
from partitions.plan import Granules
from server.config.changes import with_options, with_tables
from server.config.schema import Config, ModelOptions, ModelsConfig
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.control.device_runtime import Arrival
from server.control.reconfiguration import reconfigure
from server.control.reload import Reloader
from server.errors import BadRequest, Conflict, NotFound, RequestError, Unavailable
from tests.fakes import PATIENCE

from .test_several_devices import FakeRuntime, Reporting
from .test_several_devices import Site as SeveralDevices


class Models:
    """The models of a `Runtime`."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime

    async def prepare(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> list[str]:
        self._runtime._do("prepare models")
        return []

    async def use(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> None:
        self._runtime._do("use models")

    async def discard(self) -> None:
        self._runtime._do("discard models")


class Runtime(FakeRuntime):
    """Of device 0, which has four granules."""

    def __init__(self, steps: list[str], name: str) -> None:
        super().__init__(steps, name)
        self.models = Models(self)

    async def usage(self) -> None:
        return None


class Frontend(Reporting):
    """Its requests are answered when `idle` is set."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self.suspended = ""

    async def drained(self) -> None:
        await self.idle.wait()

    def suspend(self, reason: str) -> None:
        self.suspended = reason
        self.idle.set()


class Host:
    """Writes down what it is to do; `fails` is raised by the step of that name."""

    def __init__(self, steps: list[str], runtime: Any) -> None:
        self.fails: dict[str, Exception] = {}
        self.placed: dict[str, Granules] = {}
        self._steps = steps
        self._runtime = runtime

    def _do(self, step: str, name: str) -> None:
        self._steps.append(f"{step} {name}")
        if error := self.fails.get(f"{step} {name}"):
            raise error

    async def prepare(self, config: Config, name: str, device: str, granules: Granules) -> Arrival:
        self._do("prepare", name)
        assert name in config.tenants
        self.placed[name] = granules
        frontend: Any = Frontend()
        return Arrival(frontend, self._runtime, {name: None})

    async def discard(self, name: str) -> None:
        self._do("discard", name)

    async def admit(self, name: str) -> None:
        self._do("admit", name)

    def leave(self, name: str) -> None:
        self._do("leave", name)

    async def end(self, name: str) -> None:
        self._do("end", name)


def tenant(name: str, granules: int = 1, **more: Any) -> TenantConfig:
    return TenantConfig(name=name, granules=granules, models=("a",), **more)


class Site:
    """acme has two granules of four, globex one."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        config = self.config(tenant("acme", 2), tenant("globex"))
        self.runtime: Any = Runtime(self.steps, "0")
        self.frontends: Any = {name: Frontend() for name in config.tenants}
        self.controller = Controller(config, self.frontends, lambda _: None)
        self.host = Host(self.steps, self.runtime)
        self.controller.tenant_host = self.host
        self.controller.add(dict.fromkeys(config.tenants, self.runtime), "0", self.runtime)
        self.fails: Exception | None = None

    @staticmethod
    def config(*tenants: TenantConfig) -> Config:
        by_name = {each.name: each for each in tenants}
        return Config(models=ModelsConfig(repository=Path()), tenants=by_name, source="test")

    async def start(self) -> "Site":
        await self.controller.start()
        return self

    async def use(self, *tenants: TenantConfig) -> None:
        config = self.controller.config
        await reconfigure(self.controller, with_tables(config, config.server, {each.name: each for each in tenants}), self._all)

    async def _all(self, config: Config) -> None:
        self.steps.append(f"everywhere {'+'.join(config.tenants)}")
        if error := self.fails:
            self.fails = None
            raise error

    @property
    def held(self) -> dict[str, Granules]:
        return {name: each.granules for name, each in self.controller.devices[0].held.items()}


HELD = {"acme": (0, 1), "globex": (2,)}
NEXT = (tenant("acme", 1, target_rate=5), tenant("initech", 2), tenant("hooli"))
"""acme shrinks, globex goes, and two come, which do not fit beside globex, nor beside acme as it was."""


@pytest.fixture
async def site() -> Site:
    return await Site().start()


async def test_tenants_come_go_and_shrink_in_one_reload(site: Site) -> None:
    await site.use(*NEXT)
    assert site.steps == [
        "prepare initech",
        "prepare hooli",
        "prepare 0",
        "switch 0",
        "everywhere acme+initech+hooli",
        "leave globex",
        "admit initech",
        "admit hooli",
        "end globex",
    ]
    assert site.held == {"acme": (0,), "initech": (1, 2), "hooli": (3,)} == {"acme": (0,), **site.host.placed}
    assert site.controller.moves.given == {"acme", "initech", "hooli"}
    assert [each.name for each, _ in await site.controller.reports()] == ["acme", "initech", "hooli"]
    with pytest.raises(NotFound):
        site.controller.models_change("globex")
    assert site.controller.device_state(site.controller.devices[0]) in ("starting", "serving")


@pytest.mark.parametrize(
    ("at", "error", "undone"),
    [
        ("prepare initech", Conflict("failed to load 'a': broken"), ["discard hooli"]),
        ("prepare hooli", PartitionError("no core"), ["discard initech"]),
        ("prepare", PartitionError("Misplaced"), ["discard 0", "discard hooli", "discard initech"]),
        ("switch", Conflict("tenant acme: slow"), ["discard 0", "discard hooli", "discard initech"]),
        (
            "everywhere",
            OSError("no descriptors"),
            ["everywhere acme+globex", "prepare 0", "switch 0", "discard hooli", "discard initech"],
        ),
    ],
)
async def test_what_one_step_refuses_leaves_everything_as_it_was(
    site: Site, at: str, error: Exception, undone: list[str]
) -> None:
    if at == "everywhere":
        site.fails = error
    (site.host.fails if at.startswith("prepare ") else site.runtime.fails)[at] = error
    before = site.controller.config
    with pytest.raises((RequestError, PartitionError, OSError), match=str(error)):
        await site.use(*NEXT)
    assert site.steps[-len(undone) :] == undone
    assert not {"leave globex", "admit initech", "end globex"} & set(site.steps)
    assert (site.controller.config, site.held) == (before, HELD)
    assert [each.name for each, _ in await site.controller.reports()] == ["acme", "globex"]
    assert not site.controller.moving, "the lock is free"
    site.host.fails.clear()
    site.runtime.fails.clear()
    await site.use(*NEXT)
    assert set(site.held) == {"acme", "initech", "hooli"}


async def test_lists_of_models_are_discarded_with_the_tenants(site: Site) -> None:
    site.host.fails["prepare hooli"] = Unavailable("its process ended")
    with pytest.raises(Conflict) as refused:
        await site.use(tenant("acme", 2).with_models(["b"]), tenant("globex"), tenant("hooli"))
    assert str(refused.value).splitlines() == [
        "nothing has changed, as not every tenant that is added can be served:",
        "tenants.hooli: its process ended",
    ]
    assert site.steps == ["prepare models 0", "prepare hooli", "discard models 0"]


async def test_what_does_not_fit_is_refused_with_the_arithmetic_before_anything_is_made(site: Site) -> None:
    """What tenants have now counts, not what the file said: an operator has given acme another granule."""
    await site.controller.repartition({"acme": 3})
    del site.steps[:]
    with pytest.raises(Conflict) as refused:
        await site.use(tenant("acme", 2), tenant("globex"), tenant("hooli"))
    assert "acme 3 + globex 1 + hooli 1 = 5 granules, but the device has 4: 1 too many" in str(refused.value)
    assert "GET /admin/partitions" in str(refused.value)
    with pytest.raises(Conflict, match="= 5 cores, but the device has 4: lower them by 1"):
        await site.use(tenant("acme", 2), tenant("globex"), tenant("hooli", 2))
    assert site.steps == []
    await site.use(tenant("acme", 2), tenant("hooli"))
    assert site.held == {"acme": (0, 1, 3), "hooli": (2,)}, "it keeps what the operator gave it"


async def test_shares_of_bandwidth_that_are_too_much_are_refused_where_they_change(site: Site) -> None:
    await site.use(tenant("acme", 2, pcie=0.5), tenant("globex", pcie=0.5))
    with pytest.raises(Conflict, match=r"test: tenants\.acme\.pcie 0\.7 \+ tenants\.globex\.pcie 0\.5 = 1\.2 of the"):
        await site.use(tenant("acme", 2, pcie=0.7), tenant("globex", pcie=0.5))
    assert site.controller.tenants["acme"].pcie == 0.5
    await site.use(tenant("acme", 2, pcie=0.7), tenant("globex"))
    await site.controller.repartition({"acme": 3})
    await site.use(tenant("acme", 2, pcie="auto"), tenant("globex", pcie=0.25))


async def test_what_fits_once_a_repartition_has_ended_is_not_refused_while_it_goes_on(site: Site) -> None:
    await site.controller.repartition({"acme": 3})
    shrinking = site.controller.repartition({"acme": 2})
    await asyncio.gather(shrinking, site.use(tenant("acme", 2), tenant("globex"), tenant("hooli")))
    assert {name: len(granules) for name, granules in site.held.items()} == {"acme": 2, "globex": 1, "hooli": 1}


async def test_a_share_in_the_file_is_given_also_to_one_that_an_operator_gave_another(site: Site) -> None:
    await site.controller.repartition({"acme": 1})
    await site.use(tenant("acme", 3), tenant("globex"))
    assert {name: len(granules) for name, granules in site.held.items()} == {"acme": 3, "globex": 1}


async def test_a_tenant_that_goes_is_given_time_and_is_then_stopped(site: Site) -> None:
    config = site.controller.config
    site.controller.config = with_tables(config, config.server.model_copy(update={"drain_timeout": 0.0}), config.tenants)
    slow = site.frontends["globex"]
    slow.idle.clear()
    await site.use(tenant("acme", 2))
    assert "was taken away" in slow.suspended
    assert site.steps[-1] == "end globex"


async def test_requests_of_a_tenant_that_goes_are_waited_for(site: Site) -> None:
    slow = site.frontends["globex"]
    slow.idle.clear()
    going = asyncio.create_task(site.use(tenant("acme", 2)))
    while "leave globex" not in site.steps:
        await asyncio.sleep(0)
    assert site.controller.moving, "no other tenant gets its granules meanwhile"
    assert "end globex" not in site.steps
    slow.idle.set()
    await going
    assert slow.suspended == ""
    assert site.steps[-1] == "end globex"
    with pytest.raises(NotFound):
        await site.controller.transfer("globex", "0")


async def test_one_process_has_the_tenants_that_it_started_with(site: Site) -> None:
    site.controller.tenant_host = None
    with pytest.raises(Conflict, match=r"tenants.hooli, tenants.globex: this server is one process"):
        await site.use(tenant("acme", 2), tenant("hooli"))
    await site.use(tenant("acme", 3), tenant("globex"))
    assert site.held == {"acme": (0, 1, 3), "globex": (2,)}


async def test_what_was_asked_for_a_tenant_that_goes_meanwhile_is_refused(site: Site) -> None:
    slow, controller = site.frontends["globex"], site.controller
    slow.idle.clear()
    going = asyncio.create_task(site.use(tenant("acme", 2)))
    while "leave globex" not in site.steps:
        await asyncio.sleep(0)
    asked = [
        controller.load("globex", "a"),
        controller.unload("globex", "a"),
        controller.refresh("globex", "a"),
        controller.repartition({"globex": 1}),
        controller.transfer("globex", "0", 2),
    ]
    waiting = [asyncio.create_task(each) for each in asked]
    await asyncio.sleep(0)
    slow.idle.set()
    await going
    kinds = [type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)]
    assert kinds == [NotFound, NotFound, NotFound, BadRequest, NotFound]


async def test_a_load_that_waits_for_a_reload_is_refused_before_the_end_of_its_tenants_process(site: Site) -> None:
    """Which answers it before it ends, so each would wait for the other."""
    slow, controller, waiting = site.frontends["globex"], site.controller, list[asyncio.Task[None]]()
    slow.idle.clear()

    async def everywhere(_: Config) -> None:
        waiting.extend(asyncio.create_task(each) for each in (controller.load("globex", "a"), controller.unload("globex", "a")))
        await asyncio.sleep(0)

    config = controller.config
    left = with_tables(config, config.server, {"acme": config.tenants["acme"]})
    going = asyncio.create_task(reconfigure(controller, left, everywhere))
    while "leave globex" not in site.steps:
        await asyncio.sleep(0)
    for each in waiting:
        with pytest.raises(NotFound, match="there is no such tenant"):
            await asyncio.wait_for(each, PATIENCE)
    assert "end globex" not in site.steps
    slow.idle.set()
    await going


async def test_a_tenant_that_cannot_be_admitted_leaves_nothing_else_undone(site: Site) -> None:
    site.host.fails["admit initech"] = OSError("no process can be started")
    with pytest.raises(OSError, match="no process"):
        await site.use(*NEXT)
    assert site.steps[-4:] == ["leave globex", "admit initech", "admit hooli", "end globex"]
    assert set(site.held) == {"acme", "initech", "hooli"}
    assert not site.controller.moving, "the lock is free"


class Moving(SeveralDevices):
    """A move waits for `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = asyncio.Event(), asyncio.Event()
        for runtime in self.runtimes.values():
            runtime.models = Models(runtime)

    async def _transfer(self, *given: Any) -> Any:
        self.begun.set()
        await self.gate.wait()
        return await super()._transfer(*given)

    async def reload_while_acme_moves(self, config: Config) -> list[str]:
        """The steps before and after the end of the move."""
        moving = asyncio.ensure_future(self.controller.transfer("acme", "1"))
        await self.begun.wait()
        reloading = asyncio.ensure_future(reconfigure(self.controller, config, self._everywhere))
        for _ in range(10):
            await asyncio.sleep(0)
        self.steps.append("the move ends")
        self.gate.set()
        await moving
        await reloading
        return self.steps

    async def _everywhere(self, _: Config) -> None:
        pass


async def test_models_of_a_tenant_that_moves_when_a_reload_begins_change_on_the_device_that_it_moves_to() -> None:
    site = await Moving().start()
    before = site.controller.config
    config = with_tables(before, before.server, {**before.tenants, "acme": before.tenants["acme"].with_models(("m",))})
    assert await site.reload_while_acme_moves(config) == ["the move ends", "prepare models 1", "use models 1"]


async def test_other_options_of_models_are_not_used_before_a_move_has_ended() -> None:
    """The tenant may move to a process of its own, which has been started with the options of before: it is asked as well."""
    site = await Moving().start()
    before = site.controller.config
    tenants = {name: each.with_models((f"{name}'s",)) for name, each in before.tenants.items()}
    site.controller.config = before = with_tables(before, before.server, tenants)
    config = with_options(before, {"globex's": ModelOptions(max_batch=2)})
    steps = ["the move ends", "prepare models 0", "prepare models 1", "use models 0", "use models 1"]
    assert await site.reload_while_acme_moves(config) == steps


async def test_a_load_whose_caller_has_gone_is_ended_before_its_tenant_moves() -> None:
    """The device side completes it. What it published after the tenant had left would be lost."""
    site = await Moving().start()
    loading, loaded = asyncio.Event(), asyncio.Event()

    class Loading(Models):
        async def load(self, tenant: str, name: str, override: str | None) -> None:
            loading.set()
            await loaded.wait()

    site.runtimes["0"].models = Loading(site.runtimes["0"])
    asked = asyncio.ensure_future(site.controller.load("acme", "m"))
    await loading.wait()
    asked.cancel()
    moving = asyncio.ensure_future(site.controller.transfer("acme", "1"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert asked.cancelled()
    assert not site.begun.is_set()
    loaded.set()
    site.gate.set()
    await moving
    assert site.held["acme"] == ("1", (1, 2))


async def test_a_load_that_fails_when_its_caller_has_gone_is_not_logged_as_an_error_that_was_forgotten() -> None:
    site = await Moving().start()
    loading, loaded, forgotten = asyncio.Event(), asyncio.Event(), list[str]()

    class Failing(Models):
        async def load(self, tenant: str, name: str, override: str | None) -> None:
            loading.set()
            await loaded.wait()
            raise BadRequest("failed to load 'm': not in the repository")

    site.runtimes["0"].models = Failing(site.runtimes["0"])
    asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context["message"]))
    asked = asyncio.ensure_future(site.controller.load("acme", "m"))
    await loading.wait()
    asked.cancel()
    await asyncio.wait({asked})
    del asked  # It knows what it waited for.
    loaded.set()
    async with site.controller.models_change("acme"):  # Once that has ended.
        await asyncio.sleep(0)
    gc.collect()
    assert forgotten == []


class Loading(Models):
    """Loads of a reload, or on request, wait for `gate`."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__(runtime)
        self.gate, self.begun = asyncio.Event(), asyncio.Event()

    async def prepare(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> list[str]:
        self.begun.set()
        await self.gate.wait()
        return await super().prepare(lists, options)

    async def load(self, tenant: str, name: str, override: str | None) -> None:
        self.begun.set()
        await self.gate.wait()


class Replacing(Models):
    """Requests of models that are replaced end when `gate` is set."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__(runtime)
        self.gate, self.begun = asyncio.Event(), asyncio.Event()

    async def use(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> None:
        self.begun.set()
        await self.gate.wait()
        await super().use(lists, options)


async def loading_site() -> tuple[Site, Loading]:
    site = await Site().start()
    before = site.controller.config
    tenants = {name: each.with_models((f"{name}'s",)) for name, each in before.tenants.items()}
    site.controller.config = with_tables(before, before.server, tenants)
    site.runtime.models = models = Loading(site.runtime)
    return site, models


async def test_a_repartition_of_another_tenant_does_not_wait_for_loads_of_a_reload() -> None:
    site, models = await loading_site()
    config = with_options(site.controller.config, {"acme's": ModelOptions(max_batch=2)})
    reloading = asyncio.ensure_future(reconfigure(site.controller, config, site._all))
    await models.begun.wait()
    async with asyncio.timeout(PATIENCE):
        await site.controller.repartition({"globex": 2})
    models.gate.set()
    await reloading
    assert site.held == {"acme": (0, 1), "globex": (2, 3)}
    assert site.steps[-3:] == ["prepare models 0", "everywhere acme+globex", "use models 0"]


async def test_a_reload_that_loads_models_and_changes_shares_counts_again_what_tenants_have_once_it_has_loaded() -> None:
    site, models = await loading_site()
    config = with_options(site.controller.config, {"acme's": ModelOptions(max_batch=2)})
    resized = config.tenants["acme"].model_copy(update={"granules": 3})
    config = with_tables(config, config.server, {**config.tenants, "acme": resized})
    reloading = asyncio.ensure_future(reconfigure(site.controller, config, site._all))
    await models.begun.wait()
    async with asyncio.timeout(PATIENCE):
        await site.controller.repartition({"globex": 2})
    models.gate.set()
    with pytest.raises(Conflict, match=r"acme 3 \+ globex 2 = 5 granules, but the device has 4"):
        await reloading
    assert site.held == {"acme": (0, 1), "globex": (2, 3)}
    assert site.steps[-1] == "discard models 0"
    await site.controller.repartition({"globex": 1})
    await reconfigure(site.controller, config, site._all)
    assert {name: len(granules) for name, granules in site.held.items()} == {"acme": 3, "globex": 1}


async def test_what_waits_for_the_load_of_a_tenant_that_comes_is_refused_after_a_while_and_nothing_of_it_is_done(
    site: Site,
) -> None:
    begun, gate, prepare = asyncio.Event(), asyncio.Event(), site.host.prepare

    async def never(*given: Any) -> Arrival:
        begun.set()
        await gate.wait()
        return await prepare(*given)

    site.host.prepare, site.controller.patience = never, 0.01  # type: ignore[method-assign]
    reloading = asyncio.ensure_future(site.use(tenant("acme", 2), tenant("globex"), tenant("initech")))
    await begun.wait()
    for change in (
        site.controller.repartition({"globex": 2}),
        site.controller.transfer("acme", "1"),
        site.controller.probe(site.controller.devices[0]),
        site.controller.strain("acme", "memory read", 0.1),
    ):
        with pytest.raises(Conflict, match=r"nothing has changed: a reload.* has gone on for 0\.01 s; try again"):
            await change
    gate.set()
    await reloading
    assert site.held == {"acme": (0, 1), "globex": (2,), "initech": (3,)}
    await site.controller.repartition({"acme": 1})


async def test_a_repartition_that_waits_for_a_move_is_refused_after_a_while() -> None:
    site = await Moving().start()
    moving = asyncio.ensure_future(site.controller.transfer("acme", "1"))
    await site.begun.wait()
    site.controller.patience = 0.01
    with pytest.raises(Conflict, match="nothing has changed: another change has gone on"):
        await site.controller.repartition({"globex": 1})
    site.gate.set()
    await moving


@pytest.mark.parametrize("goes", [False, True])
async def test_a_reload_that_waits_for_a_load_on_request_is_refused_after_a_while(goes: bool) -> None:
    site, models = await loading_site()
    loading = asyncio.ensure_future(site.controller.load("acme", "acme's"))
    await models.begun.wait()
    site.controller.patience, before = 0.01, site.controller.config
    staying = [tenant("acme", 2).with_models(("b",))] * (not goes)
    with pytest.raises(Conflict, match=r"nothing has changed: a change of acme's models has gone on for 0\.01 s; try again"):
        await site.use(*staying, before.tenants["globex"])
    assert site.controller.config is before
    models.gate.set()
    await loading
    await site.use(*staying, before.tenants["globex"])
    assert site.steps[-1] == ("end acme" if goes else "use models 0")


@pytest.mark.parametrize("lock", ["device_changes", "granules_change"])
async def test_a_reload_that_waits_for_another_change_is_refused_after_a_while(site: Site, lock: str) -> None:
    site.controller.patience = 0.01
    async with getattr(site.controller, lock):
        with pytest.raises(Conflict, match=r"nothing has changed: another change has gone on for 0\.01 s; try again"):
            await site.use(*NEXT)
    assert site.steps == []
    await site.use(*NEXT)


async def test_a_reload_that_waits_for_another_one_is_refused_after_a_while() -> None:
    site, models = await loading_site()
    site.controller.on_state(site.frontends, "serving")
    before = site.controller.config
    after = with_options(before, {"acme's": ModelOptions(max_batch=2)})
    reloader = Reloader(site.controller, lambda: after, lambda config: reconfigure(site.controller, config, site._all))
    reloading = asyncio.ensure_future(reloader.reload())
    await models.begun.wait()
    site.controller.patience = 0.01
    with pytest.raises(Conflict, match=r"nothing has changed: a reload, which may load models, has gone on for 0\.01 s"):
        await reloader.reload()
    models.gate.set()
    assert len(await reloading) == 1
    assert await reloader.reload() == []


async def test_a_repartition_does_not_wait_for_requests_of_models_that_a_reload_replaces(site: Site) -> None:
    site.runtime.models = models = Replacing(site.runtime)
    reloading = asyncio.ensure_future(site.use(tenant("acme", 1).with_models(("b",)), tenant("globex")))
    await models.begun.wait()
    async with asyncio.timeout(PATIENCE):
        await site.controller.repartition({"globex": 2})
    models.gate.set()
    await reloading
    assert {name: len(granules) for name, granules in site.held.items()} == {"acme": 1, "globex": 2}


async def test_a_move_that_waits_for_loads_lets_a_repartition_go_on() -> None:
    """Of a reload, which a process of before is not to miss, or of the tenant itself."""
    site = await Moving().start()
    site.gate.set()
    before = site.controller.config
    tenants = {name: each.with_models((f"{name}'s",)) for name, each in before.tenants.items()}
    site.controller.config = before = with_tables(before, before.server, tenants)
    config = with_options(before, {"globex's": ModelOptions(max_batch=2)})
    for of_reload, to in (True, "1"), (False, "0"):
        for runtime in site.runtimes.values():
            runtime.models = Loading(runtime)
        load = reconfigure(site.controller, config, site._everywhere) if of_reload else site.controller.load("acme", "m")
        loading = asyncio.ensure_future(load)
        await site.runtimes["1"].models.begun.wait()
        moving = asyncio.ensure_future(site.controller.transfer("acme", to))
        async with asyncio.timeout(PATIENCE):
            await site.controller.repartition({"globex": 1 + of_reload})
        assert not moving.done()
        for runtime in site.runtimes.values():
            runtime.models.gate.set()
        await asyncio.gather(loading, moving)
        assert site.held["acme"][0] == to
