"""What the supervisor keeps of a device process, to send it to the one that replaces it; the test is that process."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest

from server.accounts.usage import Report, TenantUsages, Usage
from server.config.tenant import TenantConfig
from server.control.descriptions import AtStart, Beside, DeviceInfo, Execution, Loading, ReadyShare, TenantMemory
from server.control.device_runtime import Models, Placements
from server.errors import Unavailable
from server.processes.channels import descriptors
from server.processes.channels.calls import proxy
from server.processes.channels.descriptors import DescriptorReceiver, DescriptorSender
from server.processes.channels.device_protocols import Change, FromRuntime, ToDeviceProcess, ToRuntime
from server.processes.channels.rpc import Channel
from server.processes.remote.kept_state import MOST_NAMES
from server.processes.remote.remote_frontend import RemoteFrontend, open_remote
from server.processes.remote.remote_runtime import RemoteRuntime
from server.tenants.frontend import HttpSide
from tests.fakes import PATIENCE

from ..recorder import Recorder

INFO = DeviceInfo("fake", "a device", "core", (1, 1))


class Process(Recorder):
    """A device process, whose models are loaded once `loaded` is set."""

    def __init__(self) -> None:
        self.loaded = asyncio.Event()
        answers = {"open": INFO, "start": {"acme": None}}
        super().__init__(ToRuntime, ToDeviceProcess, Models, Placements, answers=answers, gates={"loaded": self.loaded})
        self.channel = Channel("the supervisor", self.handlers())

    async def connect(self, runtime: RemoteRuntime) -> None:
        ours, theirs = socket.socketpair()
        sender, end = descriptors.pair()
        self._sender: DescriptorSender = sender
        self.descriptors = DescriptorReceiver(end)
        self.supervisors = Channel("the device process", runtime.handlers())
        await self.supervisors.open(ours)
        await self.channel.open(theirs)
        await runtime.connect(self.supervisors, sender)

    async def replace(self, before: "Process", runtime: RemoteRuntime) -> None:
        """Connect it once the one before has ended."""
        runtime.disconnect("it has ended")
        before.close()
        await self.connect(runtime)

    def close(self) -> None:
        self.channel.close()
        self.supervisors.close()
        self._sender.close()
        self.descriptors.close()


Started = tuple[RemoteRuntime, Process, Process]


def frontend(name: str) -> RemoteFrontend:
    return open_remote(TenantConfig(name=name, granules=1, models=("*",), memory=1 << 20), linked=False)


@pytest.fixture
async def acme() -> AsyncIterator[RemoteFrontend]:
    acme = frontend("acme")
    yield acme
    acme.close()


@pytest.fixture
async def started(acme: RemoteFrontend) -> AsyncIterator[Started]:
    """The first process serves acme on granule 1; the second is to replace it."""
    runtime, first, second = RemoteRuntime("the process", {"acme": acme}, lambda *_: None), Process(), Process()
    await first.connect(runtime)
    await runtime.open()
    await runtime.start({"acme": (1,)})
    yield runtime, first, second
    second.close()


async def test_a_model_that_children_are_making_is_not_what_ended_the_process(acme: RemoteFrontend) -> None:
    said = list[Loading]()
    runtime = RemoteRuntime("the process", {"acme": acme}, lambda *_: None, on_loading=said.append)
    runtime.on_loading(Loading("acme", "mob", "building or compiling", 0, 0, 2, apart=True))
    assert said == [Loading("acme", "mob", "building or compiling", 0, 0, 2, apart=True)]
    runtime.kept.crashes.on_end("the process")
    assert not runtime.kept.crashes.suspects()
    runtime.on_loading(Loading("acme", "mob", "compiling or loading the kernels of", 0, 0, 2))
    runtime.kept.crashes.on_end("the process")
    assert runtime.kept.crashes.suspects() == {("acme", "mob")}


async def test_what_a_process_reports_of_a_tenant_that_it_never_had_is_left_out(acme: RemoteFrontend) -> None:
    runtime, process = RemoteRuntime("the process", {"acme": acme}, lambda *_: None), Process()
    names = "acme", "globex"
    process.answers |= {
        "usage": Report(1, [TenantUsages(name, []) for name in names], 7),
        "executions": [Execution(name, "mob", "1", {}) for name in names],
        "memory": [TenantMemory(name, None, 0, 0, 0, 0.0, 0.0, []) for name in names],
    }
    await process.connect(runtime)
    report = await runtime.usage()
    assert report == Report(1, [TenantUsages("acme", [])], 7)
    assert [each.tenant for each in await runtime.models.executions()] == ["acme"]
    assert [each.tenant for each in await runtime.models.memory()] == ["acme"]
    runtime.tenants.leave("acme")
    assert await runtime.usage() == report, "what a tenant used that has left is billed"
    globex = frontend("globex")
    runtime.tenants.join("globex", globex)
    runtime.tenants.leave("globex")
    assert await runtime.usage() == process.answers["usage"], "also if the process was not asked while it had it"
    process.close()
    globex.close()


async def test_a_process_that_has_ended_has_no_rung_until_the_next_one_has(acme: RemoteFrontend) -> None:
    """Its replacement is not asked before it has loaded the same models, which may take minutes."""
    runtime, process = RemoteRuntime("the process", {"acme": acme}, lambda *_: None), Process()
    process.answers["states"] = states = {"acme": Beside(None, None, [ReadyShare((0, 1), 2, 8)])}
    await process.connect(runtime)
    await runtime.start({"acme": (0,)})
    assert await runtime.placements.states() == states
    runtime.disconnect("it has ended")
    assert await runtime.placements.states() == {"acme": Beside(None, None, [])}
    process.close()


async def test_a_process_has_the_supervisor_keep_no_names_without_end(
    acme: RemoteFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    """On cores a client may have taken it over."""
    said = list[Loading]()
    runtime, process = RemoteRuntime("the process", {"acme": acme}, lambda *_: None, said.append), Process()
    await process.connect(runtime)
    runtime.on_loading(Loading("acme", "m0/1"))
    runtime.on_loading(Loading("globex", "m0/1"))
    used = [Usage(f"m{number}/1", 1, 1, {}) for number in range(MOST_NAMES + 2)]
    process.answers["usage"] = Report(1, [TenantUsages("acme", used)])
    assert await runtime.usage() == Report(1, [TenantUsages("acme", used[:MOST_NAMES])])
    runtime.on_loading(Loading("acme", "another"))
    await runtime.models.load("acme", "another")
    assert (said, runtime.kept.changes("acme")) == ([Loading("acme", "m0/1")], {})
    assert caplog.text.count(f"the process of tenant acme has said {MOST_NAMES} names of models") == 1
    process.close()


async def test_a_tenants_own_process_may_not_call_its_http_side_in_the_supervisor(acme: RemoteFrontend) -> None:
    """It has that itself. What it announced, published or paged out would be kept for another process."""
    runtime, process = RemoteRuntime("the process", {"acme": acme}, lambda *_: None), Process()
    ours, theirs = socket.socketpair()
    supervisors = Channel("the process", runtime.handlers_of_hosted())
    await supervisors.open(ours)
    await process.channel.open(theirs)
    proxy(HttpSide, process.channel, "acme").announce("m")
    await asyncio.wait_for(supervisors.closed.wait(), PATIENCE)
    assert supervisors.distrusted
    process.channel.close()


@pytest.mark.parametrize("loading", [Loading("acme", "m" * 1025), Loading("acme", "m", "d" * 1025)])
async def test_a_process_that_says_longer_names_than_there_are_is_replaced(acme: RemoteFrontend, loading: Loading) -> None:
    runtime, process = RemoteRuntime("the process", {"acme": acme}, lambda *_: None), Process()
    await process.connect(runtime)
    proxy(FromRuntime, process.channel).on_loading(loading)
    await asyncio.wait_for(process.supervisors.closed.wait(), PATIENCE)
    assert process.supervisors.distrusted
    process.close()


async def test_only_the_first_process_builds_models_on_the_cores_of_others_while_it_starts(started: Started) -> None:
    runtime, first, second = started
    own, builds, every = frozenset({0, 1}), frozenset({5}), frozenset(range(6))
    runtime.set_affinity(own, builds, starting=every)
    await asyncio.wait_for(first.hears("set_affinity", own, builds, every), PATIENCE)
    await second.replace(first, runtime)
    assert ("set_affinity", own, builds, own) in second.heard
    second.loaded.set()
    await runtime.resumed(PATIENCE)


async def test_a_process_that_replaces_another_is_away_until_its_models_are_loaded(started: Started) -> None:
    runtime, first, second = started
    assert not runtime.away
    runtime.disconnect("it has ended")
    assert runtime.away
    first.close()
    await second.connect(runtime)
    assert runtime.away
    assert second.heard == [("open",), ("start", {"acme": (1,)}, {}, AtStart(again=True))]
    second.loaded.set()
    await runtime.resumed(PATIENCE)
    assert not runtime.away


async def test_a_process_gets_the_pages_of_as_many_tenants_as_there_are_before_it_has_read_any(acme: RemoteFrontend) -> None:
    """Each message takes a part of the socket's buffer, which has room for 278 (Linux 6.18, its default of 208 KiB)."""
    page = os.memfd_create("page")
    runtime, process = RemoteRuntime("the process", {"acme": acme}, lambda *_: None), Process()
    names = [f"tenant-{number}" for number in range(1000)]
    await process.connect(runtime)
    runtime.handover.set_pages(dict.fromkeys(names, page))
    runtime.handover.forget_page("tenant-7")
    async with asyncio.timeout(PATIENCE):
        await process.hears("set_pages", ["tenant-7"], None)
    came = []
    for tenants, number in process.of("set_pages")[:-1]:
        for descriptor in process.descriptors.take(number, len(tenants)):
            assert os.fstat(descriptor).st_ino == os.fstat(page).st_ino
            os.close(descriptor)
        came += tenants
    assert came == names
    process.close()
    os.close(page)


