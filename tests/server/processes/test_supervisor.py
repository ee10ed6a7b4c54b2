"""How long what dies is left alone, and what comes before what takes its place.

What the house does with real processes is in tests/end_to_end/test_http_processes.py.
"""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.config.schema import Config, ModelsConfig, TenantConfig
from server.host.backoff import Backoff
from server.processes.remote_frontend import open_remote
from server.processes.supervisor import Front, House


def test_what_dies_late_is_started_at_once() -> None:
    restarts = Backoff()
    restarts.started(100.0)
    assert restarts.pause(106.0) == 0.0


def test_what_dies_again_and_again_is_left_alone_for_longer_and_longer_up_to_a_bound() -> None:
    restarts, pauses = Backoff(), []
    for _ in range(10):
        restarts.started(100.0)
        pauses.append(restarts.pause(100.1))
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-2:] == [10.0, 10.0]
    restarts.started(100.0)
    assert restarts.pause(200.0) == 0.0
    assert restarts.pause(100.1) == 0.1, "it begins anew once it was stable"


class Staged(House):
    """A house whose processes end and begin when they are told to, without any; it writes down what happens."""

    def __init__(self, tenant: TenantConfig) -> None:
        self.told: list[Any] = []
        self.desk = open_remote(tenant)
        config = Config(models=ModelsConfig(repository=Path()), tenants={tenant.name: tenant}, source="test")
        super().__init__(config, {tenant.name: self.desk}, [], {}, None, self._tell)

    async def _tell(self, name: str, free: Callable[[], None]) -> None:
        free()
        self.told.append(("reopened", self.desk.descriptors))

    async def _buried(self, *_: Any) -> None:
        self.told.append("buried")

    async def _start(self, front: Front) -> None:
        assert front.desk
        self.told.append(("started", front.desk.descriptors))
        self._closing.set()


async def test_a_process_has_the_memory_of_the_one_before_only_once_the_worker_has_left_that_s_link() -> None:
    house = Staged(TenantConfig(name="acme", granules=1, models=("*",)))
    front, before = house._fronts["acme"], house.desk.descriptors
    front.channel.closed.set()
    await house._mind(front)
    now = house.desk.descriptors
    assert house.told == ["buried", ("reopened", now), ("started", now)]
    assert now != before
    house.desk.close()


class Unlucky(Staged):
    """Its processes can be started the second time only."""

    async def _start(self, front: Front) -> None:
        if "failed" not in self.told:
            self.told.append("failed")
            raise EOFError("unexpected EOF")
        await super()._start(front)

    async def _rest(self, seconds: float) -> None:
        self.told.append(("rest", seconds))


async def test_what_cannot_be_started_is_tried_again_at_once_first() -> None:
    """What it was to be forked off ended at that moment, and the next try begins with another."""
    house = Unlucky(TenantConfig(name="acme", granules=1, models=("*",)))
    await house._insist(lambda: house._start(house._fronts["acme"]))
    assert house.told == ["failed", ("rest", 0.0), ("started", house.desk.descriptors)]
    house.desk.close()


async def test_a_server_ends_in_order_though_its_dispatcher_has_just_died() -> None:
    house = Staged(TenantConfig(name="acme", granules=1, models=("*",)))
    house._control, theirs = socket.socketpair()
    for end in (house._control, theirs):  # As `_mind_dispatcher` leaves it until there is another.
        end.close()
    await house.close()
    await asyncio.wait_for(house._mind_dispatcher(), 10)
    house.desk.close()
