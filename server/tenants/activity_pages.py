"""The activity pages of tenants that lend, which say when their granules may be used, and their HTTP side's end of them."""

from collections.abc import Mapping
from types import MappingProxyType

from ..config.tenant import TenantConfig
from ..link import activity
from ..scheduling.lender import Lender
from .service import Tenant


def open_pages(tenants: Mapping[str, TenantConfig], processes: Mapping[str, int] = MappingProxyType({})) -> dict[str, int]:
    """Create the pages of each of these that lends, if one has a burst: their descriptors, which belong to the caller.

    `processes` is how many HTTP processes a tenant has, if not one.
    """
    if not any(tenant.burst for tenant in tenants.values()):
        return {}
    lenders = [name for name, tenant in tenants.items() if tenant.lend]
    return {name: activity.create(len(tenants), processes.get(name, 1)) for name in lenders}


def use_page(tenant: Tenant, tenants: Mapping[str, TenantConfig], page: int, number: int = 1) -> None:
    """Have a tenant of this process lend to others of `tenants` from now on, which are all of the configuration.

    `page` is the descriptor of its pages, `number` that of the process.
    """
    own = activity.attach(page, number)
    own.expect([number for number, each in enumerate(tenants.values()) if each.burst and each.name != tenant.name])
    tenant.lane.admission.lender = Lender(tenant.name, own, tenants[tenant.name].lend)
