"""`greenlane curve` on a simulated GPU: shares are SMs in whole granules, and two works are on the stream."""

import json
import time
from pathlib import Path

import pytest

from greenlane.__main__ import main
from tests.engines.simulated import AFFINE, ROWS
from tests.engines.small import model
from tests.simulation import Gpu, installed
from tests.simulation.plans import make_plan
from tests.simulation.tensorrt import library

CONFIG = """
[device]
backend = "cuda"
index = 1
[models]
repository = "models"
[tenants.acme]
granules = 1
models = ["*"]
"""
PEAK = 2619e6 * 2 * 5120 / 8
"""Bytes a second that the simulated GPU's memory moves at most."""
WEIGHTS = 10**6
"""Bytes that a work reads."""


def configured(folder: Path, plan: bytes) -> list[str]:
    """The words that name a plan with this content, and a configuration for the simulated GPU."""
    (folder / "models").mkdir()
    (folder / "c.toml").write_text(CONFIG)
    (folder / "affine.plan").write_bytes(plan)
    return ["curve", str(folder / "affine.plan"), "--config", str(folder / "c.toml")]


def test_a_plan_is_measured_on_shares_of_sms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve, gpu = configured(tmp_path, make_plan(model(AFFINE), ROWS)), Gpu()
    with installed(gpu, library(gpu)):
        words = ["--shares", "4,16", "--seconds", "0.5", "--batch", "2", "--json", str(tmp_path / "out.json")]
        assert main([*curve, *words]) == 0
        refused = main([*curve, "--shares", "100000"])
    out, err = capsys.readouterr()
    assert refused == 2
    assert "--shares: 100000 SMs, but the device has " in err
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["unit"] == "SM"
    assert [point["units"] for point in found["points"]] == [8, 16]
    assert "4 SMs were rounded to 8: shares are whole granules of 8 SMs" in out
    assert "\nsms = " in found["toml"] or found["knee"] is None


def test_what_requests_move_is_found_by_the_gpus_counters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A work reads weights, as it would from memory, besides its input and output of 24 bytes each."""
    curve, gpu = configured(tmp_path, make_plan(model(AFFINE), ROWS)), Gpu()

    def sampled() -> None:
        gpu.meanwhile("nvmlGpmSampleGet", sampled)
        gpu.seconds = time.perf_counter()

    def launched() -> None:
        gpu.meanwhile("cuGraphLaunch", launched)
        memory, *pcie = gpu.moved or (0.0, 0.0, 0.0)
        gpu.moved = memory + WEIGHTS, pcie[0], pcie[1]

    sampled()
    launched()
    files = ["--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html")]
    with installed(gpu, library(gpu)):
        assert main([*curve, "--bandwidth", "--shares", "1g,2g", "--seconds", "0.5", "--batch", "2", *files]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    for point in found["points"]:
        drawn, rate = point["drawn"], point["requests_per_second"]
        assert drawn["moved"]["memory"] == pytest.approx(WEIGHTS + 48, rel=0.1)
        assert drawn["moved"]["pcie_in"] == drawn["moved"]["pcie_out"] == pytest.approx(24, abs=3)
        assert drawn["bytes_per_second"]["memory"] == pytest.approx(drawn["moved"]["memory"] * rate, rel=0.01)
        assert drawn["memory_bandwidth"] == pytest.approx(drawn["bytes_per_second"]["memory"] / PEAK)
    assert "memory MB" in out
    assert " would not hold them back" in out
    assert ("\nmemory_bandwidth = " in found["toml"]) == (found["knee"] is not None)
    assert "<th>memory MB</th>" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize("lacks", ["counters", "NVML"])
def test_a_gpu_without_counters_is_said_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lacks: str
) -> None:
    curve, gpu = configured(tmp_path, b"no plan"), Gpu()
    gpu.has_nvml, gpu.moved = lacks != "NVML", None
    with installed(gpu, library(gpu)):
        assert main([*curve, "--bandwidth"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("greenlane: --bandwidth: ")
    assert said.endswith(" has no counters of what it moves; whole GPUs from Hopper on have\n")
    assert len(said.splitlines()) == 1


def test_counters_that_stop_answering_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve, gpu = configured(tmp_path, make_plan(model(AFFINE), ROWS)), Gpu()
    gpu.fail("nvmlGpmSampleGet", 3)
    with installed(gpu, library(gpu)):
        assert main([*curve, "--bandwidth", "--shares", "1g", "--seconds", "0.1", "--batch", "2"]) == 2
    assert "the GPU's counters of what it moves cannot be read any more" in capsys.readouterr().err
