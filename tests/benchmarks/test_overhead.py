"""What Greenlane may cost beyond a bare ASGI application; a short run of `python -m benchmarks.overhead`."""

from collections.abc import Iterator

import pytest

from benchmarks.cases import Case
from benchmarks.overhead import TARGET, experiment, model_microseconds
from benchmarks.sidebyside import SideBySide

pytestmark = pytest.mark.load


@pytest.fixture(scope="module")
def both() -> Iterator[SideBySide]:
    with experiment() as servers:
        yield servers


@pytest.mark.parametrize("connections", [1, 32])
def test_greenlane_serves_at_least_three_fifths_of_what_a_bare_application_does(both: SideBySide, connections: int) -> None:
    comparison = both.compare(Case("identity", "binary", connections), rounds=3, seconds=1)

    assert comparison.ratio >= 0.6, str(comparison)


def test_an_image_costs_less_than_a_millisecond_of_cpu_beyond_its_model(both: SideBySide) -> None:
    comparison = both.compare(Case("image", "binary", 1), rounds=3, seconds=1)

    assert comparison.first.cpu - model_microseconds(both.root, "image") < TARGET, str(comparison)
