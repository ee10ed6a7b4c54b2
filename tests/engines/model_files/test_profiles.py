import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.datatypes import DATATYPES
from engines.errors import ModelRefused, TensorMismatch
from engines.model_files.profiles import (
    Profile,
    Range,
    best_profile,
    choose,
    complete,
    make_range,
    padded,
    parse_shape,
    shape_text,
    usual,
)
from engines.signature import Signature, TensorSpec

FP32 = DATATYPES["FP32"]
X = TensorSpec("x", FP32, ("batch", 4))
IMAGE = TensorSpec("image", FP32, ("batch", 3, "h", ""))
FIXED = TensorSpec("fixed", FP32, (2, 3))
SHAPES = st.lists(st.integers(0, 10**6), min_size=1, max_size=6).map(tuple)


@given(st.text(min_size=1), SHAPES)
def test_a_shape_as_shown_is_parsed_whatever_the_inputs_name(name: str, shape: tuple[int, ...]) -> None:
    assert parse_shape(f"{name}:{shape_text(shape)}") == (name, shape)


@pytest.mark.parametrize("text", ["", "x", "x:", ":1x2", "x:1x", "x:1xa", "x:-1x2", "x:1 x2", "x:²"])
def test_invalid_shapes_are_refused_with_the_text_that_came(text: str) -> None:
    with pytest.raises(ValueError, match="is no shape; expected NAME:1x3x224x224") as refusal:
        parse_shape(text)
    assert str(refusal.value).startswith(repr(text))


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (((1,), (2,), (3,)), ((1,), (2,), (3,))),
        ((None, (2,), None), ((2,), (2,), (2,))),
        (((1,), None, (3,)), ((1,), (3,), (3,))),
        (((1,), None, None), ((1,), (1,), (1,))),
        ((None, None, (3,)), ((3,), (3,), (3,))),
    ],
)
def test_what_is_left_out_of_a_range_is_the_next_larger_shape_given(
    given_: tuple[tuple[int, ...] | None, ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert make_range(*given_) == expected


def test_only_dynamic_batches_get_a_default_range_with_a_note() -> None:
    profiles, notes = complete([], [X, FIXED], 16)
    assert profiles == (Profile({"x": Range((1, 4), (16, 4), (16, 4))}),)
    assert notes == ["profile 0: no range given for input 'x': built for 1x4..16x4..16x4"]


def test_a_network_without_dynamic_inputs_needs_no_ranges() -> None:
    assert complete([], [FIXED], 16) == ((Profile(),), [])


def test_a_profile_keeps_its_partition_whether_it_has_ranges_or_not() -> None:
    given_ = Range((1, 4), (2, 4), (2, 4))
    profiles, notes = complete([Profile({"x": given_}, 48), Profile({}, 16)], [X], 2)
    assert profiles == (Profile({"x": given_}, 48), Profile({"x": Range((1, 4), (2, 4), (2, 4))}, 16))
    assert len(notes) == 1


def test_a_range_for_an_input_that_is_not_dynamic_is_checked_and_dropped() -> None:
    ranges = {"fixed": Range((2, 3), (2, 3), (2, 3)), "x": Range((1, 4), (1, 4), (1, 4))}
    assert list(complete([Profile(ranges)], [X, FIXED], 1)[0][0].ranges) == ["x"]


def test_sizes_that_cannot_be_guessed_are_requested_as_command_line_options() -> None:
    with pytest.raises(
        ModelRefused, match="besides the first: \\[batch, 3, h, \\?\\]; give --min, --opt and --max image:<batch>x3x<h>x<3>"
    ):
        complete([], [IMAGE], 8)


def a(least: tuple[int, ...], best: tuple[int, ...], most: tuple[int, ...]) -> Profile:
    return Profile({"x": Range(least, best, most)})


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        (Profile({"xx": Range((1, 4), (1, 4), (1, 4))}), "no input 'xx'; did you mean 'x'\\? it has 'x', 'y'"),
        (Profile({"other": Range((1, 4), (1, 4), (1, 4))}), "no input 'other'; it has 'x', 'y'"),
        (a((1, 4), (1, 4), (1, 4)), "no range for input 'y' of shape \\[batch, 4\\]; give --min, --opt and --max y:<batch>x4"),
        (a((1,), (1, 4), (1, 4)), "min of input 'x' is 1, but the model has \\[batch, 4\\]"),
        (a((1, 4), (1, 4), (1, 5)), "max of input 'x' is 1x5, but"),
        (a((3, 4), (2, 4), (9, 4)), "3x4..2x4..9x4; expected min <= opt <= max"),
        (a((1, 4), (9, 4), (2, 4)), "expected min <= opt <= max"),
        (a((0, 4), (0, 4), (0, 4)), "max from 1"),
    ],
)
def test_a_profile_that_does_not_fit_the_model_is_refused_with_both_sides(profile: Profile, why: str) -> None:
    y = TensorSpec("y", FP32, ("batch", 4))
    with pytest.raises(ModelRefused, match=f"^profile 0: .*{why}"):
        complete([profile], [X, y], 8)


