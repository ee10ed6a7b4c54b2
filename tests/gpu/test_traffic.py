"""Whether the bytes that NVML says a GPU moves are those that copies of known sizes move, and in which direction it means."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from partitions.cuda.nvml import open_nvml
from server.accounts.traffic import Traffic
from server.accounts.usage import Moved

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SIZE = 1 << 30
SECONDS = 2.0
WARM = 0.3
"""Seconds of copies before, longer than NVML's values stay as they are."""
Paths = dict[str, float]


@pytest.fixture(scope="module")
def copies(device: Any) -> Iterator[dict[str, Callable[[], None]]]:
    """Each moves SIZE bytes, four times, and waits for them."""
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    with device.current():
        source, target = (int(handle_return(driver.cuMemAlloc(SIZE))) for _ in range(2))
        host = int(handle_return(driver.cuMemHostAlloc(SIZE, 0)))

        def made(copy: Callable[[], Any]) -> Callable[[], None]:
            def four() -> None:
                for _ in range(4):
                    handle_return(copy())
                handle_return(driver.cuStreamSynchronize(0))

            return four

        yield {
            "in its memory": made(lambda: driver.cuMemcpyDtoDAsync(target, source, SIZE, 0)),
            "into it": made(lambda: driver.cuMemcpyHtoDAsync(target, host, SIZE, 0)),
            "out of it": made(lambda: driver.cuMemcpyDtoHAsync(host, source, SIZE, 0)),
        }
        handle_return(driver.cuMemFreeHost(host))
        for each in (source, target):
            handle_return(driver.cuMemFree(each))


@pytest.fixture(scope="module")
def works(device: Any) -> Iterator[tuple[list[Callable[[], Any]], list[Moved], Callable[[], None]]]:
    """Works that move known numbers of bytes, these numbers, and what waits for all that were enqueued."""
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    large, small = 256 << 20, 32 << 20
    with device.current():
        source, target = (int(handle_return(driver.cuMemAlloc(large))) for _ in range(2))
        host = int(handle_return(driver.cuMemHostAlloc(small, 0)))
        yield (
            [
                lambda: handle_return(driver.cuMemcpyDtoDAsync(target, source, large, 0)),
                lambda: handle_return(driver.cuMemsetD32Async(target, 7, large // 4, 0)),
                lambda: handle_return(driver.cuMemcpyDtoHAsync(host, source, small, 0)),
            ],
            [Moved(2 * large), Moved(large), Moved(small, 0, small)],
            lambda: handle_return(driver.cuStreamSynchronize(0)),
        )
        handle_return(driver.cuMemFreeHost(host))
        for each in (source, target):
            handle_return(driver.cuMemFree(each))


@pytest.fixture(scope="module")
def nvml(device: Any) -> Any:
    found = open_nvml(device.address)
    assert found, "NVML cannot be asked"
    if not found.traffic():
        pytest.skip("NVML counts no traffic of this GPU")
    return found


def measured(nvml: Any, copy: Callable[[], None]) -> tuple[float, Paths]:
    """Bytes a second that were copied, by our count, and those that NVML says were moved."""
    until = time.monotonic() + WARM
    while time.monotonic() < until:
        copy()
    traffic, began, count = nvml.traffic(), time.monotonic(), 0
    while time.monotonic() < began + SECONDS:
        copy()
        count += 4 * SIZE
    found, seconds = traffic.read(), time.monotonic() - began
    assert found, "it could not be read"
    return count / seconds, {path: each / seconds for path, each in found.items()}


def shown(figures: Any, what: str, nvml: Any, ours: float, theirs: Paths) -> None:
    gb = {path: round(each / 1e9, 2) for path, each in theirs.items()}
    figures[f"traffic: copies {what}, GB/s"] = {"copied": round(ours / 1e9, 2), **gb, "most": nvml.bandwidth() / 1e9}


def test_its_memory_moves_what_a_copy_reads_and_writes(nvml: Any, copies: Any, figures: Any) -> None:
    ours, theirs = measured(nvml, copies["in its memory"])
    shown(figures, "in its memory", nvml, ours, theirs)
    assert theirs["memory"] == pytest.approx(2 * ours, rel=0.05)
    assert theirs["memory"] <= 1.02 * nvml.bandwidth()
    assert max(theirs["pcie_in"], theirs["pcie_out"]) < 0.01 * ours


@pytest.mark.parametrize(("what", "path", "other"), [("into it", "pcie_in", "pcie_out"), ("out of it", "pcie_out", "pcie_in")])
def test_directions_over_pcie_are_as_the_gpu_sees_them(
    nvml: Any, copies: Any, figures: Any, what: str, path: str, other: str
) -> None:
    """Within 10 %, as packets have headers; requests and acknowledgements go the other way."""
    ours, theirs = measured(nvml, copies[what])
    shown(figures, what, nvml, ours, theirs)
    assert theirs[path] == pytest.approx(ours, rel=0.1)
    assert theirs[other] < 0.2 * ours


def test_a_reading_costs_little(nvml: Any, figures: Any) -> None:
    clock = iter(range(1_000_000))
    traffic = nvml.traffic(lambda: float(next(clock)))
    times = []
    for _ in range(200):
        began = time.perf_counter()
        traffic.read()
        times.append(time.perf_counter() - began)
    figures["traffic: a reading, ms"] = {"median": sorted(times)[100] * 1e3, "most": max(times) * 1e3}
    assert sorted(times)[100] < 2e-3


def test_what_works_move_is_found_from_what_the_gpu_moved(nvml: Any, works: Any, figures: Any) -> None:
    """Three kinds of works in mixes that change, for windows of a second; a server's are of two, and hundreds.

    NVML's values are up to 100 ms old, so that these few windows are not as exact.
    """
    launch, truth, wait = works
    traffic, meter, random = Traffic(), nvml.traffic(), np.random.default_rng(0)
    found = None
    for _ in range(12):
        mix, until = random.integers(0, 8, len(launch)), time.monotonic() + 1.0
        while time.monotonic() < until:
            for at, count in enumerate(mix):
                for _ in range(count):
                    launch[at]()
                traffic.ran(("acme", str(at)), int(count), int(count))
            wait()
            time.sleep(0.001)
        if found := meter.read():
            traffic.read(Moved(**found), time.monotonic_ns())
    assert found, "it could not be read"
    rows = {
        f"work {at}, {path}": (truth[at][index] / 1e6, fit.bytes_of(("acme", str(at))) / 1e6, fit.measured(("acme", str(at))))
        for at in range(len(launch))
        for index, (path, fit) in enumerate(zip(Moved._fields, traffic.fits, strict=True))
    }
    figures["traffic: MB a work, truth and fit, measured"] = rows
    figures["traffic: residuals of the fits"] = [fit.residual for fit in traffic.fits]
    for name in ("work 0, memory", "work 1, memory", "work 2, pcie_out"):
        assert rows[name][1] == pytest.approx(rows[name][0], rel=0.25), name
