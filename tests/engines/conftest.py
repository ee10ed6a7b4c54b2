"""A simulated GPU for tests of engines.tensorrt and its neighbours."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .simulated import Bench, opened


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as bench:
        yield bench
        bench.close()
