"""The measurement of lent cores: rounds that other processes disturbed do not count, and threads are where they should be."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import lent_cores
from benchmarks.lent_cores import Lab, Round, busy
from benchmarks.subjects import write
from partitions.cpu import open_cpu

CORES = sorted(os.sched_getaffinity(0))[:2]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    if len(CORES) == 1:
        pytest.skip("one core has none beside it to be lent")
    write(tmp_path, {"conv"}, plans=False)
    with ExitStack() as made:
        return Lab(open_cpu(CORES), tmp_path / "conv" / "1" / "model.onnx", made, 0.0, 2, 0.06)


def test_a_round_that_others_disturbed_is_measured_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.seconds, seen, found = 0.0, iter([0.0, 9.0, 9.0, 9.0, 9.0, 9.0]), iter([[3.0], [2.0], [1.0]])
    monkeypatch.setattr(lent_cores, "busy", lambda cores: next(seen))
    assert lab.latencies({"case": lambda: Round(next(found))}) == {"case": [1.0, 2.0]}


def test_the_seconds_that_cores_were_busy_grow() -> None:
    before = busy(CORES)
    while busy(CORES) == before:
        sum(range(10_000))
    assert busy(CORES) > before
