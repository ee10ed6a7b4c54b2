"""Whether an engine's own kernels stay on their partition's SMs. Tested from outside, as an engine does not report it.

Every thread of partition A's SMs is taken. Where the SMs copy, an inference on A does not end: its first kernel, the copy, ran
nowhere else. Where the copy engines do, the engine's kernels are the first: the input reaches the GPU, and nothing is computed
from it, on the stream or on auxiliary ones. The same engine on a stream with all of the GPU ends meanwhile, so its kernels do
run elsewhere where they may; and engines on B do too. SMs copy for these two: in a copy engine they would wait behind what
waits for A's SMs. What this does not prove: that DRAM, L2 or PCIe are not shared. They are
(tests/gpu/test_isolation.py has bounds for that).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from benchmarks import subjects
from benchmarks.asks import TOLERANCE, tensor
from benchmarks.seat import Seat, all_at_once, open_seat
from benchmarks.subjects import SUBJECTS
from engines import RuntimeSettings, load_engine
from engines.model_files.profiles import Profile, Range
from engines.tensorrt.building.builder import BuildOptions, build
from partitions import Device

from .bench import Pinned, assert_close, expected, results
from .holding import GIVE_UP_NS, Kernels
from .networks import Draft, Network, feed

pytestmark = pytest.mark.gpu
ROWS = {"conv": 64, "resnet": 8, "mlp": 1, "image": 16}
"""Batches of the engines: one that fills every SM, one of many kernels, one of short ones, one that is copies above all."""
ON_B = 200
"""Inferences on B while nothing on A can begin."""


class Bench:
    """Two partitions that are all of the GPU, seats on them, and the kernel that takes a partition's SMs."""

    def __init__(self, device: Device, root: Path, left: ExitStack) -> None:
        count = len(device.granules)
        self.a = left.enter_context(closing(device.carve(range(count // 2))))
        self.b = left.enter_context(closing(device.carve(range(count // 2, count))))
        self.kernels = Kernels(device)
        self.sms_a, self.sms_b = self.a.locate(), self.b.locate()
        self._device = device
        self._root = root
        self._left = left
        self._seats: dict[tuple[str, int], Seat] = {}

    def seat(self, model: str, partition: Any) -> Seat:
        """Binds the engine at the first call, which blocks and needs free SMs."""
        key = (model, id(partition))
        if key not in self._seats:
            engine = self._left.enter_context(closing(load_engine(next((self._root / model / "1").iterdir()), self._device)))
            made = open_seat(self._device, engine, partition, tensor(model, ROWS[model]))
            self._seats[key] = self._left.enter_context(closing(made))
        return self._seats[key]


def assert_right(seat: Seat, model: str) -> None:
    wanted = subjects.expected(SUBJECTS[model].network(), tensor(model, ROWS[model]))
    assert np.abs(seat.answer() - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.fixture(scope="module")
def bench(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("confinement")
    subjects.write(root, set(ROWS), plans=True)
    with ExitStack() as left:
        yield Bench(device, root, left)


@pytest.mark.parametrize("model", ROWS)
def test_an_engine_runs_only_on_its_partitions_sms(model: str, bench: Bench) -> None:
    seat, neighbour = bench.seat(model, bench.a), bench.seat("mlp", bench.b)
    run_once: Callable[[Seat], Any] = lambda each: each.enqueue().wait()  # noqa: E731  # A task for a seat's thread.

    with bench.kernels.held(bench.a) as held:
        assert held.sms == bench.sms_a
        waiting = Thread(target=lambda: all_at_once([(seat, run_once)]))
        waiting.start()
        all_at_once([(neighbour, lambda each: [run_once(each) for _ in range(ON_B)])])
        stood_still = waiting.is_alive()
        gave_up = held.gave_up
        held.release()
        waiting.join()

    assert stood_still
    assert not gave_up
    assert_right(seat, model)
    assert_right(neighbour, "mlp")


def branches(count: int = 4, width: int = 256) -> Network:
    """Products of one input, each an output, which depend on each other in nothing: an engine may use a stream for each."""
    draft = Draft()
    for number in range(count):
        draft.named(f"y{number}", draft.op("Relu", draft.dense("x", width, width)))
    outputs = {f"y{number}": ("b", width) for number in range(count)}
    return Network(draft.finish({"x": ("b", width)}, outputs), {"x": ((1, width), (64, width), (64, width))}, ())


NETWORKS = {name: SUBJECTS[name].network for name in ("mlp", "conv")} | {"branches": branches}
BY_SMS = {
    "without graphs": RuntimeSettings(graphs="off"),
    "the library's graphs": RuntimeSettings(graphs="off", cuda_graph_strategy="whole_graph_capture"),
}
AUX_STREAMS = 3


class Run:
    """An engine on a partition, an inference's memory, and what of it is on the GPU."""

    def __init__(self, device: Any, engine: Any, partition: Any, network: Network, left: ExitStack) -> None:
        self.partition = partition
        self.executor = left.enter_context(closing(engine.bind(partition)))
        self.arrays = feed(network, {name: best for name, (_, best, _) in network.ranges.items()}, 1)
        self.memory = left.enter_context(closing(Pinned(device, engine, network, self.arrays)))
        self.submitted = Event()
        """Whether `infer` has submitted its work."""
        for _ in range(3):
            self.infer()

    def infer(self) -> list[Any]:
        """One inference, on a thread of the partition; copies of its outputs."""
        return results(self.executor.engine, self.partition.run(self._infer))

    def _infer(self) -> Any:
        work = self.executor.enqueue(self.memory.inputs, self.memory.room)
        self.submitted.set()
        return work.wait()

    def clear(self) -> None:
        """Zeros in all its tensors on the GPU."""
        stream = self.partition.stream
        self.partition.run(lambda: (self.executor.instance.clear(stream), stream.sync()))
        self.submitted.clear()


@pytest.fixture(scope="module")
def everywhere(bench: Bench, device: Any) -> Iterator[Any]:
    """A stream with all of the GPU's SMs, as a partition."""
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    with device.current():
        handle = int(handle_return(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
    with closing(device.adopt(handle)) as adopted:
        yield adopted
    with device.current():
        handle_return(driver.cuStreamDestroy(handle))


@pytest.mark.parametrize("way", BY_SMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_an_engines_own_kernels_run_only_on_its_partitions_sms(
    name: str, way: str, bench: Bench, device: Any, everywhere: Any, tmp_path: Path
) -> None:
    network = NETWORKS[name]()
    profile = Profile({key: Range(*shapes) for key, shapes in network.ranges.items()})
    path = tmp_path / "model.plan"
    path.write_bytes(build(network.onnx, BuildOptions(profiles=(profile,), max_aux_streams=AUX_STREAMS)))
    with ExitStack() as left:
        engine: Any = left.enter_context(closing(load_engine(path, device, BY_SMS[way].merge(copies="engine"))))
        if name == "branches" and not engine.loaded.plan.num_aux_streams:
            pytest.skip("the library made an engine without auxiliary streams")
        control = left.enter_context(closing(load_engine(path, device, BY_SMS[way])))
        run = Run(device, engine, bench.a, network, left)
        free, neighbour = (Run(device, control, each, network, left) for each in (everywhere, bench.b))
        wanted = expected(network)(run.arrays)
        run.clear()
        waiting = Thread(target=run.infer)
        source, *targets = zip(run.executor.instance.addresses, run.executor.instance.sizes, strict=True)
        read = left.enter_context(bench.kernels.reading(bench.b, max(run.executor.instance.sizes)))
        with device.current(), bench.kernels.held(bench.a) as held:
            waiting.start()
            ends = monotonic() + GIVE_UP_NS / 2e9
            while not read(*source).any():
                assert monotonic() < ends, f"the input did not reach the GPU; was it submitted? {run.submitted.is_set()}"
                sleep(0.001)
            began = monotonic()
            elsewhere = free.infer()
            everywhere_took = monotonic() - began
            for _ in range(ON_B):
                beside = neighbour.infer()
            beside_took = monotonic() - began - everywhere_took
            outputs = [read(*target) for target in targets]
            stood_still = waiting.is_alive()
            gave_up = held.gave_up
            held.release()
            waiting.join()

        took = f"while its SMs were taken: {everywhere_took:.3f} s on all of the GPU, {beside_took:.3f} s on others"
        if gave_up and way == "without graphs":
            pytest.xfail(f"{took}: the library loaded a module, and waited for running kernels (docs/gpu.md)")
        assert not gave_up, took
        assert stood_still
        assert not any(output.any() for output in outputs), "the engine has computed something on other SMs"
        for got in elsewhere, beside, run.infer():
            assert_close(got, wanted)
