"""Skips everything here without a GPU; opens it once, for a process may split it only once; collects figures."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partitions import Device, open_device

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
"""As the server does, before the driver is loaded. The driver's own number is 8, and streams beyond it share a queue."""
Figures = dict[str, Any]


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Skip unless cuda.core is installed and finds a GPU. A GPU that cannot be carved is a failure, no reason to skip."""
    core = pytest.importorskip("cuda.core", reason="needs the cuda extra")
    try:
        found = core.Device.get_all_devices()
    except Exception as error:  # A machine without a driver may raise anything.
        pytest.skip(f"needs a GPU: {error}")
    if not found:
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def device(gpu: None) -> Iterator[Device]:
    """The first GPU."""
    device = open_device("cuda")
    yield device
    device.close()


@pytest.fixture(scope="session")
def figures(device: Device) -> Iterator[Figures]:
    """What tests measured, by name; printed in the end, and written to $OUT/partitions.json where that is set."""
    found: Figures = {"device": device.describe(), "granules": list(device.granules)}
    yield found
    text = json.dumps(found, indent=2)
    print(f"\n{text}")
    if folder := os.environ.get("OUT"):
        (Path(folder) / "partitions.json").write_text(text, encoding="utf-8")
