"""`greenlane curve` on a simulated GPU: shares are SMs in whole granules, and two works are on the stream."""

import json
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


def test_a_plan_is_measured_on_shares_of_sms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, gpu = tmp_path / "affine.plan", Gpu()
    path.write_bytes(make_plan(model(AFFINE), ROWS))
    with installed(gpu, library(gpu)):
        (tmp_path / "models").mkdir()
        (tmp_path / "c.toml").write_text(CONFIG)
        config = ["--config", str(tmp_path / "c.toml")]
        words = [*config, "--shares", "4,16", "--seconds", "0.5", "--batch", "2", "--json", str(tmp_path / "out.json")]
        assert main(["curve", str(path), *words]) == 0
        refused = main(["curve", str(path), *config, "--shares", "100000"])
    out, err = capsys.readouterr()
    assert refused == 2
    assert "--shares: 100000 SMs, but the device has " in err
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["unit"] == "SM"
    assert [point["units"] for point in found["points"]] == [8, 16]
    assert "4 SMs were rounded to 8: shares are whole granules of 8 SMs" in out
    assert "\nsms = " in found["toml"] or found["knee"] is None
