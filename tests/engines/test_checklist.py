"""CHECKLIST.md against the tests that it names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    (item.strip(), promise, re.findall(r"`([^`]+)`", held))
    for line in Path(__file__).with_name("CHECKLIST.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| F")
    for item, promise, held in [line.strip("|").split("|")]
]


def test_every_item_has_one_row() -> None:
    assert [item for item, _, _ in ROWS] == [f"F{number:02}" for number in range(1, 79)]


@pytest.mark.parametrize(("item", "promise", "held"), ROWS, ids=[item for item, _, _ in ROWS])
def test_what_holds_an_item_is_there_and_names_it(item: str, promise: str, held: list[str]) -> None:
    """A file may hold an item by being about it; a test has to name it."""
    assert held or "Does not apply: " in promise
    for path, _, name in (each.partition("::") for each in held):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or item in (source(text, name) or pytest.fail(f"{path} has no test {name}")), name


def source(text: str, name: str) -> str:
    """A function's, decorators included; empty if there is none of this name."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return "".join(ast.get_source_segment(text, node) or "" for node in found)
