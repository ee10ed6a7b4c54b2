"""How long what ends is left alone, and what is done before its replacement starts.

What the supervisor does with real processes is in tests/end_to_end/test_http_processes.py.
"""

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from server.config.schema import Config, ModelsConfig
from server.config.tenant import TenantConfig
from server.errors import Failed
from server.host.backoff import Backoff
from server.processes import serve
from server.processes.channels import handoff
from server.processes.channels.routing import SHARED
from server.processes.dispatching.dispatcher import MAX_NAME, RECONFIGURE, RECONFIGURED
from server.processes.remote.remote_frontend import open_remote
from server.processes.supervision.restarts import Restarts, WatchTasks
from server.processes.supervision.supervised import Current, SupervisedProcess
from server.processes.supervision.supervised_dispatcher import SupervisedDispatcher
from server.processes.supervision.supervised_http import SupervisedHttp
from server.processes.supervision.supervisor import Supervisor

PATIENCE = 10
"""Seconds."""


def test_backoff_is_zero_after_a_long_run() -> None:
    backoff = Backoff()
    backoff.started(100.0)
    assert backoff.delay(106.0) == 0.0


def test_backoff_doubles_up_to_a_bound() -> None:
    backoff, pauses = Backoff(), []
    for _ in range(10):
        backoff.started(100.0)
        pauses.append(backoff.delay(100.1))
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-2:] == [10.0, 10.0]
    backoff.started(100.0)
    assert backoff.delay(200.0) == 0.0
    assert backoff.delay(100.1) == 0.1, "it starts at the first delay again once a process was stable"


