"""The service apart from inference: health, metadata, configuration, statistics, the repository index; and administration.

Loads and unloads, log and trace settings ask the route of HTTP, so that its rules and texts hold.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import orjson
from google.protobuf.json_format import ParseDict
from msgspec import to_builtins

from ..errors import BadRequest, NotFound, Unavailable
from ..protocol.json_document import Object, short
from ..repository.model_repository import names_for
from ..repository.triton_schema import MESSAGE as ModelConfig
from ..tenants.answers import SERVER
from ..tenants.catalog import Catalog
from . import sockets
from .messages import MESSAGES
from .tenant_port import Refused, TenantPort

_SERVING, _NOT_SERVING = 1, 2


class Metadata:
    """Answers about the server, and about the models of the port's tenant. Belongs to the event loop."""

    def __init__(self, tenant_port: TenantPort) -> None:
        self._tenant_port = tenant_port

    async def health(self, _: Any) -> bytes:
        """Check of `grpc.health.v1.Health`, for every service: as ServerReady."""
        return _encoded("HealthCheckResponse", {"status": _NOT_SERVING if self._tenant_port.service.unready else _SERVING})

    async def live(self, _: Any) -> bytes:
        """ServerLive."""
        return _encoded("ServerLiveResponse", {"live": True})

    async def ready(self, _: Any) -> bytes:
        """ServerReady: false where HTTP answers 503."""
        return _encoded("ServerReadyResponse", {"ready": not self._tenant_port.service.unready})

    async def server(self, _: Any) -> bytes:
        """ServerMetadata."""
        return _encoded("ServerMetadataResponse", to_builtins(SERVER))

    async def model_ready(self, context: Any) -> bytes:
        """ModelReady: false where HTTP answers 503, and for a model that is not there, as in Triton."""
        tenant, request = self._tenant_port.tenant(context), await self._tenant_port.request(context, "ModelReadyRequest")
        try:
            tenant.callable(request.name, request.version or None)
        except (NotFound, Unavailable):
            return _encoded("ModelReadyResponse", {"ready": False})
        return _encoded("ModelReadyResponse", {"ready": True})

    async def model(self, context: Any) -> bytes:
        """ModelMetadata."""
        catalog, request = await self._asked(context, "ModelMetadataRequest")
        return _encoded("ModelMetadataResponse", to_builtins(catalog.metadata(request.name, request.version or None)))

    async def config(self, context: Any) -> bytes:
        """ModelConfig."""
        catalog, request = await self._asked(context, "ModelConfigRequest")
        config = ParseDict(catalog.find(request.name, request.version or None).config, ModelConfig())
        answer: bytes = MESSAGES["ModelConfigResponse"](config=config.SerializeToString()).SerializeToString()
        return answer

    async def statistics(self, context: Any) -> bytes:
        """ModelStatistics: of all models where none is named, of all versions where none is."""
        catalog, request = await self._asked(context, "ModelStatisticsRequest")
        if request.version and not request.name:
            raise BadRequest(f"version: {short(request.version)!r} without a name; expected the name of its model")
        served = catalog.matching(request.name, request.version or None) if request.name else catalog.served()
        return _encoded("ModelStatisticsResponse", to_builtins(await self._tenant_port.service.statistics(served)))

    async def index(self, context: Any) -> bytes:
        """RepositoryIndex."""
        tenant, request = self._tenant_port.tenant(context), await self._tenant_port.request(context, "RepositoryIndexRequest")
        if request.ready:
            entries = [entry for entry in tenant.index() if entry.state == "READY"]
        else:
            there = await asyncio.to_thread(names_for, tenant.config, self._tenant_port.service.config.models.repository)
            entries = tenant.index(there, tenant.config.models)
        return _encoded("RepositoryIndexResponse", {"models": [entry.as_json() for entry in entries]})

    async def _asked(self, context: Any, kind: str) -> tuple[Catalog, Any]:
        """The models of the tenant that asks, and its request."""
        return self._tenant_port.tenant(context).catalog, await self._tenant_port.request(context, kind)


def _encoded(kind: str, fields: Object) -> bytes:
    answer: bytes = ParseDict(fields, MESSAGES[kind]()).SerializeToString()
    return answer


