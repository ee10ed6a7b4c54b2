"""What is decided for several devices: all of them change or none, and a tenant moves only between devices that serve."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from partitions import DoesNotFit, Misplaced, PartitionError
from partitions.plan import Granules
from partitions.resctrl import CoreGroups, CoreShare
from server.config.schema import Config, DeviceConfig, ModelsConfig
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.control.descriptions import DeviceInfo, Execution, Paused
from server.control.device_runtime import DeviceRuntime
from server.errors import BadRequest, Conflict, NotFound, Unavailable
from server.scheduling.lane_statistics import LaneStatistics, SlotStatistics
from server.tenants.frontend import Report
from tests.simulation.resctrl import KernelPath, groups, lay_out

UNITS = 4


class FakeRuntime:
    """Writes down what it is to do; `fails` is raised by the step of that name, and `late` is how often it cannot halt."""

    def __init__(self, steps: list[str], name: str) -> None:
        self.away = False
        self.fails: dict[str, Exception] = {}
        self.late = 0
        self.strays = frozenset[int]()
        """Units on which the probe of a partition runs besides its own."""
        self._steps = steps
        self._name = name
        self.moves: Any = self
        self.models: Any = self
        self.placements: Any = self

    def _do(self, step: str) -> None:
        self._steps.append(f"{step} {self._name}")
        if error := self.fails.get(step):
            raise error

    async def open(self) -> DeviceInfo:
        return DeviceInfo("fake", f"device {self._name}", "core", (1,) * UNITS)

    async def start(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int] | None]:
        return dict.fromkeys(granules)

    async def prepare(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int]]:
        self._do("prepare")
        return {name: frozenset(each) | self.strays for name, each in granules.items()}

    async def settle(self) -> None:
        self._do("settle")

    async def halt(self) -> bool:
        self._do("halt")
        self.late -= 1
        return self.late < 0

    async def commit(self) -> dict[str, Paused]:
        self._do("commit")
        return {}

    async def switch(self) -> dict[str, Paused]:
        self._do("switch")
        return {}

    async def discard(self) -> None:
        self._do("discard")

    async def close(self) -> None:
        self._do("close")

    async def executions(self) -> list[Execution]:
        return [Execution(name, "m", "1", {"path": self._name}) for name in ("acme", "globex")]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not called here")


class Reporting:
    """A frontend, which is asked for its report only."""

    async def report(self) -> Report:
        return Report([], [], LaneStatistics(0, 0, 0, 0), SlotStatistics(0, 0, 0))


def two_devices(*tenants: TenantConfig) -> Config:
    """The configuration of devices 0 and 1 with these tenants."""
    by_name = {tenant.name: tenant for tenant in tenants}
    devices = {"0": DeviceConfig(), "1": DeviceConfig()}
    return Config(devices=devices, models=ModelsConfig(repository=Path()), tenants=by_name, source="test")


def controller_of(
    config: Config, runtimes: Mapping[str, Any], publish: Callable[[Any], None] = lambda _: None, transfer: Any = None
) -> Controller:
    """A controller of these runtimes, by device."""
    frontends: Any = dict.fromkeys(config.tenants, Reporting())
    controller = Controller(config, frontends, publish, transfer)
    for name, runtime in runtimes.items():
        controller.add(dict.fromkeys(config.tenants_on(name), runtime), name, runtime)
    return controller


class Site:
    """Two devices of four granules: acme has two of device 0, globex one of device 1."""

    def __init__(self, **keys: Any) -> None:
        self.steps: list[str] = []
        self.runtimes = {name: FakeRuntime(self.steps, name) for name in "01"}
        config = two_devices(
            TenantConfig(name="acme", device="0", granules=2, models=("*",), **keys),
            TenantConfig(name="globex", device="1", granules=1, models=("*",), **keys),
        )
        self.controller = controller_of(config, self.runtimes, transfer=self._transfer)
        self.transfers: list[tuple[str, str, Granules]] = []
        self.refuses: Exception | None = None

    async def start(self, serving: Iterable[str] = ("acme", "globex")) -> "Site":
        await self.controller.start()
        for name in self.runtimes:
            self.controller.on_state(serving, "serving", name)
        return self

    async def _transfer(self, tenant: str, source: DeviceRuntime, device: str, granules: Granules) -> DeviceRuntime:
        assert source is not self.runtimes[device]
        if self.refuses:
            raise self.refuses
        self.transfers.append((tenant, device, granules))
        found: Any = self.runtimes[device]
        return found  # type: ignore[no-any-return]

    @property
    def held(self) -> dict[str, tuple[str, Granules]]:
        return {
            name: (device.name, partition.granules)
            for device in self.controller.devices
            for name, partition in device.held.items()
        }


BEFORE = {"acme": ("0", (0, 1)), "globex": ("1", (0,))}


@pytest.fixture
async def site() -> Site:
    return await Site().start()


async def test_shares_that_all_tenants_have_already_are_no_move(caplog: pytest.LogCaptureFixture) -> None:
    """Yet an operator wants them: the autopilot leaves them alone, as after a move."""
    caplog.set_level(logging.INFO)
    site = await Site().start()
    caplog.clear()
    assert await site.controller.repartition({"globex": 1, "acme": 2}) == ()
    assert site.held == {"acme": ("0", (0, 1)), "globex": ("1", (0,))}
    assert (site.steps, list(site.controller.moves), site.controller.repartitions) == ([], [], 1)
    assert caplog.text == ""
    assert site.controller.moves.by_operator is not None
    with pytest.raises(DoesNotFit):
        await site.controller.repartition({"acme": 2, "globex": 5})
    assert [each.outcome for each in site.controller.moves] == ["refused"]


async def test_every_device_prepares_and_halts_before_one_commits(site: Site) -> None:
    assert await site.controller.repartition({"acme": 1, "globex": 3}) == ("acme", "globex")
    steps = "prepare", "settle", "halt", "commit"
    assert site.steps == [f"{step} {device}" for step in steps for device in "01"]
    assert site.held == {"acme": ("0", (0,)), "globex": ("1", (0, 1, 2))}


async def test_where_one_device_has_a_long_inference_both_settle_again(site: Site) -> None:
    site.runtimes["1"].late = 1
    await site.controller.repartition({"acme": 1, "globex": 3})
    steps = "prepare", "settle", "halt", "settle", "halt", "commit"
    assert site.steps == [f"{step} {device}" for step in steps for device in "01"]


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("prepare", PartitionError("no")),
        ("prepare", Unavailable("it has ended")),
        ("settle", Conflict("tenant globex: slow")),
        ("halt", Unavailable("it has ended")),
    ],
)
async def test_if_one_device_refuses_none_commits_and_all_discard(site: Site, step: str, error: Exception) -> None:
    site.runtimes["1"].fails[step] = error
    with pytest.raises(type(error)):
        await site.controller.repartition({"acme": 1, "globex": 3})
    assert not any(each.startswith("commit") for each in site.steps)
    assert site.steps[-2:] == ["discard 0", "discard 1"]
    assert site.held == BEFORE


async def test_what_does_not_fit_one_device_is_tried_on_none(site: Site) -> None:
    with pytest.raises(DoesNotFit, match="globex 5 granules, but the device has 4: 1 too many"):
        await site.controller.repartition({"acme": 1, "globex": 5})
    assert (site.steps, site.held) == ([], BEFORE)


async def test_tenants_of_two_processes_that_ran_on_one_granule_do_not_move(site: Site) -> None:
    """On cores each process probes its own partition alone, so that only here both are known."""
    site.controller.devices.clear()
    runtimes = {name: FakeRuntime(site.steps, name) for name in ("acme", "globex")}
    site.controller.add(runtimes, "0")
    await site.controller.start()
    before = site.held
    runtimes["globex"].strays = frozenset({0})
    with pytest.raises(Misplaced, match=r"acme and globex both ran on 0"):
        await site.controller.repartition({"acme": 1, "globex": 2})
    assert site.held == before
    assert site.steps == ["prepare acme", "prepare globex", "discard acme", "discard globex"]
    runtimes["globex"].strays = frozenset()
    await site.controller.repartition({"acme": 1, "globex": 2})


async def test_a_tenant_moves_with_as_many_granules_as_it_has_or_is_given(site: Site) -> None:
    await site.controller.transfer("acme", "1")
    await site.controller.transfer("acme", "0", 4)
    assert site.transfers == [("acme", "1", (1, 2)), ("acme", "0", (0, 1, 2, 3))]
    assert site.held == {"acme": ("0", (0, 1, 2, 3)), "globex": ("1", (0,))}
    assert [list(device.runtimes) for device in site.controller.devices] == [["acme"], ["globex"]]


async def test_how_a_model_runs_is_said_by_the_device_that_its_tenant_is_on(site: Site) -> None:
    """While a tenant moves two have its models."""
    assert [(each.tenant, each.description["path"]) for each in await site.controller.executions()] == [
        ("acme", "0"),
        ("globex", "1"),
    ]
    await site.controller.transfer("acme", "1")
    assert {each.description["path"] for each in await site.controller.executions()} == {"1"}


@pytest.mark.parametrize(
    ("tenant", "to", "count", "error"),
    [
        ("acme", "1", 4, DoesNotFit),
        ("acme", "2", None, BadRequest),
        ("acme", "1", 0, BadRequest),
        ("acme", "0", 1, BadRequest),
        ("initech", "1", None, NotFound),
    ],
)
async def test_a_move_that_cannot_be_is_not_begun(
    site: Site, tenant: str, to: str, count: int | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await site.controller.transfer(tenant, to, count)
    assert (site.transfers, site.held) == ([], BEFORE)


async def test_no_tenant_moves_to_a_device_where_shares_of_bandwidth_would_be_too_much() -> None:
    site = await Site(pcie=0.6).start()
    with pytest.raises(DoesNotFit, match=r"globex\.pcie 0\.6 \+ tenants\.acme\.pcie 0\.6 = 1\.2 of the device's PCIe"):
        await site.controller.transfer("acme", "1")
    assert (site.transfers, site.held) == ([], BEFORE)


@pytest.mark.parametrize("away", ["0", "1"])
async def test_no_tenant_moves_from_or_to_a_device_that_is_started_again(site: Site, away: str) -> None:
    site.runtimes[away].away = True
    with pytest.raises(Unavailable, match=f"device {away} is restarting; move tenant acme when both devices serve"):
        await site.controller.transfer("acme", "1")


async def test_no_tenant_moves_while_its_models_are_loaded() -> None:
    site = await Site().start(serving=["globex"])
    with pytest.raises(Unavailable, match="device 0 is starting"):
        await site.controller.transfer("acme", "1")


async def test_a_tenant_whose_move_fails_stays(site: Site) -> None:
    site.refuses = Conflict("tenant acme: model a 1 cannot be served on that device")
    with pytest.raises(Conflict):
        await site.controller.transfer("acme", "1")
    assert site.held == BEFORE


class Watching:
    """An observer whose end fails."""

    def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        raise RuntimeError("it cannot be closed")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize("fails", ["observer", "device"])
async def test_the_end_closes_all_devices_and_frees_cores_whatever_of_it_fails(fails: str, tmp_path: Path) -> None:
    site = Site()
    base, cores = lay_out(KernelPath(tmp_path), 4), CoreGroups(KernelPath(tmp_path))
    site.controller.placements.cores = cores
    watching: Any = Watching()
    if fails == "observer":
        site.controller.observers.append(watching)
    else:
        site.runtimes["0"].fails["close"] = PartitionError("it cannot be closed")
    await site.start()
    cores.hold({"acme": CoreShare((0, 1), 0.4)})
    with pytest.raises((RuntimeError, PartitionError), match="it cannot be closed"):
        await site.controller.close()
    assert site.steps == ["close 0", "close 1"]
    assert not groups(base)
