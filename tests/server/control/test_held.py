"""Several processes have partitions of one device: it is seen that these are apart by holding all of them at the same time."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from partitions import DeviceUnavailable, Misplaced, PartitionError
from partitions.base import Held
from partitions.plan import Granules
from partitions.probe import Placement
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.control.descriptions import DeviceInfo, Loading, Paused
from server.control.device_runtime import DeviceRuntime
from server.errors import Conflict, Unavailable
from tests.passing_time import pass_time

from .test_several_devices import Reporting, two_devices

MILLISECOND = 1_000_000


class Process:
    """The runtime of one tenant, which begins `late` nanoseconds after the others when it is held; first those of `delays`."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.late = 0
        self.delays: list[int] = []
        self.skew = 0
        """Nanoseconds by which the last of its units begins after the first."""
        self.away = False
        self.processes = 1
        self.asked: list[float] = []
        self.steps: list[str] = []
        self.raises: list[Exception] = []
        """What the next looks raise."""
        self.takes = 0.0
        """Seconds that such a look takes."""
        self.loads: Callable[[int], None] = lambda _: None
        """Called after one, two and three hundred looks."""
        self.moves: Any = self

    async def open(self) -> DeviceInfo:
        return DeviceInfo("fake", "a shared device", "core", (1,) * 4, shared=True)

    async def start(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int] | None]:
        return dict.fromkeys(granules)

    async def probe(self, seconds: float) -> dict[str, Placement]:
        assert not self.away
        self.asked.append(seconds)
        if len(self.asked) <= 300 and len(self.asked) % 100 == 0:
            self.loads(len(self.asked) // 100)
        if self.raises:
            await pass_time(self.takes)
            raise self.raises.pop(0)
        late = self.delays.pop(0) if self.delays else self.late
        return {self.tenant: Held(1, late + self.skew, late + round(seconds * 1e9))}

    async def prepare(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int]]:
        return dict.fromkeys(granules, frozenset())

    async def switch(self) -> dict[str, Paused]:
        self.steps.append("switch")
        return {}

    async def discard(self) -> None:
        self.steps.append("discard")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not called here")


class Site:
    """Three tenants of one granule each, of a device of four, and another device with these."""

    def __init__(self, others: tuple[str, ...] = ()) -> None:
        shares = {"acme": "0", "globex": "0", "initech": "0"} | dict.fromkeys(others, "1")
        config = two_devices(*(TenantConfig(name=name, device=on, granules=1, models=("*",)) for name, on in shares.items()))
        frontends: Any = dict.fromkeys(config.tenants, Reporting())
        self.controller = Controller(config, frontends, lambda _: None, self._transfer)
        self.processes: dict[str, Any] = {name: Process(name) for name in config.tenants}
        for device in config.devices:
            self.controller.add({name: self.processes[name] for name in config.tenants_on(device)}, device)

    async def _transfer(self, tenant: str, source: DeviceRuntime, device: str, granules: Granules) -> DeviceRuntime:
        """To a process of its own there."""
        late, self.processes[tenant] = self.processes[tenant].late, Process(tenant)
        self.processes[tenant].late = late
        return self.processes[tenant]  # type: ignore[no-any-return]

    async def start(self) -> "Site":
        await self.controller.start()
        for device in self.controller.config.devices:
            self.controller.on_state(self.processes, "serving", device)
        for process in self.processes.values():
            process.asked.clear()
        return self

    @property
    def shares(self) -> list[int]:
        return [len(each.granules) for each in self.controller.devices[0].held.values()]


async def test_all_partitions_are_held_at_the_start_and_before_a_move_is_committed() -> None:
    """What moved for longer than what stayed."""
    site = Site()
    await site.controller.start()
    assert [process.asked for process in site.processes.values()] == [[0.002]] * 3
    await site.controller.repartition({"acme": 2})
    assert [process.asked for process in site.processes.values()] == [[0.002] * 2, [0.002, 0.0005], [0.002, 0.0005]]
    assert site.shares == [2, 1, 1]


@pytest.mark.parametrize(
    ("late", "asked"),
    [(1, [0.0005]), (3, [0.0005] * 3), (19, [0.0005] * 6), (99, [0.0005] * 26)],
)
async def test_those_that_move_are_held_for_longer_where_one_that_stays_began_too_late(late: int, asked: list[float]) -> None:
    site = await Site().start()
    site.processes["globex"].late = late * MILLISECOND
    await site.controller.repartition({"acme": 2})
    assert site.processes["globex"].asked == asked
    assert site.processes["acme"].asked == [0.002, 0.002, *[0.005] * 3, *[0.02] * 20, 0.1][: len(asked)]
    assert site.processes["initech"].asked == [0.0005], "it was held together with acme, and stayed, as globex did"
    assert site.shares == [2, 1, 1]


async def test_one_that_stays_is_held_as_long_as_those_that_move_once_its_units_needed_more_to_begin() -> None:
    site = await Site().start()
    site.processes["globex"].skew = 3 * MILLISECOND
    await site.controller.repartition({"acme": 2})
    assert {name: process.asked for name, process in site.processes.items()} == {
        "acme": [0.002, 0.002, 0.005],
        "globex": [0.0005, 0.002, 0.005],
        "initech": [0.0005],
    }


