"""The MPS daemon of a real GPU, with processes that use it."""

import shutil

import pytest

from partitions.mps import COMMAND
from tests.partitions import test_mps as simulated
from tests.partitions.test_mps import Subject
from tests.partitions.test_mps import parent as parent

pytestmark = pytest.mark.gpu


class TestGpu(simulated.TestMps):
    @pytest.fixture
    def subject(self, gpu: None) -> Subject:
        if not shutil.which(COMMAND):
            pytest.skip(f"needs {COMMAND}")
        from cuda.core import Device

        return Subject(Device(0).uuid, "tests.gpu.mps_client", felt=1.3)
