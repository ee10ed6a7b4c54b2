"""A device side in another process, with the test at the other end of its channel: what happens when the process ends."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from engines import DATATYPES, Signature, TensorSpec
from partitions import DeviceUnavailable, PartitionError
from server.config.tenant import TenantConfig
from server.control.descriptions import AtStart, DeviceInfo, Paused
from server.control.device_runtime import Models, Moves
from server.errors import Conflict, Failed, RequestError, Unavailable
from server.processes.channels import descriptors
from server.processes.channels.calls import proxy
from server.processes.channels.device_protocols import ToDeviceProcess, ToRuntime
from server.processes.channels.rpc import Channel
from server.processes.remote import remote_runtime
from server.processes.remote.remote_frontend import RemoteFrontend, open_remote
from server.processes.remote.remote_runtime import RemoteRuntime
from server.tenants.catalog import UNLOADED, ModelVersion
from server.tenants.frontend import HttpSide
from tests.fakes import PATIENCE

from ..recorder import Recorder
from .test_remote_frontend import Process as HttpProcess

INFO = DeviceInfo("cpu", "cores", "core", (1, 1, 1))
ANSWERS: dict[str, Any] = {"open": INFO, "start": {"acme": None}, "prepare": {}, "probe": {}, "executions": [], "halt": True}
FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))
GONE = "the device process has ended and is being started again"


class Process(Recorder):
    """A device process. It answers a method once its gate is open, if it has one."""

    started: ClassVar[list["Process"]] = []

    def __init__(self, **gates: asyncio.Event) -> None:
        super().__init__(ToRuntime, ToDeviceProcess, Moves, Models, answers=ANSWERS, gates=gates)
        self.channel = Channel("the supervisor", self.handlers())
        self.acme = proxy(HttpSide, self.channel, "acme")
        self.supervisors: Channel
        self._ends: list[Any] = []

    async def start(self, runtime: RemoteRuntime) -> None:
        """As the supervisor does."""
        ours, theirs = socket.socketpair()
        self.supervisors = Channel("the device process", runtime.handlers())
        self.started.append(self)
        await self.supervisors.open(ours)
        await self.channel.open(theirs)
        sender, end = descriptors.pair()
        self._ends += [sender, end]
        await runtime.connect(self.supervisors, sender)

    async def end(self, runtime: RemoteRuntime) -> None:
        """As the supervisor notices it."""
        self.close()
        await self.supervisors.closed.wait()
        runtime.disconnect(GONE)

    async def replaced(self, runtime: RemoteRuntime, **gates: asyncio.Event) -> "Process":
        """The next one, which is started once this one has ended."""
        await self.end(runtime)
        another = Process(**gates)
        await another.start(runtime)
        return another

    def close(self) -> None:
        self.channel.close()
        for end in self._ends:
            end.close()
        self._ends.clear()


@pytest.fixture
async def frontend() -> AsyncIterator[RemoteFrontend]:
    frontend = open_remote(TenantConfig(name="acme", granules=1, models=("*",)))
    yield frontend
    frontend.close()


@pytest.fixture
async def runtime(frontend: RemoteFrontend) -> AsyncIterator[RemoteRuntime]:
    """One that serves acme on granule 0."""
    runtime = RemoteRuntime("the device process", {"acme": frontend}, lambda *_: None)
    yield runtime
    for each in Process.started:
        each.close()
        each.supervisors.close()
    Process.started.clear()


def model(name: str) -> ModelVersion:
    return ModelVersion(name, "1", f"{name}/1#1", SIGNATURE, "onnx", {})


def names(frontend: RemoteFrontend) -> set[str]:
    return {each.name for each in frontend.served()}


async def served(runtime: RemoteRuntime) -> Process:
    process = Process()
    await process.start(runtime)
    await runtime.open()
    await runtime.start({"acme": (0,)})
    return process


@pytest.fixture
async def process(runtime: RemoteRuntime) -> Process:
    return await served(runtime)


async def test_cancellations_for_a_process_that_does_not_read_take_no_more_and_more_memory(
    process: Process, runtime: RemoteRuntime
) -> None:
    """An HTTP process that was taken over may send any number of them."""
    for serial in range(200_000):
        runtime.cancel("acme", 0, serial)
    assert process.supervisors.unread < 2 << 20
    async with asyncio.timeout(PATIENCE):
        while process.supervisors.unread:
            await asyncio.sleep(0)
        runtime.cancel("acme", 1, 7)
        await process.hears("cancel", "acme", 1, 7)


async def test_a_process_that_hangs_while_it_opens_its_device_is_given_up_when_it_replaces_another(
    process: Process, runtime: RemoteRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under an MPS server that hangs; its tenants would get 503 for ever."""
    monkeypatch.setattr(remote_runtime, "OPEN_LIMIT", 0.05)
    with pytest.raises(DeviceUnavailable, match=r"^it did not open its device within 0.05 s$"):
        await process.replaced(runtime, open=asyncio.Event())
    assert runtime.away
    await Process.started[-1].replaced(runtime)
    await runtime.resumed(PATIENCE)
    assert not runtime.away


