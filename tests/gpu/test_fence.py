"""Whether a fenced tenant is held on a GPU while another is asked, and only then: strains, a model that reads memory, and one
that slows others by reads which are few bytes.
"""

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.hogs import copying, random, reading
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
memory_bandwidth = 0.25
pcie = 0.2
models = ["*"]
[tenants.globex]
granules = 7
models = ["mlp", "hog"]
"""
"""Of memory it is about what one granule of an H100 draws, and more than one of an H200 does, so this is a bound for what runs
there. On their own granules all models but `mlp` draw more: `copying` 0.29 of it on an H200."""
LEARNING = 12.0
"""Seconds in which what the hog moves is known, as NVML is read every two."""
HOGS = 3
"""Clients of the hog."""
RANDOM = 512, 8
"""MiB of its table, and passes."""


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What was measured, for $OUT/held.json."""
    yield from figures("held.json")


@pytest.fixture(scope="module")
def server(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("fence") / "models"
    plan(add(root, "mlp"), mlp())
    plan(add(root, "hog"), reading(MIB, PASSES))
    plan(add(root, "copying"), copying(MIB, PASSES))
    plan(add(root, "random"), random(*RANDOM))
    with serving(root, tmp_path_factory.mktemp("server"), gpu_section(), TENANTS) as served:
        until(lambda: fence(served)["granules"], "a narrow placement is made")
        yield served


def fence(server: Served) -> dict[str, Any]:
    """What /admin/partitions says of it; nothing before it is planned."""
    shown: dict[str, Any] = server.admin("GET", "partitions")["partitions"]["acme"].get("fence", {"granules": [], "models": []})
    return shown


def held(server: Served, name: str) -> dict[str, Any]:
    """What it says of a model; empty while its placement is made."""
    return next((each for each in fence(server)["models"] if each["model"] == name), {})


def until(holds: Any, what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)


@contextmanager
def hogs(
    server: Served, model: str = "hog", tenant: str = "acme", count: int = HOGS, pause: float = 0.0
) -> Iterator[list[tuple[float, float]]]:
    """So many clients ask for a model in the block; when each answer was there, and the milliseconds that it took."""
    answers, stopped = list[tuple[float, float]](), threading.Event()

    def ask() -> None:
        with closing(Client(server.port)) as client:
            while not stopped.wait(pause):
                began = time.monotonic()
                (y,) = client.infer(model, tenant, {"x": np.zeros((1, 1), np.float32)}).values()
                assert y.tolist() == [[0.0]]
                answers.append((time.monotonic(), (time.monotonic() - began) * 1e3))

    threads = [threading.Thread(target=ask) for _ in range(count)]
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
    (begin, _), (end, _) = answers[0], answers[-1]
    return len(answers) / (end - begin)


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


def test_a_model_of_random_reads_is_held_once_a_neighbour_is_seen_to_be_slower_beside_it(
    server: Served, found: dict[str, Any]
) -> None:
    """It moves few bytes, so the meter does not hold it, and more than one granule would not. The neighbour asks for what reads
    memory, 5 ms after each answer.
    """

    def median(answers: list[tuple[float, float]]) -> float:
        return statistics.median(took for _, took in answers)

    def neighbour() -> dict[str, tuple[int, int]]:
        """Its works so far and their nanoseconds, by part, as its statistics have them."""
        with closing(Client(server.port)) as client:
            answer = client.ask("GET", "/v2/models/hog/stats", tenant="globex")
        (stats,) = json.loads(answer.body)["model_stats"]
        return {part: (each["count"], each["ns"]) for part, each in stats["inference_stats"].items()}

    def parts(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> dict[str, float]:
        """The mean milliseconds of each part of its inferences between two looks at its statistics."""
        more = {part: (count - before[part][0], ns - before[part][1]) for part, (count, ns) in after.items()}
        return {part: round(ns / count / 1e6, 3) for part, (count, ns) in more.items() if count and ns}

    looks = [neighbour()]
    with hogs(server, tenant="globex", count=1, pause=0.005) as alone:
        time.sleep(4.0)
    before = fence(server)["launches"]
    looks.append(neighbour())
    with hogs(server, "random"), hogs(server, tenant="globex", count=1, pause=0.005) as tried:
        began = time.monotonic()
        time.sleep(1.5)
        beside = list(tried)
        looks.append(neighbour())
        until(lambda: held(server, "random/1").get("slows"), "it is found to slow its neighbour")
        seconds = time.monotonic() - began
    trial = [[took for at, took in tried if second <= at - began < second + 1] for second in range(int(seconds))]
    looks.append(neighbour())
    with hogs(server, "random") as free:
        time.sleep(1.5)
    after = fence(server)["launches"]
    with hogs(server, "random") as narrow, hogs(server, tenant="globex", count=1, pause=0.005) as calm:
        time.sleep(3.0)
    looks.append(neighbour())
    model = held(server, "random/1")
    found["fence: a model of random reads"] = {
        "the neighbour's median ms: alone, beside, held": [median(alone), median(beside), median(calm)],
        "its medians in each second of the trial": [round(statistics.median(each), 2) for each in trial if each],
        "its mean ms by part: alone, beside, tried, held": [parts(*each) for each in pairwise(looks)],
        "seconds until it was found": round(seconds, 1),
        "its neighbour's works take so many times as long at least": model["slows"],
        "its answers in 1.5 s alone, in 3 s held": [len(free), len(narrow)],
        "ms at home and narrow": [model["home_ms"], model["narrow_ms"]],
        "works that ran narrow while it was tried": after - before,
    }
    assert model["slows"] >= 1.5
    assert median(calm) < 1.5 * median(alone)
    assert median(calm) < median(beside) / 1.2
    assert fence(server)["launches"] - after > len(narrow) / 2
    assert len(fence(server)["granules"]) == 1


def test_a_model_that_draws_less_there_gets_as_many_granules_as_its_share_allows(server: Served, found: dict[str, Any]) -> None:
    """A copy draws half of what a granule can. The model of the tenant that draws the most counts, so others go first."""
    for model in ("hog", "random"):
        with closing(Client(server.port)) as client:
            assert client.ask("POST", f"/v2/repository/models/{model}/unload", b"{}", "acme").status == 200
    until(lambda: len(fence(server)["models"]) == 2, "its other models have gone")
    with hogs(server, "copying"):
        time.sleep(LEARNING)  # As a model that never rests cannot be distinguished from others' traffic.
    first, began = len(fence(server)["granules"]), time.monotonic()
    with asking(server.port, "globex", 0.005) as asked, hogs(server, "copying") as answers:
        # It may have been made a moment ago for models that have gone, and is made wider once a minute at most.
        until(lambda: len(fence(server)["granules"]) > first, "its placement grows", 90.0)
        seconds = time.monotonic() - began
        until(lambda: held(server, "copying/1").get("narrow_ms"), "works run there")
        start = len(answers)
        time.sleep(3.0)
        beside = (len(answers) - start) / 3.0
        shown, model = fence(server), held(server, "copying/1")
    assert asked.wrong == []
    drawn = model["moved"] * beside
    found["fence: a model that copies memory"] = {
        "granules at first and later": [first, len(shown["granules"])],
        "seconds until then": round(seconds, 1),
        "GB/s beside": drawn / 1e9,
        "share": shown["memory_bandwidth"] / 1e9,
        "ms at home and narrow": [model["home_ms"], model["narrow_ms"]],
    }
    assert 0.8 * shown["memory_bandwidth"] < drawn <= 1.1 * shown["memory_bandwidth"]
