"""Whether a fenced tenant is held on a GPU while another is asked, and only then: strains, and a model that reads memory."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from benchmarks.hogs import reading
from partitions.strain import STRAINS

from .asking import asking
from .networks import add, mlp, plan
from .process import Client, Served, gpu_section
from .test_two_devices import figures, serving

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MIB, PASSES = 256, 4
MOVED = PASSES * (MIB << 20)
"""Bytes of memory that a work of the hog reads."""
TENANTS = """
[tenants.acme]
granules = 7
memory_bandwidth = 0.35
pcie = 0.2
models = ["*"]
[tenants.globex]
granules = 7
models = ["mlp"]
"""
"""Of memory it is more than one granule of an H100 draws, so that this is a bound for what runs there."""
LEARNING = 12.0
"""Seconds in which what the hog moves is known, as NVML is read every two."""
HOGS = 3
"""Clients of the hog."""


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What was measured, for $OUT/held.json."""
    yield from figures("held.json")


@pytest.fixture(scope="module")
def server(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("fence") / "models"
    plan(add(root, "mlp"), mlp())
    plan(add(root, "hog"), reading(MIB, PASSES))
    with serving(root, tmp_path_factory.mktemp("server"), gpu_section(), TENANTS) as served:
        until(lambda: fence(served)["granules"], "a narrow placement is made")
        yield served


def fence(server: Served) -> dict[str, Any]:
    """What /admin/partitions says of it."""
    shown: dict[str, Any] = server.admin("GET", "partitions")["partitions"]["acme"]["fence"]
    return shown


def until(holds: Any, what: str) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, f"not within a minute: {what}"
        time.sleep(0.05)


@contextmanager
def hogs(server: Served) -> Iterator[list[float]]:
    """Clients that ask for the hog in the block, without a pause; when each answer was there."""
    answers, stopped = list[float](), threading.Event()

    def ask() -> None:
        with closing(Client(server.port)) as client:
            while not stopped.is_set():
                (y,) = client.infer("hog", "acme", {"x": np.zeros((1, 1), np.float32)}).values()
                assert y.tolist() == [[0.0]]
                answers.append(time.monotonic())

    threads = [threading.Thread(target=ask) for _ in range(HOGS)]
    for each in threads:
        each.start()
    try:
        yield answers
    finally:
        stopped.set()
        for each in threads:
            each.join()


def rate(server: Served, seconds: float) -> float:
    """Answers of the hog in a second."""
    with hogs(server) as answers:
        time.sleep(seconds)
    begin = answers[0]
    return len(answers) / (answers[-1] - begin)


def test_strains_are_held_while_a_neighbour_is_asked(server: Served, found: dict[str, Any]) -> None:
    held = fence(server)
    most = {"PCIe out": held["pcie"], "PCIe in": held["pcie"]}
    for kind in STRAINS:

        def strained(kind: str = kind) -> float:
            done = server.admin("POST", "tenants/acme/strain", {"kind": kind, "seconds": 0.5})
            return float(done["gigabytes_per_second"])

        strained()  # The first one compiles its kernels.
        alone = strained()
        with asking(server.port, "globex") as asked:
            beside = strained()
        assert asked.wrong == []
        bound = most.get(kind, held["memory_bandwidth"]) / 1e9
        found[f"fence: strain {kind}, GB/s"] = {"alone": alone, "beside": beside, "bound": round(bound, 1)}
        assert beside <= 1.1 * bound, kind
        assert beside < alone, kind


def test_a_model_that_reads_memory_runs_narrow_while_a_neighbour_is_asked(server: Served, found: dict[str, Any]) -> None:
    free = rate(server, LEARNING)
    before = fence(server)["launches"]
    assert rate(server, 2.0) > 0.75 * free, "alone it has all it wants"
    assert fence(server)["launches"] == before
    with asking(server.port, "globex", 0.005) as asked:
        rate(server, 4.0)
        beside = rate(server, 4.0)
    assert asked.wrong == []
    after = fence(server)
    (hog,) = [each for each in after["models"] if each["model"] == "hog/1"]
    worked = MOVED * beside / 1e9
    found["fence: a model that reads memory"] = {
        "answers a second alone": free,
        "beside": beside,
        "GB/s alone": MOVED * free / 1e9,
        "GB/s beside": worked,
        "bound": after["memory_bandwidth"] / 1e9,
        "GB that a work moves, as it is metered": hog["moved"] / 1e9,
        "truth": MOVED / 1e9,
        "ms at home and narrow": [hog["home_ms"], hog["narrow_ms"]],
        "works that ran narrow": after["launches"] - before,
    }
    assert hog["moved"] == pytest.approx(MOVED, rel=0.35)
    assert after["launches"] - before > beside, "it ran narrow for a second at least"
    assert worked <= 1.1 * after["memory_bandwidth"] / 1e9
    assert rate(server, 2.0) > 0.75 * free, "and has again all it wants"
