import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import DATATYPES, ModelRefused, Signature, TensorSpec
from engines.signature import align
from server.config.tenant import TenantConfig
from server.device.loaded_model import fit, needed

FP32 = DATATYPES["FP32"]
MIB = 1 << 20


def signature(*dims: int | str, limits: tuple[tuple[int, int], ...] = (), max_batch: int = 0) -> Signature:
    """One input of these dimensions, and an output of the same."""
    return Signature((TensorSpec("x", FP32, dims, limits),), (TensorSpec("y", FP32, dims),), max_batch)


@pytest.mark.parametrize(
    ("made", "smallest", "largest"),
    [
        (signature(), (64, 64), (64, 64)),
        (signature(32, 2), (256, 256), (256, 256)),
        (signature("b", 32, max_batch=4), (128, 128), (512, 512)),
        (signature("b", 32, limits=((2, 3), (32, 32)), max_batch=4), (256, 256), (384, 384)),
        (signature("b", "n", max_batch=4), (64, 64), None),
        (signature("b", "n", limits=((1, 8), (32, 64))), (128, 128), (2048, 2048)),
    ],
)
def test_the_smallest_and_largest_request_follow_from_a_signature(
    made: Signature, smallest: tuple[int, int], largest: tuple[int, int] | None
) -> None:
    assert needed(made, largest=False) == smallest
    assert needed(made, largest=True) == largest


def test_a_dimension_of_two_inputs_is_limited_by_both() -> None:
    inputs = (TensorSpec("x", FP32, ("n",), ((16, 64),)), TensorSpec("y", FP32, ("n",), ((32, 48),)))
    made = Signature(inputs, (TensorSpec("z", FP32, ("n",)), TensorSpec("free", FP32, ("m",))))
    assert needed(made, largest=True) == (256 + 192, 192)


@given(st.integers(1, 64), st.integers(1, 512), st.integers(1, 64))
def test_every_request_within_the_limits_is_within_the_memory_needs(least: int, width: int, more: int) -> None:
    made = signature("b", width, limits=((least, least + more), (width, width)))
    smallest, largest = needed(made, largest=False), needed(made, largest=True)
    assert smallest
    assert largest
    for rows in (least, least + more):
        assert smallest[0] <= align(rows * width * 4) <= largest[0]


def tenant(memory: int) -> TenantConfig:
    return TenantConfig(name="acme", granules=1, models=("*",), memory=memory)


def test_a_model_that_fits_is_served_without_a_warning() -> None:
    assert fit(signature("n", 32), tenant(MIB)) == fit(signature(1024), tenant(MIB)) == ""


def test_a_model_whose_smallest_request_never_fits_is_refused() -> None:
    need = f"{8 * MIB} bytes of memory (inputs {4 * MIB} + outputs {4 * MIB})"
    limit = f"tenants.acme.memory of {8 * MIB} lets one take {7 * MIB}"
    with pytest.raises(ModelRefused, match=re.escape(f"its smallest request takes {need}, but {limit}; raise it")):
        fit(signature(MIB), tenant(8 * MIB))


def test_a_model_whose_largest_request_does_not_fit_is_served_with_a_warning() -> None:
    assert fit(signature("b", MIB // 4, max_batch=4), tenant(8 * MIB)) == (
        f"its largest request takes {8 * MIB} bytes of memory (inputs {4 * MIB} + outputs {4 * MIB}), but "
        f"tenants.acme.memory of {8 * MIB} lets one take {7 * MIB}: larger ones are answered 413"
    )
