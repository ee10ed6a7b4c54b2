"""Which models tenants may call, as a process that replaces another has to know it. Pure: nothing here awaits or blocks."""

from collections.abc import Mapping, Sequence

Lists = dict[str, list[str]]
"""The models that a tenant may call, as the configuration's `models`, by tenant."""


class KeptLists:
    """The lists of one device side's tenants that were changed since the server started, and what its process knows of them."""

    def __init__(self) -> None:
        self._lists: Lists = {}
        self._known: Lists = {}

    def __repr__(self) -> str:
        return f"<KeptLists of {', '.join(self._lists) or 'no tenant'}>"

    def of(self, tenant: str) -> list[str] | None:
        """The tenant's list; None if it was not changed."""
        return self._lists.get(tenant)

    def allows(self, tenant: str, model: str) -> bool:
        """Whether the tenant may call this model, as far as that is known here."""
        found = self._lists.get(tenant)
        return found is None or model in found or "*" in found

    def use(self, lists: Mapping[str, Sequence[str]]) -> None:
        """These tenants have these lists from now on."""
        self._lists |= {tenant: list(models) for tenant, models in lists.items()}

    def on_used(self, lists: Mapping[str, Sequence[str]]) -> None:
        """The process has these lists now."""
        self._known |= {tenant: list(models) for tenant, models in lists.items()}

    def remove(self, tenant: str) -> None:
        """This tenant has gone."""
        self._lists.pop(tenant, None)

    def at_start(self) -> Lists:
        """What a process is to be started with."""
        self._known = dict(self._lists)
        return dict(self._lists)

    def late(self) -> Lists:
        """What has changed since the process was started, each once."""
        found = {tenant: models for tenant, models in self._lists.items() if self._known.get(tenant) != models}
        self._known |= found
        return found
