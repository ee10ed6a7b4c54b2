"""The tests of a lost device in tests/gpu, on a simulated one."""

from pathlib import Path

import pytest

from tests.engines.simulated import AFFINE, ROWS
from tests.engines.small import model
from tests.gpu import test_lost as real

from . import Gpu
from .plans import make_plan


class TestLost(real.TestLost):
    @pytest.fixture
    def case(self, tmp_path: Path) -> real.Case:
        (real.version(tmp_path) / "model.plan").write_bytes(make_plan(model(AFFINE), ROWS))
        inputs = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 2.0, 3.0]}
        return real.Case("tests.simulation.losing", tmp_path, inputs, Gpu.index)
