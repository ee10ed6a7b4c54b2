"""Product code, documentation and some of the tests use the field's terms, those of the glossary in docs/architecture.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = "benchmarks", "engines", "examples", "greenlane", "partitions", "server"
TESTS = "tests/engines", "tests/gpu", "tests/partitions"
CODE = [path for package in (*PACKAGES, *TESTS) for path in (ROOT / package).rglob("*.py")]
DOCS = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "lab"]  # Notes of the laboratory are not edited.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests/EDGES.md", *DOCS, *(ROOT / "server").rglob("DESIGN.md")]
OTHERS = [path for folder in ("scripts", "deploy") for path in (ROOT / folder).iterdir() if path.is_file()]
FILES = sorted([*CODE, *PAGES, *OTHERS])

INSTEAD = {
    r"whoever|whomever": "the caller, the client, the process that ...",
    r"nobody(?:'s)?|somebody(?:'s)?": "no client, another tenant, a caller ...",
    r"is told|are told|was told|were told|be told|being told|told": "is notified, gets, is answered, is logged",
    r"tells?|telling": "notifies, says, shows, logs, distinguishes",
    r"heard|unheard": "on_done, notified",
    r"anew": "again",
    r"comes? past": "passes, is skipped",
    r"doorman": "dispatcher",
    r"the house|a house|house's": "supervisor, shared HTTP process",
    r"strangers?": "unauthenticated",
    r"Desk|LocalDesk|RemoteDesk|desks?": "Frontend",
    r"Precedence|precedence": "GIL priority",
    r"departures?": "disconnects",
    r"bur(?:y|ied|ies)|sl(?:ay|ays|ain)|doomed": "kill, terminate",
    r"outfit|outset": "process setup",
    r"kin": "batchable, same batch key",
    r"credits?": "in_flight_limit",
}
"""Words that are not used, as regular expressions between word boundaries, and what to say in their place."""

NAMES = r"told|tells?|nobody|somebody|everybody|whoever|anew|buried|heard"
"""Words that are not in names of tests either."""

ALLOWED = {
    r'"credits": |credits: Annotated': "a field of the admin API's JSON, which keeps its name",
    r"takes precedence": "a setting that overrules another one",
    r"cannot tell the shape": "ordinary English, in a message that clients know",
}
"""Lines that may have such a word all the same: a regular expression, and the reason."""


@pytest.mark.parametrize("word", INSTEAD)
def test_the_dialect_is_not_used(word: str) -> None:
    pattern, allowed = re.compile(rf"\b(?:{word})\b"), [re.compile(text) for text in ALLOWED]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line) and not any(each.search(line) for each in allowed)
    ]
    assert found == [], f"say {INSTEAD[word]}"


def test_names_of_tests_have_none_of_its_words() -> None:
    pattern = re.compile(rf"def test_(?:\w*_)?(?:{NAMES})(?:_\w*)?\(")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for match in pattern.finditer(path.read_text())
    ]
    assert found == []
