"""Shapes to be ready for, from batch sizes and shapes that are asked for."""

import pytest

from engines import DATATYPES, ModelRefused, Signature, TensorSpec
from engines.settings import RuntimeSettings, Sample
from engines.warmup import shape_sets, usual_shapes

FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n", 3), ((1, 8), (3, 3))), TensorSpec("scale", FP32, (1,))), ())
USUAL = ((1, 3), (1,))


def test_a_batch_size_is_the_first_dimension_where_that_varies() -> None:
    assert shape_sets((4, 1), SIGNATURE, USUAL) == [((4, 3), (1,)), ((1, 3), (1,))]


def test_a_shape_is_that_of_the_input_it_names_and_the_others_are_as_usual() -> None:
    assert shape_sets(((("x", (2, 3)),),), SIGNATURE, USUAL) == [((2, 3), (1,))]


def test_a_shape_that_is_named_twice_is_run_once() -> None:
    assert shape_sets((2, (("x", (2, 3)),), 2), SIGNATURE, USUAL) == [((2, 3), (1,))]


def test_usual_shapes_have_what_is_known_of_the_model_and_of_requests_and_else_1() -> None:
    inputs = (
        TensorSpec("x", FP32, ("n", "length", 3)),
        TensorSpec("y", FP32, ("n", "length")),
        TensorSpec("z", FP32, ("", "")),
    )
    known = RuntimeSettings(usual_shapes=(("x", (-1, 128, 3)), ("z", (5, -1))))
    assert usual_shapes(known, inputs) == ((1, 128, 3), (1, 128), (5, 1))
    assert usual_shapes(RuntimeSettings(), inputs) == ((1, 1, 3), (1, 1), (1, 1))
    of_another_model = RuntimeSettings(usual_shapes=(("x", (7,)), ("w", (7,))))
    assert usual_shapes(of_another_model, inputs) == ((1, 1, 3), (1, 1), (1, 1))


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        (9, "warm_up: input 'x': dimension 0 of shape [9, 3] is 9; the engine was built for 1 to 8"),
        ((("x", (2, 4)),), "warm_up: input 'x': dimension 1 of shape [2, 4] is 4; expected 3"),
        ((("x", (2,)),), "warm_up: input 'x': shape [2] has 1 dimension; expected 2, as in [-1, 3]"),
        ((("z", (2,)),), "warm_up: the model has no input 'z'; it has 'x', 'scale'"),
    ],
)
def test_shapes_that_the_model_does_not_take_are_refused_with_the_input(sample: Sample, why: str) -> None:
    with pytest.raises(ModelRefused) as refusal:
        shape_sets((sample,), SIGNATURE, USUAL)
    assert str(refusal.value) == why


def test_a_model_whose_first_dimensions_do_not_vary_takes_no_batch_sizes() -> None:
    fixed = Signature((TensorSpec("x", FP32, (2, "n")),), ())
    with pytest.raises(ModelRefused, match=r"no input has a first dimension that varies; there is x \[2, n\]"):
        shape_sets((4,), fixed, ((2, 1),))
