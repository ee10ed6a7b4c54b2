"""Tenants that lend: the pages that say when their granules may be used, and their HTTP side's end of them."""

from ..config.schema import Config
from ..link import activity
from ..scheduling.lender import Lender
from .service import Tenant


def open_pages(config: Config) -> dict[str, int]:
    """Create the pages of every tenant that lends, if any tenant has a burst: their descriptors, which belong to the caller."""
    if not any(tenant.burst for tenant in config.tenants.values()):
        return {}
    return {name: activity.create(len(config.tenants)) for name, tenant in config.tenants.items() if tenant.lend}


def lend(tenant: Tenant, config: Config, page: int) -> None:
    """Have a tenant of this process lend from now on; `page` is the descriptor of its pages."""
    own = activity.attach(page)
    own.expect([number for number, each in enumerate(config.tenants.values()) if each.burst and each.name != tenant.name])
    tenant.lane.lender = Lender(tenant.name, own, config.tenants[tenant.name].lend)
