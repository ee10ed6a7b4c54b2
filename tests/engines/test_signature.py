import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import DATATYPES, ModelRefused, Signature, TensorMismatch, TensorSpec
from engines.signature import ALIGNMENT, Form, align, dimension_name

DIMS = st.lists(st.integers(0, 4) | st.sampled_from(["", "a", "b", "rows"]), max_size=4).map(tuple)
SIZES = st.fixed_dictionaries({name: st.integers(0, 4) for name in ("a", "b", "rows")})


def _spec(name: str, *dims: int | str, datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name, DATATYPES[datatype], dims)


def _takes(*specs: TensorSpec, max_batch: int = 0) -> Signature:
    return Signature(specs, (), max_batch)


IMAGE = _spec("image", "batch", 3, "side", "side")
BATCHES = Signature((_spec("x", "batch", 2), _spec("y", "rows", 2)), (_spec("z", "batch", 4),)).with_max_batch(8)


@given(st.integers(0, 10**12))
def test_aligning_gives_the_next_multiple(offset: int) -> None:
    assert offset <= align(offset) < offset + ALIGNMENT
    assert align(offset) % ALIGNMENT == 0
    assert align(align(offset)) == align(offset)


@given(DIMS, SIZES)
def test_a_shape_made_from_the_dimensions_fits_and_gives_their_sizes(
    dims: tuple[int | str, ...], sizes: dict[str, int]
) -> None:
    shape = tuple(dim if isinstance(dim, int) else sizes.get(dim, 5) for dim in dims)
    found = _takes(_spec("x", *dims)).check([shape])
    assert found == {dim: sizes[dim] for dim in dims if isinstance(dim, str) and dim}


@given(DIMS, SIZES, st.data())
def test_a_shape_that_differs_in_a_fixed_dimension_is_refused(
    dims: tuple[int | str, ...], sizes: dict[str, int], data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, len(dims)))
    dims = (*dims[:axis], 7, *dims[axis:])
    shape = tuple(dim if isinstance(dim, int) else sizes.get(dim, 5) for dim in dims)
    wrong = (*shape[:axis], data.draw(st.integers(0, 9).filter(lambda size: size != 7)), *shape[axis + 1 :])
    with pytest.raises(TensorMismatch, match=f"input 'x': dimension {axis} of shape .* is {wrong[axis]}; expected 7"):
        _takes(_spec("x", *dims)).check([wrong])


@given(st.lists(st.integers(1, 4) | st.just(-1), max_size=5), st.data())
def test_a_form_takes_shapes_there_and_back(dims: list[int], data: st.DataObject) -> None:
    outer = tuple(dims)
    inner = tuple(part for size in outer for part in ((2, 2, 1) if size == 4 else (size, 1)))
    shape = tuple(data.draw(st.integers(0, 5)) if size < 0 else size for size in outer)
    form = Form(outer, inner)
    assert form.obstacle() is None
    found = form.inward(shape)
    assert found is not None
    assert math.prod(found) == math.prod(shape)
    assert form.outward(found) == shape


@pytest.mark.parametrize("shape", [(), (2,), (2, 3, 5), (3, 3), (2, 3, 1)])
def test_a_shape_that_is_not_as_its_form_says_has_no_other(shape: tuple[int, ...]) -> None:
    form = Form((2, -1), (-1, 1, 2))
    assert form.inward(shape) is None
    assert form.outward(shape) is None
    with pytest.raises(
        TensorMismatch, match=rf"^input 'x': shape {re.escape(str(list(shape)))}; expected one as in \[2, -1\]$"
    ):
        TensorSpec("x", DATATYPES["FP32"], ("n", 1, 2), form=form).inward(shape)


@pytest.mark.parametrize(
    ("outer", "inner"), [((2, 3), (5,)), ((2, -1), (-1, 2)), ((-1, 2), (2,)), ((2,), ()), ((-1,), (-1, -1))]
)
def test_a_form_whose_shapes_have_other_elements_says_so(outer: tuple[int, ...], inner: tuple[int, ...]) -> None:
    assert Form(outer, inner).obstacle()


