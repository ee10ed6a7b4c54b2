from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.simulated import Bench


@pytest.fixture
def wide(bench: Bench) -> Iterator[Any]:
    partition = bench.device.carve([0, 1, 2], [1, 2])
    yield partition
    bench.close_engines()
    partition.close()
