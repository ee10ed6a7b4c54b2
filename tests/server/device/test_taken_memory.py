"""What models of a tenant share counts once for it."""

from types import SimpleNamespace
from typing import Any

from engines.in_turn import BoundTogether
from server.device.budget import model_memory, shared_in, taken, taken_more

KERNELS = {"cache": {"kernels": 40}}


def executor(shared: dict[str, dict[str, int]] | None = None, **memory: int) -> Any:
    """Of an engine of its own, with 7 bytes of weights."""
    engine = SimpleNamespace(memory={"weights": 7, "contexts": 1000})
    return SimpleNamespace(engine=engine, memory=memory, **({} if shared is None else {"shared_memory": shared}))


def worker(**executors: Any) -> Any:
    return SimpleNamespace(executors={f"{name}/1#1": each for name, each in executors.items()}, wide=None)


def shown(worker: Any) -> dict[str, dict[str, int]]:
    return {each.name: dict(each.memory) for each in model_memory(worker, lambda _: {})}


def test_a_model_takes_what_it_shares_in_full_by_itself() -> None:
    assert taken(executor(KERNELS, buffers=3)) == {"weights": 7, "buffers": 3, "kernels": 40}
    assert taken(executor(KERNELS, buffers=3), counted={"cache"}) == {"weights": 7, "buffers": 3}
    assert taken(executor(buffers=3)) == {"weights": 7, "buffers": 3}


def test_kernels_that_several_models_share_count_at_the_first_of_them() -> None:
    apart = executor({"other": {"kernels": 5}})
    assert shown(worker(a=executor(KERNELS), b=executor(KERNELS, graphs=2), c=apart)) == {
        "a": {"weights": 7, "kernels": 40},
        "b": {"weights": 7, "graphs": 2},
        "c": {"weights": 7, "kernels": 5},
    }


def test_they_count_at_the_second_once_the_first_is_gone() -> None:
    assert shown(worker(b=executor(KERNELS))) == {"b": {"weights": 7, "kernels": 40}}


def test_a_model_that_is_loaded_takes_no_kernels_that_the_tenant_has() -> None:
    new, have = executor(KERNELS, buffers=3), worker(a=executor(KERNELS))
    assert taken_more([new], shared_in(have)) == {"weights": 7, "buffers": 3}
    assert taken_more([new], shared_in(worker())) == {"weights": 7, "buffers": 3, "kernels": 40}


def test_two_versions_that_are_loaded_together_take_what_they_share_once() -> None:
    assert taken_more([executor(KERNELS), executor(KERNELS)]) == {"weights": 14, "kernels": 40}


def test_a_model_of_the_tenant_takes_what_the_others_do_not_have() -> None:
    one = executor(KERNELS)
    assert shared_in(worker(a=one), without=one) == set()
    assert shared_in(worker(a=one, b=executor(KERNELS)), without=one) == {"cache"}


def test_several_executors_as_one_share_what_each_shares() -> None:
    each = [executor(KERNELS), executor({"other": {"kernels": 5}}), executor()]
    assert BoundTogether(each).shared_memory == {**KERNELS, "other": {"kernels": 5}}
