"""Every row of docs/edges.md names tests that exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NAMED = re.findall(r"`([a-z0-9_/]+\.py)::(\w+)`", (TESTS.parent / "docs/edges.md").read_text())


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)), ids="::".join)
def test_tests_of_a_row_exist(file: str, name: str) -> None:
    assert re.search(rf"^\s*(async )?def {name}\(|^{name} = ", (TESTS / file).read_text(), re.MULTILINE)


def test_every_row_has_a_test_or_says_that_it_is_open() -> None:
    rows = [line for line in (TESTS.parent / "docs/edges.md").read_text().splitlines() if line.startswith("| ")]
    numbers = [int(row.split("|")[1]) for row in rows if row.split("|")[1].strip()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [row for row in rows if ".py::" not in row and "**Open**" not in row and "tested by" not in row] == []
