"""The measurement of `python -m benchmarks.copies` over a simulated GPU; its figures mean something on a real one only."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import copies, engine
from tests.engines.simulated import opened


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that a simulation copies in no time, and no neighbour, whose thread would share the simulation's clock."""
    monkeypatch.setattr(copies, "SIZES", (100, 70_000))
    monkeypatch.setattr(copies, "NEIGHBOUR", 4096)
    monkeypatch.setattr(copies, "BESIDE", ("",))


def test_every_size_is_copied_in_both_ways_and_written_down(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path) as bench:
        monkeypatch.setattr(engine, "open_device", lambda _: bench.device)
        assert copies.main(["--sms", "8", "--seconds", "1e-6", "--json", str(tmp_path / "copies.json")]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "copies.json").read_text())
    assert [(row["nbytes"], row["way"]) for row in found["rows"]] == [
        (size, way) for size in (100, 70_000) for way in copies.WAYS
    ]
    assert all(0 < row["p50"] <= row["p99"] for row in found["rows"])
    assert capsys.readouterr().out.count("none") == 4
