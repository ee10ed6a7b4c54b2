"""Engines on green contexts: the numbers of ONNX Runtime, through copies, engine and copies in one graph."""

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from engines import Builds, CacheFolder, Engine, Executor, ModelRefused, Room, RuntimeSettings, load_engine, make_ahead
from engines.tensorrt.building.builder import BuildOptions
from partitions import Device, Partition
from tests.models import classifier

from .bench import MIB, Pinned, assert_close, assert_right, expected, free_memory, results, tensors
from .networks import FEW, MORE, NETWORKS, Network, bottlenecks, feed, mlp, plan, resnet, typed

pytestmark = pytest.mark.gpu

STRATEGIES = ("lazy", "eager", "none")


@pytest.fixture(params=sorted(NETWORKS))
def network(request: pytest.FixtureRequest) -> Network:
    return NETWORKS[request.param]()


@pytest.fixture
def partition(device: Device) -> Iterator[Partition]:
    partition = device.carve(range(6))
    yield partition
    partition.close()


@pytest.fixture
def engine(network: Network, tmp_path: Path, device: Device) -> Engine:
    return load_engine(plan(tmp_path, network), device)


@pytest.fixture
def executor(engine: Engine, partition: Partition) -> Iterator[Executor]:
    executor = engine.bind(partition)
    yield executor
    executor.close()


def test_first_captured_and_replayed_outputs_are_those_of_onnx_runtime(
    network: Network, executor: Executor, partition: Partition
) -> None:
    assert_right(network, executor, partition)


def test_answers_of_a_network_with_branches_are_right_each_time(tmp_path: Path, device: Device, partition: Partition) -> None:
    """Those of a plan without auxiliary streams were not: see `LEAST_AUX_STREAMS`."""
    network = bottlenecks()
    with closing(load_engine(plan(tmp_path, network), device).bind(partition)) as executor:
        assert_right(network, executor, partition, turns=24)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_outputs_are_right_in_fp16_and_bf16(
    name: str, datatype: str, tmp_path: Path, device: Device, partition: Partition
) -> None:
    half = typed(NETWORKS[name](), datatype)
    engine = load_engine(plan(tmp_path, half), device)
    assert {spec.datatype.name for spec in engine.signature.outputs} == {datatype}
    with closing(engine.bind(partition)) as executor:
        assert_right(half, executor, partition)


@pytest.mark.parametrize("copies", ["sm", "engine"])
@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["mlp", "anysize"])
def test_outputs_are_right_with_all_settings(
    name: str, strategy: str, graphs: str, copies: str, tmp_path: Path, device: Device, partition: Partition
) -> None:
    network = NETWORKS[name]()
    settings = RuntimeSettings(graphs=graphs, copies=copies, dynamic_shapes_kernel_specialization_strategy=strategy)
    engine = load_engine(plan(tmp_path, network), device, settings)
    with closing(engine.bind(partition)) as executor:
        assert_right(network, executor, partition, turns=3)
        assert_right(network, executor, partition, turns=1)


def test_outputs_are_right_with_the_librarys_own_graphs(
    network: Network, tmp_path: Path, device: Device, partition: Partition
) -> None:
    settings = RuntimeSettings(graphs="off", cuda_graph_strategy="whole_graph_capture")
    engine = load_engine(plan(tmp_path, network), device, settings)
    with closing(engine.bind(partition)) as executor:
        assert_right(network, executor, partition)


@pytest.mark.parametrize("kept", [0, MIB])
def test_streamed_weights_give_right_outputs_and_take_what_is_kept(
    kept: int, tmp_path: Path, device: Device, partition: Partition
) -> None:
    """F74: `kept` bytes stay on the GPU, and the rest comes from the host for each inference."""
    path = plan(tmp_path, mlp(), BuildOptions(flags=("weight_streaming",)))
    whole, streamed = (load_engine(path, device, RuntimeSettings(weight_streaming_budget=each)) for each in (1 << 40, kept))
    streamable = streamed.plan.streamable_weights_size  # type: ignore[attr-defined]
    assert streamable > MIB
    assert whole.memory["weights"] - streamed.memory["weights"] == streamable - kept
    for engine, graphs in (whole, "captured"), (streamed, "none"):
        with closing(engine.bind(partition)) as executor:
            assert_right(mlp(), executor, partition)
            assert executor.describe()["graphs"] == graphs


