"""The experiment without HTTP on CPU cores: checks that it runs, not its results."""

import gc
import json
import os
import sys
from pathlib import Path
from time import perf_counter

import pytest

from benchmarks import subjects
from benchmarks.arrangement import Impossible
from benchmarks.asks import tensor
from benchmarks.inside import bound, chosen
from benchmarks.isolation import main
from benchmarks.plain import open_plain
from benchmarks.seat import all_at_once, at_rate, back_to_back, open_seat
from engines import load_engine
from partitions import open_device
from server.workers.gil_priority import GilPriorities


def test_a_run_restores_the_switch_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores, a partition each")
    before = sys.getswitchinterval()
    arguments = ["--inside", "--victim", "mlp", "--only", "compute", "--seconds", "0.5", "--rounds", "1", "--rate", "50"]

    status = main([*arguments, "--json", str(tmp_path / "found.json"), "--out", str(tmp_path / "page")])

    found = json.loads((tmp_path / "found.json").read_text())
    assert status in (0, 1)
    printed = capsys.readouterr().out
    assert "mlp / compute" in printed
    assert "mlp: few samples: as few as " in printed
    assert found["verdicts"][0]["alone"]["failed"] == 0
    assert found["combinations"][0]["rounds"]["under load"][0]["busy"][0]["rate"] > 0
    assert found["throughput"][0]["ratio"] > 0
    files = [path.suffix for path in (tmp_path / "page").iterdir()]
    assert set(files) == {".html", ".json", ".png"}
    assert len(files) <= 8  # Few enough to be sent along.
    assert gc.isenabled()
    assert sys.getswitchinterval() == before


def test_a_model_on_a_partition_is_driven_from_a_thread_with_right_answers(tmp_path: Path) -> None:
    subjects.write(tmp_path, {"identity"}, plans=False)
    device = open_device("cpu")
    partition, engine = open_plain(device), load_engine(tmp_path / "identity" / "1" / "model.onnx")
    seat = open_seat(device, engine, partition, tensor("identity", rows=3))

    (samples,) = all_at_once(
        [(seat, lambda s: at_rate(s, rate=1000, start=perf_counter(), seconds=0.02, priorities=GilPriorities()))]
    )
    (count,) = all_at_once(
        [(seat, lambda s: back_to_back(s, start=0.0, until=perf_counter() + 0.02, priorities=GilPriorities()))]
    )

    assert samples.status == [200] * len(samples)
    assert 1 <= len(samples) <= 20
    assert count >= 1
    assert seat.answer().tolist() == tensor("identity", rows=3).tolist()
    seat.close()
    engine.close()
    partition.close()
    device.close()


def test_an_error_on_a_drivers_thread_is_raised_to_the_caller(tmp_path: Path) -> None:
    subjects.write(tmp_path, {"identity"}, plans=False)
    device = open_device("cpu")
    partition, engine = open_plain(device), load_engine(tmp_path / "identity" / "1" / "model.onnx")
    seat = open_seat(device, engine, partition, tensor("identity"))

    with pytest.raises(ZeroDivisionError):
        all_at_once([(seat, lambda _: 1 // 0)])
    seat.close()


def test_three_aggressors_need_four_granules_unless_they_are_asked_for() -> None:
    assert chosen(None, granules=2) == ("compute", "transfer")
    assert chosen(None, granules=16) == ("compute", "transfer", "three", "trio")
    assert chosen(["trio"], granules=2) == ("trio",)
    with pytest.raises(Impossible, match="not json"):
        chosen(["json"], granules=16)


def test_a_short_engine_is_allowed_more_than_a_long_one() -> None:
    assert [bound("resnet", "compute"), bound("resnet", "trio"), bound("mlp", "compute")] == [1.1, 1.2, 1.5]
