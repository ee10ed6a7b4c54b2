import os

import pytest

from benchmarks.holding import RATE, main


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two tenants")
def test_a_tenant_is_measured_alone_and_beside_each_chosen_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", str(10 / RATE), "100,000 texts"]) == 0
    alone, beside = capsys.readouterr().out.splitlines()
    assert alone.startswith("alone  ")
    assert beside.startswith("100,000 texts  ")
    assert " of 200" in beside