PROFILES = (a((1, 4), (1, 4), (4, 4)), a((2, 4), (8, 4), (8, 4)), a((1, 4), (8, 4), (9, 4)))
SIGNATURE = Signature((FIXED, X), ())


@pytest.mark.parametrize(
    ("batch", "active", "chosen"), [(1, 0, 0), (3, 1, 1), (3, 0, 0), (5, 0, 1), (1, 1, 0), (9, 0, 2), (3, 2, 2)]
)
def test_the_active_profile_is_kept_if_it_fits_and_else_the_first_that_does(batch: int, active: int, chosen: int) -> None:
    """F72."""
    assert choose(PROFILES, SIGNATURE, [(2, 3), (batch, 4)], active) == chosen


@pytest.mark.parametrize(
    ("sms", "usable", "number"),
    [(7, (0, 1, 2, 3), 3), (8, (0, 1, 2, 3), 1), (47, (0, 1, 2, 3), 1), (48, (0, 1, 2, 3), 0), (132, (0, 1, 2, 3), 0),
     (132, (1, 2), 1), (7, (0, 1), 0), (7, (2,), 2)],
)  # fmt: skip
def test_a_partition_begins_with_the_profile_for_the_most_of_its_multiprocessors(
    sms: int, usable: tuple[int, ...], number: int
) -> None:
    profiles = [Profile(sms=48), Profile(sms=8), Profile(sms=8), Profile()]
    assert best_profile(profiles, usable, sms) == number


def test_shapes_that_no_profile_fits_are_refused_with_every_range() -> None:
    """F72."""
    with pytest.raises(
        TensorMismatch, match=r"no profile of the engine fits x 10x4; .*1x4..1x4..4x4; .*2x4..8x4..8x4; "
    ) as refusal:
        choose(PROFILES, SIGNATURE, [(2, 3), (10, 4)])
    assert "fixed" not in str(refusal.value)


@given(SHAPES, SHAPES)
def test_a_range_fits_shapes_between_its_ends_only(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    expected = len(one) == len(other) and all(size <= most for size, most in zip(one, other, strict=True))
    assert Range((0,) * len(other), other, other).fits(one) == expected


def test_a_profile_shows_its_ranges_and_its_partition() -> None:
    assert str(Profile()) == "no dynamic inputs"
    assert str(Profile(PROFILES[0].ranges, 48)) == "x 1x4..1x4..4x4; meant, but not tuned, for 48 SMs"
    assert str(Profile({}, 48, True)) == "no dynamic inputs; tuned for 48 SMs"


def ranged(*dims: tuple[int, int, int]) -> Range:
    return Range(*(tuple(dim[which] for dim in dims) for which in range(3)))


def test_usual_shapes_are_the_powers_of_two_of_a_batch_and_the_optimum_last() -> None:
    profile = Profile({"x": ranged((1, 4, 6), (3, 3, 3))})
    inputs = [TensorSpec("x", DATATYPES["FP32"], ("n", 3)), TensorSpec("w", DATATYPES["FP32"], (2,))]
    assert usual(profile, inputs) == [((1, 3), (2,)), ((6, 3), (2,)), ((2, 3), (2,)), ((4, 3), (2,))]


def test_usual_shapes_are_minimum_maximum_and_optimum_where_more_than_the_batch_varies() -> None:
    profile = Profile({"x": ranged((1, 1, 8), (16, 32, 64))})
    assert usual(profile, [TensorSpec("x", DATATYPES["FP32"], ("n", "w"))]) == [((1, 16),), ((8, 64),), ((1, 32),)]


def test_a_fixed_profile_has_one_usual_shape() -> None:
    assert usual(Profile(), [TensorSpec("x", DATATYPES["FP32"], (2, 3))]) == [((2, 3),)]


READY = [((8, 4), (8,)), ((2, 4), (2,)), ((4, 4), (4,)), ((4, 5), (4,)), ((16, 4), (8,))]


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        (((3, 4), (3,)), ((4, 4), (4,))),
        (((1, 4), (1,)), ((2, 4), (2,))),
        (((5, 4), (5,)), ((8, 4), (8,))),
        (((4, 4), (4,)), ((8, 4), (8,))),  # Of more rows, so not itself, which needs no padding.
        (((3, 5), (3,)), ((4, 5), (4,))),
        (((8, 4), (8,)), None),
        (((9, 4), (9,)), None),
        (((3, 6), (3,)), None),
        (((3, 4), (2,)), None),
        (((0, 4), (0,)), None),
        (((), (3,)), None),
        ((), None),
    ],
)
def test_fewer_rows_are_padded_to_the_smallest_larger_batch_that_is_ready(
    shapes: tuple[tuple[int, ...], ...], found: tuple[tuple[int, ...], ...] | None
) -> None:
    assert padded(shapes, READY) == found


def test_without_ready_shapes_nothing_is_padded() -> None:
    assert padded(((3, 4),), []) is None
