"""Subjects of commits are short enough for what lists them, as CONTRIBUTING.md asks."""

import subprocess
from pathlib import Path

SINCE = "2026-11-28T00:00:00Z"
"""Those before are as they are."""
MOST = 72


def test_a_commit_has_a_subject_of_72_letters_and_a_blank_line_below() -> None:
    log = ["git", "log", "--no-merges", f"--since={SINCE}", "--format=%h %B%x00"]
    done = subprocess.run(log, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    commits = [each.strip().partition(" ") for each in done.stdout.split("\0") if each.strip()]
    lines = [(number, *text.split("\n")[:2]) for number, _, text in commits]
    assert [each for each in lines if len(each[1]) > MOST or each[1].endswith(".") or any(each[2:])] == []
