"""What the models in a worker take of the device's memory. Any thread may ask."""

from collections.abc import Callable, Container, Hashable, Iterable, Mapping

from engines import Executor
from engines.memory import added, shared_by, shared_memory

from ..control.descriptions import ModelMemory
from ..link.messages import ModelKey
from ..workers.worker import Worker
from .paged_executor import PagedExecutor, bound

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
