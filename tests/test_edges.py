"""Every row of tests/EDGES.md, and every script, names tests that exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NAMED = re.findall(r"`([a-z0-9_/]+\.py)::(\w+)`", (TESTS / "EDGES.md").read_text())


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)), ids="::".join)
def test_tests_of_a_row_exist(file: str, name: str) -> None:
    assert re.search(rf"^\s*(async )?def {name}\(|^{name} = ", (TESTS / file).read_text(), re.MULTILINE)


SCRIPTS = [*(TESTS / "gpu").glob("*.sh"), *(TESTS.parent / ".ci").iterdir()]
IN_SCRIPTS = {found for script in SCRIPTS for found in re.findall(r"tests/([\w/]+\.py)(?:::(\w+))?", script.read_text())}


def test_tests_of_scripts_exist() -> None:
    assert len(IN_SCRIPTS) > 5
    for file, name in IN_SCRIPTS:
        text = (TESTS / file).read_text()
        assert not name or re.search(rf"^\s*(async )?def {name}\(", text, re.MULTILINE), f"{file}::{name}"


def test_every_row_has_a_test_or_says_that_it_is_open() -> None:
    rows = [line for line in (TESTS / "EDGES.md").read_text().splitlines() if line.startswith("| ")]
    numbers = [int(row.split("|")[1]) for row in rows if row.split("|")[1].strip()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [row for row in rows if ".py::" not in row and "**Open**" not in row and "tested by" not in row] == []
