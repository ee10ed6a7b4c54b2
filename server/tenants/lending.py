"""Tenants that lend: the pages that say when their granules may be used, and their HTTP side's end of them."""

from collections.abc import Mapping
from types import MappingProxyType

from ..config.schema import Config
from ..link import activity
from ..scheduling.lender import Lender
from .service import Tenant


def open_pages(config: Config, processes: Mapping[str, int] = MappingProxyType({})) -> dict[str, int]:
    """Create the pages of every tenant that lends, if any tenant has a burst: their descriptors, which belong to the caller.

    `processes` is how many HTTP processes a tenant has, if not one.
    """
    if not any(tenant.burst for tenant in config.tenants.values()):
        return {}
    lenders = [name for name, tenant in config.tenants.items() if tenant.lend]
    return {name: activity.create(len(config.tenants), processes.get(name, 1)) for name in lenders}


def lend(tenant: Tenant, config: Config, page: int, number: int = 1) -> None:
    """Have a tenant of this process lend from now on; `page` is the descriptor of its pages, `number` that of the process."""
    own = activity.attach(page, number)
    own.expect([number for number, each in enumerate(config.tenants.values()) if each.burst and each.name != tenant.name])
    tenant.lane.lender = Lender(tenant.name, own, config.tenants[tenant.name].lend)
