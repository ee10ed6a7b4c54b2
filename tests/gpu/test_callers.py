"""Uses of the library outside the server: lifetimes, contexts, callers' streams, chained engines and overrides."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from ctypes import memmove
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from engines import RuntimeSettings, Step, chain, load_engine
from engines.base import Tensor
from partitions import Partition

from .bench import Pinned, assert_close, assert_right, expected, feed, results, tensors
from .networks import mlp, plan, several

pytestmark = pytest.mark.gpu


@pytest.fixture
def partition(device: Any) -> Iterator[Partition]:
    with closing(device.carve([0, 1])) as partition:
        yield partition


@pytest.fixture
def engine(tmp_path: Path, device: Any) -> Iterator[Any]:
    with closing(load_engine(plan(tmp_path, mlp()), device)) as engine:
        yield engine


@pytest.fixture
def green(device: Any, partition: Any) -> Iterator[int]:
    """A stream of a green context, as a caller would make one: here the partition's, besides its own."""
    with closing(partition.make_stream()) as side:
        yield side.handle


def current() -> int:
    from cuda.bindings import driver

    return int(driver.cuCtxGetCurrent()[1])


def test_an_inference_in_one_line_is_right_every_time(engine: Any, partition: Partition) -> None:
    network = mlp()
    arrays = feed(network, network.tries[0], 1)
    for _ in range(5):
        outputs = partition.run(lambda: engine.bind(partition).enqueue(tensors(engine, network, arrays)).wait())
        assert_close(results(engine, outputs), expected(network)(arrays))


def test_a_thread_that_captures_may_collect_an_executor(device: Any, engine: Any, partition: Any) -> None:
    """The caller's capture is not spoilt by what the collector frees."""
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    def body() -> None:
        dropped = [engine.bind(partition)]
        with closing(partition.make_stream()) as side:
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            handle_return(driver.cuStreamBeginCapture(side.handle, mode))
            dropped.clear()
            gc.collect()
            graph = handle_return(driver.cuStreamEndCapture(side.handle))
            handle_return(driver.cuGraphDestroy(graph))

    partition.run(body)


def test_the_callers_context_stays_current(device: Any, tmp_path: Path) -> None:
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    cuda = handle_return(driver.cuDeviceGet(0))
    theirs = handle_return(driver.cuDevicePrimaryCtxRetain(cuda))
    network = mlp()
    for before in (0, int(theirs)):
        handle_return(driver.cuCtxSetCurrent(before))
        path = plan(tmp_path, network)
        assert current() == before, "a build asks the library about the plan, which makes the primary context current"
        with closing(device.carve([2])) as partition, closing(load_engine(path, device)) as engine:
            assert current() == before
            with closing(engine.bind(partition)) as executor:
                assert_right(network, executor, partition, turns=1)
                assert current() == before
        assert current() == before


def test_an_engine_runs_on_a_stream_that_was_adopted(device: Any, engine: Any, partition: Any, green: int) -> None:
    adopted = device.adopt(green)
    assert adopted.size == partition.size
    executor = engine.bind(adopted)
    assert_right(mlp(), executor, adopted)
    assert adopted.locate() <= partition.locate() or len(adopted.locate()) <= partition.size
    executor.close()
    engine.close()
    adopted.close()


def test_an_inference_is_part_of_a_graph_that_the_caller_captures(device: Any, engine: Any, green: int) -> None:
    """F64: launched again and again with other inputs, with inferences of the executor in between."""
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    network = mlp()
    shapes, wanted = network.tries[0], expected(network)
    adopted = device.adopt(green)
    executor = engine.bind(adopted)
    pinned = Pinned(device, engine, network, feed(network, shapes, 0))
    assert_right(network, executor, adopted, turns=1)

    def captured() -> tuple[Any, tuple[Tensor, ...]]:
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        handle_return(driver.cuStreamBeginCapture(green, mode))
        outputs = executor.enqueue(pinned.inputs, pinned.room).wait()
        graph = handle_return(driver.cuStreamEndCapture(green))
        handle = handle_return(driver.cuGraphInstantiate(graph, 0))
        handle_return(driver.cuGraphDestroy(graph))
        return handle, outputs

    def launch(graph: Any) -> None:
        handle_return(driver.cuGraphLaunch(graph, green))
        handle_return(driver.cuStreamSynchronize(green))

    graph, outputs = adopted.run(captured)
    for turn in range(4):
        arrays = feed(network, shapes, turn)
        for tensor, spec in zip(pinned.inputs, engine.signature.inputs, strict=True):
            data = np.ascontiguousarray(arrays[spec.name])
            memmove(tensor.address, data.ctypes.data, tensor.nbytes)
        adopted.run(lambda: launch(graph))
        assert_close(results(engine, outputs), wanted(arrays))
        assert_right(network, executor, adopted, turns=1)
    adopted.run(lambda: handle_return(driver.cuGraphExecDestroy(graph)))
    executor.close()
    pinned.close()
    adopted.close()


def test_settings_are_overridden_for_a_block(engine: Any, partition: Partition) -> None:
    with closing(engine.bind(partition)) as executor:
        for changes in ({"graphs": "off"}, {"copies": "engine"}, {"graphs": "off", "copies": "engine"}):
            with executor.overriding(**changes):
                assert_right(mlp(), executor, partition, turns=2)
        assert_right(mlp(), executor, partition, turns=1)


def test_two_engines_are_one_graph(tmp_path: Path, device: Any, partition: Partition) -> None:
    """The second one adds what the first one gave to itself, by its own weights."""
    network = several()
    first, second = (load_engine(plan(folder, network), device) for folder in (_folder(tmp_path, "a"), _folder(tmp_path, "b")))
    both = chain(
        [
            Step(first, {"a": "a", "b": "b"}, {"both": "wide"}),
            Step(second, {"a": "wide", "b": "b"}, {"sum": "OUT"}),
        ],
        ["OUT"],
        RuntimeSettings(graphs="required"),
    )
    reference = expected(network)
    with closing(both.bind(partition)) as executor:
        for turn in range(4):
            for shapes in network.tries:
                arrays = feed(network, shapes, turn)
                given = [Tensor.of(np.ascontiguousarray(arrays[spec.name])) for spec in both.signature.inputs]
                outputs = partition.run(lambda given=given: executor.enqueue(given).wait())  # type: ignore[misc]
                wide = reference(arrays)[2]
                wanted = reference({"a": wide, "b": arrays["b"]})[0]
                assert_close([outputs[0].array(both.signature.outputs[0].datatype)], [wanted])
        assert executor.describe()["graphs"] == "captured"
    both.close()
    for each in (first, second):
        each.close()


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


ENDING = """
    import sys
    from pathlib import Path
    from engines import load_engine
    from partitions import open_device
    from tests.gpu.bench import tensors
    from tests.gpu.networks import feed, mlp

    device, network = open_device("cuda"), mlp()
    partition = device.carve([0])
    executor = load_engine(Path(sys.argv[1]), device).bind(partition)
    partition.attach()
    works = [executor.enqueue(tensors(executor.engine, network, feed(network, shapes, 0))) for shapes in network.tries]
    print("ending")
"""


def test_exit_with_work_in_flight_does_not_crash(tmp_path: Path, device: Any) -> None:
    """A process of its own, as the GPU is split once in each."""
    command = [sys.executable, "-c", dedent(ENDING), str(plan(tmp_path, mlp()))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ending\n"), ended.stderr
