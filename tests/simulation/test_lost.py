"""The tests of a lost device in tests/gpu, on a simulated one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.simulated import AFFINE, ROWS
from tests.engines.small import model
from tests.gpu import test_lost as real

from . import Gpu
from .mps import size_of_sets
from .plans import make_plan

pytestmark = pytest.mark.usefixtures("forked_programs")


class TestLost(real.TestLost):
    @pytest.fixture(params=["off", "on"], autouse=True)
    def mps(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
        with size_of_sets(request.param, tmp_path / "fake"):
            yield

    @pytest.fixture
    def case(self, tmp_path: Path) -> real.Case:
        (real.version(tmp_path) / "model.plan").write_bytes(make_plan(model(AFFINE), ROWS))
        inputs = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 2.0, 3.0]}
        return real.Case("tests.simulation.losing", tmp_path, inputs, Gpu.index)
