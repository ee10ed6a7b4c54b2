"""What a report says of the machine and the program."""

import subprocess
from pathlib import Path

import pytest

from greenlane import __version__
from greenlane.load import machine


def git(folder: Path, *arguments: str) -> str:
    given = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(given, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is in a repository of others, as of a team's configurations."""
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_revision_is_of_the_program_and_not_of_the_current_folder(foreign: Path) -> None:
    said = git(machine.HOME, "describe", "--always", "--dirty")
    assert machine.describe("greenlane prove")["revision"] == said


def test_an_installed_program_has_a_version_wherever_it_is_installed(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = foreign / ".venv" / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.setattr(machine, "HOME", packages)
    assert machine.describe("greenlane prove")["revision"] == f"version {__version__}"
