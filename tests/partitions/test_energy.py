"""Meters of energy: what Linux shows of processors, and nothing where it shows none."""

from pathlib import Path

from partitions import open_cpu
from partitions.cpu import open_rapl


def show(root: Path, **microjoules: str) -> None:
    for name, value in microjoules.items():
        folder = root / "sys/class/powercap" / name.replace("_", ":").replace("rapl", "intel-rapl")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "energy_uj").write_text(value)


def test_processors_are_added_up_and_their_parts_are_not(tmp_path: Path) -> None:
    show(tmp_path, rapl_0="70\n", rapl_1="5\n", rapl_0_0="60\n")
    meter = open_rapl(tmp_path)
    assert meter() == 75
    show(tmp_path, rapl_1="9\n")
    assert meter() == 79


def test_nothing_is_made_up(tmp_path: Path) -> None:
    assert open_rapl(tmp_path)() is None
    show(tmp_path, rapl_0="not a number")
    assert open_rapl(tmp_path)() is None


def test_a_cpu_has_a_meter_that_may_say_nothing() -> None:
    found = open_cpu().energy()
    assert found is None or found > 0
