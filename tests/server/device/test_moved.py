"""What the account says that works move, as it comes to a tenant's placements."""

from pathlib import Path

from .test_runtime import Site, serving


async def test_figures_are_by_model_and_those_of_models_that_have_gone_are_left_out(root: Path) -> None:
    async with serving(root) as site:
        placements = site.runtime.placements
        await placements.moved({"acme": {"a/1": 800, "gone/1": 7}, "a tenant that has just gone": {"a/1": 1}})
        (a, b) = sorted(site.runtime.workers["acme"].executors)
        assert placements.of("acme").fence.moved_by_key() == {a: 800, b: 0}
        await reload(site)
        (a, b) = sorted(site.runtime.workers["acme"].executors)
        assert placements.of("acme").fence.moved_by_key() == {a: 800, b: 0}
        await site.controller.unload("acme", "a")
        assert placements.of("acme").fence.moved_by_key() == {b: 0}


async def reload(site: Site) -> None:
    before = set(site.runtime.workers["acme"].executors)
    await site.controller.load("acme", "a")
    assert set(site.runtime.workers["acme"].executors) != before
