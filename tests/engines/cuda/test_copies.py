"""The two copy kernels' host side, on a simulated GPU; what the kernels themselves do is tried in tests/gpu."""

import importlib
import os
from collections.abc import Iterator
from contextlib import closing
from ctypes import c_uint32, c_uint64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partitions import DeviceLost, PartitionError
from partitions.cuda.pages import PIN_PIECE
from tests.engines.simulated import Bench
from tests.engines.tensors import UNTOUCHED, Memory
from tests.simulation import Misuse


@pytest.fixture
def copier(bench: Bench) -> Iterator[Any]:
    """One input and one output."""
    copier = open_sm_copies(bench, 1, 2)
    yield copier
    copier.close()


def open_sm_copies(bench: Bench, inputs: int, rows: int) -> Any:
    return bench.copies.open_sm_copies(bench.device, bench.partition.stream, inputs, rows)


class Lane:
    """Pinned memory that goes in, and pinned memory that comes out, through memory of the device."""

    def __init__(self, bench: Bench, nbytes: int, seed: int) -> None:
        self.nbytes = nbytes
        self.source, self.target = Memory(max(1, nbytes)), Memory(max(1, nbytes))
        self.source.bytes[:] = np.random.default_rng(seed).integers(0, 255, len(self.source.bytes))
        self.pins = [bench.device.pin(*memory.room[:2]) for memory in (self.source, self.target)]

    def spans(self, device: int) -> list[tuple[int, int, int]]:
        return [(self.source.room.address, device, self.nbytes), (device, self.target.room.address, self.nbytes)]

    def arrived(self) -> bool:
        return bytes(self.target.bytes[: self.nbytes]) == bytes(self.source.bytes[: self.nbytes])

    def close(self) -> None:
        for pin in self.pins:
            pin.close()


def push(bench: Bench, copier: Any, lane: Lane, device: int) -> None:
    copier.write(copier.table(lane.spans(device)))
    copier.copy_in(bench.partition.stream)
    copier.copy_out(bench.partition.stream)
    copier.count()


@pytest.fixture(params=["sm", "engine"])
def copies(request: pytest.FixtureRequest, bench: Bench, copier: Any) -> Any:
    """A copier of either kind, for one input and one output."""
    return copier if request.param == "sm" else bench.copies.EngineCopies(1)


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 4097])
def test_an_input_goes_to_the_device_and_an_output_comes_back(bench: Bench, copies: Any, nbytes: int) -> None:
    middle = bench.device.make_current().allocate(8192, stream=bench.partition.stream)
    lane = Lane(bench, nbytes, 1)
    push(bench, copies, lane, int(middle.handle))
    assert (lane.target.bytes == UNTOUCHED).all()
    bench.partition.stream.sync()
    assert lane.arrived()
    middle.close()
    lane.close()


def test_tensors_across_pieces_that_were_pinned_one_by_one_are_copied(bench: Bench, copies: Any) -> None:
    """A copy engine refuses a call that crosses from one to the next; the simulation does so too."""
    nbytes = 9 * bench.copies.ENGINE_PIECE + 5
    middle = bench.device.make_current().allocate(nbytes, stream=bench.partition.stream)
    lane = Lane(bench, nbytes, 1)
    assert len(bench.gpu.pinned) > 5
    push(bench, copies, lane, int(middle.handle))
    bench.partition.stream.sync()
    assert lane.arrived()
    middle.close()
    lane.close()


def test_calls_of_copy_engines_end_where_pinned_pieces_do(bench: Bench) -> None:
    assert PIN_PIECE % bench.copies.ENGINE_PIECE == 0


