import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from ctypes import addressof, create_string_buffer
from itertools import accumulate
from threading import Thread, current_thread
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from partitions import DeviceLost, DeviceUnavailable, Misplaced, Partition, PartitionError, PartitionManager, open_device, probe
from partitions.cuda.pages import PIN_PIECE
from partitions.strain import STRAINS, Strain
from tests.simulation import Gpu, Misuse, installed

H100 = (8,) * 14 + (20,)
OLD, NEW = (13, 0), (13, 1)
"""Versions of driver and bindings: the last before structured splits and work queues, and the first with them."""
QUEUES = {OLD: "shared work queues", NEW: "balanced work queues"}


@pytest.fixture(params=[OLD, NEW], ids=["CUDA 13.0", "CUDA 13.1"])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return Gpu(cuda=request.param)


@pytest.fixture
def cuda(gpu: Gpu) -> Iterator[Any]:
    with installed(gpu) as module:
        yield module


@pytest.fixture
def device(cuda: Any) -> Iterator[Any]:
    with closing(cuda.open_cuda(Gpu.index)) as device:
        yield device


def units(sizes: tuple[int, ...], granules: tuple[int, ...]) -> frozenset[int]:
    """The SMs of these granules, if they lie one after another."""
    ends = [0, *accumulate(sizes)]
    return frozenset(sm for granule in granules for sm in range(ends[granule], ends[granule + 1]))


def put(partition: Any, work: Callable[[], None]) -> None:
    """Have the simulated stream call a function when it is waited for."""
    partition.stream.simulated.pending.append(work)


def test_the_driver_says_how_the_device_divides_and_the_remainder_is_a_granule_too(device: Any, gpu: Gpu) -> None:
    assert (device.kind, device.unit) == ("cuda", "SM")
    assert device.granules == H100
    assert device.describe() == f"Simulated H100, 132 SMs in 15 granules (14 of 8, 1 of 20), {QUEUES[gpu.cuda]}"
    assert repr(device) == "<CudaDevice 1, Simulated H100, granules 14 of 8, 1 of 20>"
    assert device.address == "0000:ff:1f.7"


def test_partitions_of_two_splits_overlap_and_the_probe_says_so(cuda: Any, device: Any) -> None:
    with closing(cuda.open_cuda(Gpu.index)) as again, closing(device.carve([0])) as one, closing(again.carve([1, 14])) as other:
        partitions = {"one": one, "other": other}
        with pytest.raises(Misplaced, match="one and other both ran on 0, 1, 2"):
            probe.check(partitions, probe.locate(partitions))


@pytest.mark.parametrize("granules", [[0], [14], [2, 0, 1], [3, 14], list(range(15))])
def test_a_partition_has_the_sms_of_its_granules_and_runs_on_those(device: Any, granules: list[int]) -> None:
    with closing(device.carve(granules)) as partition:
        assert partition.granules == tuple(sorted(granules))
        assert partition.size == sum(H100[granule] for granule in granules)
        assert partition.locate() == units(H100, partition.granules)


@pytest.mark.parametrize(
    ("granules", "error"),
    [([], PartitionError), ([15], PartitionError), ([-1], PartitionError), ([0, 0], PartitionError), (0, TypeError)],
)
def test_granules_that_cannot_be_had_are_refused_before_the_driver_is_asked(
    device: Any, gpu: Gpu, granules: Any, error: type[Exception]
) -> None:
    calls = len(gpu.log)
    with pytest.raises(error, match=r"no granules were named|is not there|named more than once|a list of their numbers"):
        device.carve(granules)
    assert len(gpu.log) == calls


def test_a_context_that_holds_less_than_was_asked_for_is_given_back(device: Any, gpu: Gpu) -> None:
    gpu.short = 2
    with pytest.raises(PartitionError, match=r"gave 14 SMs for granules \[1, 2\], which hold 16"):
        device.carve([1, 2])
    assert gpu.contexts == []