async def test_only_partitions_that_were_not_held_together_yet_are_held_again() -> None:
    site = await Site().start()
    site.processes["acme"].delays = [900 * MILLISECOND, 0, 0]
    site.processes["globex"].delays = [0, 900 * MILLISECOND, 900 * MILLISECOND]
    await site.controller.repartition({"acme": 2})
    asked = {name: len(process.asked) for name, process in site.processes.items()}
    assert asked == {"acme": 4, "globex": 4, "initech": 2}, "acme and globex are the last to be together"
    assert site.shares == [2, 1, 1]


async def test_a_server_does_not_start_with_partitions_that_are_never_held_at_the_same_time() -> None:
    site = Site()
    site.processes["initech"].late = 600 * MILLISECOND
    with pytest.raises(
        Misplaced, match=r"^device 0: acme and initech did not have all their units at the same time.*; globex and"
    ):
        await site.controller.start()


async def test_a_start_goes_on_once_a_model_that_is_loaded_lets_its_partition_be_held(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    site.processes["globex"].raises = [Conflict("tenant globex: an inference"), Conflict("tenant globex: an inference")]
    await site.controller.start()
    assert site.shares == [1, 1, 1]
    assert caplog.text.count("device 0, which is looked at again: tenant globex: an inference") == 2


async def test_a_start_is_given_up_where_a_load_that_never_ends_keeps_a_partition_from_being_held() -> None:
    """Each look takes 5 s then (about `max_pause`, which may be 0). Ten minutes count from the last load that went on."""
    site = Site()
    site.processes["globex"].takes = 5.001  # 120 of them are 600 s, however the clock rounds.
    blocked = Conflict("tenant globex: an inference keeps its partition from being looked at for more than 5 s")
    site.processes["globex"].raises = [blocked] * 1000
    site.processes["globex"].loads = lambda ready: site.controller.on_loading(
        Loading("globex", "large", "compiling or loading the kernels of", ready, 0, 9)
    )
    where = r"^device 0: its partitions could not be seen to be apart in 600 s, in which no load went on"
    with pytest.raises(DeviceUnavailable, match=where) as raised:
        await site.controller.start()
    assert "(3 of 9 models are ready, those of 2 more tenants are not known yet" in str(raised.value)
    assert "compiling or loading the kernels of large (globex)): tenant globex: an inference" in str(raised.value)
    assert len(site.processes["globex"].asked) == 300 + 120


async def test_a_start_fails_with_the_device_where_a_process_ends_when_its_partition_is_to_be_held() -> None:
    site = Site()
    site.processes["globex"].raises = [Unavailable("the device process for globex has ended")]
    with pytest.raises(PartitionError, match=r"^device 0: its .* apart: the device process for globex has ended$"):
        await site.controller.start()


async def test_a_move_to_partitions_that_are_not_apart_is_discarded() -> None:
    site = await Site().start()
    site.processes["initech"].late = 600 * MILLISECOND
    with pytest.raises(Misplaced, match=r"^device 0: acme and initech did not have"):
        await site.controller.repartition({"acme": 2})
    assert site.processes["acme"].steps == ["discard"]
    assert site.shares == [1, 1, 1]
    found, shared = await site.controller.probe(site.controller.devices[0])
    assert found["initech"] == Held(1, 600 * MILLISECOND, 1100 * MILLISECOND), "the last and longest"
    assert shared == [("acme", "initech", frozenset()), ("globex", "initech", frozenset())]


async def test_a_process_that_is_started_again_stops_no_move_of_others() -> None:
    site = await Site().start()
    site.processes["globex"].away = True
    await site.controller.repartition({"acme": 2})
    assert site.processes["initech"].asked == [0.0005]
    assert site.shares == [2, 1, 1]


async def test_a_process_that_ends_while_it_is_held_stops_no_move_of_others_and_none_of_its_own() -> None:
    site = await Site().start()
    ended = Unavailable("the device process for globex has ended")
    site.processes["globex"].raises = [ended]
    await site.controller.repartition({"acme": 2})
    assert site.shares == [2, 1, 1]
    site.processes["globex"].raises = [ended]
    with pytest.raises(Unavailable):
        await site.controller.repartition({"acme": 1, "globex": 2})
    assert site.shares == [2, 1, 1]


async def test_a_tenant_that_moves_is_held_with_those_that_are_there(caplog: pytest.LogCaptureFixture) -> None:
    site = await Site(("hooli",)).start()
    await site.controller.transfer("acme", "1")
    assert [site.processes[name].asked for name in ("acme", "hooli", "globex")] == [[0.002], [0.0005], []]
    site.processes["globex"].late = 600 * MILLISECOND
    with caplog.at_level("CRITICAL"):
        await site.controller.transfer("globex", "1")
    assert "device 1: acme and globex did not have all their units" in caplog.text


async def test_a_process_that_is_started_again_keeps_no_other_tenant_of_its_device_from_another_device() -> None:
    """One that ends again and again would do so for ever."""
    site = await Site(("hooli",)).start()
    site.processes["globex"].away = True
    await site.controller.transfer("acme", "1")
    await site.controller.transfer("acme", "0")
    with pytest.raises(Unavailable, match="device 0 is restarting; move tenant globex when both devices serve"):
        await site.controller.transfer("globex", "1")
    assert site.controller.device_state(site.controller.devices[0]) == "restarting"


async def test_no_tenant_moves_to_a_device_that_was_not_opened() -> None:
    site = await Site().start()
    with pytest.raises(Conflict, match=r"^device 1: it had no tenant at the start, so it is not open; give it one"):
        await site.controller.transfer("acme", "1")
