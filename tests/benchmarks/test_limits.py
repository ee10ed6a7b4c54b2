"""`benchmarks.limits` runs, and says of what it is."""

import re

import pytest

from benchmarks import limits


def test_a_line_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    limits.main(["--count", "50", "--rounds", "3"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"3 rounds of 50 calls, (not )?compiled, load [\d. ]+", head)
    assert [line.partition(":")[0] for line in lines] == [
        "no limits",
        "one process",
        "several processes, 20000 requests a second",
        "several processes, 99 requests a second",
    ]
    for line in lines:
        found = re.search(r": ([\d.]+) us \(([\d.]+) to ([\d.]+)\)", line)
        assert found
        median, least, most = map(float, found.groups())
        assert 0 < least <= median <= most
