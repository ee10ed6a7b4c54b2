"""Bounds the names that processes have the supervisor keep. Pure: nothing here awaits or blocks."""

import logging

log = logging.getLogger("greenlane.processes")

MOST = 10_000
"""Names that are kept of one tenant: more than any repository has models."""


class KnownNames:
    """Those of models, their versions and lenders of one process's tenants, in whatever it says.

    On cores a tenant's own process parses what clients send as well. If one of them takes it over, it could say other names for
    ever, and the supervisor would keep them for metrics, bills and replacements of the process.
    """

    def __init__(self) -> None:
        self._of: dict[str, set[str]] = {}
        self._full = set[str]()

    def __repr__(self) -> str:
        return f"<KnownNames { ({tenant: len(names) for tenant, names in self._of.items()}) }>"

    def keep(self, tenant: str, name: str) -> bool:
        """Whether this name is to be kept: it is known, or there are fewer than `MOST`. The first that is not is logged."""
        names = self._of.setdefault(tenant, set())
        if name in names or len(names) < MOST:
            names.add(name)
            return True
        if tenant not in self._full:
            self._full.add(tenant)
            text = "the process of tenant %s has said %d names of models; what it says of others is ignored, such as %.100r"
            log.error(text, tenant, MOST, name)
        return False

    def remove(self, tenant: str) -> None:
        """This tenant has gone."""
        self._of.pop(tenant, None)
        self._full.discard(tenant)