@pytest.mark.parametrize(
    ("gpu", "size", "call"),
    [
        (OLD, None, "Device.create_context"),
        (OLD, None, "Context.create_stream"),
        (OLD, None, "Device.set_current"),
        (NEW, None, "Device.set_current"),
        (OLD, 2, "cuDevResourceGenerateDesc"),
        (OLD, 2, "cuGreenCtxCreate"),
        (OLD, 2, "cuGreenCtxStreamCreate"),
        (OLD, 2, "cuGreenCtxGetDevResource"),
    ],
    indirect=["gpu"],
)
def test_a_carve_that_fails_leaks_nothing(cuda: Any, gpu: Gpu, size: int | None, call: str) -> None:
    with closing(cuda.open_cuda(Gpu.index, granule_sms=size)) as device:
        free = gpu.free
        gpu.fail(call)
        with pytest.raises(PartitionError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
            device.carve([0])
        assert not isinstance(caught.value, DeviceLost)
        assert (gpu.contexts, gpu.free) == ([], free)
        device.carve([0]).close()


BY_CORE, BY_DRIVER = ["Stream.close", "Context.close"], ["cuStreamDestroy", "cuGreenCtxDestroy"]


@pytest.mark.parametrize(
    ("gpu", "size", "calls"),
    [
        (OLD, None, ["Stream.sync", *BY_CORE]),
        (OLD, 2, ["Stream.sync", *BY_DRIVER]),
        (NEW, None, ["Stream.sync", *BY_CORE]),
        (NEW, 2, ["Stream.sync", *BY_CORE]),
    ],
    indirect=["gpu"],
)
def test_closing_waits_for_the_stream_and_the_device_destroys_its_context(
    cuda: Any, gpu: Gpu, size: int | None, calls: list[str]
) -> None:
    with closing(cuda.open_cuda(Gpu.index, granule_sms=size)) as device:
        free, done = gpu.free, []
        partition = device.carve([0])
        put(partition, lambda: done.append("work"))
        partition.close()
        partition.close()
        assert done == ["work"]
        device.close()
        assert [call for call in gpu.log if call in calls] == calls
        assert gpu.free == free
        assert repr(partition) == f"<CudaPartition granules [0], {partition.size} SMs, closed>"


def test_the_same_granules_are_the_same_context_again(device: Any, gpu: Gpu) -> None:
    first = device.carve([0, 3])
    again = device.carve([0, 3])
    assert first.handle != again.handle
    handles = {first.handle, again.handle}
    first.close()
    again.close()
    device.carve([1]).close()
    assert {device.carve([3, 0]).handle, device.carve([0, 3]).handle} == handles
    assert len(gpu.contexts) == 3


@pytest.mark.parametrize("size", [None, 2])
def test_home_streams_have_the_highest_priority_and_those_with_lent_granules_the_lowest(cuda: Any, size: int | None) -> None:
    with closing(cuda.open_cuda(Gpu.index, granule_sms=size)) as device:
        with closing(device.carve([0, 1])) as home, closing(device.carve([0, 1], [1])) as wide:
            with closing(home.make_stream()) as side, closing(wide.make_stream()) as low:
                streams = home.stream, side.stream, wide.stream, low.stream
                assert [stream.simulated.priority for stream in streams] == [-5, -5, 0, 0]
            assert repr(wide) == f"<CudaPartition granules [0, 1], [1] lent, {wide.size} SMs>"
        with closing(device.carve([0, 1])) as home, closing(device.carve([0, 1], [1])) as wide:
            assert [each.stream.simulated.priority for each in (home, wide)] == [-5, 0]
        with closing(device.carve([0, 1], [1])), closing(device.carve([0, 1])):
            pass  # The wide one was kept last, and what was kept last is used first.
        with closing(device.carve([0, 1])) as home, closing(device.carve([0, 1], [1])) as wide:
            assert [each.stream.simulated.priority for each in (home, wide)] == [-5, 0]


def test_the_simulation_objects_to_a_context_destroyed_before_its_stream(device: Any) -> None:
    partition = device.carve([0])
    with pytest.raises(Misuse, match="before its streams"):
        partition.stream._gpu.destroy_context(partition.stream.simulated.context)
    partition.close()


def test_every_method_works_on_a_thread_that_cuda_has_not_seen(device: Any) -> None:
    partitions: list[Partition] = []

    def in_a_thread(function: Callable[[], object]) -> None:
        thread = Thread(target=function)
        thread.start()
        thread.join()

    in_a_thread(lambda: partitions.append(device.carve([4])))
    in_a_thread(lambda: partitions.append(device.carve([5])) if partitions[0].locate() else None)
    memory = create_string_buffer(64)
    in_a_thread(lambda: device.pin(addressof(memory), 64).close())
    for partition in partitions:
        in_a_thread(partition.close)
    in_a_thread(device.close)
    assert len(partitions) == 2
    assert all("closed" in repr(partition) for partition in partitions)
    assert device._probe is None


def test_an_attached_thread_submits_to_the_stream_and_another_may_not(device: Any, gpu: Gpu) -> None:
    with closing(device.carve([0])) as partition:
        assert partition.handle == int(partition.stream.handle)
        partition.run(partition.stream.sync)
        gpu.fail("Device.set_current")
        with pytest.raises(PartitionError, match="as scripted"):
            partition.run(partition.stream.sync)
    with pytest.raises(PartitionError, match="cannot take another thread"):
        partition.attach()


def test_a_function_runs_on_a_fresh_thread_and_what_it_raises_is_passed_on(device: Any) -> None:
    with closing(device.carve([0])) as partition:
        assert partition.run(lambda: current_thread().name).startswith("granules (0,)")
        with pytest.raises(ZeroDivisionError):
            partition.run(lambda: 1 // 0)


def test_the_probe_is_compiled_once_and_its_memory_freed_with_the_device(device: Any, gpu: Gpu) -> None:
    with closing(device.carve([0])) as one, closing(device.carve([1])) as other:
        partitions = {"one": one, "other": other}
        for _ in range(2):
            probe.check(partitions, probe.locate(partitions))
    assert gpu.log.count("Program") == 1
    assert len(gpu.allocated) == 1
    device.close()
    device.close()
    assert gpu.allocated == {}


def test_locate_finds_a_stream_that_runs_outside_its_partition(device: Any, gpu: Gpu) -> None:
    gpu.confines = False
    with closing(device.carve([0])) as partition, pytest.raises(Misplaced, match=r"ran on 32 units .* but was granted 8"):
        probe.check({"acme": partition}, probe.locate({"acme": partition}))


def test_a_probe_without_nvrtc_names_the_package_to_install(device: Any, gpu: Gpu) -> None:
    gpu.nvrtc = False
    with closing(device.carve([0])) as partition, pytest.raises(PartitionError, match="pip install nvidia-cuda-nvrtc"):
        partition.locate()


MOVES = {
    "memory copy": (1, 0, 0),
    "memory read": (1, 0, 0),
    "memory write": (1, 0, 0),
    "random sectors": (1, 0, 0),
    "L2": (1, 0, 0),
    "PCIe out": (0, 0, 1),
    "PCIe in": (0, 1, 0),
}
"""Whether the simulated GPU sees bytes of memory, into the device and out of it. It has no cache."""


@pytest.mark.parametrize("kind", STRAINS)
def test_a_strain_moves_bytes_where_it_says_and_frees_what_it_took(device: Any, gpu: Gpu, kind: Strain) -> None:
    with closing(device.carve([0])) as partition:
        before, streams = gpu.free, len(gpu.contexts)
        done = partition.strain(kind, 0.01)
        assert [int(bool(each)) for each in gpu.moved or ()] == list(MOVES[kind])
        if kind != "random sectors":  # Of these the simulation counts what they might be of.
            assert sum(gpu.moved or ()) == done.nbytes
        assert (gpu.free, len(gpu.contexts)) == (before, streams)
        assert gpu.log.count("launch") >= 1


@pytest.mark.parametrize(("kind", "blocks"), [("memory read", 32), ("random sectors", 32), ("PCIe out", 1), ("PCIe in", 4)])
def test_passes_of_a_strain_run_where_they_are_decided_to(device: Any, gpu: Gpu, kind: Strain, blocks: int) -> None:
    """On the narrow partition the third and the fourth, with few blocks over PCIe; the memory is freed after the last."""
    with closing(device.carve([0, 1])) as home, closing(device.carve([0])) as narrow:
        before, asked, launched = gpu.free, list[int](), list[tuple[str, int, int]]()

        def decide(nbytes: int) -> Any:
            asked.append(nbytes)
            launched.extend(list(gpu.launched)[-1:])
            return narrow if len(asked) in (3, 4) else None

        done = home.strain(kind, 0.3, decide)  # Making the memory for PCIe takes some of it.
        (_, most, all_blocks), *_ = launched
        assert [(sms, grid) for _, sms, grid in launched[:6]] == [(16, all_blocks)] * 2 + [(8, blocks)] * 2 + [
            (16, all_blocks)
        ] * 2
        assert most == 16
        assert all_blocks > blocks
        assert min(asked) == max(asked) > 0
        assert 0 < done.nbytes <= asked[0] * len(asked)
        assert gpu.free == before


def test_a_strain_that_would_take_most_of_the_memory_is_refused(device: Any, gpu: Gpu) -> None:
    with closing(device.carve([0])) as partition:
        gpu.others_have = gpu.reported_free - 30 * 10**6
        with pytest.raises(PartitionError, match="a strain of memory read needs 17 MB of memory, and 30 MB are free, of which"):
            partition.strain("memory read", 0.001)
        assert partition.strain("PCIe out", 0.001).nbytes > 0, "which takes the host's"


def test_the_kernels_of_strains_are_compiled_once(device: Any, gpu: Gpu) -> None:
    with closing(device.carve([0])) as one, closing(device.carve([1])) as other:
        for partition in (one, other, one):
            partition.strain("memory read", 0.001)
    assert gpu.log.count("Program.compile") == 1


@pytest.mark.parametrize(
    "call", ["cuGreenCtxStreamCreate", "Device.allocate", "Device.create_event", "launch", "Stream.record", "Stream.sync"]
)
def test_a_strain_that_fails_leaves_nothing_behind(device: Any, gpu: Gpu, call: str) -> None:
    with closing(device.carve([0])) as partition:
        partition.strain("memory copy", 0.001)
        before = gpu.free
        gpu.fail(call)
        with pytest.raises(PartitionError, match=r" <CudaPartition granules \[0\].*OUT_OF_MEMORY"):
            partition.strain("memory copy", 0.001)
        assert gpu.free == before
        assert partition.strain("memory copy", 0.001).nbytes > 0


def test_an_error_that_passes_is_not_a_lost_device(device: Any, gpu: Gpu) -> None:
    with closing(device.carve([0])) as partition:
        gpu.fail("launch", error="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
        with pytest.raises(PartitionError, match=r"looking where <CudaPartition .*: CUDA_ERROR_LAUNCH_OUT") as caught:
            partition.locate()
        assert not isinstance(caught.value, DeviceLost)
        assert partition.locate()


def test_an_error_that_stays_is_a_lost_device_wherever_it_surfaces(device: Any, gpu: Gpu) -> None:
    memory = create_string_buffer(64)
    partition, other = device.carve([0]), device.carve([1])
    gpu.fail("Stream.sync", error="CUDA_ERROR_ILLEGAL_ADDRESS")
    for call in (
        partition.locate,
        partition.attach,
        lambda: device.carve([2]),
        lambda: device.pin(addressof(memory), 64),
        partition.close,
        other.close,
        device.close,
    ):
        with pytest.raises(DeviceLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            call()
    assert gpu.contexts == []
    partition.close()


def test_pinned_memory_is_the_device_s_until_it_is_closed(device: Any, gpu: Gpu) -> None:
    memory = create_string_buffer(4096)
    pinned = device.pin(addressof(memory), 4096)
    assert gpu.pinned == {addressof(memory): 4096}
    assert (pinned.address, pinned.nbytes, pinned.device_address) == (addressof(memory), 4096, addressof(memory))
    pinned.close()
    pinned.close()
    assert gpu.pinned == {}


def test_memory_is_pinned_once_and_unpinned_from_its_start(device: Any) -> None:
    memory = create_string_buffer(4096)
    with closing(device.pin(addressof(memory), 2048)):
        with pytest.raises(PartitionError, match=r"pinning 64 bytes at 0x\w+: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"):
            device.pin(addressof(memory) + 1024, 64)
        with pytest.raises(PartitionError, match=r"unpinning the memory at 0x\w+: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"):
            device.unpin(addressof(memory) + 1024)


def test_any_part_of_what_was_pinned_at_once_is_recognised_as_pinned(device: Any) -> None:
    memory = create_string_buffer(8192)
    start = addressof(memory)
    with ExitStack() as pins:
        for offset, nbytes in ((4096, 2048), (0, 1024), (1024, 1024)):
            pins.enter_context(closing(device.pin(start + offset, nbytes)))
        inside = [(0, 1024), (1000, 24), (1024, 1024), (4096, 2048), (6143, 1), (5000, 0)]
        assert all(device.is_pinned(start + offset, nbytes) for offset, nbytes in inside)
        outside = [(-1, 1), (1000, 100), (2048, 1), (4095, 2), (6144, 1), (4096, 2049)]
        assert not any(device.is_pinned(start + offset, nbytes) for offset, nbytes in outside)
        assert device.unpin_count == 0
    assert not device.is_pinned(start, 1)
    assert device.unpin_count == 3


def test_memory_is_pinned_in_pieces_so_that_launches_get_their_turn_in_between(device: Any, gpu: Gpu) -> None:
    memory = create_string_buffer(3 * PIN_PIECE)
    start = addressof(memory)
    pinned = device.pin(start, len(memory))
    assert sum(gpu.pinned.values()) == len(memory)
    assert max(gpu.pinned.values()) == PIN_PIECE
    assert {at % PIN_PIECE for at in gpu.pinned} == {start % PIN_PIECE, 0}
    assert device.is_pinned(start, len(memory))
    gpu.fail("cuMemHostUnregister", 2)
    with pytest.raises(PartitionError, match="unpinning the memory"):
        pinned.close()
    assert len(gpu.pinned) == 1, "the others were unpinned all the same"


def test_memory_of_one_piece_is_one_registration_wherever_it_begins(device: Any, gpu: Gpu) -> None:
    memory = create_string_buffer(PIN_PIECE)
    with closing(device.pin(addressof(memory), PIN_PIECE)):
        assert gpu.pinned == {addressof(memory): PIN_PIECE}
    assert gpu.pinned == {}


def test_where_a_piece_cannot_be_pinned_none_stays_pinned(device: Any, gpu: Gpu) -> None:
    memory = create_string_buffer(3 * PIN_PIECE)
    gpu.fail("cuMemHostRegister", 3)
    with pytest.raises(PartitionError, match="OUT_OF_MEMORY"):
        device.pin(addressof(memory), len(memory))
    assert gpu.pinned == {}
    assert not device.is_pinned(addressof(memory), 1)


def test_memory_that_is_not_the_process_s_cannot_be_pinned(device: Any, gpu: Gpu) -> None:
    with pytest.raises(PartitionError, match=r"^taking 4096 bytes at 0x1000 to pin them: Cannot allocate memory$"):
        device.pin(4096, 4096)
    assert gpu.pinned == {}


def test_memory_that_cannot_be_mapped_is_unpinned_again(device: Any, gpu: Gpu) -> None:
    memory = create_string_buffer(64)
    gpu.fail("cuMemHostGetDevicePointer")
    with pytest.raises(PartitionError, match="OUT_OF_MEMORY"):
        device.pin(addressof(memory), 64)
    assert gpu.pinned == {}


def test_a_gpu_that_is_not_there_is_refused_with_what_is_needed(cuda: Any) -> None:
    with pytest.raises(DeviceUnavailable, match=r"CUDA device 3 cannot be carved: .* got 3 \(green contexts need .* 12.4"):
        cuda.open_cuda(3)


@pytest.mark.parametrize("call", ["Device", "Device.set_current", "DeviceResources.sm"])
def test_a_driver_without_green_contexts_is_refused_with_what_is_needed(cuda: Any, gpu: Gpu, call: str) -> None:
    gpu.fail(call, error="CUDA_ERROR_NOT_SUPPORTED")
    with pytest.raises(
        DeviceUnavailable, match=r"CUDA_ERROR_NOT_SUPPORTED: as scripted \(green contexts need .*capability 6.0"
    ):
        cuda.open_cuda(Gpu.index)


def test_a_gpu_that_others_have_filled_is_refused_with_what_to_do(cuda: Any, gpu: Gpu) -> None:
    gpu.fail("Device.set_current", error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DeviceUnavailable, match=r"OUT_OF_MEMORY: as scripted \(other processes use .*nvidia-smi shows them"):
        cuda.open_cuda(Gpu.index)


def test_the_best_device_present_is_a_gpu_that_can_be_carved(cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with closing(open_device("auto", index=Gpu.index)) as device, closing(open_device("cuda", None, Gpu.index, 2)) as finer:
        assert (device.kind, device.granules) == ("cuda", H100)
        assert caplog.messages == [f"the device is a GPU: {device.describe()}"]
        assert len(finer.granules) == 65


def test_where_the_gpu_cannot_be_carved_the_cpu_is_taken_and_the_reason_logged(
    cuda: Any, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gpu.fail("SMResource.split", error="CUDA_ERROR_INVALID_RESOURCE_TYPE")
    gpu.lost = "CUDA_ERROR_NOT_SUPPORTED"
    assert open_device("auto", index=Gpu.index).kind == "cpu"
    (message,) = caplog.messages
    assert message.startswith("the device is the CPU: CUDA device 1 cannot be carved: CUDA_ERROR_NOT_SUPPORTED")


def test_without_the_packages_the_extra_to_install_is_named(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "partitions.cuda.device", None)
    with pytest.raises(DeviceUnavailable, match=r"^CUDA partitions need scripts/install cuda "):
        open_device("cuda")


def test_nothing_of_cuda_is_imported_before_it_is_asked_for() -> None:
    script = "import sys, partitions; partitions.open_device('cpu'); print(*[m for m in sys.modules if m.startswith('cuda')])"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


class Repartitioning(RuleBasedStateMachine):
    """Tenants that are added, removed and resized on a simulated GPU that fails at random."""

    cuda = OLD

    def __init__(self) -> None:
        super().__init__()
        self.gpu = Gpu(cuda=self.cuda)
        self._installed = installed(self.gpu)
        self.device = self._installed.__enter__().open_cuda(Gpu.index)
        self.free = self.gpu.free
        self.manager = PartitionManager(self.device)

    def teardown(self) -> None:
        self.manager.close()
        self.device.close()
        assert (self.gpu.contexts, self.gpu.free, self.gpu.splits) == ([], self.free, 1)
        self._installed.__exit__(None, None, None)

    @rule(counts=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3), min_size=1))
    def repartition(self, counts: dict[str, int]) -> None:
        move = self.manager.plan(counts)
        left = self.manager.commit(move, self.manager.carve(move))
        self.manager.discard(left)

    @rule(
        counts=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3), min_size=1),
        call=st.sampled_from(["Device.create_context", "Context.create_stream"]),
        nth=st.integers(1, 3),
    )
    def repartition_in_vain(self, counts: dict[str, int], call: str, nth: int) -> None:
        move = self.manager.plan(counts)
        new = [name for name in move.movers if not self.device._idle.get((move.after[name], -5))]
        if len(new) >= nth:
            before = self.manager.held
            self.gpu.fail(call, nth)
            self.gpu.fail(call, nth + (self.cuda is NEW))  # It is tried again without queues.
            with pytest.raises(PartitionError, match="as scripted"):
                self.manager.carve(move)
            assert self.manager.held == before

    @rule()
    def close(self) -> None:
        self.manager.close()

    @invariant()
    def every_tenant_runs_on_all_of_its_sms_and_no_others(self) -> None:
        held = self.manager.held
        placed = probe.locate(held)
        probe.check(held, placed)
        assert {name: len(sms) for name, sms in placed.items()} == {name: partition.size for name, partition in held.items()}

    @invariant()
    def the_driver_has_a_context_for_each_tenant_and_those_that_are_kept(self) -> None:
        idle = sum(map(len, self.device._idle.values()))
        assert len(self.gpu.contexts) == len(self.manager.held) + idle


class RepartitioningWithQueues(Repartitioning):
    cuda = NEW

    @invariant()
    def every_context_has_queues_of_its_own(self) -> None:
        assert {context.queues for context in self.gpu.contexts} <= {"green_ctx_balanced"}
        assert QUEUES[NEW] in self.device.describe()


TestRepartitioning = Repartitioning.TestCase
TestRepartitioningWithQueues = RepartitioningWithQueues.TestCase
for case in (TestRepartitioning, TestRepartitioningWithQueues):
    case.settings = settings(max_examples=30, stateful_step_count=10)  # each step starts a thread a tenant


@pytest.mark.parametrize("size", [None, 2])
def test_a_further_stream_has_the_partition_s_multiprocessors_and_is_destroyed_once(
    cuda: Any, gpu: Gpu, size: int | None
) -> None:
    with closing(cuda.open_cuda(Gpu.index, granule_sms=size)) as device, closing(device.carve([1, 2])) as partition:
        partition.attach()
        side = partition.make_stream()
        assert gpu.find_stream(side.handle).context is gpu.find_stream(partition.handle).context
        assert side.handle == side.stream.handle != partition.handle
        assert repr(side) == f"<SideStream {side.handle:#x}>"
        side.close()
        side.close()
        assert repr(side) == f"<SideStream {side.handle:#x}, closed>"
        assert gpu.find_stream(side.handle).closed


@pytest.mark.parametrize("call", ["cuStreamGetGreenCtx", "cuGreenCtxStreamCreate", "cuStreamDestroy"])
def test_a_further_stream_that_cannot_be_made_or_destroyed_is_an_error(device: Any, gpu: Gpu, call: str) -> None:
    partition = device.carve([1])
    gpu.fail(call)
    with pytest.raises(PartitionError, match=r"(making a stream on <CudaPartition|closing <SideStream).*OUT_OF_MEMORY"):
        partition.make_stream().close()
    gpu.lose("CUDA_ERROR_UNKNOWN")
    with pytest.raises(DeviceLost):
        partition.make_stream()