def test_each_of_two_profiles_answers_the_batches_that_it_alone_has(
    tmp_path: Path, device: Device, partition: Partition
) -> None:
    engine = load_engine(plan(tmp_path, mlp(), BuildOptions(profiles=(FEW, MORE))), device)
    with closing(engine.bind(partition)) as executor:
        assert_right(mlp(), executor, partition)
        said = executor.describe()
        assert (said["profiles"], said["graphs"]) == (2, "captured")
        ready = {shapes[0][0] for shapes in said["shapes"]}  # type: ignore[attr-defined]
        assert {1, 3, 8} <= ready


def test_many_inferences_in_flight_get_their_own_outputs(
    network: Network, engine: Engine, executor: Executor, partition: Partition, device: Device
) -> None:
    wanted = expected(network)
    batches = [feed(network, network.tries[turn % len(network.tries)], turn) for turn in range(40)]
    slots = [Pinned(device, engine, network, arrays) for arrays in batches]

    def run() -> list[list[np.ndarray]]:
        works = [executor.enqueue(slot.inputs, slot.room) for slot in slots]
        return [results(engine, work.wait()) for work in works]

    for _ in range(2):
        for arrays, got in zip(batches, partition.run(run), strict=True):
            assert_close(got, wanted(arrays))
    for slot in slots:
        slot.close()


def test_outputs_are_in_the_pinned_room_if_there_is_one(
    network: Network, engine: Engine, executor: Executor, partition: Partition, device: Device
) -> None:
    with closing(Pinned(device, engine, network, feed(network, network.tries[0], 0))) as slot:
        inside = partition.run(lambda: executor.enqueue(slot.inputs, slot.room).wait())
        outside = partition.run(lambda: executor.enqueue(slot.inputs, Room()).wait())
        for tensor in inside:
            assert slot.memory.holds(tensor)
        assert_close(results(engine, inside), results(engine, outside))


