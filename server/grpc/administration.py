"""Loads and unloads, log and trace settings: each call asks the route of HTTP, so that its rules and texts hold."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import orjson

from ..errors import NotFound
from ..protocol.json_document import Object
from . import sockets
from .messages import MESSAGES
from .tenant_port import Refused, TenantPort

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
            path = f"/v2/models/{_encoded(request.model_name)}/trace/setting"
        settings = {name: _setting(name, list(value.value)) for name, value in request.settings.items()}
        found = await self._settings(context, path, settings)
        answer = MESSAGES["TraceSettingResponse"]()
        for name, value in found.items():
            answer.settings[name].value.extend(value if isinstance(value, list) else [value])
        return _bytes(answer)

    async def _change(self, context: Any, what: str) -> bytes:
        self._tenant_port.tenant(context)
        request = await self._tenant_port.request(context, f"RepositoryModel{what}Request")
        path = f"/v2/repository/models/{_encoded(request.model_name)}/{what.lower()}"
        values = {name: _chosen(value) for name, value in request.parameters.items()}
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


def _encoded(model: str) -> str:
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
