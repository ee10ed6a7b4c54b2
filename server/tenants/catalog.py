"""The models one tenant may call, as the HTTP side sees them: signatures and states, no engines."""

from bisect import bisect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any, Literal

from engines import Signature

from ..errors import NotFound, Unavailable
from ..functions.definition import Functions
from ..link.messages import ModelKey
from ..protocol.classification import UNLABELLED, Labels
from ..protocol.request_cache import RequestCache
from ..scheduling.queue_policy import Batching, QueuePolicy
from ..text.folder import TextFolder
from .answers import ModelMetadata, TensorMetadata
from .statistics import ModelStatistics

if TYPE_CHECKING:
    from .running_functions import RunningFunctions
    from .running_text import RunningText

_LONGEST_NAME = 200
"""Characters of an unknown name that is compared with those that there are."""
_MOST_COMPARED = 20
_MOST_NAMED = 3
_NEAR = 0.75
"""How alike names have to be, for difflib."""
UNLOADED = "unloaded"
"""The reason of a model that was unloaded on request; it does not make the server unready with `strict_readiness`."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model, ready on this tenant's partition: what a device side publishes.

    `batching` is set if its requests are batched; `labels` are the names of its output classes; `queues` are the limits of its
    queues, if its configuration has any. If it has `functions`, `signature` is what clients know. `folder` is its tokenizer
    with what is said of it, if it has one.
    """

    name: str
    version: str
    key: ModelKey
    signature: Signature
    platform: str
    config: dict[str, Any]
    batching: Batching | None = None
    labels: Labels = field(default=UNLABELLED, compare=False)
    queues: QueuePolicy | None = None
    functions: Functions | None = None
    folder: TextFolder | None = None

    @property
    def engine_signature(self) -> Signature:
        """The tensors that the engine takes and gives."""
        return self.functions.inner if self.functions else self.signature


@dataclass(frozen=True, slots=True)
class ServedModel(ModelVersion):
    """A version where its requests are served: with its functions and its tokenizer, if it has such, and what is counted."""

    text: "RunningText | None" = field(default=None, compare=False)
    running: "RunningFunctions | None" = field(default=None, compare=False)
    statistics: ModelStatistics = field(default_factory=ModelStatistics, compare=False)
    request_cache: RequestCache = field(default_factory=RequestCache, compare=False)

    @classmethod
    def of(
        cls, version: ModelVersion, running: "RunningFunctions | None" = None, text: "RunningText | None" = None
    ) -> "ServedModel":
        """This version with nothing counted yet."""
        plain = {each.name: getattr(version, each.name) for each in fields(ModelVersion)}
        return cls(**plain, running=running, text=text)


