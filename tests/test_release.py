"""scripts/release: it knows each file that names the version, and refuses what is no version. .ci/nightly makes a dry run."""

import re
import subprocess
from pathlib import Path

import pytest

from server import __version__

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "release"
PLACES = ("README.md", "deploy", "docs", "engines", "greenlane", "partitions", "pyproject.toml", "server")


def test_release_sets_the_version_wherever_it_is_named() -> None:
    [files] = re.findall(r"^named='(.*)'", SCRIPT.read_text(), re.MULTILINE)
    grep = ["git", "grep", "-lw", "--fixed-strings", __version__, "--", *PLACES, ":!docs/lab", ":!*.json"]
    found = subprocess.run(grep, cwd=ROOT, capture_output=True, text=True)
    assert sorted(found.stdout.split()) == sorted(files.split())


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["v1.0.0"], ["1.0"], ["1.0.0rc1", "--dry-run"]])
def test_release_refuses_what_is_no_version(words: list[str]) -> None:
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "expected a version such as 0.2.0" in done.stderr
