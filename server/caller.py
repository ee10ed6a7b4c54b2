"""Who asks, for routes of the framework: the tenant of a request, or proof that it may administer."""

from ipaddress import ip_address
from typing import Annotated

from fastapi import Depends, Request

from . import strict
from .body import Uploads
from .config import TenantConfig
from .errors import Unauthorized
from .runtime import Runtime
from .service import Service, Tenant
from .tenancy import digest


def runtime(request: Request) -> Runtime:
    """The runtime behind this application. Raises Unavailable before there is one."""
    found: Runtime = request.app.state.runtime()
    return found


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
    """Let administrators pass: those with the admin key, or, where none is configured, those on this machine.

    Raises Unauthorized, Ambiguous.
    """
    _unambiguous(request)
    expected = service(request).config.server.admin_key_sha256
    if expected is None:
        if not _is_local(request):
            raise Unauthorized("without server.admin_key_sha256 the admin API answers on the loopback interface only")
        if "forwarded" in request.headers or "x-forwarded-for" in request.headers:  # A proxy here brings everybody.
            raise Unauthorized("without server.admin_key_sha256 the admin API does not answer through a proxy")
        if "origin" in request.headers:  # A web page that is open on this machine comes from the loopback interface, too.
            raise Unauthorized("without server.admin_key_sha256 the admin API does not answer to web pages")
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or digest(key) != expected:
        raise Unauthorized("send Authorization: Bearer KEY with the admin key")


def _is_local(request: Request) -> bool:
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False


TheRuntime = Annotated[Runtime, Depends(runtime)]
TheService = Annotated[Service, Depends(service)]
TheAsker = Annotated[TenantConfig, Depends(asker)]
TheTenant = Annotated[Tenant, Depends(tenant)]
IsAdmin = Depends(admin)