async def test_a_replacement_has_the_tenants_that_came_and_not_those_that_left(started: Started) -> None:
    globex = frontend("globex")
    runtime, first, second = started
    change = Change("globex", "b", True)
    runtime.handover.join("globex", globex, (0,), {"b": change})
    assert runtime.handover.leave("acme") == ((1,), {})
    runtime.handover.stay("acme", (1,))
    runtime.handover.leave("acme")
    await runtime.handover.release("acme")
    await second.replace(first, runtime)
    assert second.heard == [("open",), ("start", {"globex": (0,)}, {}, AtStart({("globex", "b"): None}, again=True))]
    second.loaded.set()
    await runtime.resumed(PATIENCE)
    assert list(runtime.frontends) == ["globex"]
    globex.close()


async def test_a_replacement_starts_with_the_lists_of_models_that_were_changed(started: Started) -> None:
    """And loads on request no more what its tenants may not call any more."""
    runtime, first, second = started
    for name in ("a", "b"):
        await runtime.models.load("acme", name)
    await runtime.models.use({"acme": ("b", "c")})
    assert first.heard[-1] == ("use", {"acme": ["b", "c"]}, {})
    await second.replace(first, runtime)
    second.loaded.set()
    await runtime.resumed(PATIENCE)
    assert second.heard[1:] == [
        ("start", {"acme": (1,)}, {"acme": ["b", "c"]}, AtStart({("acme", "b"): None}, again=True)),
        ("loaded",),
    ]
    assert runtime.handover.leave("acme")[0] == (1,)
    assert runtime.kept.lists.of("acme") == ["b", "c"], "for the device that it moves to"
    await runtime.handover.release("acme")
    assert runtime.kept.lists.of("acme") is None


async def test_a_replacement_that_was_starting_when_lists_changed_is_sent_them(started: Started) -> None:
    runtime, first, second = started
    runtime.disconnect("it has ended")
    first.close()
    with pytest.raises(Unavailable, match="is being started again"):
        await runtime.models.prepare({"acme": ["b"]})
    await second.connect(runtime)
    await runtime.models.use({"acme": ["b"]})
    second.loaded.set()
    await runtime.resumed(PATIENCE)
    assert second.heard[1:] == [
        ("start", {"acme": (1,)}, {}, AtStart(again=True)),
        ("loaded",),
        ("use", {"acme": ["b"]}, {}),
    ]
    assert not runtime.away