@pytest.mark.parametrize("others", [False, True])
async def test_a_process_that_does_not_free_its_last_tenant_is_ended_and_one_that_has_others_is_waited_for(
    process: Process, runtime: RemoteRuntime, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """The tenant is served by another device only then. A process of its own, as under MPS, is not worth that wait."""
    monkeypatch.setattr(remote_runtime, "RELEASE_LIMIT", 0.0)
    freed = process.gates["release"] = asyncio.Event()
    globex = open_remote(TenantConfig(name="globex", granules=1, models=("*",)))
    if others:
        runtime.handover.join("globex", globex, (1,), {})
    runtime.handover.leave("acme")
    releasing = asyncio.create_task(runtime.handover.release("acme"))
    async with asyncio.timeout(PATIENCE):
        if others:
            await process.hears("release", "acme")
            freed.set()
        await releasing
        if not others:
            await process.supervisors.closed.wait()
    assert process.supervisors.closed.is_set() != others
    globex.close()


async def test_a_process_that_does_not_serve_yet_is_sent_nothing_but_its_start(
    process: Process, runtime: RemoteRuntime
) -> None:
    """It has no runtime before it is opened, and no worker before it is started; its models are loaded after that."""
    await process.end(runtime)
    gates = {name: asyncio.Event() for name in ("open", "start", "loaded")}
    second = Process(**gates)
    starting = asyncio.create_task(second.start(runtime))
    for name, gate in gates.items():
        await second.hears(name)
        for call in (
            runtime.models.load("acme", "m"),
            runtime.models.unload("acme", "m"),
            runtime.moves.prepare({"acme": (1,)}),
            runtime.moves.halt(),
            runtime.probe(0.002),
            runtime.strain("acme", "L2", 0.1),
        ):
            with pytest.raises(Unavailable, match="is being started again"):
                await asyncio.wait_for(call, 10)
        assert await runtime.models.executions() == [], "metrics are answered"
        await runtime.loaded()
        if name != "loaded":
            await runtime.handover.replace_link("acme")
        gate.set()
    await starting
    await runtime.resumed(10)
    assert second.names() == list(gates)
    await runtime.models.load("acme", "m")


async def test_a_process_that_ends_at_its_first_start_is_a_device_that_cannot_be_used(runtime: RemoteRuntime) -> None:
    process = Process(start=asyncio.Event())
    await process.start(runtime)
    await runtime.open()
    starting = asyncio.create_task(runtime.start({"acme": (0,)}))
    await process.hears("start")
    await process.end(runtime)
    with pytest.raises(PartitionError, match="ended while it partitioned the device; the log says why"):
        await starting


async def test_a_load_is_answered_when_the_process_ends(process: Process, runtime: RemoteRuntime) -> None:
    process.gates["load"] = asyncio.Event()
    loading = asyncio.create_task(runtime.models.load("acme", "m"))
    await process.hears("load")
    await process.end(runtime)
    with pytest.raises(Unavailable, match=GONE):
        await loading
    process = Process()
    await process.start(runtime)
    await runtime.resumed(10)
    assert process.heard[1] == ("start", {"acme": (0,)}, {}, AtStart(again=True)), "it may be what ended the process"


async def test_a_refresh_is_answered_with_its_reason_and_not_repeated_in_the_next_process(
    process: Process, runtime: RemoteRuntime
) -> None:
    for reason in ("", "no memory"):
        process.answers["refresh"] = reason
        assert await runtime.models.refresh("acme", "m") == reason
    await process.end(runtime)
    with pytest.raises(Unavailable, match=GONE):
        await runtime.models.refresh("acme", "m")
    process = Process()
    await process.start(runtime)
    await runtime.resumed(10)
    assert "refresh" not in process.names()


@pytest.mark.parametrize("ends", ["after prepare", "after halt"])
async def test_a_move_is_never_continued_by_another_process(process: Process, runtime: RemoteRuntime, ends: str) -> None:
    """It has not prepared the new partitions, and would stay on the old granules while others get them."""
    await runtime.moves.prepare({"acme": (1, 2)})
    if ends == "after halt":
        await runtime.moves.halt()
    second = await process.replaced(runtime)
    await runtime.resumed(10)
    if ends == "after prepare":
        with pytest.raises(Unavailable):
            await runtime.moves.halt()
        await runtime.moves.discard()
        assert second.names() == ["open", "start", "loaded"]
        return
    await runtime.moves.commit()  # All others have halted as well, so the plan is carried out.
    await asyncio.wait_for(second.supervisors.closed.wait(), 10)
    third = await second.replaced(runtime)
    assert third.heard[1] == ("start", {"acme": (1, 2)}, {}, AtStart(again=True))


async def test_a_move_that_is_committed_while_the_replacement_starts_is_not_forgotten(
    process: Process, runtime: RemoteRuntime
) -> None:
    await runtime.moves.prepare({"acme": (1, 2)})
    await runtime.moves.halt()
    await process.end(runtime)
    second = Process(start=asyncio.Event())
    starting = asyncio.create_task(second.start(runtime))
    await second.hears("start")
    await runtime.moves.commit()
    with pytest.raises(Unavailable):
        await starting
    third = await second.replaced(runtime)
    assert third.heard[1] == ("start", {"acme": (1, 2)}, {}, AtStart(again=True))


async def test_a_commit_that_fails_is_made_by_the_next_process(process: Process, runtime: RemoteRuntime) -> None:
    process.answers["commit"] = Failed("a partition cannot be closed")
    await runtime.moves.prepare({"acme": (1,)})
    await runtime.moves.halt()
    await runtime.moves.commit()
    await asyncio.wait_for(process.supervisors.closed.wait(), 10)
    second = await process.replaced(runtime)
    assert second.heard[1] == ("start", {"acme": (1,)}, {}, AtStart(again=True))


async def test_the_next_process_starts_as_a_switch_left_the_tenants(process: Process, runtime: RemoteRuntime) -> None:
    process.answers["switch"] = {"acme": Paused(0.001, True)}
    await runtime.moves.prepare({"acme": (1,)})
    assert await runtime.moves.switch() == {"acme": Paused(0.001, True)}
    second = await process.replaced(runtime)
    assert second.heard[1] == ("start", {"acme": (1,)}, {}, AtStart(again=True))


async def test_a_switch_that_work_in_flight_prevents_changes_nothing(process: Process, runtime: RemoteRuntime) -> None:
    process.answers["switch"] = Conflict("tenant acme: an inference has been running for 5 s")
    await runtime.moves.prepare({"acme": (1,)})
    with pytest.raises(Conflict, match="tenant acme"):
        await runtime.moves.switch()
    assert not process.supervisors.closed.is_set()
    second = await process.replaced(runtime)
    assert second.heard[1] == ("start", {"acme": (0,)}, {}, AtStart(again=True))


async def test_a_process_whose_switch_fails_is_replaced_by_one_with_the_old_granules(
    process: Process, runtime: RemoteRuntime
) -> None:
    process.answers["switch"] = Failed("a partition cannot be closed")
    await runtime.moves.prepare({"acme": (1,)})
    with pytest.raises(Failed, match="a partition cannot be closed"):
        await runtime.moves.switch()
    await asyncio.wait_for(process.supervisors.closed.wait(), 10)
    second = await process.replaced(runtime)
    assert second.heard[1] == ("start", {"acme": (0,)}, {}, AtStart(again=True))


async def test_a_tenant_that_the_new_process_suspends_stays_suspended(
    process: Process, runtime: RemoteRuntime, frontend: RemoteFrontend
) -> None:
    await process.end(runtime)
    second = Process(start=asyncio.Event(), loaded=asyncio.Event())
    starting = asyncio.create_task(second.start(runtime))
    await second.hears("start")
    second.acme.suspend("its worker failed")
    assert await second.acme.last_uses() == {}, "which is answered after that was heard"
    assert frontend.refusing == GONE, "nothing reads the link before"
    second.gates["start"].set()
    await starting
    assert frontend.refusing == "its worker failed"
    for reason in ("", "its worker failed again"):
        second.acme.suspend(reason)
        while frontend.refusing != reason:
            await asyncio.sleep(0)
    second.gates["loaded"].set()
    await runtime.resumed(10)
    assert frontend.refusing == "its worker failed again"
    await second.replaced(runtime)
    await runtime.resumed(10)
    assert frontend.refusing == "", "the process with that worker has ended"


async def test_a_process_that_ends_before_it_serves_again_is_replaced_without_an_answer(
    process: Process, runtime: RemoteRuntime, frontend: RemoteFrontend
) -> None:
    await process.end(runtime)
    assert frontend.refusing == GONE
    second = Process(loaded=asyncio.Event())
    await second.start(runtime)
    await second.hears("loaded")
    second.close()
    await runtime.resumed(10)  # Before the supervisor notices: it may be waiting for something else of this process.
    assert runtime.away
    await second.replaced(runtime)
    await runtime.resumed(10)
    assert (frontend.refusing, runtime.processes) == ("", 3)


async def test_the_log_says_how_long_a_tenant_was_away_and_what_took_the_time(
    process: Process, runtime: RemoteRuntime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now = iter((100.0, 100.25, 101.25, 101.5, 103.5))
    monkeypatch.setattr(remote_runtime, "monotonic", lambda: next(now))
    await process.replaced(runtime)
    await runtime.resumed(10)
    again = "the device process serves again: acme; 3.50 s after the last one ended"
    assert f"{again} (0.25 to start, 1.00 for the device, 0.25 for partitions, 2.00 for models)" in caplog.messages


@pytest.mark.parametrize("error", [Conflict("no"), Failed("KeyError: 'acme'")])
async def test_tenants_are_served_again_though_not_all_is_as_before(
    process: Process, runtime: RemoteRuntime, frontend: RemoteFrontend, error: RequestError
) -> None:
    await process.end(runtime)
    second = Process()
    second.answers["loaded"] = error
    await second.start(runtime)
    await runtime.resumed(10)
    assert frontend.refusing == ""


async def test_each_model_is_served_when_the_new_process_has_it_if_its_tenant_may_still_call_it(
    process: Process, runtime: RemoteRuntime, frontend: RemoteFrontend
) -> None:
    for name in ("a", "b", "c"):
        await process.acme.publish(name, [model(name)], [])
    await runtime.models.unload("acme", "c")
    await runtime.models.load("acme", "b", "{}")
    await process.end(runtime)
    clients = HttpProcess()
    channel = await clients.meet(frontend)
    assert clients.of("announce") == [("a",), ("b",), ("c",)]
    second = Process(loaded=asyncio.Event())
    await second.start(runtime)
    again = AtStart({("acme", "b"): "{}"}, {("acme", "c"): UNLOADED}, again=True)
    assert second.heard[1] == ("start", {"acme": (0,)}, {}, again)
    await runtime.models.use({"acme": ["a"]})
    for name in ("a", "b"):
        await second.acme.publish(name, [model(name)], [])
    assert [name for name, *_ in clients.of("publish")] == ["a"]
    for each in (clients, channel):
        each.close()


async def test_a_model_that_the_new_process_does_not_find_is_not_served(
    process: Process, runtime: RemoteRuntime, frontend: RemoteFrontend
) -> None:
    """Its requests would name a model of the process that has ended."""
    for name in ("kept", "removed"):
        await process.acme.publish(name, [model(name)], [])
    assert names(frontend) == {"kept", "removed"}
    second = await process.replaced(runtime, loaded=asyncio.Event())
    await second.acme.publish("kept", [model("kept")], [])
    second.gates["loaded"].set()
    await runtime.resumed(10)
    assert names(frontend) == {"kept"}


async def test_a_tenant_that_stays_as_its_process_ends_is_served_what_the_next_process_has(
    process: Process, runtime: RemoteRuntime, frontend: RemoteFrontend
) -> None:
    """A move to another device that fails just then: what was served there is no model of the next process."""
    for name in ("kept", "removed", "listed no more"):
        await process.acme.publish(name, [model(name)], [])
    granules, _ = runtime.handover.leave("acme")
    await process.end(runtime)
    runtime.handover.stay("acme", granules)
    assert frontend.refusing == GONE
    await runtime.models.use({"acme": ["kept", "removed"]})
    second = Process(loaded=asyncio.Event())
    await second.start(runtime)
    assert frontend.refusing == ""
    for name in ("kept", "listed no more"):
        await second.acme.publish(name, [model(name)], [])
    second.gates["loaded"].set()
    await runtime.resumed(10)
    assert names(frontend) == {"kept"}


async def test_a_process_that_was_started_without_a_tenant_that_has_come_is_replaced(
    process: Process, runtime: RemoteRuntime, frontend: RemoteFrontend
) -> None:
    """Another device's tenant that comes, or one that was to leave and stays, as the process before has ended."""
    granules, _ = runtime.handover.leave("acme")
    second = await process.replaced(runtime, loaded=asyncio.Event())
    assert second.heard[1] == ("start", {}, {}, AtStart(again=True))
    runtime.handover.stay("acme", granules)
    assert frontend.refusing == GONE
    await asyncio.wait_for(second.supervisors.closed.wait(), 10)
    third = await second.replaced(runtime)
    assert third.heard[1] == ("start", {"acme": granules}, {}, AtStart(again=True))
    assert frontend.refusing == ""


async def test_a_process_that_cannot_change_a_link_is_replaced(process: Process, runtime: RemoteRuntime) -> None:
    process.answers["replace_link"] = OSError("no descriptors")
    await runtime.handover.replace_link("acme")
    await asyncio.wait_for(process.supervisors.closed.wait(), 10)


async def test_metrics_do_not_wait_for_a_process_that_hangs(
    process: Process, runtime: RemoteRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.processes.remote.http_processes.REPORT_TIMEOUT", 0.01)
    process.gates["executions"] = asyncio.Event()
    assert await asyncio.wait_for(runtime.models.executions(), 10) == []
