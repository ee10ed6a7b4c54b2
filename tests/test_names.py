"""Files, modules, marks and tests that scripts, workflows and deployments name exist: what is renamed is renamed there too."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from greenlane.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
PLACES = ".ci", ".github", "deploy", "examples", "scripts", "*.sh", "pyproject.toml", "setup.py", "mkdocs.yml", "MANIFEST.in"
FOLDERS = r"benchmarks|deploy|docs|engines|examples|greenlane|partitions|scripts|server|tests|\.ci|\.github"
LISTED = subprocess.run(["git", "ls-files", "--", *PLACES], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
MARKS = [
    each.partition(":")[0]
    for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
]

every_file = pytest.mark.parametrize("file", LISTED)


@every_file
def test_files_that_it_names_exist(file: str) -> None:
    """Also as a pattern. Names that go on with `$name` or `{{ name }}` are not, nor the keys of annotations."""
    text = (ROOT / file).read_text()
    named = re.findall(rf"(?<![\w./@}}$-])(?:{FOLDERS})/[\w./@*-]*[\w*](?![\w@*/-]|\.\w|[${{{{]|: )", text)
    assert [path for path in named if not any(ROOT.glob(path))] == []


@every_file
def test_modules_that_it_runs_can_be_run(file: str) -> None:
    named = re.findall(r" -m ((?:benchmarks|engines|greenlane|partitions|server|tests)[\w.]*)", (ROOT / file).read_text())
    assert [module for module in named if not _runs(ROOT / module.replace(".", "/"))] == []


@every_file
def test_marks_that_it_chooses_tests_by_are_known(file: str) -> None:
    chosen = re.findall(r"""pytest\b[^\n#]*? -m ["']?([\w ]+?)["']? ?(?:\\?$|tests|-|[,`.])""", (ROOT / file).read_text(), re.M)
    words = {word for each in chosen for word in each.split()} - {"and", "or", "not"}
    assert sorted(words - {*MARKS}) == []


@pytest.mark.parametrize("file", [each for each in LISTED if each.startswith("deploy/")])
def test_options_and_subcommands_that_it_gives_exist(file: str) -> None:
    """In a list of arguments, and after the program's path."""
    text, known = (ROOT / file).read_text(), (ROOT / "server/command_line.py").read_text()
    lists = re.findall(r"(?:^CMD|args:|command:) \[(.*)\]", text, re.MULTILINE)
    called = re.findall(r"bin/greenlane ([^\n`]*)", text)
    options = [option for each in (*lists, *called) for option in re.findall(r"--[a-z-]+", each)]
    assert [option for option in options if f'"{option}"' not in known] == []
    assert [each for each in called if each[0] != "-" and each.split()[0] not in COMMANDS] == []


def test_tests_of_whole_servers_that_are_measured_exist() -> None:
    (names,) = re.findall(r"^for name in (.*?); do$", (ROOT / "scripts/test").read_text(), re.M | re.S)
    missing = [name for name in names.replace("\\", "").split() if not (ROOT / f"tests/end_to_end/test_{name}.py").is_file()]
    assert missing == []


def _runs(place: Path) -> bool:
    """Whether this is a module with a `main`, or a package that is run."""
    file = place.with_suffix(".py")
    return (place / "__main__.py").is_file() or (file.is_file() and '__name__ == "__main__"' in file.read_text())
