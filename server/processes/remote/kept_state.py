"""What a process with a device side was sent last, so that its replacement starts as it was: the same tenants on the same
granules, with the same models, but for those that ended it. Pure: nothing here awaits or blocks.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from partitions.plan import Granules

from ...control.descriptions import CRASHED, AtStart
from ...control.fence import Fence
from ...control.stretch import Wide
from ...tenants.catalog import UNLOADED
from ..channels.device_protocols import Change
from .remote_frontend import RemoteFrontend

log = logging.getLogger("greenlane.processes")

MOST_NAMES = 10_000
"""Names that are kept of one tenant: more than any repository has models."""


class KnownNames:
    """Those of models, their versions and lenders of one process's tenants, in whatever it says.

    On cores a tenant's own process parses what clients send as well. If one of them takes it over, it could say other names for
    ever, and the supervisor would keep them for metrics, bills and replacements of the process.
    """

    def __init__(self) -> None:
        self._of: dict[str, set[str]] = {}
        self._full = set[str]()

    def keep(self, tenant: str, name: str) -> bool:
        """Whether this name is to be kept: it is known, or they are fewer than MOST_NAMES. The first that is not is logged."""
        names = self._of.setdefault(tenant, set())
        if name in names or len(names) < MOST_NAMES:
            names.add(name)
            return True
        if tenant not in self._full:
            self._full.add(tenant)
            text = "the process of tenant %s has said %d names of models; what it says of others is ignored, such as %.100r"
            log.error(text, tenant, MOST_NAMES, name)
        return False

    def remove(self, tenant: str) -> None:
        """This tenant has gone."""
        self._of.pop(tenant, None)
        self._full.discard(tenant)


MOST_CRASHES = 3
"""How often a process may end while it loads a model before the model is left out."""


class LoadCrashes:
    """The models that are being loaded in one process, and how often it or its predecessors ended meanwhile.

    A model that crashes its process each time would otherwise do so for ever, and no other model of its tenant would be served.
    In a process of several tenants, models that others were loading at that moment count as well: which one it was is unknown.
    """

    def __init__(self) -> None:
        self._loading: dict[str, str] = {}
        self._crashes: Counter[tuple[str, str]] = Counter()

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
        return self._crashes[tenant, model] >= MOST_CRASHES

    def suspects(self) -> set[tuple[str, str]]:
        """The models during whose last load a process ended, with their tenants."""
        return set(self._crashes)

    def left_out(self) -> dict[tuple[str, str], str]:
        """The models that are left out, with their tenants, and why."""
        return dict.fromkeys((each for each in self._crashes if self.crashes(*each)), CRASHED)


_MOST_TEXT = 16 << 20
"""Characters of the configurations that are kept of one tenant's loads: room for thousands, as Triton's have some hundred."""
Lists = dict[str, list[str]]
"""The models that a tenant may call, as the configuration's `models`, by tenant."""
Changes = dict[str, Change]
"""The models of a tenant that were loaded and unloaded on request, by name, as the last request says."""


class KeptLists:
    """The lists of one device side's tenants that were changed since the server started, and what its process knows of them."""

    def __init__(self) -> None:
        self._lists: Lists = {}
        self._known: Lists = {}

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


class KeptState:
    """Of one device side, by tenant: `wide` are wide partitions, `fences` hold tenants to shares of bandwidth, `ready` are the
    granules on which models are ready too.
    """

    def __init__(self) -> None:
        self.lists = KeptLists()
        self.crashes = LoadCrashes()
        self.names = KnownNames()
        self.affinity: tuple[frozenset[int], frozenset[int]] | None = None
        """The host's cores of the process, and of its builds."""
        self.wide: Mapping[str, Wide] = {}
        self.fences: Mapping[str, Fence] = {}
        self.ready: dict[str, list[Granules]] = {}
        self._granules: dict[str, Granules] = {}
        self._changes: dict[tuple[str, str], Change] = {}

    def on_started(self, granules: Mapping[str, Granules]) -> None:
        """The first process has these tenants on these granules."""
        self._granules = dict(granules)

    def on_moved(self, granules: Mapping[str, Granules]) -> None:
        """These tenants have these granules now. Wide partitions are planned again after a move, and fences."""
        self._granules |= granules
        self.wide, self.fences = {}, {}

    def on_narrowed(self, tenants: Collection[str]) -> None:
        """These tenants have no wide partition for now."""
        self.wide = {name: plan for name, plan in self.wide.items() if name not in tenants}

    def on_changed(self, change: Change) -> None:
        """A model was loaded or unloaded on request, as the process says."""
        others = sum(len(each.override or "") for name, each in self.changes(change.tenant).items() if name != change.name)
        if others + len(change.override or "") > _MOST_TEXT:
            text = "%s gave models configurations of over %d characters; when its process is started again, %.100r has none"
            log.error(text, change.tenant, _MOST_TEXT, change.name)
            change = change._replace(override=None)
        if self.names.keep(change.tenant, change.name):
            self._changes[change.tenant, change.name] = change

    def use_lists(self, lists: Mapping[str, Sequence[str]]) -> None:
        """These tenants may call these models from now on; what was loaded on request stays if they still may."""
        self.lists.use(lists)
        for tenant, name in [key for key in self._changes if not self.lists.allows(*key)]:
            del self._changes[tenant, name]

    def start(self, frontends: Mapping[str, RemoteFrontend]) -> tuple[dict[str, Granules], Lists, AtStart]:
        """What a replacement is started with: the models that were used last come first, and last what may end it again."""
        first = {name: _ranked(frontend.last_uses_known()) for name, frontend in frontends.items()}
        ranks = {name: found for name, found in first.items() if found}
        for tenant, model in self.crashes.suspects():
            ranks.setdefault(tenant, {})[model] = 1
        overrides = {key: change.override for key, change in self._changes.items() if change.loaded}
        left_out = dict.fromkeys(self._changes.keys() - overrides.keys(), UNLOADED) | self.crashes.left_out()
        return dict(self._granules), self.lists.at_start(), AtStart(overrides, left_out, ranks, again=True)

    def changes(self, tenant: str) -> Changes:
        return {name: change for (of, name), change in self._changes.items() if of == tenant}

    def join(self, tenant: str, granules: Granules, changes: Changes, models: list[str] | None) -> None:
        """The tenant has come. `models` is its list of models if that was changed since the start."""
        if models is not None:
            self.lists.use({tenant: models})
            self.lists.on_used({tenant: models})
        self._granules[tenant] = granules
        self._changes |= {(tenant, name): change for name, change in changes.items()}

    def leave(self, tenant: str) -> Granules:
        """The tenant goes; returns its granules, with which `join` undoes this."""
        return self._granules.pop(tenant)

    def release(self, tenant: str) -> None:
        """The tenant has gone."""
        self.lists.remove(tenant)
        self.names.remove(tenant)
        for key in [key for key in self._changes if key[0] == tenant]:
            del self._changes[key]


def _ranked(last_uses: Mapping[str, int]) -> dict[str, int]:
    """Below 0 for models that were used, the lower the later."""
    used = sorted((at, name) for name, at in last_uses.items() if at)
    return {name: -number for number, (_, name) in enumerate(used, 1)}
