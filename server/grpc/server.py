"""The gRPC server of one tenant's port: its methods, its limits, its start and end."""

import asyncio
import logging
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from ..config.server import ServerConfig
from ..config.tables import ConfigError, dotted
from ..config.tenant import TenantConfig
from ..errors import WrongMethod
from ..tenants.service import SPARE_SLOTS, Service
from .infer import Infer
from .messages import HEALTH, INFERENCE
from .metadata import Administration, Ask, Metadata
from .tenant_port import Connections, TenantPort

MAX_CONNECTIONS = 16384
"""Open connections, unless a quarter of the descriptors is less. Beyond these gRPC closes new ones; `Connections` closes those
that show no call of the tenant's before.
"""
MAX_FIELDS = 128
"""Fields of metadata. gRPC does not apply its own limit of bytes to fields that HPACK names again and again in few bytes."""
_READ_BYTES = 256 * 1024
"""Bytes of a connection that gRPC reads in one go; others have their turn then."""
STOP_SECONDS = 3.0
"""How long accepted calls may go on at the end; the tenant's requests have been answered or refused before."""
_HANDSHAKE_SECONDS = 30
_SETTINGS_SECONDS = 5
_PENDING_SECONDS = 5
"""Calls that have come and wait for so long until this process takes them are refused, as those beyond `2 * calls` are."""
_LEAST_AHEAD, _MOST_AHEAD = 64 * 1024, 4 << 20
"""Bytes of a message that a client may send before the message is asked for; then it may send the whole."""
_MAX_METADATA = 64 * 1024

UNSERVED = {
    f"{kind}SharedMemory{what}": "raw_input_contents: shared memory is not served, since regions have no tenant"
    for kind in ("System", "Cuda")
    for what in ("Status", "Register", "Unregister")
}
"""The service's other methods, and what to use in place of each."""

Method = Callable[[Any], Awaitable[Any]]


