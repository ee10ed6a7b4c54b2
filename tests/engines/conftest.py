"""A simulated GPU for tests of engines.tensorrt.load and its neighbours."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import Gpu
from tests.simulation.tensorrt import library

from .simulated import Bench, opened


@pytest.fixture(params=["10.11", "11.4"])
def full(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """With the full TensorRT."""
    gpu = Gpu()
    with opened(tmp_path, library(gpu, "tensorrt", request.param), gpu) as bench:
        yield bench
        bench.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as bench:
        yield bench
        bench.close()


@pytest.fixture
def executor(bench: Bench) -> Iterator[Any]:
    """Of AFFINE."""
    executor = bench.bind()
    yield executor
    executor.close()
