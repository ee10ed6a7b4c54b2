"""Whether the same inputs have the same answer, and the right one each time."""

from collections.abc import Callable, Generator, Iterator

import numpy as np
import pytest

from engines.datatypes import DATATYPES
from engines.signature import TensorSpec
from engines.verification import steady
from engines.verification.steady import LEAST, RUNS, Repeated, repeated

SPECS = [TensorSpec("y", DATATYPES["FP32"], ("n", 4))]
RIGHT = np.random.default_rng(3).standard_normal((2, 4)).astype(np.float32)


class Library:
    """Answers by a number's function; `ended` once nothing more is asked of it."""

    def __init__(self, answer: Callable[[int], np.ndarray]) -> None:
        self.ended = False
        self._answer = answer

    def repeat(self, inputs: object) -> Generator[list[np.ndarray], None, None]:
        try:
            for number in self._numbers():
                yield [self._answer(number)]
        finally:
            self.ended = True

    def _numbers(self) -> Iterator[int]:
        yield from range(1, 1000)


def found(answer: Callable[[int], np.ndarray], reference: bool = True) -> Repeated:
    library = Library(answer)
    seen = repeated(library.repeat, [], SPECS, [RIGHT] if reference else None, "TF32")
    assert library.ended
    return seen


def test_the_same_right_answer_each_time_is_steady() -> None:
    seen = found(lambda number: RIGHT.copy())
    assert (seen.runs, seen.steady, seen.spread.error) == (RUNS, True, 0.0)
    assert seen.found
    assert seen.found.agrees


def test_the_same_wrong_answer_each_time_is_steady_and_off() -> None:
    seen = found(lambda number: RIGHT * 2)
    assert seen.steady
    assert seen.found
    assert not seen.found.agrees


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("off", [0.0026, 0.057, 150.0])
def test_one_answer_that_differs_is_unsteady_with_and_without_a_reference(reference: bool, off: float) -> None:
    seen = found(lambda number: RIGHT * np.float32(1 + off) if number == RUNS else RIGHT, reference)
    assert not seen.steady
    assert seen.why_not().startswith("output 'y' is unsteady: it differs by ")
    assert (seen.found is None) is not reference


def test_sums_in_another_order_are_steady() -> None:
    assert found(lambda number: RIGHT * np.float32(1 + number * 2.0**-20)).steady


def test_an_answer_that_is_not_a_number_each_time_is_steady() -> None:
    assert found(lambda number: np.full((2, 4), np.nan, np.float32), reference=False).steady


def test_a_slow_model_runs_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "SECONDS", -1.0)
    assert found(lambda number: RIGHT).runs == LEAST


def test_texts_are_compared() -> None:
    words = np.array([b"a", b"b"], object)
    specs = [TensorSpec("y", DATATYPES["BYTES"], ("n",))]
    changing = Library(lambda number: words[::-1] if number == 2 else words.copy())
    assert repeated(Library(lambda number: words.copy()).repeat, [], specs, None, "FP32").steady
    assert not repeated(changing.repeat, [], specs, None, "FP32").steady
