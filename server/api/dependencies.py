"""FastAPI dependencies: the tenant of a request, and the checks of who may administer and who may load models.

All are coroutines, though they wait for nothing: FastAPI calls a plain function on another thread, which takes longer than
these do.
"""

from ipaddress import ip_address
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader, HTTPBearer

from ..config.tenant import TenantConfig
from ..errors import Unauthorized
from ..http import strict
from ..tenants import audit
from ..tenants.auth import digest
from ..tenants.service import Service, Tenant
from . import browsers

TENANT_KEY = HTTPBearer(
    scheme_name="tenantKey",
    description="A key of the tenant, where it has keys (`keys_sha256`). Where no tenant has keys, Authorization is ignored.",
    auto_error=False,
)
TENANT_NAME = APIKeyHeader(
    name="X-Tenant",
    scheme_name="tenantName",
    description="The tenant, where it has no keys. Without this header and without a key it is `server.default_tenant`.",
    auto_error=False,
)
ADMIN_KEY = HTTPBearer(
    scheme_name="adminKey",
    description="The admin key (`server.admin_key_sha256`). Where none is configured, programs on the server's own machine "
    "may administer without one.",
    auto_error=False,
)
# These three only document, as `auto_error=False` accepts everything. The functions below check, and answer in our own texts.
TenantKey = Annotated[Any, Security(TENANT_KEY)]
TenantName = Annotated[Any, Security(TENANT_NAME)]
AdminKey = Annotated[Any, Security(ADMIN_KEY)]


async def service(request: Request) -> Service:
    """The service behind this application. Raises Unavailable while the server starts."""
    return _service(request)


async def tenant_config(request: Request, _key: TenantKey = None, _name: TenantName = None) -> TenantConfig:
    """The configuration of this request's tenant, whichever process serves it.

    FastAPI calls this once for each request, however many dependencies use it. Raises Unauthorized, and Ambiguous for repeated
    headers.
    """
    found = _service(request)
    strict.headers(request.headers.raw)
    config = found.tenancy.identify(request.headers.get("authorization"), request.headers.get("x-tenant"))
    audit.is_tenants(request.scope, config.name)
    return config


TenantConfigDep = Annotated[TenantConfig, Depends(tenant_config)]


async def tenant(request: Request, config: TenantConfigDep) -> Tenant:
    """The tenant of this request. Raises as `tenant_config` does, and Misdirected for a tenant that another process serves."""
    found = _service(request)
    return found.tenants.get(config.name) or found.misdirected(config)


async def admin(request: Request, _key: AdminKey = None) -> None:
    """Allow administrators only: those with the admin key, or, where none is configured, programs on this machine.

    Raises Unauthorized, Ambiguous.
    """
    _check_admin(request)
    audit.is_administrators(request.scope)


def _check_admin(request: Request) -> None:
    strict.headers(request.headers.raw)
    server, headers = _service(request).config.server, request.headers
    expected = server.admin_key_sha256
    if expected is not None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("send Authorization: Bearer KEY with the admin key")
        if digest(key) != expected:
            raise Unauthorized("Authorization: this is not the admin key, whose SHA-256 is server.admin_key_sha256")
        return
    without = "without server.admin_key_sha256 the admin API"
    if shown := browsers.proxy_header(headers):  # Its clients may be anywhere; uvicorn takes its word for their addresses.
        raise Unauthorized(f"{without} does not answer through a proxy ({shown})")
    if not _is_local(request):
        raise Unauthorized(f"{without} answers on the loopback interface only")
    if shown := browsers.cross_origin(headers):  # A page opened in a browser on this machine uses the loopback interface too.
        raise Unauthorized(f"{without} does not answer to web pages ({shown})")
    if shown := browsers.unknown_host(headers, server.allowed_hosts):
        raise Unauthorized(f"{without} answers under this machine's names and server.allowed_hosts only ({shown})")


async def model_control(request: Request, config: TenantConfigDep) -> None:
    """Allow requests that may load and unload models of their tenant.

    These are requests with the tenant's key, and for tenants without keys all that no web page of another origin sent, and,
    while there is no admin key, no proxy. Raises Unauthorized, Ambiguous.
    """
    server, headers = _service(request).config.server, request.headers
    if config.keys_sha256:  # The request has the key then, which no page knows.
        return
    without = "without a key of its tenant's a model is not loaded or unloaded"
    if server.admin_key_sha256 is None and (shown := browsers.proxy_header(headers)):
        raise Unauthorized(f"{without} through a proxy ({shown}), unless there is a server.admin_key_sha256")
    page = browsers.cross_origin(headers)
    if page is None and browsers.is_from_page(headers):
        page = browsers.unknown_host(headers, server.allowed_hosts)
    if page:
        raise Unauthorized(f"{without} by web pages ({page})")


def _service(request: Request) -> Service:
    found: Service = request.app.state.service()
    return found


def _is_local(request: Request) -> bool:
    try:
        address = ip_address(request.client.host) if request.client else None
        mapped = getattr(address, "ipv4_mapped", None)  # A client over IPv4 of a socket that takes both.
        return address is not None and (mapped or address).is_loopback
    except ValueError:
        return False


ServiceDep = Annotated[Service, Depends(service)]
TenantDep = Annotated[Tenant, Depends(tenant)]
RequireAdmin = Depends(admin)
RequireModelControl = Depends(model_control)
