"""Lists of models that change while tenants are served: loaded before anything changes, and all of it or nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from server.config.changes import with_options, with_tables
from server.config.schema import Config, ModelOptions
from server.control.descriptions import CRASHED, AtStart
from server.control.reconfiguration import reconfigure
from server.errors import Conflict, NotFound, Unavailable
from server.tenants.catalog import UNLOADED, IndexEntry, ServedModel
from server.tenants.service import Tenant

from .test_runtime import Site, add_model, serving

ENSEMBLE = """platform: "ensemble"
input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }}
ensemble_scheduling {{ step {{ model_name: "{step}" model_version: -1
  input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }} }} }}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        add_model(tmp_path, name)
    return tmp_path


def add_ensemble(root: Path, name: str, step: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(ENSEMBLE.format(step=step))


def with_lists(config: Config, lists: dict[str, Sequence[str]]) -> Config:
    tenants = {name: each.with_models(lists.get(name, each.models)) for name, each in config.tenants.items()}
    return with_tables(config, config.server, tenants)


async def use(site: Site, check: Callable[[], Awaitable[None]] | None = None, **lists: Sequence[str]) -> None:
    """As a reload does; `check` is awaited when all is prepared and nothing is used."""

    async def everywhere(config: Config) -> None:
        if check:
            await check()
        site.service.reconfigure(config)

    await reconfigure(site.controller, with_lists(site.controller.config, lists), everywhere)


async def set_options(site: Site, check: Callable[[], Awaitable[None]] | None = None, **options: ModelOptions) -> None:
    """The same for tables [models.NAME]."""

    async def everywhere(config: Config) -> None:
        if check:
            await check()

    config = site.controller.config
    await reconfigure(site.controller, with_options(config, {**config.models.options, **options}), everywhere)


OTHER = ModelOptions(warm_up="opt")


def names(tenant: Tenant) -> list[str]:
    return sorted(each.name for each in tenant.catalog.served())


def bound(site: Site) -> int:
    """Executors that are not closed."""
    return sum(not executor.closed for engine in site.engines for executor in engine.executors)


async def test_models_come_when_all_are_loaded_and_others_go(site: Site) -> None:
    acme, globex = site.tenant("acme"), site.tenant("globex")

    async def nothing_is_served_yet() -> None:
        assert (names(acme), names(globex)) == (["a", "b", "c"], ["b"])
        assert [entry.name for entry in globex.catalog.index()] == ["b"], "what is prepared is not shown"
        assert bound(site) == 4 + 2

    await use(site, nothing_is_served_yet, acme=["a"], globex=["c", "a"])
    assert (names(acme), names(globex)) == (["a"], ["a", "c"])
    for model in ("a", "c"):
        await site.infer("globex", model)
    with pytest.raises(NotFound):
        globex.catalog.find("b")
    assert [entry.name for entry in globex.catalog.index()] == ["a", "c"]
    assert bound(site) == 3, "b is freed, and what acme had"
    with pytest.raises(NotFound):
        await site.controller.load("globex", "b")
    await site.controller.load("globex", "c")
    await use(site, globex=["*"])
    assert (names(acme), names(globex)) == (["a"], ["a", "b", "c"])
    await use(site, globex=[])
    assert (names(globex), globex.catalog.index(), bound(site)) == ([], [], 1)


@pytest.mark.parametrize("fails", ["not there", "bind"])
async def test_if_one_model_cannot_be_loaded_nothing_changes(site: Site, fails: str) -> None:
    before = {name: frontend.tenant.catalog.served() for name, frontend in site.frontends.items()}
    config, were = site.controller.config, bound(site)
    lists: dict[str, Sequence[str]] = {"globex": ["a", "c"], "acme": ["b"]}
    text = "tenants.globex.models: failed to load 'c': version 1: scripted to fail at bind"
    if fails == "not there":
        lists["globex"] = ["a", "c", "d"]
        text = "tenants.globex.models: failed to load 'd': not in the repository"
    else:
        site.script.fail("bind", nth=2)

    async def never() -> None:
        raise AssertionError("no process is to use it")

    with pytest.raises(Conflict) as refused:
        await use(site, never, **lists)
    assert str(refused.value).splitlines() == [
        "nothing has changed, as not every model that is added can be loaded:",
        text,
    ]
    assert {name: frontend.tenant.catalog.served() for name, frontend in site.frontends.items()} == before
    assert (bound(site), site.controller.config) == (were, config), "what was bound in vain is closed"
    await site.infer("globex", "b")
    with pytest.raises(NotFound):
        await site.controller.load("globex", "a")
    site.script = type(site.script)()
    await use(site, globex=["a"])
    await site.infer("globex", "a")


async def test_a_name_in_place_of_all_is_a_model_that_is_there(site: Site, root: Path) -> None:
    """A typo there would take all models away."""
    acme = site.tenant("acme")
    with pytest.raises(Conflict, match=r"tenants\.acme\.models: failed to load 'd': not in the repository$"):
        await use(site, acme=["a", "d"])
    assert names(acme) == ["a", "b", "c"]
    add_model(root, "d")
    await site.controller.unload("acme", "b")
    await use(site, acme=["b", "d"])
    assert names(acme) == ["d"], "what was unloaded stays so"
    await site.infer("acme", "d")


async def test_a_model_goes_when_its_requests_have_ended(site: Site) -> None:
    gate = site.script.hold("run")
    asking = [asyncio.ensure_future(site.infer("acme", "a")) for _ in range(3)]
    await asyncio.to_thread(gate.wait_for_arrival)
    changing = asyncio.ensure_future(use(site, acme=["b"]))
    while "a" in names(site.tenant("acme")):
        await asyncio.sleep(0)
    assert not changing.done()
    gate.open()
    await changing
    assert all(done.failure is None for done in await asyncio.gather(*asking))


async def test_a_repartition_takes_along_what_is_prepared(site: Site) -> None:

    async def move() -> None:
        await site.controller.repartition({"globex": 4})

    await use(site, move, globex=["b", "a"])
    await site.infer("globex", "a")
    assert bound(site) == 5


async def test_ensembles_follow_their_steps(root: Path) -> None:
    """They may come with a step, wait for it, and stay without it, as after a start with these lists."""
    add_ensemble(root, "of_a", "a")
    add_ensemble(root, "of_b", "b")
    async with serving(root) as site:
        globex = site.tenant("globex")
        with pytest.raises(Conflict, match=r"failed to load 'of_a': .*is not a model of this tenant's"):
            await use(site, globex=["of_a", "b"])
        await use(site, globex=["of_a", "a"])
        assert names(globex) == ["a", "of_a"]
        await site.infer("globex", "of_a")
        await use(site, globex=["of_a"])
        assert names(globex) == []
        with pytest.raises(Unavailable, match="its step 'a' is not a model of this tenant's any more"):
            globex.catalog.find("of_a")
        await use(site, globex=["of_a", "a"])
        await site.infer("globex", "of_a")


async def test_a_process_that_starts_with_a_list_loads_that_one_and_one_that_hears_of_it_later_follows(root: Path) -> None:
    site = Site(root)
    started: Any = {"acme": (0, 1), "globex": (2, 3)}
    await site.runtime.start(started, models={"globex": ["a"]})
    await site.runtime.loaded()
    assert (names(site.tenant("acme")), names(site.tenant("globex"))) == (["a", "b", "c"], ["a"])
    await site.runtime.models.use({"globex": ["c", "d"]})  # It has prepared nothing.
    assert names(site.tenant("globex")) == ["c"]
    assert [(entry.name, entry.state) for entry in site.tenant("globex").catalog.index()] == [
        ("c", "READY"),
        ("d", "UNAVAILABLE"),
    ]
    await site.runtime.close()


async def test_a_process_that_replaces_another_starts_as_that_was_and_with_the_models_that_matter_most(root: Path) -> None:
    add_ensemble(root, "of_b", "b")
    site = Site(root)
    overrides = {("acme", "a"): '{"max_batch_size": 3}', ("acme", "b"): None}
    at_start = AtStart(overrides, {("acme", "c"): UNLOADED, ("globex", "b"): CRASHED}, {"acme": {"of_b": -1, "a": 1}})
    published: list[str] = []
    frontend = site.frontends["acme"]
    publish = frontend.publish

    async def note(name: str, served: list[ServedModel], problems: list[IndexEntry]) -> bool:
        published.append(name)
        return await publish(name, served, problems)

    frontend.publish = note  # type: ignore[method-assign]
    await site.runtime.start({"acme": (0, 1), "globex": (2, 3)}, {}, at_start)
    await site.runtime.loaded()
    assert published == ["b", "of_b", "c", "a"], "an ensemble behind its steps, and what may end the process last"
    assert site.tenant("acme").catalog.find("a").config["max_batch_size"] == 3
    for tenant, name, why in (("acme", "c", UNLOADED), ("globex", "b", CRASHED)):
        with pytest.raises(Unavailable, match=why):
            site.tenant(tenant).catalog.find(name)
    await site.runtime.close()


async def test_models_with_other_options_are_loaded_again_beside_what_is_served(root: Path) -> None:
    """Of every tenant that has them, with the ensembles that use them; not what a tenant has unloaded, nor other models."""
    add_ensemble(root, "of_b", "b")
    async with serving(root) as site:
        acme, globex = site.tenant("acme"), site.tenant("globex")
        await site.controller.unload("acme", "a")
        keys = {each.name: each.key for each in acme.catalog.served()}
        assert bound(site) == 3 + 1, "acme's c, b and of_b, and globex's b"
        read = len(site.settings)

        async def old_ones_serve() -> None:
            assert {each.name: each.key for each in acme.catalog.served()} == keys
            await site.infer("globex", "b")
            assert bound(site) == 4 + 3

        await set_options(site, old_ones_serve, a=OTHER, b=OTHER)
        assert [each.warm_up for each in site.settings[read:]] == ["opt"], "the tenants share what is read"
        now = {each.name: each.key for each in acme.catalog.served()}
        assert {name for name in now if now[name] != keys[name]} == {"b", "of_b"}
        assert bound(site) == 4, "the old ones are closed"
        for model in ("b", "of_b"):
            await site.infer("acme", model)
        await site.infer("globex", "b")
        await site.controller.load("acme", "a")
        assert site.settings[-1].warm_up == "opt", "it has the new options when it is loaded again"
    assert globex.catalog.served()


@pytest.mark.parametrize("nth", [1, 2])
async def test_if_one_cannot_be_loaded_with_its_new_options_all_keep_the_old_ones(site: Site, root: Path, nth: int) -> None:
    before = {name: frontend.tenant.catalog.served() for name, frontend in site.frontends.items()}
    config, were = site.controller.config, bound(site)
    site.script.fail("bind", nth=nth)
    with pytest.raises(Conflict) as refused:
        await set_options(site, b=OTHER)
    header, line = str(refused.value).splitlines()
    assert header == "nothing has changed, as not every model that is added or changed can be loaded:"
    assert line.endswith(".models: failed to load 'b' with its new options: version 1: scripted to fail at bind")
    assert {name: frontend.tenant.catalog.served() for name, frontend in site.frontends.items()} == before
    assert (bound(site), site.controller.config) == (were, config)
    site.script = type(site.script)()
    (root / "b" / "1" / "model.onnx").write_text("another")
    await site.controller.load("globex", "b")
    assert site.settings[-1].warm_up != "opt", "a load has the old options, too"
    await site.infer("globex", "b")


async def test_lists_and_options_change_in_one_reload(site: Site) -> None:
    config = with_lists(site.controller.config, {"globex": ["a", "c"]})

    async def everywhere(_: Config) -> None:
        return None

    keys = {each.name: each.key for each in site.tenant("acme").catalog.served()}
    await reconfigure(site.controller, with_options(config, {"a": OTHER}), everywhere)
    assert names(site.tenant("globex")) == ["a", "c"]
    now = {each.name: each.key for each in site.tenant("acme").catalog.served()}
    assert {name for name in now if now[name] != keys[name]} == {"a"}
    assert bound(site) == 3 + 2
    await site.infer("globex", "a")
