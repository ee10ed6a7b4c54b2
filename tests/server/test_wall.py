"""The seams of `server`: the wall's contract names every package, as import-linter passes what it does not name."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSES_BOTH_SIDES = {
    "server.__main__",
    "server.app",
    "server.check",
    "server.processes.composition",
    "server.processes.serve",
    "server.starting",
}
"""What may import both sides, because it starts them, tries them out or writes what they read."""


def modules(package: str) -> set[str]:
    """The modules and packages directly in a package."""
    folder = ROOT / package.replace(".", "/")
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/*.py")}
    return {f"{package}.{name}" for name in names - {"__init__"}}


def test_every_package_of_server_is_on_one_side_of_the_wall() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (wall,) = (each for each in contracts if each["name"].startswith("the wall: "))
    there = (modules("server") - {"server.processes"}) | modules("server.processes")
    assert set(wall["source_modules"]) | set(wall["forbidden_modules"]) | COMPOSES_BOTH_SIDES == there
    assert not set(wall["source_modules"]) & (set(wall["forbidden_modules"]) | COMPOSES_BOTH_SIDES)


def test_nothing_in_server_finds_out_by_its_name_which_library_an_engine_is_of() -> None:
    """What is to be known is asked of the engine, so that another library has an answer."""
    question = re.compile(r"platform\.(startswith|removeprefix)\b|\.platform (==|!=|in|not in) |TensorRTEngine|OnnxEngine")
    files = sorted((ROOT / "server").rglob("*.py"))
    asked = [str(path.relative_to(ROOT)) for path in files if question.search(path.read_text())]
    assert (len(files) > 200, asked) == (True, [])