Ask = Callable[[str, str, Mapping[str, str], bytes, tuple[str, int]], Awaitable[tuple[int, bytes]]]
"""Asks the routes of HTTP: method, path, headers, body and the client's address; returns status and body."""

_OF_LISTS = ("trace_level",)
"""Trace settings that are lists in HTTP; the others are texts."""


class Administration:
    """Belongs to the event loop. Who may do what, and the audit, are those of the routes."""

    def __init__(self, tenant_port: TenantPort, ask: Ask) -> None:
        self._tenant_port = tenant_port
        self._ask = ask

    async def load(self, context: Any) -> bytes:
        """RepositoryModelLoad."""
        return await self._change(context, "Load")

    async def unload(self, context: Any) -> bytes:
        """RepositoryModelUnload."""
        return await self._change(context, "Unload")

    async def log_settings(self, context: Any) -> bytes:
        """LogSettings: without settings, those that are; with some, changes those."""
        request = await self._tenant_port.request(context, "LogSettingsRequest")
        settings = {name: _chosen(value) for name, value in request.settings.items()}
        found = await self._settings(context, "/v2/logging", settings)
        answer = MESSAGES["LogSettingsResponse"]()
        for name, value in found.items():
            kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
            setattr(answer.settings[name], kind, value)
        return _bytes(answer)

    async def trace_setting(self, context: Any) -> bytes:
        """TraceSetting, of a model if one is named: without settings, those that are; others are refused as over HTTP."""
        request = await self._tenant_port.request(context, "TraceSettingRequest")
        path = "/v2/trace/setting"
        if request.model_name:
            self._tenant_port.tenant(context)
            path = f"/v2/models/{_quoted(request.model_name)}/trace/setting"
        settings = {name: _setting(name, list(value.value)) for name, value in request.settings.items()}
        found = await self._settings(context, path, settings)
        answer = MESSAGES["TraceSettingResponse"]()
        for name, value in found.items():
            answer.settings[name].value.extend(value if isinstance(value, list) else [value])
        return _bytes(answer)

    async def _change(self, context: Any, what: str) -> bytes:
        self._tenant_port.tenant(context)
        request = await self._tenant_port.request(context, f"RepositoryModel{what}Request")
        path = f"/v2/repository/models/{_quoted(request.model_name)}/{what.lower()}"
        values = {name: _chosen(value) for name, value in request.parameters.items()}
        if "config" in values and request.parameters["config"].WhichOneof("choice") == "bytes_param":
            raise BadRequest("parameters.config: bytes_param; expected string_param, as it is a text")
        await self._answer(context, "POST", path, {"parameters": values})
        return b""

    async def _settings(self, context: Any, path: str, settings: Object) -> Object:
        """The settings at a path, changed first if there are any to change."""
        found: Object = orjson.loads(await self._answer(context, "POST" if settings else "GET", path, settings))
        return found

    async def _answer(self, context: Any, method: str, path: str, document: Object) -> bytes:
        """The answer of a route, with the call's metadata as headers. Raises Refused, Ambiguous."""
        headers = self._tenant_port.headers(context)
        body = orjson.dumps(document) if document else b""
        status, answer = await self._ask(method, path, headers, body, sockets.address(context.peer()))
        if status >= 400:
            raise Refused(status, orjson.loads(answer)["error"])
        return answer


def _quoted(model: str) -> str:
    if not model or "/" in model:  # No name has a slash, and over HTTP a path with one leads elsewhere.
        raise NotFound(f"Request for unknown model: {model!r} is not found")
    return quote(model, safe="")


def _chosen(value: Any) -> Any:
    """The value of a parameter or setting, None if it has none. Bytes, of Triton's files, are refused by their name."""
    chosen = value.WhichOneof("choice")
    return ("" if chosen == "bytes_param" else getattr(value, chosen)) if chosen else None


def _setting(name: str, values: list[str]) -> object:
    """A trace setting as HTTP has it; None if it is to be cleared."""
    if name in _OF_LISTS or len(values) > 1:
        return values or None
    return values[0] if values else None


def _bytes(message: Any) -> bytes:
    answer: bytes = message.SerializeToString()
    return answer
