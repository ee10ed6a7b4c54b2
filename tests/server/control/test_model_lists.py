"""A change of lists of models over several devices: all load what is added before one serves it, or none does."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from server.config.changes import with_tables
from server.config.schema import Config
from server.config.tenant import TenantConfig
from server.control.reconfiguration import reconfigure
from server.errors import Conflict, Unavailable

from .test_several_devices import FakeRuntime, controller_of, two_devices

ALL = {"acme": ["a", "b"], "globex": ["b"], "initech": ["b"]}


class ListedRuntime(FakeRuntime):
    """Says which of the models that it prepares cannot be loaded."""

    def __init__(self, steps: list[str], name: str) -> None:
        super().__init__(steps, name)
        self.problems: list[str] = []
        self.models = ListedModels(self)


class ListedModels:
    """The models of a `ListedRuntime`."""

    def __init__(self, runtime: ListedRuntime) -> None:
        self._runtime = runtime

    async def prepare(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> list[str]:
        self._runtime._do(f"prepare {'+'.join(lists)}")
        return self._runtime.problems

    async def use(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> None:
        self._runtime._do(f"use {'+'.join(lists)}")

    async def discard(self) -> None:
        self._runtime._do("discard")


class Site:
    """acme is on the first device, globex and initech on the second."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.runtimes = {name: ListedRuntime(self.steps, name) for name in "01"}
        config = two_devices(
            TenantConfig(name="globex", device="1", granules=1, models=("a",)),
            TenantConfig(name="initech", device="1", granules=1, models=("a",)),
            TenantConfig(name="acme", device="0", granules=1, models=("a",)),
        )
        self.controller = controller_of(config, self.runtimes)

    async def use(self, lists: Mapping[str, Sequence[str]]) -> None:
        config = self.controller.config
        tenants = {name: each.with_models(lists.get(name, each.models)) for name, each in config.tenants.items()}
        await reconfigure(self.controller, with_tables(config, config.server, tenants), self._everywhere)

    async def _everywhere(self, _: Config) -> None:
        self.steps.append("everywhere")


async def test_every_device_prepares_its_tenants_before_one_uses_them() -> None:
    site = Site()
    await site.use(ALL)
    assert site.steps == ["prepare acme 0", "prepare globex+initech 1", "everywhere", "use acme 0", "use globex+initech 1"]
    assert {name: each.models for name, each in site.controller.config.tenants.items()} == {
        "globex": ("b",),
        "initech": ("b",),
        "acme": ("a", "b"),
    }


async def test_devices_whose_tenants_keep_their_lists_are_not_asked() -> None:
    site = Site()
    await site.use({"globex": ["a", "b"]})
    assert site.steps == ["prepare globex 1", "everywhere", "use globex 1"]
    del site.steps[:]
    await site.use({})
    assert site.steps == ["everywhere"]


async def test_what_one_device_cannot_load_is_used_by_none() -> None:
    site = Site()
    site.runtimes["0"].problems = ["tenants.acme.models: failed to load 'b': no memory"]
    site.runtimes["1"].fails["prepare globex+initech"] = Unavailable("the process of device 1 has ended")
    before = site.controller.config
    with pytest.raises(Conflict) as refused:
        await site.use(ALL)
    assert str(refused.value).splitlines()[1:] == [
        "tenants.acme.models: failed to load 'b': no memory",
        "tenants.globex.models: the process of device 1 has ended",
        "tenants.initech.models: the process of device 1 has ended",
    ]
    assert site.steps == ["prepare acme 0", "prepare globex+initech 1", "discard 0", "discard 1"]
    assert site.controller.config is before


async def test_a_change_that_processes_cannot_be_sent_is_discarded() -> None:
    site = Site()

    async def fails(_: Config) -> None:
        raise OSError("no descriptors")

    config = site.controller.config
    tenants = {**config.tenants, "globex": config.tenants["globex"].with_models(["b"])}
    with pytest.raises(OSError, match="no descriptors"):
        await reconfigure(site.controller, with_tables(config, config.server, tenants), fails)
    assert site.steps == ["prepare globex 1", "discard 1"]
