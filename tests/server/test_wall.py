"""The wall's contract in pyproject.toml names every package of `server`, as import-linter passes what it does not name."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSES_BOTH_SIDES = {
    "server.__main__",
    "server.app",
    "server.check",
    "server.processes.composition",
    "server.processes.serve",
}
"""What may import both sides, because it starts them or tries them out."""


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
