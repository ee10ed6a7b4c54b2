"""Which models ended the processes that loaded them. Pure: nothing here awaits or blocks."""

import logging
from collections import Counter

from ...control.descriptions import CRASHED

log = logging.getLogger("greenlane.processes")

MOST = 3
"""How often a process may end while it loads a model before the model is left out."""


class LoadCrashes:
    """The models that are being loaded in one process, and how often it or its predecessors ended meanwhile.

    A model that crashes its process each time would otherwise do so for ever, and no other model of its tenant would be served.
    In a process of several tenants, models that others were loading at that moment count as well: which one it was is unknown.
    """

    def __init__(self) -> None:
        self._loading: dict[str, str] = {}
        self._crashes: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        return f"<LoadCrashes {dict(self._crashes)}, now {self._loading}>"

    def on_loading(self, tenant: str, model: str) -> None:
        """The tenant's process loads this model now; with "" it has ended to load one, well or not."""
        before = self._loading.pop(tenant, None)
        if model:
            self._loading[tenant] = model
        elif before:
            self._crashes.pop((tenant, before), None)

    def on_end(self, label: str) -> None:
        """The process of this name in the log has ended."""
        for tenant, model in self._loading.items():
            self._crashes[tenant, model] += 1
            then = "; it is left out until it is loaded on request" if self.crashes(tenant, model) else ""
            log.error("%s ended while it loaded model %s of %s%s", label, model, tenant, then)
        self._loading.clear()

    def crashes(self, tenant: str, model: str) -> bool:
        """Whether this model is left out."""
        return self._crashes[tenant, model] >= MOST

    def suspects(self) -> set[tuple[str, str]]:
        """The models during whose last load a process ended, with their tenants."""
        return set(self._crashes)

    def left_out(self) -> dict[tuple[str, str], str]:
        """The models that are left out, with their tenants, and why."""
        return dict.fromkeys((each for each in self._crashes if self.crashes(*each)), CRASHED)
