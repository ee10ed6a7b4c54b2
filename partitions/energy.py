"""Meters of the energy that a device has taken, in microjoules; each only grows. None where a meter cannot be read: nothing is
estimated.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

Meter = Callable[[], int | None]


def open_rapl(root: Path = Path("/")) -> Meter:
    """The processors of this machine, by what Linux shows of RAPL (only to root, on most machines).

    It counts all that they do, other programs included, and begins at 0 again from time to time.
    """
    folder = root / "sys/class/powercap"
    return partial(_read_rapl, [folder / name / "energy_uj" for name in _packages(folder)])


def _packages(folder: Path) -> list[str]:
    """The names of whole processors: `intel-rapl:0`, but not its parts, `intel-rapl:0:0`. AMD's have the same names."""
    try:
        return sorted(each.name for each in folder.iterdir() if each.name.count(":") == 1)
    except OSError:
        return []


def _read_rapl(files: list[Path]) -> int | None:
    try:
        return sum(int(file.read_text()) for file in files) if files else None
    except (OSError, ValueError):
        return None
