"""What the models in a worker take of the device's memory. Any thread may ask."""

from collections.abc import Callable, Mapping

from engines import Executor
from engines.memory import added

from ..control.descriptions import ModelMemory
from ..link.messages import ModelKey
from ..workers.worker import Worker
from .paged_executor import PagedExecutor

ENGINES_OWN = ("weights", "file")
"""The kinds of an engine's memory that count for every tenant: what it keeps for its next executors does not."""


def bound_executors(workers: Mapping[str, Worker]) -> list[Executor]:
    """The executors of all workers but those that stand for models that are paged out. Any thread."""
    executors = [executor for worker in list(workers.values()) for executor in list(worker.executors.values())]
    return [executor for executor in executors if not isinstance(executor, PagedExecutor)]


def model_memory(worker: Worker, on_rungs: Callable[[ModelKey], Mapping[str, int]]) -> list[ModelMemory]:
    """What each model in a worker takes, and what those took that are paged out. Any thread.

    `on_rungs` says what one takes because it is ready on the tenant's ladder.
    """
    found, engines = [], set[int]()
    for model, executor in {id(executor): (model, executor) for model, executor in list(worker.executors.items())}.values():
        name, _, version = label(model).rpartition(" ")
        if isinstance(executor, PagedExecutor):
            found.append(ModelMemory(name, version, executor.taken, paged=True))
        else:
            own = taken(executor, id(executor.engine) in engines)
            found.append(ModelMemory(name, version, added([own, taken_wide(worker, model), on_rungs(model)])))
            engines.add(id(executor.engine))
    return found


def taken(executor: Executor, without_engine: bool = False) -> dict[str, int]:
    """What a model takes: its executor, and its engine unless that was counted."""
    own = {} if without_engine else {kind: n for kind, n in executor.engine.memory.items() if kind in ENGINES_OWN and n}
    return added([own, executor.memory])


def taken_wide(worker: Worker, model: ModelKey) -> dict[str, int]:
    """What a model takes more because it may also run on the tenant's wide partition."""
    wide = worker.borrowing.executors.get(model) if worker.borrowing else None
    adds = wide.describe().get("adds") if wide else None
    return dict(adds) if isinstance(adds, dict) else {}


def label(model: ModelKey) -> str:
    """A model and its version, from its key."""
    return model.partition("#")[0].replace("/", " ")
