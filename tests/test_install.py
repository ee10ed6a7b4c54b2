"""scripts/install knows the extras of pyproject.toml."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_extra_is_known_and_any_other_is_refused_by_name() -> None:
    """The words are judged in order, before anything is done: the first that is not known is the one that is no extra."""
    words = ",".join([*sorted(EXTRAS), "nope"])
    refused = subprocess.run([ROOT / "scripts" / "install", words], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("there is no extra nope; expected some of " + ", ".join(sorted(EXTRAS)))


def test_every_extra_is_explained() -> None:
    explained = subprocess.run([ROOT / "scripts" / "install", "--help"], capture_output=True, text=True, check=True).stdout
    assert [extra for extra in EXTRAS if not re.search(rf"  {extra}  ", explained)] == []


def test_a_folder_of_the_same_name_hides_nothing(tmp_path: Path) -> None:
    """Such as a clone, for a program that lies beside it."""
    (tmp_path / "greenlane").mkdir()
    command = [sys.executable, "-c", "from greenlane import Tensor, __version__"]
    subprocess.run(command, cwd=tmp_path, check=True)
