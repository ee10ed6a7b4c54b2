"""Many tenants in one device process and in one each, in small: that the benchmark runs, not what it measures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.processes import FakeMps

PUTS = 4


def measured(folder: Path, tenants: int, *options: str) -> dict[str, Any]:
    """The figures of each form of a server on cores, under a fake MPS daemon if it has one."""
    fake, output = FakeMps(folder / "fake"), folder / "apart.json"
    fake.behave()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")} | {"UUID": "GPU-0"}
    words = [sys.executable, "-m", "benchmarks.apart", "--device", "cpu", "--tenants", str(tenants), "--seconds", "0.4"]
    words += ["--clients", "1", "--kills", "1", "--puts", str(PUTS), "--json", str(output), *options]
    subprocess.run(words, env=inherited | {"PATH": f"{fake.folder}:{os.environ['PATH']}"}, check=True)
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


@pytest.mark.load
def test_partitions_are_put_to_and_fro_beside_a_victim_in_both_forms(tmp_path: Path) -> None:
    found = measured(tmp_path, 3)

    assert list(found) == ["off", "on"]
    for form in found.values():
        for model in ("tiny", "mob"):
            beside = form[f"victim {model}"]["beside PUTs"]
            assert beside["answers"] > 0
            parts = form[f"victim {model}"]["alone"]["parts"]
            assert parts["request"] > parts["run"] > 0 < parts["on its units"]
            assert beside["closed"] == 0
            assert set(beside["PUTs"]) == {"200"}
            assert beside["PUTs"]["200"] == 2 + len(beside["each, ms"]) >= 2 + PUTS


@pytest.mark.load
def test_where_every_granule_is_a_tenant_s_only_one_there_are_no_puts(tmp_path: Path) -> None:
    found = measured(tmp_path, 4, "--forms", "off")

    assert "beside PUTs" not in found["off"]["victim tiny"]
