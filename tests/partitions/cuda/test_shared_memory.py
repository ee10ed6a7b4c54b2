"""Memory that processes share, on simulated GPUs, each of which is a process here."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from ctypes import c_uint32
from typing import Any

import pytest

from partitions import DeviceLost, PartitionError
from partitions.deposit import Deposit, deposit_of, open_deposit
from tests.simulation import Gpu, installed

SOURCE, BYTES = "kernels", 256


@pytest.fixture
def deposit() -> Iterator[Deposit]:
    with closing(open_deposit()) as deposit:
        yield deposit


def copied(deposit: Deposit) -> Deposit:
    return deposit_of([os.dup(each) for each in deposit.descriptors])


@contextmanager
def process(deposit: Deposit | None) -> Iterator[tuple[Gpu, Any]]:
    """A simulated GPU, and its device as a process has it."""
    gpu = Gpu()
    with installed(gpu) as cuda, closing(cuda.open_cuda(Gpu.index)) as device:
        if deposit:
            device.share(copied(deposit))
        device.make_current()
        yield gpu, device


def words(device: Any, source: str = SOURCE) -> Any:
    found = device.kernels.memory(device.make_current(), source, BYTES)
    return (c_uint32 * (BYTES // 4)).from_address(int(found.handle))


def test_processes_with_one_deposit_share_memory_which_is_of_zeros_at_first(deposit: Deposit) -> None:
    with process(deposit) as (_, first):
        ours = words(first)
        assert list(ours) == [0] * (BYTES // 4)
        with process(deposit) as (_, second):
            theirs = words(second)
            ours[3] = 7
            assert theirs[3] == 7
            assert list(words(second)) == list(ours)
        ours[4] = 8
        assert list(ours)[3:5] == [7, 8]


def test_it_lives_as_long_as_the_deposit_and_not_as_its_maker(deposit: Deposit) -> None:
    for before in (0, 1, 2):
        with process(deposit) as (_, device):
            found = words(device)
            assert found[0] == before
            found[0] += 1


def test_without_a_deposit_a_process_has_its_own(deposit: Deposit) -> None:
    with process(deposit) as (_, first), process(None) as (gpu, alone):
        words(first)[0] = 1
        assert words(alone)[0] == 0
        assert "cuMemCreate" not in gpu.log


def test_of_two_that_make_it_at_once_both_have_the_first(deposit: Deposit) -> None:
    with process(deposit) as (_, first), process(deposit) as (gpu, second):
        gpu.meanwhile("cuMemExportToShareableHandle", lambda: words(first).__setitem__(0, 5))
        assert words(second)[0] == 5
        assert gpu.log.count("cuMemCreate") == 1
        assert gpu.log.count("cuMemUnmap") == 1, "its own is given up"


@pytest.mark.parametrize(
    "call",
    [
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemsetD8",
    ],
)
def test_where_it_cannot_be_shared_a_process_has_its_own_and_says_so(
    deposit: Deposit, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    with process(deposit) as (gpu, device):
        gpu.fail(call, error="CUDA_ERROR_NOT_SUPPORTED")
        assert list(words(device)) == [0] * (BYTES // 4)
        assert gpu.pages.count == 0
    assert "does not take turns with the GPU's others" in caplog.text
    assert "CUDA_ERROR_NOT_SUPPORTED" in caplog.text
    assert deposit.look() is None


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap"])
def test_so_it_is_where_it_cannot_be_imported(deposit: Deposit, call: str, caplog: pytest.LogCaptureFixture) -> None:
    with process(deposit) as (_, first), process(deposit) as (gpu, second):
        words(first)[0] = 1
        gpu.fail(call, error="CUDA_ERROR_NOT_SUPPORTED")
        assert words(second)[0] == 0
        assert gpu.pages.count == 0
    assert "CUDA_ERROR_NOT_SUPPORTED" in caplog.text


def test_a_lost_device_is_no_reason_to_go_on(deposit: Deposit) -> None:
    with process(deposit) as (gpu, device):
        gpu.fail("cuMemCreate", error="CUDA_ERROR_ILLEGAL_ADDRESS")
        with pytest.raises(DeviceLost):
            words(device)
        gpu.lost = ""


def test_processes_of_other_sources_do_not_take_each_other_s(deposit: Deposit, caplog: pytest.LogCaptureFixture) -> None:
    with process(deposit) as (_, first), process(deposit) as (_, second):
        words(first)[0] = 1
        assert words(second, "others")[0] == 0
    assert "they are not of one version" in caplog.text


def test_one_source_of_kernels_shares(deposit: Deposit) -> None:
    with process(deposit) as (_, device):
        words(device)
        with pytest.raises(PartitionError, match="of one source"):
            words(device, "others")


def test_nothing_is_left_when_it_is_closed(deposit: Deposit) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with ExitStack() as opened:
        gpus = [opened.enter_context(process(deposit)) for _ in range(2)]
        for _, device in gpus:
            words(device)
        opened.close()
        assert [gpu.pages.count for gpu, _ in gpus] == [0, 0]
    assert set(os.listdir("/proc/self/fd")) == before