class GrpcServer:
    """Serves the calls on one tenant's gRPC port. Belongs to the event loop."""

    def __init__(self, service: Service, name: str, ask: Ask, shares_port: bool = False) -> None:
        """`ask` asks the routes of HTTP.

        `shares_port`: other processes of the tenant may listen on the same port, and one may have it reserved.
        """
        config = service.config.tenants[name]
        calls = config.queue + SPARE_SLOTS  # Of one connection; all together may have twice as many.
        tenant_port = self.tenant_port = TenantPort(service, name, 2 * calls)
        self._infer = Infer(tenant_port)
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)
        limits = _options(service.config.server, config, calls)
        options = [*limits.items(), ("grpc.so_reuseport", int(shares_port))]
        self._server: Any = grpc.aio.server(options=options, maximum_concurrent_rpcs=2 * calls)
        services = _methods(self._infer, Metadata(tenant_port), Administration(tenant_port, ask))
        self._server.add_generic_rpc_handlers((_Handlers(tenant_port, services),))

    @property
    def connections(self) -> Connections:
        """Those of the port."""
        return self.tenant_port.connections

    async def start(self) -> None:
        """Listen. Raises ConfigError if that is not possible."""
        config, name = self.tenant_port.service.config, self.tenant_port.name
        host, port = config.server.host, config.tenants[name].grpc_port
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for address in dict.fromkeys(str(address[0]) for *_, address in found):
                self._server.add_insecure_port(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
        except (OSError, RuntimeError) as error:
            key = dotted(("tenants", name, "grpc_port"))
            text = f"cannot listen on {host}:{port}: {error}; another program may listen there"
            raise ConfigError([f"{config.source}: {key}: {text}"]) from error
        await self._server.start()
        self.tenant_port.connections.start()

    async def stop(self) -> None:
        """Accept no more calls, and wait for those that are being answered; cancel what is left after `STOP_SECONDS`."""
        self._infer.stop()
        await self._server.stop(STOP_SECONDS)
        await self.tenant_port.connections.close()


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether gRPC logs something else than that a client has gone while its answer was written, with a traceback each time."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"


def _options(server: ServerConfig, tenant: TenantConfig, calls: int) -> dict[str, int]:
    """Limits, which gRPC enforces before a call reaches this code; `calls`: of a connection at a time, of all twice as many."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "grpc.max_receive_message_length": server.max_body,
        "grpc.max_send_message_length": -1,
        "grpc.max_concurrent_streams": calls,
        "grpc.http2.lookahead_bytes": max(_LEAST_AHEAD, min(tenant.memory // (2 * calls), _MOST_AHEAD)),
        "grpc.http2.bdp_probe": 0,  # It would let every call send megabytes before its message is asked for.
        "grpc.max_metadata_size": _MAX_METADATA,
        "grpc.absolute_max_metadata_size": _MAX_METADATA,
        "grpc.experimental.tcp_max_read_chunk_size": _READ_BYTES,
        "grpc.http2.hpack_table_size.decoder": 0,  # In force once the client has acknowledged it, which it has a while for.
        "grpc.http2.settings_timeout": _SETTINGS_SECONDS * 1000,
        "grpc.server.max_pending_requests": 2 * calls,
        "grpc.server.max_pending_requests_hard_limit": 2 * calls,
        "grpc.server_max_unrequested_time_in_server": _PENDING_SECONDS,
        "grpc.max_allowed_incoming_connections": max(1, min(MAX_CONNECTIONS, descriptors // 4)),
        "grpc.max_connection_idle_ms": round(server.keep_alive * 1000),
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_SECONDS * 1000,
        "grpc.default_compression_algorithm": 0,
    }


def _methods(infer: Infer, metadata: Metadata, administration: Administration) -> dict[str, dict[str, Method]]:
    served: dict[str, Method] = {
        "ServerLive": metadata.live,
        "ServerReady": metadata.ready,
        "ServerMetadata": metadata.server,
        "ModelReady": metadata.model_ready,
        "ModelMetadata": metadata.model,
        "ModelConfig": metadata.config,
        "ModelStatistics": metadata.statistics,
        "RepositoryIndex": metadata.index,
        "RepositoryModelLoad": administration.load,
        "RepositoryModelUnload": administration.unload,
        "LogSettings": administration.log_settings,
        "TraceSetting": administration.trace_setting,
    }
    unserved = {method: _unserved(method, instead) for method, instead in UNSERVED.items()}
    inference = {"ModelInfer": infer.unary, "ModelStreamInfer": infer.stream}
    return {INFERENCE: {**served, **unserved, **inference}, HEALTH: {"Check": metadata.health}}


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types.
    """Finds the handler of each call, and cuts off connections whose metadata has too many fields, whatever they call."""

    def __init__(self, tenant_port: TenantPort, services: dict[str, dict[str, Method]]) -> None:
        self._handlers = {
            f"/{service}/{method}": _handler(tenant_port, method, call)
            for service, methods in services.items()
            for method, call in methods.items()
        }

        async def cut(_: Any, context: Any) -> None:
            tenant_port.connections.cut(context.peer())
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many fields of metadata")

        self._cut = grpc.stream_unary_rpc_method_handler(cut)

    def service(self, handler_call_details: Any) -> Any:
        if len(handler_call_details.invocation_metadata or ()) > MAX_FIELDS:
            return self._cut
        return self._handlers.get(handler_call_details.method)


def _unserved(method: str, instead: str) -> Method:
    async def refuse(_: Any) -> bytes:
        raise WrongMethod(method, instead)

    return refuse


def _handler(tenant_port: TenantPort, method: str, call: Method) -> Any:
    """The handler of a method, which reads its message itself, when it wants it: gRPC would read it before any check."""

    async def handle(_: Any, context: Any) -> Any:
        try:
            answer = await call(context)
            if not keeps:
                tenant_port.kept.keep_until_done(context, len(answer))
            return answer
        except Exception as error:
            await tenant_port.refuse(context, error)

    streams, keeps = method == "ModelStreamInfer", method in ("ModelInfer", "ModelStreamInfer")
    return (grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler)(handle)