ModelState = Literal["READY", "LOADING", "UNAVAILABLE"]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A line of the repository index; `version` is empty if the problem concerns the whole model."""

    name: str
    version: str
    state: ModelState
    reason: str = ""

    def as_json(self) -> dict[str, str]:
        fields = {"name": self.name, "version": self.version, "state": self.state, "reason": self.reason}
        return {key: value for key, value in fields.items() if value}


PAGED_OUT = "paged out"
"""The reason of a version that is ready, but not on the device: its next request brings it back."""


class Catalog:
    """The models that one tenant may call, by name and version. Belongs to the event loop."""

    def __init__(self) -> None:
        self._served: dict[str, dict[str, ServedModel]] = {}
        self._by_key: dict[ModelKey, ServedModel] = {}
        self._routes: dict[str, dict[str | None, ServedModel]] = {}
        """By model: the versions, and for requests without one the highest, unless there are `_turns`."""
        self._weights: Mapping[str, Mapping[str, float]] = {}
        self._turns: dict[str, Turns] = {}
        """By model with weights for versions that are served: whose turn it is."""
        self._entries: dict[str, list[IndexEntry]] = {}
        self.paged: set[ModelKey] = set()
        """The versions that are paged out: served, but their next request waits until the device side has them again."""
        self._lost: set[ModelKey] = set()
        """The versions whose device side has ended: each is loading until it is `put` again, and what it counted is kept."""
        self.expected: Callable[[str], bool] | None = None
        """Which names may turn out to be models, while it is not known which models there are; None once it is."""

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """The model at a version, the highest by default. Raises NotFound, or Unavailable with the reason."""
        try:
            versions = self._served[name]
            found = versions[version] if version else next(iter(versions.values()))
        except KeyError:
            raise self._missing(name, version) from None
        if found.key in self._lost:
            raise self._missing(name, version)
        return found

    def route(self, name: str, version: str | None = None, had: ServedModel | None = None) -> ServedModel:
        """The model that an inference is to run with: at this version, else at one by the weights, or the highest.

        `had` is what it got before: with weights it keeps that while it is served. Raises as `find`.
        """
        try:
            return self._routes[name][version]
        except KeyError:
            turns = None if version else self._turns.get(name)
            if turns is None:
                raise self._missing(name, version) from None
        versions = self._served[name]
        return (had and versions.get(had.version)) or versions[turns.next()]

    def weigh(self, weights: Mapping[str, Mapping[str, float]]) -> None:
        """Share requests without a version out by these weights of versions, by model."""
        self._weights = weights
        for name in self._served:
            self._follow(name)

    def with_key(self, key: ModelKey) -> ServedModel | None:
        """The version with this key; None if it is not served, or not any more."""
        return self._by_key.get(key)

    def versions(self, name: str) -> list[str]:
        """The versions served of a model, the highest first."""
        return list(self._served.get(name, ()))

    def metadata(self, name: str, version: str | None) -> ModelMetadata:
        """What is answered of a model. Raises as `find`."""
        found = self.find(name, version)
        tensors = (found.signature.inputs, found.signature.outputs)
        shown = ([TensorMetadata(each.name, each.datatype.name, list(each.shape)) for each in specs] for specs in tensors)
        return ModelMetadata(found.name, self.versions(name)[::-1], found.platform, *shown)

    def matching(self, name: str, version: str | None) -> list[ServedModel]:
        """This version of a model, or all that are served. Raises as `find`."""
        found = self.find(name, version)
        return [found] if version else list(self._served[name].values())

    def served(self) -> list[ServedModel]:
        """Everything that is ready."""
        return [served for versions in self._served.values() for served in versions.values()]

    def index(self, there: Collection[str] | None = None, expected: Collection[str] = ()) -> list[IndexEntry]:
        """Every model that this tenant may call, by name, with its state.

        `there` are the models in the repository, if known: then models that are not loaded yet are listed too, and those that
        are neither there nor served nor `expected` are omitted.
        """
        if there is None:
            return [entry for name in sorted(self._entries) for entry in self._of(name)]
        present = {*there, *expected}
        known = [name for name, entries in self._entries.items() if name in present or any(map(_is_alive, entries))]
        named = sorted({*known, *there})
        not_yet: Literal["LOADING", "UNAVAILABLE"] = "UNAVAILABLE" if self.expected is None else "LOADING"
        other = "not loaded" if self.expected is None else ""
        return [e for name in named for e in self._of(name) or [IndexEntry(name, "", not_yet, other)]]

    def listing(self) -> list[tuple[str, list[ServedModel], list[IndexEntry]]]:
        """The arguments for `put` that rebuild this catalog: what is ready and what failed; neither while a model loads."""
        return [
            (
                name,
                [each for each in self._served.get(name, {}).values() if each.key not in self._lost],
                [replace(e, state="UNAVAILABLE") for e in entries if _is_problem(e)],
            )
            for name, entries in self._entries.items()
        ]

    def announce(self, name: str) -> None:
        """Mark a model as loading; versions that are served stay."""
        if name not in self._served:
            self._entries[name] = [IndexEntry(name, "", "LOADING")]

    def lose(self) -> None:
        """The device side of all versions has ended: each model is loading until it is `put` again."""
        self._lost.update(self._by_key)
        self.paged.clear()
        for name in self._served:
            self._entries[name] = [IndexEntry(name, "", "LOADING")]
            self._follow(name)

    def put(self, name: str, served: list[ServedModel], problems: list[IndexEntry]) -> None:
        """Serve exactly these versions of a model; each keeps the counters of the same version before.

        With neither versions nor problems the tenant does not know the model any more. A problem of a version that is served is
        why that was not replaced.
        """
        before = self._served.pop(name, {})
        for item in before.values():
            del self._by_key[item.key]
            self._lost.discard(item.key)
        kept = [_continue(item, before.get(item.version)) for item in served]
        self._by_key.update({item.key: item for item in kept})
        if kept:
            self._served[name] = {item.version: item for item in sorted(kept, key=lambda i: int(i.version), reverse=True)}
        self._follow(name)
        reasons = {problem.version: problem.reason for problem in problems}
        ready = [IndexEntry(name, version, "READY", reasons.get(version, "")) for version in self._served.get(name, ())]
        self._entries[name] = ready + [problem for problem in problems if problem.version not in self._served.get(name, ())]
        if not self._entries[name]:
            del self._entries[name]
        self.paged -= {item.key for item in before.values()} - {item.key for item in kept}

    def _follow(self, name: str) -> None:
        """Have requests find the versions of a model that are served now, by the weights that hold now."""
        versions = {number: item for number, item in self._served.get(name, {}).items() if item.key not in self._lost}
        if not versions:
            self._routes.pop(name, None)
            self._turns.pop(name, None)
            return
        routes = self._routes[name] = dict[str | None, ServedModel](versions.items())
        weights = {version: weight for version, weight in self._weights.get(name, {}).items() if version in versions}
        if not any(weights.values()):
            self._turns.pop(name, None)
            routes[None] = next(iter(versions.values()))
        elif name not in self._turns or self._turns[name].weights != weights:
            self._turns[name] = Turns(weights)

    def _of(self, name: str) -> list[IndexEntry]:
        """The entries of a model; those of versions that are paged out say so."""
        paged = {item.version for item in self._served.get(name, {}).values() if item.key in self.paged}
        entries = self._entries.get(name, [])
        return [replace(e, reason=PAGED_OUT) if e.state == "READY" and e.version in paged else e for e in entries]

    def _missing(self, name: str, version: str | None) -> NotFound | Unavailable:
        for entry in self._entries.get(name, ()):
            if entry.state != "READY" and (entry.version in ("", version) or name not in self._served):
                return Unavailable(f"model {name!r} is {entry.state.lower()}: {entry.reason or 'try again soon'}")
        if name not in self._entries and self.expected and self.expected(name):
            return Unavailable(
                f"model {name!r}: the server is starting, and does not know yet which models there are; try again soon"
            )
        if name in self._served:
            return NotFound(f"Request for unknown model: {name!r} version {version} is not found")
        return NotFound(f"Request for unknown model: {name!r} is not found{_did_you_mean(name, self._entries)}")


def none_ready(index: Collection[IndexEntry]) -> bool:
    """Whether none of these is ready, though some were not unloaded on request."""
    return not any(entry.state == "READY" for entry in index) and any(entry.reason != UNLOADED for entry in index)


def _did_you_mean(name: str, known: Collection[str]) -> str:
    """The names that are most like this one, as the end of an error's text; empty if none is.

    Comparing takes some 25 us a name, so only those are compared that are next to this one in alphabetical order.
    """
    if len(name) > _LONGEST_NAME:
        return ""
    asked = name.casefold()
    as_written = {each.casefold(): each for each in known}
    ordered = sorted(as_written)
    first = max(0, bisect(ordered, asked) - _MOST_COMPARED // 2)
    compared = ordered[first : first + _MOST_COMPARED]
    near = [repr(as_written[each]) for each in get_close_matches(asked, compared, _MOST_NAMED, _NEAR)]
    if not near:
        return ""
    return f"; did you mean {' or '.join([*([', '.join(near[:-1])] if near[1:] else []), near[-1]])}?"


def _is_problem(entry: IndexEntry) -> bool:
    return entry.state == "UNAVAILABLE" or bool(entry.reason)


def _is_alive(entry: IndexEntry) -> bool:
    return entry.state != "UNAVAILABLE"


def _continue(item: ServedModel, before: ServedModel | None) -> ServedModel:
    if before is None:
        return item
    return replace(item, statistics=before.statistics)


class Turns:
    """A smooth weighted round robin, as nginx has it: each name comes as often as its weight says, evenly spread.

    The same weights always give the same order. After n turns a name has never had more than one turn above its share of n, and
    once n is a multiple of `period` each has had exactly its share.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Weights above 0; those that are 0 never have a turn."""
        shares = {
            name: Fraction(repr(weight)) for name, weight in weights.items() if weight
        }  # 0.1 is a tenth: as it is written.
        unit = lcm(*(share.denominator for share in shares.values()))
        self.weights = dict(weights)
        self._shares = {name: int(share * unit) for name, share in shares.items()}
        self.period = sum(self._shares.values())
        self._due = dict.fromkeys(self._shares, 0)
        """How much each is behind its share, in units of `period`."""

    def next(self) -> str:
        """The name whose turn it is."""
        due = self._due
        for name, share in self._shares.items():
            due[name] += share
        chosen = max(due, key=due.__getitem__)
        due[chosen] -= self.period
        return chosen
