"""Which connections have shown a call of the tenant's, by real sockets."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from server.errors import RequestError
from server.grpc import tenant_port
from server.grpc.tenant_port import Connections


class Executor(ThreadPoolExecutor):
    """Runs each look at once, and gives what it found when the test lets it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.begun = asyncio.Condition()
        self.looks: list[Callable[[], None]] = []

    def submit(self, look: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        found, future = look(*arguments, **named), Future[Any]()
        self.looks.append(lambda: future.set_result(found))
        asyncio.get_running_loop().create_task(self._say())
        return future

    async def wait(self, count: int) -> None:
        """Until so many looks were begun; what those before the last one found has been used then."""
        async with self.begun:
            await self.begun.wait_for(lambda: len(self.looks) >= count)

    async def _say(self) -> None:
        async with self.begun:
            self.begun.notify_all()


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(tenant_port, "LOOK_INTERVAL", 0.01)
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as opened:
        yield opened


def refuse(most: int) -> RequestError:
    return RequestError(f"{most} connections may be open")


def peer(client: socket.socket) -> str:
    """As gRPC has it, which gives addresses of IPv6 a scope where they have one."""
    host, port = client.getsockname()[:2]
    return f"ipv6:%5B{host}%252%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


async def test_a_connection_that_shows_a_call_while_sockets_are_looked_at_counts(listener: socket.socket) -> None:
    executor, connections = Executor(), Connections(listener.getsockname()[1], refuse)
    asyncio.get_running_loop().set_default_executor(executor)
    connections.start()
    await executor.wait(1)
    with socket.create_connection(listener.getsockname()[:2]) as client, listener.accept()[0]:
        connections.show(peer(client), 1)
        for count in (1, 2):
            executor.looks[-1]()
            await executor.wait(count + 1)
            with pytest.raises(RequestError, match="1 connections may be open"):
                connections.show("ipv4:192.0.2.1:1", 1)
        assert connections.unshown == 0
    executor.looks[-1]()
    await executor.wait(4)
    connections.show("ipv4:192.0.2.1:1", 1)
    await connections.close()
