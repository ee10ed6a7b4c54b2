"""Who asks, for routes of the framework: the tenant of a request, or proof that it may administer."""

from ipaddress import ip_address
from typing import Annotated

from fastapi import Depends, Request

from ..config.schema import TenantConfig
from ..errors import Unauthorized
from ..http import strict
from ..tenants.auth import digest
from ..tenants.service import Service, Tenant
from ..tenants.uploads import Uploads
from . import origins


def service(request: Request) -> Service:
    """What the HTTP side knows. Raises Unavailable before there is anything."""
    found: Service = request.app.state.service()
    return found


def tenant(request: Request) -> Tenant:
    """The tenant of this request, who is served here. Raises Unauthorized, Ambiguous, Misdirected."""
    return service(request).tenant(*_named(request))


def asker(request: Request) -> TenantConfig:
    """Whose request this is, wherever they are served. Raises Unauthorized, Ambiguous."""
    return service(request).tenancy.identify(*_named(request))


def uploads(request: Request) -> Uploads:
    """Where the body of this request counts while it is on its way: its tenant's, unless it is an administrator's."""
    found = service(request)
    if request.url.path.startswith("/admin"):
        return found.uploads
    try:
        return found.tenants[found.tenancy.identify(*_named(request)).name].uploads
    except (Unauthorized, KeyError):
        return found.uploads


def _named(request: Request) -> tuple[str | None, str | None]:
    _unambiguous(request)
    return request.headers.get("authorization"), request.headers.get("x-tenant")


def _unambiguous(request: Request) -> None:
    """Raises Ambiguous for two keys or two names of tenants."""
    strict.headers(request.headers.raw)


def admin(request: Request) -> None:
    """Let administrators pass: those with the admin key, or, where none is configured, programs on this machine.

    Raises Unauthorized, Ambiguous.
    """
    _unambiguous(request)
    server, headers = service(request).config.server, request.headers
    expected = server.admin_key_sha256
    if expected is None:
        without = "without server.admin_key_sha256 the admin API"
        if shown := origins.proxied(headers):  # A proxy on this machine brings everybody, and uvicorn takes its word for whom.
            raise Unauthorized(f"{without} does not answer through a proxy ({shown})")
        if not _is_local(request):
            raise Unauthorized(f"{without} answers on the loopback interface only")
        if shown := origins.from_elsewhere(headers):  # A page that is open on this machine comes from the loopback interface.
            raise Unauthorized(f"{without} does not answer to web pages ({shown})")
        if shown := origins.foreign_host(headers, server.allowed_hosts):
            raise Unauthorized(f"{without} answers under this machine's names and server.allowed_hosts only ({shown})")
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or digest(key) != expected:
        raise Unauthorized("send Authorization: Bearer KEY with the admin key")


def changer(request: Request) -> None:
    """Let pass what changes a tenant's models: with its key, or, where it has none, unless a page of somebody else's sent it.

    Raises Unauthorized, Ambiguous.
    """
    server, headers = service(request).config.server, request.headers
    if asker(request).keys_sha256:  # Its key was sent, then, which no page knows.
        return
    without = "without a key of its tenant's a model is not loaded or unloaded"
    if server.admin_key_sha256 is None and (shown := origins.proxied(headers)):
        raise Unauthorized(f"{without} through a proxy ({shown}), unless there is a server.admin_key_sha256")
    page = origins.from_elsewhere(headers) or (origins.is_page(headers) and origins.foreign_host(headers, server.allowed_hosts))
    if page:
        raise Unauthorized(f"{without} by web pages ({page})")


def _is_local(request: Request) -> bool:
    try:
        address = ip_address(request.client.host) if request.client else None
        mapped = getattr(address, "ipv4_mapped", None)  # A client of IPv4 where one socket takes both.
        return address is not None and (mapped or address).is_loopback
    except ValueError:
        return False


TheService = Annotated[Service, Depends(service)]
TheAsker = Annotated[TenantConfig, Depends(asker)]
TheTenant = Annotated[Tenant, Depends(tenant)]
IsAdmin = Depends(admin)
IsChanger = Depends(changer)
