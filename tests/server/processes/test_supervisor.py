"""How long what dies is left alone, and what comes before what takes its place.

What the supervisor does with real processes is in tests/end_to_end/test_http_processes.py.
"""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from server.config.schema import Config, ModelsConfig
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.errors import Failed
from server.host.backoff import Backoff
from server.processes import serve
from server.processes.remote_frontend import open_remote
from server.processes.supervisor import SupervisedProcess, Supervisor


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
    assert backoff.delay(100.1) == 0.1, "it begins anew once it was stable"


class Staged(Supervisor):
    """A supervisor whose processes end and begin when they are told to, without any; it writes down what happens."""

    def __init__(self, tenant: TenantConfig) -> None:
        self.told: list[Any] = []
        self.frontend = open_remote(tenant)
        config = Config(models=ModelsConfig(repository=Path()), tenants={tenant.name: tenant}, source="test")
        super().__init__(config, {tenant.name: self.frontend}, [], {}, None, self._tell)

    async def _tell(self, name: str, free: Callable[[], None]) -> None:
        free()
        self.told.append(("reopened", self.frontend.descriptors))

    async def _wait_for_end(self, *_: Any) -> None:
        self.told.append("buried")

    async def _start(self, each: SupervisedProcess) -> None:
        assert each.frontend
        self.told.append(("started", each.frontend.descriptors))
        self._closing.set()


async def test_a_replacement_starts_after_the_worker_has_left_the_old_link() -> None:
    supervisor = Staged(TenantConfig(name="acme", granules=1, models=("*",)))
    front, before = supervisor._http["acme"], supervisor.frontend.descriptors
    front.channel.closed.set()
    await supervisor._keep(front)
    now = supervisor.frontend.descriptors
    assert supervisor.told == ["buried", ("reopened", now), ("started", now)]
    assert now != before
    supervisor.frontend.close()


class Unlucky(Staged):
    """Its processes can be started the second time only."""

    async def _start(self, each: SupervisedProcess) -> None:
        if "failed" not in self.told:
            self.told.append("failed")
            raise EOFError("unexpected EOF")
        await super()._start(each)

    async def _sleep(self, seconds: float) -> None:
        self.told.append(("rest", seconds))


async def test_the_second_attempt_to_start_a_process_is_made_at_once() -> None:
    """What it was to be forked off ended at that moment, and the next try begins with another."""
    supervisor = Unlucky(TenantConfig(name="acme", granules=1, models=("*",)))
    await supervisor._retry(lambda: supervisor._start(supervisor._http["acme"]))
    assert supervisor.told == ["failed", ("rest", 0.0), ("started", supervisor.frontend.descriptors)]
    supervisor.frontend.close()


async def test_a_server_ends_in_order_though_its_dispatcher_has_just_died() -> None:
    supervisor = Staged(TenantConfig(name="acme", granules=1, models=("*",)))
    supervisor._control, theirs = socket.socketpair()
    for end in (supervisor._control, theirs):  # As `_keep_dispatcher` leaves it until there is another.
        end.close()
    await supervisor.close()
    await asyncio.wait_for(supervisor._keep_dispatcher(), 10)
    supervisor.frontend.close()


def test_a_process_that_sent_the_dispatcher_a_malformed_handoff_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Staged(TenantConfig(name="acme", granules=1, models=("*",)))
    killed: list[object] = []
    monkeypatch.setattr("server.processes.spawn.kill", killed.append)
    process: Any = object()
    supervisor._http["acme"].process = process
    for message in (b"!", b"nobody", b"\xff", b"(shared)"):  # The last one has not started.
        supervisor._on_dispatcher(message)
    assert killed == []
    supervisor._on_dispatcher(b"acme")
    assert killed == [process]
    supervisor.frontend.close()


async def test_a_process_that_cannot_change_its_link_is_killed_and_the_device_is_started_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = Staged(TenantConfig(name="acme", granules=1, models=("*",)))
    killed: list[object] = []
    monkeypatch.setattr("server.processes.spawn.kill", killed.append)

    async def relink() -> None:
        raise Failed("OSError: 0 descriptors came with number 1; expected 4 with 1")

    monkeypatch.setattr(supervisor.frontend, "relink", relink)
    process: Any = object()
    supervisor._http["acme"].process = process
    await supervisor._relink(supervisor._http["acme"], supervisor.frontend)
    assert killed == [process]
    supervisor.frontend.close()


class Short(Staged):
    """There is no memory for a new link at first."""

    async def _tell(self, name: str, free: Callable[[], None]) -> None:
        if "failed" not in self.told:
            self.told.append("failed")
            free()
            raise OSError("no memory")
        await super()._tell(name, free)


async def test_a_process_for_which_there_was_no_memory_is_started_later() -> None:
    supervisor = Short(TenantConfig(name="acme", granules=1, models=("*",)))
    supervisor._http["acme"].channel.closed.set()
    await supervisor._keep(supervisor._http["acme"])
    assert [each if isinstance(each, str) else each[0] for each in supervisor.told] == [
        "buried",
        "failed",
        "reopened",
        "started",
    ]
    supervisor.frontend.close()


async def test_a_server_whose_processes_cannot_be_started_waits_for_none() -> None:
    class Broken:
        async def start(self) -> None:
            raise OSError("no process ids are left")

    class Waiting:
        async def start(self) -> None:
            await asyncio.Event().wait()

    supervisor, controller = cast(Supervisor, Broken()), cast(Controller, Waiting())
    with pytest.raises(OSError, match="no process ids are left"):
        await asyncio.wait_for(serve._start(supervisor, controller), 10)
