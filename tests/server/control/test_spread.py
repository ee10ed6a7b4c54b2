"""The controller with a tenant on two devices, beside one that is on the second alone."""

from collections.abc import Mapping

import pytest

from partitions import DoesNotFit
from partitions.plan import Granules
from server.config.tenant import TenantConfig
from server.control.descriptions import Execution, ModelMemory, Paused, TenantMemory
from server.errors import BadRequest, Unavailable

from .test_several_devices import FakeRuntime, controller_of, two_devices


class SpreadRuntime(FakeRuntime):
    """Also loads, and says what its models take."""

    def __init__(self, steps: list[str], name: str) -> None:
        super().__init__(steps, name)
        self.prepared: list[Mapping[str, Granules]] = []
        self.loaded: list[str] = []
        self.reason = ""

    async def prepare(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int]]:
        self.prepared.append(granules)
        return await super().prepare(granules)

    async def commit(self) -> dict[str, Paused]:
        return {}

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        self.loaded.append(f"{tenant} {name}")

    async def refresh(self, tenant: str, name: str) -> str:
        self.loaded.append(f"{tenant} {name} again")
        return self.reason

    async def memory(self) -> list[TenantMemory]:
        models = [ModelMemory("m", "1", False, {"weights": 3, "contexts": 1})]
        return [TenantMemory("acme", 10, 4, 1, 2, 0.5, 0.25, models)]

    async def executions(self) -> list[Execution]:
        return [Execution("acme", "m", "1", {"graphs": "own", "counts": {"replays": 4}})]


class Site:
    def __init__(self) -> None:
        self.runtimes = {name: SpreadRuntime([], name) for name in "01"}
        self.states: list[str] = []
        config = two_devices(
            TenantConfig(name="globex", device="1", granules=1, models=("*",)),
            TenantConfig(name="acme", device=("0", "1"), granules=1, models=("*",)),
        )
        self.controller = controller_of(config, self.runtimes, self.states.append)

    def held(self) -> dict[str, dict[str, Granules]]:
        return {each.name: {name: held.granules for name, held in each.held.items()} for each in self.controller.devices}


@pytest.fixture
async def site() -> Site:
    site = Site()
    await site.controller.start()
    return site


async def test_it_has_as_many_granules_of_each_and_not_the_same_ones(site: Site) -> None:
    assert site.held() == {"0": {"acme": (0,)}, "1": {"globex": (0,), "acme": (1,)}}
    move = await site.controller.repartition({"acme": 2})
    assert list(move.movers) == ["acme"]
    assert site.held() == {"0": {"acme": (0, 1)}, "1": {"globex": (0,), "acme": (1, 2)}}
    assert [runtime.prepared for runtime in site.runtimes.values()] == [[{"acme": (0, 1)}], [{"acme": (1, 2)}]]
    with pytest.raises(DoesNotFit, match="globex 1 \\+ acme 4 = 5 granules"):
        await site.controller.repartition({"acme": 4})
    assert site.held()["0"] == {"acme": (0, 1)}


async def test_it_is_ready_when_all_of_its_devices_have_loaded_its_models(site: Site) -> None:
    site.controller.on_state(["acme"], "serving", "0")
    site.controller.on_state(["globex"], "serving", "1")
    assert site.states == []
    site.controller.on_state(["acme"], "serving", "1")
    assert site.states == ["serving"]


async def test_models_are_loaded_on_both_unless_one_is_started_again(site: Site) -> None:
    await site.controller.load("acme", "m")
    assert [runtime.loaded for runtime in site.runtimes.values()] == [["acme m"], ["acme m"]]
    site.runtimes["1"].away = True
    with pytest.raises(Unavailable, match="device 1 is being started again; change the models of tenant acme"):
        await site.controller.load("acme", "m")
    assert [runtime.loaded for runtime in site.runtimes.values()] == [["acme m"], ["acme m"]]


async def test_a_changed_model_is_refreshed_on_both_and_the_reasons_are_joined(site: Site) -> None:
    assert await site.controller.refresh("acme", "m") == ""
    assert [runtime.loaded for runtime in site.runtimes.values()] == [["acme m again"]] * 2
    site.runtimes["0"].reason, site.runtimes["1"].reason = "no memory", "device 0: no memory"
    assert await site.controller.refresh("acme", "m") == "no memory; device 0: no memory"
    site.runtimes["1"].away = True
    with pytest.raises(Unavailable, match="device 1 is being started again"):
        await site.controller.refresh("acme", "m")


async def test_what_both_say_of_a_model_is_added_up(site: Site) -> None:
    [memory] = await site.controller.memory()
    assert memory == TenantMemory("acme", 20, 8, 2, 4, 1.0, 0.5, [ModelMemory("m", "1", False, {"weights": 6, "contexts": 2})])
    assert {name: each["acme"].used for name, each in (await site.controller.memory_on()).items()} == {"0": 4, "1": 4}
    assert await site.controller.executions() == [
        Execution("acme", "m", "1", {"graphs": "own", "counts": {"replays": 8}}),
    ]


async def test_it_does_not_move_to_another_device(site: Site) -> None:
    with pytest.raises(BadRequest, match="tenant acme: on devices 0 and 1: it is on several devices and cannot move"):
        await site.controller.transfer("acme", "1")
