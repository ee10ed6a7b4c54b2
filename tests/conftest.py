"""What every test may rely on: the CPU as a device, one partition of it, and no deadline for generated examples."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from partitions.cpu import CpuDevice, CpuPartition, open_cpu
from server.host.compiled import ROOT, Outdated, ensure_current

pytest.register_assert_rewrite("tests.contract")

settings.register_profile("unhurried", deadline=None)  # A busy machine is no reason to fail.
settings.load_profile("unhurried")

WITH_COMPILED = (
    "tests/end_to_end/",
    "tests/benchmarks/",
    "tests/gpu/",
    "tests/server/protocol/",
    "tests/server/host/test_compiled.py",
)
"""What can be tested of compiled modules, which take no fakes for what they call by name."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """No test may pass because of code that is no longer there, nor fail because of what compiled code cannot do."""
    try:
        ensure_current()
    except Outdated as error:
        pytest.exit(str(error), returncode=2)
    fakers = [item.nodeid for item in session.items if not item.nodeid.startswith(WITH_COMPILED)]
    if fakers and list((ROOT / "server").rglob("*.so")):
        pytest.exit(
            f"{fakers[0]} needs the sources: scripts/compile --remove, or run only {', '.join(WITH_COMPILED)}", returncode=2
        )


@pytest.fixture
def device() -> CpuDevice:
    """Every core this process may use."""
    return open_cpu()


@pytest.fixture
def partition(device: CpuDevice) -> Iterator[CpuPartition]:
    """The first core."""
    partition = device.carve([0])
    yield partition
    partition.close()
