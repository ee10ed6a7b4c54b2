"""Models whose files have changed: what is served of them, and what the index says."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from .test_model_lists import add_ensemble, bound
from .test_runtime import Site, add_model, serving


def index(site: Site, tenant: str = "acme") -> Sequence[tuple[str, str, str, str]]:
    entries = site.tenant(tenant).catalog.index()
    return [(entry.name, entry.version, entry.state, entry.reason) for entry in entries]


async def test_a_new_model_and_a_new_version_are_served_beside_what_there_is(site: Site, root: Path) -> None:
    add_model(root, "new")
    assert await site.controller.refresh("acme", "new") == ""
    assert await site.controller.refresh("globex", "new") == "", "globex may not call it"
    await site.infer("acme", "new")
    assert [name for name, *_ in index(site, "globex")] == ["b"]
    (root / "b" / "config.pbtxt").write_text("version_policy { all {} }")
    (root / "b" / "2").mkdir()
    (root / "b" / "2" / "model.onnx").write_text("2")
    assert await site.controller.refresh("acme", "b") == ""
    assert [each.version for each in site.tenant("acme").catalog.served() if each.name == "b"] == ["2", "1"]
    assert site.tenant("globex").catalog.versions("b") == ["1"], "each tenant for itself"
    shutil.rmtree(root / "b" / "1")
    assert await site.controller.refresh("acme", "b") == ""
    assert site.tenant("acme").catalog.versions("b") == ["2"]
    assert bound(site) == 4, "a, b and new of acme, and b of globex"


async def test_requests_run_on_the_old_version_while_the_new_one_loads_and_none_fails(site: Site, root: Path) -> None:
    (root / "b" / "1").rename(root / "b" / "2")
    bind = site.script.hold("bind")
    refreshing = asyncio.ensure_future(site.controller.refresh("acme", "b"))
    await asyncio.to_thread(bind.wait_for_arrival)
    for _ in range(3):
        await site.infer("acme")
    assert site.tenant("acme").catalog.find("b").version == "1"
    assert site.states[-1] == "serving", "ready all the time"
    bind.open()
    assert await refreshing == ""
    assert site.tenant("acme").catalog.find("b").version == "2"
    await site.infer("acme")


async def test_what_fails_is_in_the_index_and_the_old_one_serves_on(root: Path) -> None:
    async with serving(root, strict_readiness=True) as site:
        (root / "b" / "2").mkdir()
        (root / "b" / "2" / "model.onnx").write_text("2")
        site.script.fail("bind")
        assert await site.controller.refresh("acme", "b") == "version 2: scripted to fail at bind"
        assert index(site)[1:] == [("b", "1", "READY", ""), ("b", "2", "UNAVAILABLE", "scripted to fail at bind")]
        await site.infer("acme")
        assert site.states[-1] == "serving", "every model is served, if not in its newest version"
        (root / "b" / "config.pbtxt").write_text("max_batch_size: many")
        reason = await site.controller.refresh("acme", "b")
        goes_on = "served as it was, since its files have changed and cannot be: "
        assert reason == "b/config.pbtxt:1:17 : Couldn't parse integer: many"
        assert index(site)[1:] == [("b", "1", "READY", goes_on + reason)]
        (root / "b" / "config.pbtxt").unlink()
        shutil.rmtree(root / "b" / "2")
        (root / "b" / "1" / "model.onnx").write_text("another")
        site.script.fail("bind")
        assert await site.controller.refresh("acme", "b") == "version 1: scripted to fail at bind"
        assert index(site)[1:] == [("b", "1", "READY", f"{goes_on}scripted to fail at bind")]
        (root / "b" / "1").rename(root / "b" / "2")
        assert await site.controller.refresh("acme", "b") == ""
        assert index(site)[1:] == [("b", "2", "READY", "")]
        assert bound(site) == 3


async def test_a_new_model_that_fails_says_why_and_is_served_once_it_is_right(site: Site, root: Path) -> None:
    (root / "new" / "1").mkdir(parents=True)
    assert await site.controller.refresh("acme", "new") == "version 1: no model.onnx or model.plan in new/1"
    assert ("new", "1", "UNAVAILABLE", "no model.onnx or model.plan in new/1") in index(site)
    (root / "new" / "1" / "model.onnx").write_text("new")
    assert await site.controller.refresh("acme", "new") == ""
    await site.infer("acme", "new")


async def test_a_model_that_has_gone_is_not_served_nor_are_ensembles_of_it(root: Path) -> None:
    add_ensemble(root, "whole", "b")
    async with serving(root) as site:
        assert [name for name, *_ in index(site)] == ["a", "b", "whole"]
        away = root / "b"
        away.rename(root / ".b")
        for tenant in ("acme", "globex"):
            assert await site.controller.refresh(tenant, "b") == ""
        gone = "no longer in the repository"
        assert index(site)[1:] == [("whole", "", "UNAVAILABLE", f"its step 'b' is {gone}")]
        assert index(site, "globex") == [("b", "", "UNAVAILABLE", gone)], "it is named in the list"
        (root / ".b").rename(away)
        for tenant in ("acme", "globex"):
            assert await site.controller.refresh(tenant, "b") == ""
        await site.infer("globex")
        assert [state for _, _, state, _ in index(site)] == ["READY"] * 3


async def test_a_model_that_its_tenant_has_unloaded_stays_unloaded(site: Site, root: Path) -> None:
    await site.controller.unload("acme", "b")
    (root / "b" / "1" / "model.onnx").write_text("another")
    assert await site.controller.refresh("acme", "b") == ""
    assert index(site)[1:] == [("b", "", "UNAVAILABLE", "unloaded")]


async def test_it_keeps_the_configuration_that_it_was_loaded_with(site: Site, root: Path) -> None:
    await site.controller.load("acme", "b", '{"version_policy": {"all": {}}}')
    (root / "b" / "2").mkdir()
    (root / "b" / "2" / "model.onnx").write_text("2")
    assert await site.controller.refresh("acme", "b") == ""
    assert site.tenant("acme").catalog.versions("b") == ["2", "1"]