def test_a_tensor_with_a_form_has_the_caller_s_shape_and_the_model_s_checks() -> None:
    spec = TensorSpec("x", DATATYPES["FP32"], ("batch",), form=Form((-1, 1), (-1,)))
    assert (spec.shape, repr(_takes(spec))) == ((-1, 1), "<Signature x FP32[-1, 1] -> , batch none>")
    assert _takes(spec).check([spec.inward((3, 1))]) == {"batch": 3}


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((1, 3, 8), "input 'image': shape [1, 3, 8] has 3 dimensions; expected 4, as in [-1, 3, -1, -1]"),
        ((), "input 'image': shape [] has 0 dimensions; expected 4, as in [-1, 3, -1, -1]"),
        ((1, 4, 8, 8), "input 'image': dimension 1 of shape [1, 4, 8, 8] is 4; expected 3"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_what_was_expected(shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(TensorMismatch) as caught:
        _takes(IMAGE).check([shape])
    assert str(caught.value) == text


def test_a_name_is_the_same_size_in_every_input_where_the_library_wants_it() -> None:
    signature = replace(_takes(_spec("x", "n"), _spec("y", "n", "m")), same_sizes=True)
    assert signature.check([(4,), (4, 2)]) == {"n": 4, "m": 2}
    with pytest.raises(TensorMismatch) as caught:
        signature.check([(4,), (5, 2)])
    assert str(caught.value) == "input 'y': dimension 0 of shape [5, 2] is 5; dimension 'n' is 4 elsewhere in the request"


def test_a_name_with_several_sizes_says_nothing_of_outputs() -> None:
    signature = Signature((_spec("x", "n"), _spec("y", "n", "m")), (_spec("z", "n"), _spec("u", "m")))
    sizes = signature.check([(4,), (5, 2)])
    assert sizes == {"n": -1, "m": 2}
    assert signature.output_shapes(sizes) == (None, (2,))
    assert signature.disagreement([(4,), (4, 2)]) == ""
    why = "input 'y': dimension 0 of shape [5, 2] is 5; dimension 'n' is 4 elsewhere in the request"
    assert signature.disagreement([(4,), (5, 2)]) == why
    assert _takes(IMAGE).disagreement([(1, 3, 8, 9)]).endswith("is 9; dimension 'side' is 8 elsewhere in the request")


@pytest.mark.parametrize("written", ["", "?", " ? ", "None", "none", "-1", "0", " ", "*", "unk", "Unknown", "dynamic", "N/A"])
def test_what_exporters_write_in_place_of_a_name_is_none(written: str) -> None:
    assert dimension_name(written) == ""


@pytest.mark.parametrize("written", ["n", "batch", "unk__12", "dynamic_axes_1", "floor(w/2)", "Länge", "DynamicDimension.0"])
def test_names_of_dimensions_stay(written: str) -> None:
    assert dimension_name(f" {written}") == written


def test_a_dimension_without_a_name_is_a_size_of_its_own_each_time() -> None:
    assert _takes(_spec("x", "", ""), _spec("y", "")).check([(1, 2), (3,)]) == {}


@pytest.mark.parametrize(
    ("shapes", "came"),
    [([], "0 shapes given"), ([(1,)], "1 shape given"), ([(1,), (1,), (1,)], "3 shapes given")],
)
def test_a_shape_for_each_input_has_to_be_given(shapes: list[tuple[int, ...]], came: str) -> None:
    with pytest.raises(TensorMismatch) as caught:
        _takes(_spec("x", 1), _spec("y", "n", 1, datatype="INT8")).check(shapes)
    assert str(caught.value) == f"{came}, but the model's inputs are 2: x FP32[1], y INT8[-1, 1]"


@pytest.mark.parametrize("batch", [1, 8])
def test_a_batch_up_to_the_largest_is_taken(batch: int) -> None:
    shapes = [(batch, 2), (batch, 2)]
    assert BATCHES.check(shapes) == {"batch": batch, "rows": batch}
    assert BATCHES.rows(shapes) == batch


@pytest.mark.parametrize("batch", [0, 9])
def test_a_batch_beyond_the_limits_is_refused_with_them(batch: int) -> None:
    with pytest.raises(TensorMismatch) as caught:
        BATCHES.check([(batch, 2), (1, 2)])
    assert (
        str(caught.value) == f"input 'x': batch of {batch} in shape [{batch}, 2]; expected 1 to 8, the model's max_batch_size"
    )


def test_a_batch_beyond_the_limits_is_shown_in_the_shape_that_callers_sent() -> None:
    spec = replace(_spec("x", "batch", 2), form=Form((-1, 1, 2), (-1, 2)))
    with pytest.raises(TensorMismatch, match=r"^input 'x': batch of 9 in shape \[9, 1, 2\]; expected 1 to 8, "):
        _takes(spec).with_max_batch(8).check([(9, 2)])


def test_inputs_of_different_batches_are_refused() -> None:
    with pytest.raises(TensorMismatch, match="input 'y': batch of 3, but input 'x' has 2"):
        BATCHES.check([(2, 2), (3, 2)])


def test_without_batches_a_request_counts_as_one_inference() -> None:
    assert _takes(_spec("x", "n")).rows([(5,)]) == 1
    assert Signature((), (), 8).rows([]) == 1


@pytest.mark.parametrize("spec", [_spec("fixed", 4, "n"), _spec("scalar")])
@pytest.mark.parametrize("output", [True, False])
def test_batches_are_refused_where_a_tensor_cannot_carry_them(spec: TensorSpec, output: bool) -> None:
    good = _spec("good", "batch")
    signature = Signature((good,), (spec,)) if output else Signature((spec,), (good,))
    with pytest.raises(ModelRefused) as caught:
        signature.with_max_batch(4)
    assert str(caught.value) == (
        f"max_batch 4 needs first dimensions that vary, but {spec.name!r} has shape {list(spec.shape)}; "
        "export it with one, or set 0"
    )
    assert signature.with_max_batch(0) == signature


def test_output_shapes_follow_from_the_inputs_as_far_as_they_are_known() -> None:
    signature = Signature((), (_spec("a", "n", 3), _spec("b", "m"), _spec("c", ""), _spec("d"), _spec("e", 0, "n")))
    assert signature.output_shapes({"n": 2}) == ((2, 3), None, None, (), (0, 2))


@given(st.lists(DIMS, max_size=3), SIZES)
def test_output_bytes_are_those_of_known_size_each_aligned(dims: list[tuple[int | str, ...]], sizes: dict[str, int]) -> None:
    signature = Signature((), tuple(_spec(f"y{index}", *each) for index, each in enumerate(dims)))
    known = [shape for shape in signature.output_shapes(sizes) if shape is not None]
    assert signature.output_bytes(sizes) == sum(align(4 * math.prod(shape)) for shape in known)


def test_a_signature_shows_what_it_takes_and_gives() -> None:
    assert repr(BATCHES) == "<Signature x FP32[-1, 2], y FP32[-1, 2] -> z FP32[-1, 4], batch 8>"
    assert repr(_takes(_spec("text", datatype="BYTES"))) == "<Signature text BYTES[] -> , batch none>"
