"""The gRPC server of one tenant's port: its methods, its limits, its start and end."""

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from ..config.section import ConfigError
from ..config.server import ServerConfig
from ..config.tables import dotted
from ..errors import WrongMethod
from ..tenants.service import SPARE_SLOTS, Service
from .front import Front
from .infer import Infer
from .messages import HEALTH, INFERENCE
from .metadata import Metadata

MAX_CONNECTIONS = 1024
"""Open connections; a client needs one, however many calls it makes at a time."""
STOP_SECONDS = 3.0
"""How long accepted calls may go on at the end; the tenant's requests have been answered or refused before."""
_HANDSHAKE_SECONDS = 30
_MAX_METADATA = 64 * 1024

UNSERVED = {
    "RepositoryModelLoad": "POST /v2/repository/models/NAME/load over HTTP",
    "RepositoryModelUnload": "POST /v2/repository/models/NAME/unload over HTTP",
    **dict.fromkeys(
        [f"{kind}SharedMemory{what}" for kind in ("System", "Cuda") for what in ("Status", "Register", "Unregister")],
        "raw_input_contents: shared memory is not served, since regions have no tenant",
    ),
    "TraceSetting": "server.tracing_endpoint; GET /v2/trace/setting over HTTP",
    "LogSettings": "GET and POST /v2/logging over HTTP",
}
"""The service's other methods, and what to use in place of each."""

Method = Callable[[Any], Awaitable[Any]]


class GrpcServer:
    """Serves the calls on one tenant's gRPC port. Belongs to the event loop."""

    def __init__(self, service: Service, name: str, shares_port: bool = False) -> None:
        """`shares_port`: other processes of the tenant may listen on the same port, and one may have it reserved."""
        config, front = service.config.tenants[name], Front(service, name)
        self._front, self._infer = front, Infer(front)
        options = [*_options(service.config.server, config.max_connections).items(), ("grpc.so_reuseport", int(shares_port))]
        calls = config.queue + SPARE_SLOTS
        self._server: Any = grpc.aio.server(options=options, maximum_concurrent_rpcs=calls)
        for service_name, methods in _methods(self._infer, Metadata(front)).items():
            handlers = {method: _handler(front, method, call) for method, call in methods.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, handlers),))

    def __repr__(self) -> str:
        return f"<GrpcServer {self._front!r}>"

    async def start(self) -> None:
        """Listen. Raises ConfigError if that is not possible."""
        config, name = self._front.service.config, self._front.name
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

    async def stop(self) -> None:
        """Accept no more calls, and wait for those that are being answered; cancel what is left after `STOP_SECONDS`."""
        self._infer.stop()
        await self._server.stop(STOP_SECONDS)


def _options(server: ServerConfig, connections: int | None) -> dict[str, int]:
    """Limits, which gRPC enforces before a call reaches this code."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "grpc.max_receive_message_length": server.max_body,
        "grpc.max_send_message_length": -1,
        "grpc.max_metadata_size": _MAX_METADATA,
        "grpc.absolute_max_metadata_size": _MAX_METADATA,
        "grpc.max_allowed_incoming_connections": max(1, min(connections or MAX_CONNECTIONS, MAX_CONNECTIONS, descriptors // 8)),
        "grpc.max_connection_idle_ms": round(server.keep_alive * 1000),
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_SECONDS * 1000,
        "grpc.default_compression_algorithm": 0,
    }


def _methods(infer: Infer, metadata: Metadata) -> dict[str, dict[str, Method]]:
    served: dict[str, Method] = {
        "ServerLive": metadata.live,
        "ServerReady": metadata.ready,
        "ServerMetadata": metadata.server,
        "ModelReady": metadata.model_ready,
        "ModelMetadata": metadata.model,
        "ModelConfig": metadata.config,
        "ModelStatistics": metadata.statistics,
        "RepositoryIndex": metadata.index,
        "ModelInfer": infer.unary,
        "ModelStreamInfer": infer.stream,
    }
    unserved = {method: _unserved(method, instead) for method, instead in UNSERVED.items()}
    return {INFERENCE: {**served, **unserved}, HEALTH: {"Check": metadata.health}}


def _unserved(method: str, instead: str) -> Method:
    async def refuse(_: Any) -> bytes:
        raise WrongMethod(method, instead)

    return refuse


def _handler(front: Front, method: str, call: Method) -> Any:
    """The handler of a method, which reads its message itself, when it wants it: gRPC would read it before any check."""

    async def handle(_: Any, context: Any) -> Any:
        try:
            return await call(context)
        except Exception as error:
            await front.refuse(context, error)

    streams = method == "ModelStreamInfer"
    return (grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler)(handle)
