"""What a tenant's models take of the device's memory, and whether one more fits (`tenants.NAME.device_memory`).

An engine that several tenants use counts in full for each of them: what a tenant may load, and is billed for, must not change
when another one loads or unloads the same model. So the sum over all tenants may be more than the device has in use.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from typing import NamedTuple

from engines import Executor
from engines.memory import added, shared_by, shared_memory

from ..config.tables import dotted
from ..config.tenant import TenantConfig
from ..control.descriptions import ModelMemory
from ..link.messages import ModelKey
from ..workers.worker import Worker
from .paged_executor import PagedExecutor, bound

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_MOST_NAMED = 5
"""How many models a refusal names at most."""


class Claim(NamedTuple):
    """A model, and the bytes of the device's memory that it takes or is expected to take, by kinds of `engines.base.MEMORY`.

    `least` is set if it takes more than that, as a model of which only the file's size is known.
    """

    label: str
    memory: Mapping[str, int]
    least: bool = False

    def __str__(self) -> str:
        return f"{sized(self.nbytes)} ({_parts(self.memory)})"

    @property
    def nbytes(self) -> int:
        return sum(self.memory.values())


def missing(limit: int, held: Iterable[Claim], needed: Claim) -> int:
    """By how many bytes a model is too large beside what the tenant has; 0 or less if it fits."""
    return sum(claim.nbytes for claim in held) + needed.nbytes - limit


def refusal(tenant: TenantConfig, held: Iterable[Claim], needed: Claim) -> str:
    """Why a model does not fit, with the arithmetic and what could be done."""
    limit, key = tenant.device_memory or 0, dotted(("tenants", tenant.name, "device_memory"))
    taken = sorted((claim for claim in held if claim.nbytes), key=lambda claim: -claim.nbytes)
    over = sized(missing(limit, taken, needed))
    need = f"it needs {'at least ' if needed.least else ''}{sized(needed.nbytes)} of device memory ({_parts(needed.memory)})"
    if needed.nbytes > limit or not taken:
        return f"{need}, but {tenant.name} may have {sized(limit)}: {over} too many; raise {key}"
    used = sized(sum(claim.nbytes for claim in taken))
    named = [f"{claim.label} {sized(claim.nbytes)}" for claim in taken[:_MOST_NAMED]]
    named += [f"{len(taken) - _MOST_NAMED} more"] if len(taken) > _MOST_NAMED else []
    or_paging = "" if tenant.paging else f", or set {dotted(('tenants', tenant.name, 'paging'))}"
    return (
        f"{need}, but {tenant.name} has {used} of {sized(limit)} in use by {', '.join(named)}: {over} too many; "
        f"unload something{' or' if tenant.paging else ','} raise {key}{or_paging}"
    )


def sized(nbytes: int) -> str:
    """A number of bytes for people."""
    for size, unit in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes} bytes"


def _parts(memory: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {sized(nbytes)}" for kind, nbytes in memory.items())


ENGINES_OWN = ("weights", "file")
"""The kinds of an engine's memory that count for every tenant: what it keeps for its next executors does not."""


def bound_executors(workers: Mapping[str, Worker]) -> list[Executor]:
    """The executors of all workers but those that stand for models that are paged out. Any thread."""
    return [executor for worker in list(workers.values()) for executor in bound(dict(worker.executors)).values()]


def model_memory(worker: Worker, elsewhere: Callable[[ModelKey], Mapping[str, int]]) -> list[ModelMemory]:
    """What each model in a worker takes, and what those took that are paged out. Any thread.

    `elsewhere` says what one takes because it is ready on other placements than the tenant's home.
    """
    found, engines, shared = [], set[int](), set[Hashable]()
    for model, executor in {id(executor): (model, executor) for model, executor in list(worker.executors.items())}.values():
        name, _, version = label(model).rpartition(" ")
        if isinstance(executor, PagedExecutor):
            found.append(ModelMemory(name, version, True, dict(executor.taken)))
        else:
            own = taken(executor, id(executor.engine) in engines, shared)
            found.append(ModelMemory(name, version, False, added([own, elsewhere(model)])))
            engines.add(id(executor.engine))
            shared.update(shared_memory(executor))
    return found


def taken(executor: Executor, without_engine: bool = False, counted: Container[Hashable] = ()) -> dict[str, int]:
    """What a model takes: its executor, and its engine unless that was counted.

    What it shares with models of other engines is in it, such as compiled kernels, but what is in `counted`.
    """
    own = {} if without_engine else {kind: n for kind, n in executor.engine.memory.items() if kind in ENGINES_OWN and n}
    shared = [memory for thing, memory in shared_memory(executor).items() if thing not in counted]
    return added([own, executor.memory, *shared])


def taken_more(executors: Iterable[Executor], counted: Iterable[Hashable] = ()) -> dict[str, int]:
    """What models take beside others of their tenant, whose shared things are `counted`; their own count once, too."""
    had, found = set(counted), list[Mapping[str, int]]()
    for executor in executors:
        found.append(taken(executor, counted=had))
        had.update(shared_memory(executor))
    return added(found)


def shared_in(worker: Worker, without: Executor | None = None) -> set[Hashable]:
    """What a worker's models share with others, or could; without one of them."""
    return set(shared_by(executor for executor in list(worker.executors.values()) if executor is not without))


def label(model: ModelKey) -> str:
    """A model and its version, from its key."""
    return model.partition("#")[0].replace("/", " ")