class RecordedRestarts(Restarts):
    """Waits for no process; writes down that it was asked to."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self._events = events

    async def wait_for_end(self, *given: Any) -> None:
        self._events.append("ended")
        given[-1]()


class Staged(SupervisedHttp):
    """The HTTP process of acme, which is replaced once, by none. `events` is what happened."""

    def __init__(self) -> None:
        tenant = TenantConfig(name="acme", granules=1, models=("*",))
        config = Config(models=ModelsConfig(repository=Path()), tenants={"acme": tenant}, source="test")
        self.events: list[Any] = []
        self.frontend = open_remote(tenant)
        self.acme = SupervisedProcess("acme", self.frontend)
        self.shared = SupervisedProcess(SHARED, None)
        self.restarts, self.watching = RecordedRestarts(self.events), WatchTasks()
        processes = {each.name: each for each in (self.acme, self.shared)}
        current = Current(config)
        self.dispatcher = SupervisedDispatcher([], processes, current, self.restarts)
        super().__init__(processes, self.dispatcher, None, self.replace_link, {}, current, self.restarts, self.watching)

    async def replace_link(self, name: str, free: Callable[[], None]) -> None:
        free()
        self.events.append(("relinked", self.frontend.descriptors))

    async def kept(self) -> None:
        """Until acme's process, which has ended, is replaced or has gone."""
        self.shared.retired = True
        for each in (self.acme, self.shared):
            each.channel.closed.set()
        self.keep()
        await self.watching.wait(PATIENCE)

    async def _start(self, each: SupervisedProcess) -> None:
        self.events.append(("started", self.frontend.descriptors))
        self.restarts.closing.set()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The processes that were killed."""
    found: list[object] = []
    monkeypatch.setattr("server.processes.children.spawn.kill", found.append)
    return found


async def test_a_replacement_starts_after_the_worker_has_left_the_old_link() -> None:
    http = Staged()
    before = http.frontend.descriptors
    await http.kept()
    now = http.frontend.descriptors
    assert http.events == ["ended", ("relinked", now), ("started", now)]
    assert now != before
    http.frontend.close()


async def test_what_a_process_left_behind_is_seen_to_before_the_pause_until_the_next_one() -> None:
    """Its page may say that it has requests open, for whose sake others are held back."""
    events: list[object] = []

    class Pausing(Restarts):
        async def sleep(self, seconds: float) -> None:
            events.append(seconds)

    process, backoff = multiprocessing.get_context("spawn").Process(target=int), Backoff()
    process.start()
    backoff.started(time.monotonic())
    await Pausing().wait_for_end(process, "a process", backoff, lambda: events.append("ended"))
    assert events == ["ended", 0.1]


async def test_the_process_of_a_tenant_that_goes_while_it_is_to_be_replaced_is_not_started_again() -> None:
    """A tenant of the same name may have come by then, whose process this is not."""
    http = Staged()

    async def go(*_: Any) -> None:
        http.retire("acme")

    http.restarts.wait_for_end = go  # type: ignore[method-assign]
    await http.kept()
    assert http.events == []
    await SupervisedHttp._start(http, http.acme)
    assert http.acme.process is None
    http.frontend.close()


async def test_what_an_http_process_calls_is_bounded() -> None:
    """It parses bytes of untrusted clients, and may be taken over."""
    http = Staged()
    for each in (http.acme, http.shared):
        handlers = http.handlers(each)
        assert handlers
        assert all(handler.bounded for handler in handlers.values())
    http.frontend.close()


async def test_the_second_attempt_to_start_a_process_is_made_at_once() -> None:
    """The forkserver ended at that moment, and the next attempt begins with another one."""
    events: list[Any] = []

    class Restless(Restarts):
        async def sleep(self, seconds: float) -> None:
            events.append(("slept", seconds))

    async def start() -> None:
        if not events:
            raise EOFError("unexpected EOF")
        events.append("started")

    await Restless().retry(start)
    assert events == [("slept", 0.0), "started"]


@pytest.fixture
def dispatchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """The ends of dispatchers that were started, without a process."""
    found: list[socket.socket] = []

    async def start(_: object, *arguments: Any) -> None:
        found.append(arguments[-1].dup())

    monkeypatch.setattr("server.processes.children.spawn.start", start)
    yield found
    for end in found:
        end.close()


async def test_a_server_ends_in_order_though_its_dispatcher_has_just_died(dispatchers: list[socket.socket]) -> None:
    http = Staged()
    await http.dispatcher.start()
    http.dispatcher.disconnect()  # As `keep` leaves it until there is another.
    http.restarts.closing.set()
    await http.dispatcher.close()
    await asyncio.wait_for(http.dispatcher.keep(), PATIENCE)
    http.frontend.close()


async def test_a_new_dispatcher_is_sent_all_processes_however_many_before_it_reads(dispatchers: list[socket.socket]) -> None:
    """A socket takes some 280 messages. A tenant of which it is not notified would get no connections."""
    http, ends = Staged(), handoff.pair()
    names = [f"tenant{number}" for number in range(1000)]
    for name in names:
        each = SupervisedProcess(name, None)
        each.handoff, each.takes_connections = ends, True
        http.add(each)
    await http.dispatcher.start()
    reconfiguring = asyncio.ensure_future(http.dispatcher.reconfigure())
    await asyncio.sleep(0)
    ends.close()
    (theirs,) = dispatchers
    theirs.setblocking(False)
    heard: list[bytes] = []
    async with asyncio.timeout(PATIENCE):
        while RECONFIGURE not in heard:
            try:
                message, descriptors, *_ = socket.recv_fds(theirs, MAX_NAME, 2)
            except BlockingIOError:
                await asyncio.sleep(0)
                continue
            heard.append(message)
            assert len(descriptors) == (1 if message == RECONFIGURE else 2)
            for descriptor in descriptors:
                os.close(descriptor)
        assert [each.decode() for each in heard[:-1]] == names
        assert not reconfiguring.done()
        theirs.send(RECONFIGURED)
        keeping = asyncio.ensure_future(http.dispatcher.keep())
        await reconfiguring
    http.restarts.closing.set()
    theirs.close()
    await http.dispatcher.close()
    await keeping
    http.dispatcher.disconnect()
    http.frontend.close()


async def test_a_process_that_sent_the_dispatcher_a_malformed_handoff_is_killed(
    killed: list[object], dispatchers: list[socket.socket]
) -> None:
    http = Staged()
    process: Any = object()
    http.acme.process = process
    await http.dispatcher.start()
    for message in (b"!", b"nobody", b"\xff", b"(shared)", b"acme"):  # The last but one has not started.
        dispatchers[0].send(message)
    keeping = asyncio.ensure_future(http.dispatcher.keep())
    async with asyncio.timeout(PATIENCE):
        while not killed:
            await asyncio.sleep(0)
    http.restarts.closing.set()
    dispatchers[0].close()
    await keeping
    assert killed == [process]
    http.dispatcher.disconnect()
    http.frontend.close()


async def test_a_process_that_cannot_change_its_link_is_killed_and_the_device_is_started_all_the_same(
    killed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    http = Staged()

    async def relink() -> None:
        raise Failed("OSError: 0 descriptors came with number 1; expected 4 with 1")

    monkeypatch.setattr(http.frontend, "relink", relink)
    process: Any = object()
    http.acme.process = process
    await http.relink("acme", http.frontend)
    assert killed == [process]
    http.frontend.close()


async def test_a_process_for_which_there_was_no_memory_is_started_later() -> None:
    class Short(Staged):
        """There is no memory for a new link at first."""

        async def replace_link(self, name: str, free: Callable[[], None]) -> None:
            await super().replace_link(name, free)
            if len(self.events) == 2:
                raise OSError("no memory")

    http = Short()
    await http.kept()
    assert [each if isinstance(each, str) else each[0] for each in http.events] == ["ended", "relinked", "relinked", "started"]
    http.frontend.close()


async def test_a_server_whose_processes_cannot_be_started_waits_for_none() -> None:
    class Broken:
        async def start(self) -> None:
            raise OSError("no process ids are left")

    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(OSError, match="no process ids are left"):
        await asyncio.wait_for(serve._start(cast(Supervisor, Broken()), wait), 10)
