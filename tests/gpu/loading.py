"""A process that loads a model, for tests/gpu/test_loading.py: `python -m tests.gpu.loading PLAN`.

A line of JSON says how the device describes itself. Each line on its standard input has it load the model, and answer with the
bytes that count of it by kind, and the number of kernels and graphs that were not measured. Then the model is freed.
"""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from engines import load_engine
from engines.memory import added, shared_memory
from partitions import open_device

from .mps_client import say


def main(path: Path) -> None:
    device: Any = open_device("cuda")
    with closing(device.carve([0])) as partition:
        partition.attach()
        say(device=device.describe())
        for _ in sys.stdin:
            with closing(load_engine(path, device)) as engine, closing(engine.bind(partition)) as executor:
                taken: Any = executor.describe().get("driver_memory", {})
                parts = added([engine.memory, executor.memory, *shared_memory(executor).values()])
                say(parts=parts, unmeasured=taken.get("unmeasured", 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
