"""The application of Ray Serve: its three deployments, and what of Ray they need. The only module that imports Ray."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from greenlane.load.server_process import free_port

from .arguments import Arguments, read
from .coordinator import Coordinator, Listed, Listing, Outcome, Shares
from .ingress import Ingress, Routes, Tenants
from .server import FORGET_TIMEOUT, PATIENCE, UNLISTED, Server, ServerProcess

HEALTH_PERIOD = 1.0
"""Seconds between Ray Serve's questions whether a replica is healthy; three without a good answer replace it."""
HEALTH_TIMEOUT = 15.0
MOST_REQUESTS = 10_000
"""Requests that an ingress has at a time: the tenants' own queues are the limits, so this is out of their way."""


def build(given: dict[str, Any]) -> serve.Application:
    """What `serve run greenlane.ray.application:build config=FILE ...` runs. Raises WrongArguments."""
    return deployments(read(given))


def deployments(arguments: Arguments, child: Sequence[str] = ()) -> serve.Application:
    """The three of them, bound to each other. `child` takes the place of the server's command line, for tests."""
    health = {"health_check_period_s": HEALTH_PERIOD, "health_check_timeout_s": HEALTH_TIMEOUT}
    quiet = {"enable_access_log": False}  # Each server has metrics; a line for each request costs more than the request.
    resources = {"num_cpus": 0, "num_gpus": arguments.gpus} if arguments.gpus else {"num_cpus": arguments.cores}
    coordinator = serve.deployment(
        Coordinator,
        name="Coordinator",
        num_replicas=1,
        max_ongoing_requests=1000,
        logging_config=quiet,
        ray_actor_options={"num_cpus": 0},
        **health,
    ).bind(arguments.version)  # Another one for each version: what was changed before it is forgotten.
    servers = serve.deployment(
        ServerDeployment,
        name="Server",
        num_replicas=arguments.servers,
        ray_actor_options=resources,
        graceful_shutdown_timeout_s=PATIENCE + FORGET_TIMEOUT + UNLISTED + 10,
        **health,
    ).bind(arguments.toml, arguments.version, arguments.cores, coordinator, tuple(child))
    return serve.deployment(
        IngressDeployment,
        name="Ingress",
        num_replicas=arguments.ingresses,
        graceful_shutdown_timeout_s=PATIENCE,
        max_ongoing_requests=MOST_REQUESTS,
        logging_config=quiet,
        ray_actor_options={"num_cpus": 0},
        **health,
    ).bind(arguments.toml, dict(arguments.tenants), coordinator, servers)


class ServerDeployment:
    """One replica a server."""

    async def __init__(  # type: ignore[misc]
        self, toml: str, version: str, cores: int, coordinator: Any, child: Sequence[str]
    ) -> None:
        """Returns when the server is ready, as Ray Serve awaits it. Raises ServerEnded."""
        context = serve.get_replica_context()
        host, rank = ray.util.get_node_ip_address(), context.rank
        more = (child,) if child else ()
        process = ServerProcess(toml, host, free_port(), own_cores(cores, rank.local_rank), *more)
        self._server = Server(context.replica_tag, rank.rank, process, RemoteCoordinator(coordinator), version)
        await self._server.start()

    async def check_health(self) -> None:
        """Ray Serve calls it, and replaces the replica where it raises."""
        await self._server.check_health()

    async def __del__(self) -> None:
        """Ray Serve calls and awaits it before it ends the replica."""
        if hasattr(self, "_server"):
            await self._server.stop()


class IngressDeployment:
    """Gets every request from Ray Serve's proxies."""

    async def __init__(self, toml: str, places: Mapping[str, Sequence[int]], coordinator: Any, servers: Any) -> None:  # type: ignore[misc]
        del servers  # Named so that Ray Serve starts them; requests go to them by HTTP.
        digest = tomllib.loads(toml).get("server", {}).get("admin_key_sha256")
        self._ingress = Ingress(Tenants(toml), Routes(places), RemoteCoordinator(coordinator), digest)
        await self._ingress.start()

    async def __call__(self, request: Request) -> Response:
        """Ray Serve has the answer call the ingress, so that neither body is held in memory as a whole."""
        return _Answer(self._ingress)


class _Answer(Response):
    """Lets the ingress answer by itself."""

    def __init__(self, ingress: Ingress) -> None:
        super().__init__()
        self._ingress = ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._ingress(scope, receive, send)


class RemoteCoordinator:
    """The coordinator through Ray Serve's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def shares(self) -> Shares:
        return await self._handle.shares.remote()  # type: ignore[no-any-return]

    async def report(self, server: Listed, shares: Shares) -> Shares:
        return await self._handle.report.remote(server, shares)  # type: ignore[no-any-return]

    async def forget(self, id: str) -> None:
        await self._handle.forget.remote(id)

    async def servers(self) -> Listing:
        return await self._handle.servers.remote()  # type: ignore[no-any-return]

    async def partitions(self) -> Outcome:
        return await self._handle.partitions.remote()  # type: ignore[no-any-return]

    async def repartition(self, counts: Mapping[str, int]) -> Outcome:
        return await self._handle.repartition.remote(counts)  # type: ignore[no-any-return]


def own_cores(count: int, local_rank: int) -> list[int]:
    """The cores of the server with this rank on its machine; none where it does not count them. Raises ValueError."""
    if not count:
        return []
    cores = sorted(os.sched_getaffinity(0))
    found = cores[local_rank * count : (local_rank + 1) * count]
    if len(found) < count:
        raise ValueError(f"cores: server {local_rank} of this machine is to have {count}, but only {len(found)} are left")
    return found
