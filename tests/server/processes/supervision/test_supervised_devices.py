"""Device processes that are started together, or again, while something else fails or a tenant leaves."""

import asyncio
import math
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partitions import DeviceUnavailable
from server.config.schema import Config, ModelsConfig
from server.config.tenant import TenantConfig
from server.host.backoff import Backoff
from server.processes.channels.calls import proxy
from server.processes.channels.device_protocols import FromRuntime, ToRuntime
from server.processes.channels.rpc import Channel
from server.processes.remote.remote_runtime import RemoteRuntime
from server.processes.supervision import supervised_devices
from server.processes.supervision.restarts import Restarts
from server.processes.supervision.supervised import Current, SupervisedDevice
from server.processes.supervision.supervised_devices import SupervisedDevices

from ..recorder import Recorder

PATIENCE = 20.0


def is_there(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


class Gated:
    """A group that lets processes start while `open` is set; `asked` is set by one that asks while it is not.

    `terminated` are the processes that left it, and whether each of them was still there.
    """

    device = "0"

    def __init__(self) -> None:
        self.deposit = SimpleNamespace(descriptors=())
        self.terminated: list[tuple[int, bool]] = []
        self.open, self.asked = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.events: list[str] = []
        self.end_all: Callable[[int], None] = lambda _: None

    async def environment(self, coming: bool = False) -> Mapping[str, str]:
        self.events.append("asked")
        if not self.open.is_set():
            self.asked.set()
            await self.open.wait()
        return {}

    async def keep(self, end_all: Callable[[int], None]) -> None:
        """It fails when the test says so."""
        self.events.append("kept")
        self.end_all = end_all

    async def terminate(self, process: int) -> None:
        self.terminated.append((process, is_there(process)))

    async def close(self) -> None:
        """Nothing is shared."""
        self.events.append("closed")


class Refusing(Gated):
    """One that lets one process ask at a time, and refuses the first; the next one is asked for when `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open.clear()
        self._first = asyncio.Lock()

    async def environment(self, coming: bool = False) -> Mapping[str, str]:
        async with self._first:
            if self.asked.is_set():
                await self.open.wait()
                return {}
            self.asked.set()
            raise DeviceUnavailable("the GPU is not there")


def serve(end: socket.socket) -> None:
    """A process that has no device, and ends in order when its channel is closed."""

    async def run() -> None:
        channel = Channel("the supervisor", Recorder(ToRuntime, answers={}).handlers())
        await channel.open(end)
        await channel.closed.wait()

    asyncio.run(run())


def device(name: str, group: Gated, starts: list[str]) -> SupervisedDevice:
    def arguments(_: Config, channel: socket.socket, *__: Any) -> socket.socket:
        starts.append(name)
        return channel

    runtime = RemoteRuntime(f"the device process for {name}", {}, lambda *_: None)
    return SupervisedDevice(name, runtime, serve, arguments, group)


def devices(*all_of_them: SupervisedDevice) -> SupervisedDevices:
    tenant = TenantConfig(name="acme", granules=1, models=("*",))
    config = Config(models=ModelsConfig(repository=Path()), tenants={"acme": tenant}, source="test")

    async def relink(*_: Any) -> None:
        """They have no links."""

    return SupervisedDevices(all_of_them, {}, relink, Current(config), Restarts())


async def end_of_others() -> None:
    """Wait until no other task is left."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=PATIENCE)


async def test_a_process_whose_tenant_leaves_before_it_is_started_again_is_not_started() -> None:
    group, starts, supervised = Gated(), list[str](), devices()
    each = device("acme", group, starts)
    await supervised.begin(each)
    group.open.clear()
    each.kill()
    await asyncio.wait_for(group.asked.wait(), PATIENCE)
    await supervised.end(each)
    group.open.set()
    await end_of_others()
    assert starts == ["acme"]
    assert supervised.all == []


async def test_a_group_is_closed_after_its_last_process_and_not_while_another_starts() -> None:
    group, supervised = Gated(), devices()
    first, second, third = (device(name, group, []) for name in ("acme", "globex", "initech"))
    await supervised.begin(first)
    await supervised.begin(second)
    await supervised.end(first)
    group.open.clear()
    starting = asyncio.create_task(supervised.begin(third))
    await asyncio.wait_for(group.asked.wait(), PATIENCE)
    await supervised.end(second)
    assert "closed" not in group.events
    group.open.set()
    await starting
    await supervised.end(third)
    assert group.events[-1] == "closed"
    await supervised.begin(again := device("acme", group, []))
    await supervised.end(again)
    assert group.events[-3:] == ["closed", "asked", "closed"]
    assert group.events.count("kept") == 1


class Ending(Gated):
    """One whose end waits until that of another has failed, or fails; `asked` is set by it."""

    def __init__(self, other: Gated | None = None) -> None:
        super().__init__()
        self._other = other

    async def close(self) -> None:
        self.asked.set()
        if self._other is None:
            raise OSError("it stays")
        await self._other.asked.wait()
        await asyncio.sleep(0)  # What waits for the other learns of it first.
        await asyncio.sleep(0)
        await super().close()


async def test_the_end_waits_for_every_group_also_if_one_of_them_cannot_end() -> None:
    stays = Ending()
    ends = Ending(stays)
    with pytest.raises(OSError, match="it stays"):
        await devices(device("acme", stays, []), device("globex", ends, [])).close()
    assert ends.events == ["closed"]


async def test_a_closed_group_is_not_asked_for_a_process_whose_tenant_left_while_it_was_to_be_started_again() -> None:
    group, supervised = Gated(), devices()
    await supervised.begin(each := device("acme", group, []))
    each.kill()
    await asyncio.wait_for(each.channel.closed.wait(), PATIENCE)
    await supervised.end(each)
    await end_of_others()
    assert group.events == ["asked", "kept", "closed"]


async def test_a_group_is_closed_after_a_process_that_could_not_be_started() -> None:
    group, supervised = Refusing(), devices()
    with pytest.raises(DeviceUnavailable):
        await supervised.begin(each := device("acme", group, []))
    await supervised.end(each)
    assert group.events == ["closed"]


async def test_no_process_is_started_after_one_that_cannot_be() -> None:
    group, starts = Refusing(), list[str]()
    supervised = devices(device("acme", group, starts), device("globex", group, starts))
    with pytest.raises(DeviceUnavailable, match=r"^the GPU is not there$"):
        await supervised.start()
    group.open.set()
    await end_of_others()
    assert starts == []


async def test_a_process_whose_tenant_has_left_ends_in_order() -> None:
    each, supervised = device("acme", Gated(), []), devices()
    await supervised.begin(each)
    await supervised.end(each)
    assert each.process
    assert each.process.exitcode == 0


def serve_closing(end: socket.socket) -> None:
    """A process that never has its device closed, as the driver hangs, and does not end by itself."""

    async def run() -> None:
        recorder = Recorder(ToRuntime, answers={}, gates={"close": asyncio.Event()})
        channel = Channel("the supervisor", recorder.handlers())
        await channel.open(end)
        await asyncio.Event().wait()

    asyncio.run(run())


async def test_a_process_that_cannot_close_its_device_leaves_its_group_and_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the move, or the reload, for which its tenant goes would never end."""
    monkeypatch.setattr(supervised_devices, "CLOSE_LIMIT", 0.05)
    group, supervised = Gated(), devices()
    each = device("acme", group, [])
    each.target = serve_closing
    await supervised.begin(each)
    assert each.process
    await asyncio.wait_for(supervised.end(each), PATIENCE)
    assert group.terminated == [(each.process.pid, True)]
    assert each.process.exitcode == -signal.SIGKILL
    assert "the device process for acme has not closed its device within 0.05 s; killing it" in caplog.text


def serve_stuck(end: socket.socket) -> None:
    """A process that asks to be ended, and does not end by itself, also when its channel is closed."""

    async def run() -> None:
        channel = Channel("the supervisor", {})
        await channel.open(end)
        proxy(FromRuntime, channel).on_stuck("an inference of tenant acme cannot be stopped")
        await asyncio.Event().wait()

    asyncio.run(run())


async def test_a_process_that_asks_for_its_end_leaves_its_group_and_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    group, starts, supervised = Gated(), list[str](), devices()
    each = device("acme", group, starts)
    each.target = serve_stuck
    await supervised.begin(each)
    assert each.process
    first = each.process.pid
    each.target = serve
    async with asyncio.timeout(PATIENCE):
        while len(starts) < 2:
            await asyncio.sleep(0.001)
    assert group.terminated == [(first, True)]
    assert "the device process for acme: an inference of tenant acme cannot be stopped; ending it" in caplog.text
    await supervised.end(each)


async def test_a_process_that_is_being_started_when_all_others_end_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """It would share with none of the others: they have another deposit."""
    group, starts, supervised = Gated(), list[str](), devices()
    each = device("acme", group, starts)
    make_arguments = each.make_arguments

    def failing(config: Config, channel: socket.socket, *others: Any) -> Any:
        found = make_arguments(config, channel, *others)
        if len(starts) == 1:
            group.deposit = SimpleNamespace(descriptors=())
        return found

    each.make_arguments = failing
    await supervised.begin(each)
    async with asyncio.timeout(PATIENCE):
        while len(starts) < 2:
            await asyncio.sleep(0.001)
    assert "the processes of device 0 ended while the device process for acme was started; starting it again" in caplog.text
    await supervised.end(each)


@pytest.mark.parametrize("known", [True, False])
async def test_only_the_process_whose_kernel_failed_waits_before_it_is_started_again(
    known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it fails as soon as it serves, the others are served until then. If it is not known who it was, all wait."""
    group, starts, supervised = Gated(), list[str](), devices()
    all_of_them = [device(name, group, starts) for name in ("acme", "globex")]
    for each in all_of_them:
        each.backoff = Backoff(stable=math.inf)  # The first may run for long until the second does.
        await supervised.begin(each)
    assert all_of_them[0].process
    group.end_all(all_of_them[0].process.pid or 0 if known else 1)
    async with asyncio.timeout(PATIENCE):
        while len(starts) < 4:
            await asyncio.sleep(0.001)
    again = [record.getMessage() for record in caplog.records if "; starting another" in record.getMessage()]
    assert {(text.split()[4], text.endswith(" in 0.1 s")) for text in again} == {("acme", True), ("globex", not known)}
    assert ("the device process for acme: it was a kernel of this process that failed" in caplog.text) == known
    for each in all_of_them:
        await supervised.end(each)