@pytest.mark.alone
def test_times(
    network: Network,
    engine: Engine,
    executor: Executor,
    partition: Partition,
    device: Device,
    figures: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    def run() -> tuple[list[float], list[float]]:
        submits, totals = [], []
        for _ in range(500):
            start = time.perf_counter()
            work = executor.enqueue(slot.inputs, slot.room)
            submitted = time.perf_counter()
            work.wait()
            totals.append((time.perf_counter() - start) * 1e6)
            submits.append((submitted - start) * 1e6)
        return submits[20:], totals[20:]

    with closing(Pinned(device, engine, network, feed(network, network.tries[0], 0))) as slot:
        submits, totals = partition.run(run)
    figures.setdefault("engines_us", {})[request.node.callspec.id] = {
        "submit_p50": statistics.median(submits),
        "submit_p99": statistics.quantiles(submits, n=100)[98],
        "total_p50": statistics.median(totals),
        "total_p99": statistics.quantiles(totals, n=100)[98],
        "executor": repr(executor),
    }


@pytest.mark.parametrize("turn", range(5))
def test_two_partitions_bind_one_engine_at_the_same_time(turn: int, tmp_path: Path, device: Device) -> None:
    """F53: no kernel is compiled yet, so both threads do, for new shapes too. They share a cache, which has crashed the process
    when two threads used it at once."""
    network = mlp()
    engine = load_engine(plan(tmp_path, network), device)
    start = Barrier(2)

    def bind(partition: Partition) -> Executor:
        start.wait()
        return engine.bind(partition)

    with ExitStack() as left, ThreadPoolExecutor(2) as threads:
        partitions = [left.enter_context(closing(device.carve(range(first, first + 3)))) for first in (0, 3)]
        executors = [left.enter_context(closing(executor)) for executor in threads.map(bind, partitions)]
        list(threads.map(lambda pair: assert_right(network, *pair), zip(executors, partitions, strict=True)))
    engine.close()


@pytest.mark.alone
def test_another_partition_finds_the_kernels_loaded(tmp_path: Path, device: Device, figures: dict[str, Any]) -> None:
    """F53: on an H200 MobileNetV2 took 3.3 s with a cache of its own, kernels on disk, and 0.11 s with the first one's."""
    network = resnet()
    engine = load_engine(plan(tmp_path, network), device)
    with ExitStack() as left:
        took = []
        for first in (0, 3, 6):
            partition = left.enter_context(closing(device.carve(range(first, first + 3))))
            began = time.perf_counter()
            executor = left.enter_context(closing(engine.bind(partition)))
            took.append(time.perf_counter() - began)
            assert_right(network, executor, partition, turns=1)
    engine.close()
    figures["binding one engine to three partitions, s"] = took
    assert max(took[1:]) <= took[0] / 3


@pytest.mark.alone
def test_a_network_that_was_trained_again_finds_the_kernels_loaded(
    tmp_path: Path, device: Device, partition: Partition, figures: dict[str, Any]
) -> None:
    """Each is freed when the next is bound, and the kernels stay. On an H200 the first took 2.7 s, the others 0.03 s."""
    builds, took, left = Builds(CacheFolder([tmp_path / "cache"]), compiles=True), [], []
    with closing(builds), ExitStack() as before:
        for seed in range(1, 6):
            network = resnet(seed)
            (tmp_path / str(seed)).mkdir()
            engine = load_engine(plan(tmp_path / str(seed), network), device, builds=builds)
            began = time.perf_counter()
            executor = engine.bind(partition)
            took.append(time.perf_counter() - began)
            before.pop_all().close()
            before.callback(engine.close)
            before.callback(executor.close)
            assert_right(network, executor, partition, turns=1)
            left.append(free_memory(device))
    figures["binding five trainings of one network, s"] = took
    assert max(took[1:]) <= took[0] / 3
    assert left[-1] >= left[1] - 8 * MIB, left


def test_kernels_that_were_compiled_at_once_ahead_are_only_loaded(tmp_path: Path, device: Device, partition: Partition) -> None:
    """As at a start: a child for each network, and nothing of either in this process meanwhile."""
    networks, settings = {"mlp": mlp(), "resnet": resnet()}, RuntimeSettings(warm_up="usual")
    builds, paths = Builds(CacheFolder([tmp_path / "cache"]), compiles=True), []
    for name, network in networks.items():
        (tmp_path / name).mkdir()
        paths.append(plan(tmp_path / name, network))
    with closing(builds), ThreadPoolExecutor(2) as threads:
        kept = list(threads.map(lambda path: make_ahead(path, device, settings, None, builds, partition), paths))
        assert all(kept)
        for path, network in zip(paths, networks.values(), strict=True):
            with closing(load_engine(path, device, settings, builds=builds).bind(partition)) as executor:
                kernels = executor.describe()["kernels"]
                assert kernels["found"] > 0
                assert kernels["saved"] <= 1.05 * kernels["found"], "next to nothing was compiled here"
                assert_right(network, executor, partition, turns=1)


@pytest.mark.alone
def test_rebinding_does_not_leak_device_memory(engine: Engine, device: Device) -> None:
    left = []
    for turn in range(16):
        partition = device.carve(range(turn % 4, turn % 4 + 4))
        executor = engine.bind(partition)
        executor.close()
        partition.close()
        left.append(free_memory(device))
    assert left[-1] >= left[4] - 8 * MIB, left


@pytest.mark.alone
def test_10000_inferences_of_every_shape_do_not_leak_device_memory(
    device: Device, tmp_path: Path, partition: Partition, figures: dict[str, Any]
) -> None:
    """Of three networks on one partition, whose inputs are pinned or not by turns; the numbers are right to the end."""
    with ExitStack() as left:
        benches = []
        for name in ("mlp", "several", "anysize"):
            network = NETWORKS[name]()
            (tmp_path / name).mkdir()
            engine = load_engine(plan(tmp_path / name, network), device)
            executor = left.enter_context(closing(engine.bind(partition)))
            arrays = [feed(network, shapes, 0) for shapes in network.tries]
            slots = [left.enter_context(closing(Pinned(device, engine, network, each))) for each in arrays]
            benches.append((network, executor, arrays, slots, [tensors(engine, network, each) for each in arrays]))

        def run(count: int) -> None:
            for turn in range(count):
                _, executor, _, slots, staged = benches[turn % len(benches)]
                which = turn // len(benches) % len(slots)
                if turn % 2:
                    executor.enqueue(slots[which].inputs, slots[which].room).wait()
                else:
                    executor.enqueue(staged[which]).wait()

        partition.run(lambda: run(1_000))
        before = free_memory(device)
        partition.run(lambda: run(10_000))
        lost = before - free_memory(device)
        figures["device memory lost in 10,000 inferences, MiB"] = lost / MIB
        assert lost <= 2 * MIB
        for network, executor, *_ in benches:
            assert_right(network, executor, partition, turns=1)


def test_gpu_tensors_on_a_callers_stream_need_no_wait_in_between(device: Any, tmp_path: Path, partition: Any) -> None:
    """Inputs that another stream still writes, outputs that it reads: with a stream of all SMs, and of the partition."""
    from cuda.core import Device as CudaCoreDevice

    from engines import Tensor, on_stream

    network = mlp()
    engine = load_engine(plan(tmp_path, network), device)
    wanted = expected(network)

    def run() -> None:
        here: CudaCoreDevice = device.make_current()
        with closing(engine.bind(partition)) as executor, closing(partition.make_stream()) as side:
            plain = here.create_stream()
            for stream in (plain, side.stream, partition.stream):
                _round_trip(here, stream, executor, on_stream, Tensor)
            plain.close()

    def _round_trip(here: Any, stream: Any, executor: Executor, on_stream: Any, tensor: Any) -> None:
        from cuda.bindings import driver

        pinned = Pinned(device, engine, network, feed(network, {"x": (8, 784)}, 3))
        given, taken = (here.allocate(nbytes, stream=stream) for nbytes in (8 * 784 * 4, 4096))
        for _ in range(20):
            given.fill(0, stream=stream)
            (err,) = driver.cuMemcpyAsync(int(given.handle), pinned.inputs[0].address, given.size, stream.handle)
            assert err == 0
            with on_stream(stream):
                executor.enqueue([tensor((8, 784), int(given.handle), given.size)], Room(int(taken.handle), taken.size))
            (err,) = driver.cuMemcpyAsync(pinned.room.address, int(taken.handle), 320, stream.handle)
            assert err == 0
        stream.sync()
        got = np.frombuffer(pinned.memory.bytes[:320].tobytes(), np.float32).reshape(8, 10)
        assert_close([got], wanted(feed(network, {"x": (8, 784)}, 3)))
        for buffer in (given, taken):
            buffer.close()
        partition.stream.sync()
        pinned.close()

    partition.run(run)


BIG = 200_000_000
"""FP32 numbers, so that input and output take 1.6 GB."""


@pytest.mark.alone
def test_a_model_without_enough_memory_is_refused_and_others_are_served(
    device: Any, tmp_path: Path, partition: Partition, figures: dict[str, Any]
) -> None:
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return
    from tests.models import save

    network = mlp()
    small = load_engine(plan(tmp_path, network), device)
    onnx = save(tmp_path / "big.onnx", "big (float[n] x) => (float[n] y) { y = Neg(x) }").read_bytes()
    (tmp_path / "big").mkdir()
    big = load_engine(plan(tmp_path / "big", Network(onnx, {"x": ((1,), (1,), (BIG,))}, ())), device)
    with closing(small.bind(partition)) as executor, ExitStack() as hog:
        assert_right(network, executor, partition)
        piece = 512 * MIB
        while free_memory(device) > 2 * piece:
            hog.callback(driver.cuMemFree, handle_return(driver.cuMemAlloc(piece)))
        with closing(device.carve([8])) as aggressor, pytest.raises(ModelRefused) as caught:
            big.bind(aggressor)
        figures["a model that finds no memory"] = str(caught.value)
        assert "memory" in str(caught.value).lower()
        assert_right(network, executor, partition)
        hog.close()
        with closing(device.carve([8])) as again:
            big.bind(again).close()


def test_dimensions_that_a_file_all_calls_by_a_placeholder_may_differ(
    tmp_path: Path, device: Device, partition: Partition
) -> None:
    """As in PaddleOCR's classifier, [?, 3, ?, ?]: the library wants one size for one name."""
    shapes = [(rows, 3, 48, 192) for rows in (1, 2, 4)]
    tries = tuple({"x": shape} for shape in (*shapes, (2, 3, 24, 96)))
    ranges = {"x": ((1, 3, 24, 96), (2, 3, 48, 192), (4, 3, 48, 192))}
    paddle = Network(classifier("?", 3, "?", "?"), ranges, tries)
    with closing(load_engine(plan(tmp_path, paddle), device).bind(partition)) as executor:
        assert_right(paddle, executor, partition)
