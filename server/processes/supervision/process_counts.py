"""How many HTTP processes each tenant has. Pure arithmetic."""

from collections.abc import Collection

from ...config.schema import Config
from ...config.tables import ConfigError, KeyPath, dotted
from ...config.tenant import TenantConfig
from .affinity import MAX_CORES

MOST_AUTO = 4
"""HTTP processes of a tenant with "auto", at most."""
_HTTP_FRACTION = 2
"""One core in so many is for HTTP, as `affinity.share_cores` has it."""


def count(config: Config, hosted: Collection[str], cores: int) -> dict[str, int]:
    """The number of every tenant's HTTP processes, on a host with so many cores for this server.

    `hosted` are the devices that are cores of this host. Raises ConfigError if a tenant there is to have several.
    """
    counts: dict[str, int] = {}
    problems: list[str] = []
    for device in config.named_devices:
        tenants = [config.tenants[name] for name in config.tenants_on(device)]
        total = sum(map(_share, tenants))
        for tenant in tenants:
            asked = tenant.http_processes
            if device in hosted:
                problems += [f"{config.source}: {dotted(_key(tenant))}: {refusal(tenant)}"] if is_refused(tenant) else []
                counts[tenant.name] = 1
            elif asked == "auto":
                pairs = cores // _HTTP_FRACTION // MAX_CORES
                counts[tenant.name] = min(MOST_AUTO, max(1, pairs * _share(tenant) // total))
            else:
                counts[tenant.name] = asked
    if problems:
        raise ConfigError(problems)
    return counts


def is_refused(tenant: TenantConfig) -> bool:
    """Whether this tenant is to have several processes, which a tenant on cores of the host cannot."""
    return tenant.http_processes not in (1, "auto")


def refusal(tenant: TenantConfig) -> str:
    """Why it cannot."""
    why = "on a CPU a tenant's models are in its one process, beside its HTTP"
    return f"{tenant.http_processes}, but {why}; leave it out, or give the tenant more cores"


def _key(tenant: TenantConfig) -> KeyPath:
    return ("tenants", tenant.name, "http_processes")


def _share(tenant: TenantConfig) -> int:
    """The tenant's share, in a unit that is the same for the tenants of one device unless their files mix units."""
    return tenant.granules or tenant.sms or tenant.cores or 1
