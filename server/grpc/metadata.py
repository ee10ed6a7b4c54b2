"""The service apart from inference: health, metadata, configuration, statistics, the repository index."""

import asyncio
from typing import Any

from google.protobuf.json_format import ParseDict
from msgspec import to_builtins

from ..errors import BadRequest, NotFound, Unavailable
from ..protocol.json_document import Object, short
from ..repository.model_repository import names_for
from ..repository.triton_schema import MESSAGE as ModelConfig
from ..tenants.answers import SERVER
from ..tenants.catalog import Catalog
from .messages import MESSAGES
from .tenant_port import TenantPort

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
