"""How far the first load of all models is, as readiness, the status page and the log say it. Pure: nothing awaits or blocks."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection

from .descriptions import Loading

log = logging.getLogger("greenlane.control")

_MOST_NAMED = 4
"""Models that are named as being loaded now: a tenant loads one at a time, and there may be many tenants."""


class StartProgress:
    """What the device sides say of their loads; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, Loading] = {}
        """By tenant."""
        self._began: dict[str, float] = {}

    def on_loading(self, loading: Loading, tenants: Collection[str]) -> None:
        """A tenant's device side has begun or ended to load a model, or does something else with it; logs a model that got
        ready. `tenants` are all of the server's.
        """
        tenant, now = loading.tenant, self._clock()
        before = self._last.get(tenant)
        self._last[tenant] = loading
        if before is None or before.model != loading.model:
            began, self._began[tenant] = self._began.get(tenant, now), now
            if before and before.model and loading.ready > before.ready:
                text = "model %s of %s is ready after %.1f s; %s"
                log.info(text, before.model, before.tenant, now - began, self.line(tenants), extra={"caller": before.tenant})

    def line(self, tenants: Collection[str]) -> str:
        """For administrators: how many models are ready, and what is done now with which."""
        doing = [f"{each.doing} {each.model} ({each.tenant})" for each in self._last.values() if each.model]
        more = [f"{len(doing) - _MOST_NAMED} more"] if len(doing) > _MOST_NAMED else []
        return self._text([*doing[:_MOST_NAMED], *more], tenants)

    def public(self, tenants: Collection[str]) -> str:
        """The same for everybody: without names, as tenants are not to know of each other's models."""
        doing = Counter(each.doing for each in self._last.values() if each.model)
        return self._text([f"{what} {count}" for what, count in doing.items()], tenants)

    def _text(self, doing: list[str], tenants: Collection[str]) -> str:
        last = self._last.values()
        ready, failed = sum(each.ready for each in last), sum(each.failed for each in last)
        known = sum(each.known for each in last)
        text = f"{ready} of {known} model{'s' * (known != 1)} {'is' if 1 in (ready, known) else 'are'} ready"
        text += f", {failed} cannot be served" if failed else ""
        unknown = len([tenant for tenant in tenants if tenant not in self._last])
        text += f", those of {unknown} more tenant{'s' * (unknown != 1)} are not known yet" if unknown else ""
        return "; ".join(filter(None, [text, ", ".join(doing)]))
