"""An error does not keep the library's objects alive: the garbage collector must never be the one to free them."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from engines import ModelRefused
from engines.tensorrt.building.builder import build
from engines.tensorrt.release import releasing
from tests.engines.simulated import AFFINE, ROWS, Bench

HANGING = """
import gc
from engines import ModelRefused
from engines.tensorrt import api
from engines.tensorrt.building.builder import build

def fail():
    try:
        build(b"junk")
    except ModelRefused as error:
        kept = [error]
        kept.append(kept)

def on_message(severity, text):
    gc.collect()

gc.disable()
fail()
api.on_message = on_message  # As if the collector ran just while the library logs.
fail()
"""


def held(error: BaseException | None) -> Iterator[object]:
    """The objects that the frames of an error and of its causes refer to, without this test's own frame."""
    while error:
        step = error.__traceback__
        while step:
            if "tests" not in step.tb_frame.f_code.co_filename:
                yield from step.tb_frame.f_locals.values()
            step = step.tb_next
        error = error.__cause__ or error.__context__


def of_the_simulation(error: BaseException) -> list[object]:
    return [each for each in held(error) if type(each).__module__.startswith("tests.simulation.tensorrt")]


def test_the_library_can_log_while_the_garbage_of_an_earlier_failure_is_collected() -> None:
    """Otherwise the library would wait for its own lock for ever."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the rtx extra")
    subprocess.run([sys.executable, "-c", HANGING], timeout=120, check=True)


def test_a_failed_build_releases_the_library_s_objects() -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the rtx extra")
    with pytest.raises(ModelRefused) as caught:
        build(b"junk")
    assert not [each for each in held(caught.value) if type(each).__module__.startswith("tensorrt")]


def test_a_failed_load_releases_the_library_s_objects(bench: Bench) -> None:
    path = bench.plan(AFFINE, ROWS, aliases={"y": "x"})
    with pytest.raises(ModelRefused, match="written over") as caught:
        bench.load(path)
    assert not of_the_simulation(caught.value)


@pytest.mark.parametrize("call", ["IExecutionContext.execute_async_v3", "ICudaEngine.create_execution_context"])
def test_a_failed_bind_releases_the_library_s_objects(bench: Bench, call: str) -> None:
    bench.gpu.fail(call)
    with pytest.raises(ModelRefused) as caught:
        bench.bind()
    assert not of_the_simulation(caught.value)


def test_chained_and_self_referring_errors_are_released_too() -> None:
    class Big:
        """Objects of the library that should have been freed."""

    def first() -> None:
        big = Big()
        raise KeyError(repr(big))

    @releasing()
    def second() -> None:
        big = Big()
        try:
            first()
        except KeyError as error:
            error.__context__ = ValueError(repr(big))
            error.__context__.__context__ = error
            raise ValueError("both") from error

    with pytest.raises(ValueError, match="both") as caught:
        second()
    assert caught.value.__cause__
    frames = []
    step = caught.value.__cause__.__traceback__
    while step:
        frames += [value for value in step.tb_frame.f_locals.values() if isinstance(value, Big)]
        step = step.tb_next
    assert frames == []
