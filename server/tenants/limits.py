"""Sets the limits of a tenant of this process, as the configuration has them now: at its start, and again after a reload."""

from ..config.tables import dotted
from ..config.tenant import TenantConfig
from ..errors import LimitExceeded
from ..link.occupancy import Occupancy
from ..scheduling.limits import CONNECTIONS, LARGE_BODIES, RateLimits, SharedRateLimits, TokenBucket
from .service import Tenant


def limit(tenant: Tenant, config: TenantConfig, max_body: int, occupancy: Occupancy | None = None) -> None:
    """Limit this tenant's requests and bodies from now on, as its configuration says.

    `max_body` is in bytes; `occupancy` is set if the tenant has several HTTP processes.
    """
    before = tenant.lane.admission.limits
    limits = _rates(config, max_body, occupancy)
    if limits:
        limits.take_over(before)
    tenant.lane.admission.limits = limits
    tenant.uploads.limit_large(config.max_large_bodies, lambda text: _exceeded(tenant, LARGE_BODIES, text))


def too_many_connections(tenant: Tenant, most: int) -> LimitExceeded:
    """Count a connection beyond the tenant's limit; returns the error for its first request."""
    return _exceeded(
        tenant, CONNECTIONS, f"{most} connections may be open, and as many are. Send requests on those, or close some"
    )


def _rates(config: TenantConfig, max_body: int, occupancy: Occupancy | None) -> RateLimits | None:
    """The buckets of the tenant, None if neither rate is limited."""
    requests = nbytes = None
    if (rate := config.requests_per_second) is not None:
        requests = TokenBucket(rate, config.burst_requests or rate)
    if (rate := config.bytes_per_second) is not None:
        nbytes = TokenBucket(rate, config.burst_bytes or max(rate, max_body))
    if requests is None and nbytes is None:
        return None
    if occupancy is not None:
        return SharedRateLimits(config.name, requests, nbytes, occupancy)
    return RateLimits(config.name, requests, nbytes)


def _exceeded(tenant: Tenant, key: str, text: str) -> LimitExceeded:
    error = LimitExceeded(f"{dotted(('tenants', tenant.name, key))}: {text}", key)
    tenant.lane.admission.count_limited(error)
    return error
