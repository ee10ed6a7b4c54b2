"""The FastAPI dependencies, in an application whose tenant is served here."""

from pathlib import Path

import httpx
import pytest
from fastapi import Response

from server.api import framework, metadata, model_control
from server.config.schema import Config, ModelsConfig
from server.config.tenant import TenantConfig
from server.tenants.auth import Tenancy
from server.tenants.service import Service, open_tenant
from tests.memory import linked

ACME = TenantConfig(name="acme", granules=1, models=("m",))
CONFIG = Config(models=ModelsConfig(repository=Path()), tenants={"acme": ACME}, source="test")


class CountingTenancy(Tenancy):
    """Counts how often a tenant was identified."""

    identified = 0

    def identify(self, authorization: str | None, name: str | None) -> TenantConfig:
        self.identified += 1
        return super().identify(authorization, name)


class Device:
    """A device side without work to cancel, on which every unload succeeds."""

    def cancel(self, slot: int, serial: int) -> None:
        raise AssertionError

    async def unload(self, *_: object) -> Response:
        return Response()


@pytest.mark.parametrize("path", ["index", "models/other/load", "models/m/unload"])
async def test_the_tenant_of_a_request_with_a_body_is_identified_once(path: str) -> None:
    with linked() as link:
        acme = open_tenant(ACME, link, Device())
        service = Service(CONFIG, [acme])
        service.tenancy = tenancy = CountingTenancy([ACME], None)
        control = Device()
        routers = (metadata.router, model_control.router)
        application = framework.build(routers, service=lambda: service, model_control=control)
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.post(f"/v2/repository/{path}", json={}, headers={"X-Tenant": "acme"})
        assert answer.status_code == (404 if path == "models/other/load" else 200)
        assert tenancy.identified == 1
        assert acme.uploads.counted == len(b"{}"), "the body counts against the tenant"
