"""`greenlane curve` on a real GPU: the same executors as in serving, on shares of SMs, by hand and by the search."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hogs import reading
from partitions.cuda.nvml import open_nvml

from .networks import NETWORKS, plan

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MIB = 512
"""Of the weights that a network reads."""
CONFIG = """
[device]
backend = "cuda"
[models]
repository = "models"
[tenants.acme]
granules = 1
models = ["mlp"]
target_p99 = "20ms"
target_rate = 500
"""


def curve(folder: Path, *words: str, status: int) -> dict[str, object]:
    """What the command writes as JSON: it runs in a process of its own, as this one has the GPU split already."""
    command = [sys.executable, "-m", "greenlane", "curve", *words, "--seconds", "3", "--json", str(folder / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    print(done.stdout)
    found: dict[str, object] = json.loads((folder / "out.json").read_text())
    return found


def test_a_small_network_on_shares_of_sms(tmp_path: Path) -> None:
    path = plan(tmp_path, NETWORKS["mlp"]())
    words = ["--shares", "1g,2g,4g", "--rate", "500", "--p99", "20ms", "--plot", str(tmp_path / "curve.png")]
    found = curve(tmp_path, str(path), *words, status=0)
    points = found["points"]
    assert isinstance(points, list)
    assert [point["granules"] for point in points] == [1, 2, 4]
    assert all(point["requests_per_second"] > 500 for point in points)
    assert all(0 < point["p50_alone"] <= point["p99_alone"] < 0.05 for point in points)
    assert found["smallest"] is not None
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_the_bytes_that_a_network_reads_are_counted(tmp_path: Path, device: Any) -> None:
    """It reads its weights, more than ten times what a last cache holds, and hardly anything else."""
    nvml = open_nvml(device.address)
    if not (nvml and nvml.traffic()):
        pytest.skip("NVML counts no traffic of this GPU")
    found = curve(tmp_path, str(plan(tmp_path, reading(MIB))), "--bandwidth", "--shares", "2g,4g", status=0)
    points: Any = found["points"]
    for drawn in (point["drawn"] for point in points):
        assert drawn["moved"]["memory"] == pytest.approx(MIB << 20, rel=0.25)
        assert max(drawn["moved"]["pcie_in"], drawn["moved"]["pcie_out"]) < 1 << 20
        assert 0.05 < drawn["memory_bandwidth"] < 1.02
    assert points[0]["drawn"]["memory_bandwidth"] < points[1]["drawn"]["memory_bandwidth"]


def test_all_tenants_are_planned_onto_the_gpu(tmp_path: Path) -> None:
    version = tmp_path / "models" / "mlp" / "1"
    version.mkdir(parents=True)
    plan(tmp_path, NETWORKS["mlp"]()).rename(version / "model.plan")
    (tmp_path / "models" / "mlp" / "config.pbtxt").write_text('platform: "tensorrt_plan"\n')
    (tmp_path / "c.toml").write_text(CONFIG)
    found = curve(tmp_path, "--all", "--config", str(tmp_path / "c.toml"), status=0)
    devices = found["devices"]
    assert isinstance(devices, dict)
    assert devices["0"]["tenants"]["acme"]["granules"] >= 1
    assert devices["0"]["left"] >= 0
