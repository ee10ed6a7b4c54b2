"""CHECKLIST.md against the tests that it names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    (item.strip(), promise.strip(), re.findall(r"`(tests/[^`]+)`", held))
    for line in Path(__file__).with_name("CHECKLIST.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| F")
    for item, promise, held in [line.strip("|").split("|")]
]


def test_every_item_has_one_row() -> None:
    assert [item for item, _, _ in ROWS] == [f"F{number:02}" for number in range(1, 79)]


@pytest.mark.parametrize(("item", "promise", "held"), ROWS, ids=[item for item, _, _ in ROWS])
def test_what_holds_an_item_is_a_test_and_those_of_the_engines_name_it(item: str, promise: str, held: list[str]) -> None:
    """A row has to name a test and not only a file, which would not say which test has to fail."""
    assert held or promise.startswith("Not offered: ")
    for each in held:
        path, *names = each.split("::")
        found = source((ROOT / path).read_text(encoding="utf-8"), names)
        assert found, f"there is no test {each}"
        assert item in found.upper() or not path.startswith("tests/engines/"), f"{each} does not name {item}"


@pytest.mark.parametrize(
    ("text", "names", "found"),
    [
        ("def test_a(): 'F01'", ["test_a"], "def test_a(): 'F01'"),
        ("@mark\nasync def test_a(): ...", ["test_a"], "@mark\nasync def test_a(): ..."),
        ("class TestA:\n    def test_b(self): ...", ["TestA", "test_b"], "def test_b(self): ..."),
        ("def helper(): ...", ["helper"], ""),
        ("def test_a(): ...", ["test_b"], ""),
        ("def test_a(): ...", [], ""),
        ("test_a = 1", ["test_a"], ""),
        ("def test_a():\n    def test_b(): ...", ["test_b"], ""),
    ],
)
def test_only_what_pytest_would_collect_is_a_test(text: str, names: list[str], found: str) -> None:
    assert source(text, names) == found


def source(text: str, names: list[str]) -> str:
    """The source of a test, decorators included, by its name or by class and name; empty if there is none."""
    *classes, name = names or [""]
    body: list[ast.stmt] = ast.parse(text).body
    for each in classes:
        body = [inner for node in body if isinstance(node, ast.ClassDef) and node.name == each for inner in node.body]
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name and name.startswith("test_"):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno]).strip()
    return ""
