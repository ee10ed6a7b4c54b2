"""A short run of the fuzzer, and that it would find wrong answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .__main__ import FORMS, fuzz, main, table
from .models import Arrays, Oracle, repository
from .wire import text

MOST = 1500
"""Requests of each of two clients, in each form. At night, and by hand with `python -m tests.fuzz`, it goes on for longer."""
SECONDS = 60.0
budgets = pytest.mark.parametrize("most", [MOST, pytest.param(None, marks=pytest.mark.load)])


class Liar(Oracle):
    """An oracle whose numbers are too large by one."""

    def outputs(self, model: str, inputs: Mapping[str, Any]) -> Arrays:
        return {
            name: values + 1 if values.dtype.kind == "i" else values for name, values in super().outputs(model, inputs).items()
        }


@budgets
@pytest.mark.parametrize("form", FORMS)
def test_every_request_gets_a_right_answer_or_a_client_error(tmp_path: Path, form: str, most: int | None) -> None:
    found = fuzz(form, tmp_path, "every run", SECONDS, most=most)

    assert found.findings == [], table(found)
    assert found.answers["", 200] > 200, table(found)
    assert sum(count for (damage, status), count in found.answers.items() if damage and status == 400) > 100, table(found)


@budgets
@pytest.mark.parametrize("form", ["module", "uvicorn"])
def test_every_message_over_grpc_gets_a_right_answer_or_a_client_error(tmp_path: Path, form: str, most: int | None) -> None:
    found = fuzz(form, tmp_path, "every run", SECONDS, most=most, over_grpc=True)

    assert found.findings == [], table(found)
    assert found.answers["", "OK"] > 200, table(found)
    assert sum(count for (damage, status), count in found.answers.items() if damage and status != "OK") > 100, table(found)


def test_answers_that_differ_from_the_oracle_are_found(tmp_path: Path) -> None:
    found = fuzz("module", tmp_path, "liar", 60, most=100, make_oracle=Liar)

    assert any("of ONNX Runtime" in finding for finding in found.findings), table(found)


def test_texts_that_are_not_utf_8_are_compared_too(tmp_path: Path) -> None:
    oracle = Oracle(repository(tmp_path))
    given = np.array([[text(b"gr\xfcn"), "grün", ""]], object)
    assert oracle.outputs("same_bytes", {"x": given})["y"].tolist() == given.tolist()


def test_the_seed_is_printed_and_findings_set_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "1", "--seed", "abc", "--form", "module"]) == 0
    assert "seed: abc" in capsys.readouterr().out
