"""When answers agree: errors by row, tolerances by datatype."""

import math

import numpy as np
import pytest

from engines.datatypes import DATATYPES
from engines.signature import TensorSpec
from engines.verification.rule import BITS, MOST, coarsest, compare, explained, is_usable, row_error, tolerance


def spec(datatype: str = "FP32", name: str = "y") -> TensorSpec:
    return TensorSpec(name, DATATYPES[datatype], ("n", 4))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def test_tolerances_lie_between_what_right_and_wrong_answers_were_seen_to_be_off_by() -> None:
    assert 0.0054 * 3.5 < tolerance("TF32") < 0.021 < 0.65 / 30
    assert tolerance("FP32") < 0.001 < tolerance("FP16") == tolerance("TF32") < tolerance("BF16") < tolerance("INT8") == MOST
    assert all(0 < tolerance(name) <= MOST for name in BITS)


@pytest.mark.parametrize(
    ("datatypes", "rounds", "expected"),
    [
        ((), True, "TF32"),
        ((), False, "FP32"),
        (("FP16",), False, "FP16"),
        (("FP16", "BF16"), True, "BF16"),
        (("INT8",), False, "INT8"),
    ],
)
def test_the_coarsest_datatype_decides(datatypes: tuple[str, ...], rounds: bool, expected: str) -> None:
    assert tolerance(coarsest(datatypes, rounds)) == tolerance(expected)


def test_a_network_that_magnifies_rounding_may_be_off_by_as_much_more() -> None:
    assert explained(2.0**-11) == pytest.approx(tolerance("TF32"), rel=0.05)
    assert explained(2.0**-8) == pytest.approx(8 * explained(2.0**-11))


def test_an_error_is_that_of_the_row_that_is_off_most() -> None:
    reference = normal(64, 1000)
    answer = reference.copy()
    answer[17] = normal(1, 1000)[0][::-1]
    assert row_error(reference, reference) == 0
    assert row_error(reference, reference * np.float32(1.01)) == pytest.approx(0.01, rel=0.2)
    assert row_error(reference, answer) > 1


def test_an_element_near_zero_may_be_off_by_what_its_row_explains() -> None:
    reference = np.array([[1e-6, 1.0, 1.0]], np.float32)
    assert row_error(reference, np.array([[1e-3, 1.0, 1.0]], np.float32)) < 0.001


def test_large_outputs_are_compared_in_pieces_with_the_same_error() -> None:
    reference = normal(3000, 1000)
    answer = reference.copy()
    answer[2999] *= 2
    assert row_error(reference, answer) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_finite_in_one_answer_only_is_an_infinite_error(wrong: float) -> None:
    reference = normal(2, 4)
    answer = reference.copy()
    answer[1, 2] = wrong
    assert row_error(reference, answer) == math.inf
    assert row_error(answer, reference) == math.inf
    assert row_error(reference, normal(2, 5)) == math.inf


def test_the_same_infinity_in_both_is_right() -> None:
    reference = normal(2, 4)
    reference[0, 0] = -np.inf
    assert row_error(reference, reference.copy()) == 0


def test_the_output_that_is_off_most_is_named() -> None:
    a, b = normal(2, 4), normal(2, 5)
    found = compare([spec(), spec(name="z")], [a, b], [a, b * 2], "TF32")
    assert (found.output, found.agrees) == ("z", False)
    assert compare([spec(), spec(name="z")], [a, b], [a, b], "TF32").agrees


def test_a_near_tie_may_flip_a_class_where_products_are_rounded() -> None:
    labels = np.arange(100)
    flipped, other = labels.copy(), labels + 1
    flipped[0] = 7
    assert compare([spec("INT64")], [labels], [flipped], "TF32").agrees
    assert not compare([spec("INT64")], [labels], [flipped], "FP32").agrees
    assert not compare([spec("INT64")], [labels], [other], "TF32").agrees
    assert compare([spec("INT64")], [labels[:4]], [other[:4]], "TF32").agrees
    assert not compare([spec("INT64")], [labels[:4]], [other[:5]], "TF32").agrees


def test_bf16_is_compared_as_numbers() -> None:
    bits = (normal(2, 8).view(np.uint32) >> 16).astype(np.uint16)
    assert compare([spec("BF16")], [bits], [bits ^ 1], "BF16").agrees
    assert not compare([spec("BF16")], [bits], [bits ^ 0x8000], "BF16").agrees


@pytest.mark.parametrize(
    ("values", "usable"),
    [([1.0, 0.0], True), ([0.0, 0.0], False), ([np.nan, 1.0], False), ([-np.inf, 1.0], True), ([np.inf], False)],
)
def test_a_reference_without_a_finite_number_decides_nothing(values: list[float], usable: bool) -> None:
    assert is_usable([spec()], [np.array([values], np.float32)]) is usable


def test_a_reference_of_integers_alone_is_usable() -> None:
    assert is_usable([spec("INT64")], [np.zeros((2, 4), np.int64)])