def test_over_all_tenants_one_block_writes_to_the_host_and_four_read(bench: Bench) -> None:
    """By turns in one memory of the device. What is small takes none: it must not wait for what is large."""
    with closing(bench.device.carve([1])) as neighbour:
        kernels = bench.copies.copy_kernels(bench.device)
        turns = (c_uint32 * (32 * 5)).from_address(int(kernels.turns.handle))
        taken = []
        for partition in (bench.partition, neighbour):
            middle = bench.device.make_current().allocate(1 << 20, stream=partition.stream)
            copier = bench.copies.open_sm_copies(bench.device, partition.stream, 1, 2)
            for nbytes in (4096, 4097, 1 << 20):
                lane = Lane(bench, nbytes, 1)
                copier.write(copier.table(lane.spans(int(middle.handle))))
                copier.copy_in(partition.stream)
                copier.copy_out(partition.stream)
                copier.count()
                partition.stream.sync()
                assert lane.arrived()
                lane.close()
                taken.append(list(turns[::32]))
            assert list(turns[1::32]) == list(turns[::32])  # Each was passed on.
            copier.close()
            middle.close()
    assert taken == [[count] * 5 for count in (0, 1, 2, 2, 3, 4)]  # The writers' turn, and each reader's.


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_120"])
def test_the_kernels_compile_for_every_generation_that_is_served(architecture: str) -> None:
    """By the real compiler, which needs no GPU."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    source = importlib.import_module("engines.cuda.copies").SOURCE
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"copies.cu", 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={architecture}".encode()])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    nvrtc.nvrtcGetProgramLog(program, log := bytearray(size))  # It is written to: no bytes, which Python shares.
    assert (int(result), log.strip(b"\0")) == (0, b"")


def test_every_inference_in_flight_has_a_table_of_its_own_and_the_ring_goes_round(bench: Bench, copier: Any) -> None:
    middle = bench.device.make_current().allocate(64, stream=bench.partition.stream)
    length = bench.copies.RING_LENGTH
    lanes = [Lane(bench, 48, seed) for seed in range(3 * length)]
    for start in range(0, len(lanes), length):
        for sequence in range(start, start + length):
            push(bench, copier, lanes[sequence], int(middle.handle))
        bench.partition.stream.sync()
    assert all(lane.arrived() for lane in lanes)
    middle.close()
    for lane in lanes:
        lane.close()


def test_the_count_of_inferences_goes_round_in_step_with_the_host_s(bench: Bench, copier: Any) -> None:
    """The device counts in 32 bits, whose range is a multiple of the ring's length; the host's count has no limit."""
    middle = bench.device.make_current().allocate(64, stream=bench.partition.stream)
    bench.partition.stream.sync()
    c_uint32.from_address(int(copier._state.handle)).value = 2**32 - 1
    c_uint64.from_address(copier.counted_address).value = 2**32 - 1
    for seed in range(3):
        lane = Lane(bench, 32, seed)
        push(bench, copier, lane, int(middle.handle))
        bench.partition.stream.sync()
        assert lane.arrived()
        lane.close()
    middle.close()


def test_the_simulation_detects_a_table_that_is_overwritten_too_early(bench: Bench, copier: Any) -> None:
    """The simulation reads a table when the stream comes to it, as the device does."""
    middle = bench.device.make_current().allocate(64, stream=bench.partition.stream)
    early, late = (Lane(bench, 48, seed) for seed in range(2))
    push(bench, copier, early, int(middle.handle))
    c_uint64.from_address(copier.counted_address).value = bench.copies.RING_LENGTH
    copier.write(copier.table(late.spans(int(middle.handle))))
    bench.partition.stream.sync()
    assert late.arrived()
    assert (early.target.bytes == UNTOUCHED).all()
    middle.close()
    for lane in (early, late):
        lane.close()


def test_copy_engines_get_a_call_for_each_small_tensor_that_has_bytes(bench: Bench) -> None:
    middle = bench.device.make_current().allocate(64, stream=bench.partition.stream)
    copies, lane = bench.copies.EngineCopies(2), Lane(bench, 32, 1)
    inside, outside = lane.spans(int(middle.handle))
    copies.write([inside, (0, 0, 0), outside, outside])
    copies.copy_in(bench.partition.stream)
    assert bench.gpu.log.count("cuMemcpyAsync") == 1
    copies.copy_out(bench.partition.stream)
    assert bench.gpu.log.count("cuMemcpyAsync") == 3
    bench.partition.stream.sync()
    assert lane.arrived()
    copies.close()
    middle.close()
    lane.close()


def test_the_simulation_objects_to_copies_that_would_be_bounced(bench: Bench) -> None:
    middle = bench.device.make_current().allocate(64, stream=bench.partition.stream)
    copies, memory = bench.copies.EngineCopies(1), Memory(4096)
    copies.write([(memory.room.address, int(middle.handle), 32)])
    with pytest.raises(Misuse, match="neither pinned nor the device's"):
        copies.copy_in(bench.partition.stream)
    middle.close()


@pytest.mark.parametrize(
    ("setting", "nbytes", "sms"),
    [("sm", 1 << 40, True), ("engine", 1, False), ("auto", 0, True), ("auto", 32 << 20, True), ("auto", (32 << 20) + 1, False)],
)
def test_who_copies_is_decided_by_the_setting_and_the_size(bench: Bench, setting: str, nbytes: int, sms: bool) -> None:
    assert bench.copies.uses_sms(setting, nbytes) is sms


def test_a_copier_frees_its_memory(bench: Bench) -> None:
    before = bench.holdings()
    copier = open_sm_copies(bench, 2, 5)
    assert bench.holdings()[0] == before[0] + 4  # Tables, their state, the clocks, and what those show.
    copier.close()
    copier.close()
    assert bench.holdings() == before


def test_a_table_has_a_row_for_every_tensor(copier: Any) -> None:
    with pytest.raises(ValueError, match="reshape"):
        copier.table([(1, 2, 3)] * 3)


@pytest.mark.parametrize("call", ["LegacyPinnedMemoryResource.allocate", "Device.allocate", "Buffer.fill", "Stream.sync"])
def test_a_ring_that_cannot_be_allocated_leaks_nothing(bench: Bench, call: str) -> None:
    before = bench.holdings()
    bench.gpu.fail(call)
    with pytest.raises(PartitionError, match="allocating the ring of copy tables: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        open_sm_copies(bench, 1, 2)
    assert not isinstance(caught.value, DeviceLost)
    del caught
    bench.partition.stream.sync()
    assert bench.holdings() == before
    bench.gpu.fail(call, error="CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceLost):
        open_sm_copies(bench, 1, 2)


def test_copy_kernels_that_cannot_be_compiled_raise_partition_error(bench: Bench) -> None:
    bench.gpu.fail("Program", error="NVRTC_ERROR_COMPILATION")
    with pytest.raises(PartitionError, match="compiling the copy kernels: NVRTC_ERROR_COMPILATION"):
        bench.copies.copy_kernels(bench.device)


def test_copy_kernels_are_compiled_once_for_all_processes_that_keep_them_in_one_folder(bench: Bench, tmp_path: Path) -> None:
    for _ in range(2):  # A device forgets what it has when it is closed, as a process does when it ends.
        bench.copies.copy_kernels(bench.device, tmp_path / "copies")
        with bench.device.current():
            bench.device.kernels.close()
    assert bench.gpu.log.count("Program.compile") == 1


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_kept_copy_kernels_are_as_readable_as_their_folder(bench: Bench, tmp_path: Path, umask: int) -> None:
    """What `sudo greenlane check` keeps is for the user of the service too."""
    before = os.umask(umask)
    try:
        bench.copies.copy_kernels(bench.device, tmp_path / "copies")
    finally:
        os.umask(before)
    (file,) = (tmp_path / "copies").iterdir()
    assert (tmp_path / "copies").stat().st_mode & 0o777 == 0o777 & ~umask
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize(("wrong", "refused"), [("a file in place of the folder", 3), ("a damaged file", 1)])
def test_copy_kernels_that_cannot_be_taken_are_compiled_and_kept_again_where_they_can_be(
    bench: Bench, tmp_path: Path, wrong: str, refused: int, caplog: pytest.LogCaptureFixture
) -> None:
    def serve() -> None:
        """As one process after another."""
        assert bench.copies.copy_kernels(bench.device, kept).copy_in
        with bench.device.current():
            bench.device.kernels.close()

    kept = tmp_path / "copies"
    if wrong == "a damaged file":
        serve()
        (file,) = kept.iterdir()
        file.write_text("")
    else:
        kept.write_text("")
    for _ in range(3):
        serve()
    assert caplog.text.count(f"{kept}: kernels cannot be taken from there or kept there, so this process compiles") == refused
    assert bench.gpu.log.count("Program.compile") == 3, "of a damaged file once before, once without a file, and once for it"


def test_without_nvrtc_the_package_to_install_is_named(bench: Bench) -> None:
    bench.gpu.nvrtc = False
    with pytest.raises(PartitionError, match="compiling the copy kernels needs NVRTC, pip install nvidia-cuda-nvrtc"):
        bench.copies.copy_kernels(bench.device)


def test_the_simulation_checks_arguments_against_the_kernel_s_declaration(bench: Bench, copier: Any) -> None:
    ring, length, *others = copier._in
    copier._in = (ring, int(length), *others)
    with pytest.raises(Misuse, match=r"copy_in takes \['pointer', 'unsigned', .*but was given \['pointer', 'long long'"):
        copier.copy_in(bench.partition.stream)
