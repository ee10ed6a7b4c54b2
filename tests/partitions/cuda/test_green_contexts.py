"""How a simulated GPU is split, before CUDA 13.1 and since, and which work queues its partitions get."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from partitions import DeviceUnavailable, PartitionError
from tests.simulation import Gpu, installed

from .test_device import H100, NEW, OLD, QUEUES, units


@pytest.fixture(params=[OLD, NEW], ids=["CUDA 13.0", "CUDA 13.1"])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return Gpu(cuda=request.param)


@pytest.fixture
def cuda(gpu: Gpu) -> Iterator[Any]:
    with installed(gpu) as module:
        yield module


@pytest.mark.parametrize(
    ("gpu", "size", "granules"),
    [
        (Gpu(), None, H100),
        (Gpu(cuda=NEW), None, H100),
        (Gpu(sms=108, fine=108, smallest=2), None, (2,) * 54),
        (Gpu(), 16, (16,) * 6 + (36,)),
        (Gpu(), 12, (16,) * 6 + (36,)),
        (Gpu(cuda=NEW), 12, (16,) * 6 + (36,)),
        (Gpu(cuda=NEW), 64, (64, 68)),
        (Gpu(), 120, (120, 12)),
        (Gpu(sms=16, coarse=16, fine=16), 2, (2,) * 8),
        (Gpu(sms=16, coarse=16, fine=16, cuda=NEW), 3, (4,) * 4),
    ],
    ids=[
        "CUDA 13.0",
        "CUDA 13.1",
        "pairs of SMs",
        "sixteens",
        "twelves",
        "twelves on CUDA 13.1",
        "halves",
        "one and a rest",
        "finely, without a rest",
        "finely, threes",
    ],
)
def test_granules_add_up_to_the_device_whatever_its_topology(cuda: Any, gpu: Gpu, size: int, granules: tuple[int, ...]) -> None:
    with closing(cuda.open_cuda(Gpu.index, granule_sms=size)) as device:
        assert device.granules == granules
        assert sum(device.granules) == gpu.sms
        assert ("clusters" in device.describe()) == (size in (2, 3) and gpu.smallest == 8)


def test_finer_granules_are_had_for_thread_block_clusters(cuda: Any, gpu: Gpu) -> None:
    with closing(cuda.open_cuda(Gpu.index, granule_sms=2)) as device:
        assert device.granules == (2,) * 64 + (4,)
        description = f"Simulated H100, 132 SMs in 65 granules (64 of 2, 1 of 4), {QUEUES[gpu.cuda]}"
        assert device.describe() == f"{description}; no thread-block clusters"
        for granules in ([0, 64], [3], [0, 64]):
            with closing(device.carve(granules)) as partition:
                assert partition.size == sum(device.granules[granule] for granule in granules)
                assert partition.locate() == units(device.granules, partition.granules)
        assert gpu.log.count("cuDevResourceGenerateDesc") == (2 if gpu.cuda == OLD else 0)
        assert gpu.splits == 1


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-8, ValueError), (133, DeviceUnavailable)])
def test_granules_of_an_impossible_size_are_refused(cuda: Any, size: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"expected 1 or more|the topology does not give that"):
        cuda.open_cuda(Gpu.index, granule_sms=size)


@pytest.mark.parametrize("size", [None, 2])
def test_the_device_is_split_once_however_often_it_is_carved(cuda: Any, gpu: Gpu, size: int | None) -> None:
    with closing(cuda.open_cuda(Gpu.index, granule_sms=size)) as device:
        for _ in range(3):
            for granule in range(len(device.granules)):
                device.carve([granule]).close()
    assert gpu.splits == 1


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize(("gpu", "scope"), [(OLD, "device_ctx"), (NEW, "green_ctx_balanced")], indirect=["gpu"])
def test_partitions_have_separate_work_queues_if_the_driver_supports_them(
    cuda: Any, gpu: Gpu, size: int | None, scope: str
) -> None:
    with closing(cuda.open_cuda(Gpu.index, granule_sms=size)) as device, closing(device.carve([0])), closing(device.carve([1])):
        assert [context.queues for context in gpu.contexts] == [scope, scope]


@pytest.mark.parametrize("call", ["DeviceResources.workqueue", "WorkqueueResource.configure"])
@pytest.mark.parametrize("gpu", [NEW], indirect=True)
def test_work_queues_that_cannot_be_had_are_shared_and_one_record_says_why(
    cuda: Any, gpu: Gpu, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.fail(call, error="CUDA_ERROR_NOT_SUPPORTED")
    with closing(cuda.open_cuda(Gpu.index)) as device:
        assert "shared work queues" in device.describe()
        for granule in (0, 1):
            device.carve([granule]).close()
        assert [context.queues for context in gpu.contexts] == ["device_ctx"] * 2
    (message,) = caplog.messages
    assert message.startswith("the driver refuses separate work queues for partitions, so they share the device's: ")
    assert "CUDA_ERROR_NOT_SUPPORTED" in message


@pytest.mark.parametrize("gpu", [NEW], indirect=True)
def test_contexts_without_work_queues_are_logged_once(cuda: Any, gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.takes_queues = False
    device = cuda.open_cuda(Gpu.index)
    with closing(device), closing(device.carve([0])) as one, closing(device.carve([1, 14])) as other:
        assert "shared work queues" in device.describe()
        assert (one.size, other.size) == (8, 28)
        assert gpu.log.count("Device.create_context") == 3
    (message,) = caplog.messages
    assert "CUDA_ERROR_INVALID_RESOURCE_TYPE" in message


@pytest.mark.parametrize("gpu", [NEW], indirect=True)
def test_two_carvings_at_a_time_that_cannot_have_work_queues_make_one_record(
    cuda: Any, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.takes_queues = False
    with closing(cuda.open_cuda(Gpu.index)) as device:
        gpu.meanwhile("Device.create_context", lambda: device.carve([1]).close())
        device.carve([0]).close()
        assert len(gpu.contexts) == 2
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("call", ["Device.create_context", "Context.create_stream"])
@pytest.mark.parametrize("gpu", [NEW], indirect=True)
def test_a_carve_that_also_fails_without_work_queues_leaks_nothing(
    cuda: Any, gpu: Gpu, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(cuda.open_cuda(Gpu.index)) as device:
        free = gpu.free
        gpu.fail(call)
        gpu.fail(call, 2)
        with pytest.raises(PartitionError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            device.carve([0])
        assert (gpu.contexts, gpu.free, caplog.messages) == ([], free, [])
        with closing(device.carve([0])):
            assert [context.queues for context in gpu.contexts] == ["green_ctx_balanced"]


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize(("together", "error"), [(4, ""), (0, "CUDA_ERROR_NOT_SUPPORTED")])
@pytest.mark.parametrize("gpu", [NEW], indirect=True)
def test_a_structured_split_falls_back_to_a_split_by_count(
    cuda: Any, gpu: Gpu, together: int, error: str, size: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.rest_together = together
    for nth in range(1, 100 if error else 1):
        gpu.fail("SMResource.split", nth, error)
    device = cuda.open_cuda(Gpu.index, granule_sms=size)
    with closing(device), closing(device.carve([0, len(device.granules) - 1])) as partition:
        assert device.granules == ((2,) * 64 + (4,) if size else H100)
        assert partition.size == device.granules[0] + device.granules[-1]
        assert "shared work queues" in device.describe()
    (message,) = caplog.messages
    assert message.startswith("no structured split; splitting as before CUDA 13.1, with shared work queues: ")
    assert (error or "scheduled together by [") in message
