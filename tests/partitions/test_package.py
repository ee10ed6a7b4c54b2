import os
import sys
from pathlib import Path

import pytest

from partitions import Device, DeviceUnavailable, open_device
from partitions.installing import install_command


@pytest.mark.parametrize("kind", ["cpu", "auto"])
def test_a_cpu_device_is_opened_by_name_or_if_there_is_no_gpu(kind: str) -> None:
    device: Device = open_device(kind)
    assert device.kind == "cpu"
    assert device.unit == "core"
    assert set(device.granules) == {1}


def test_cores_limit_a_cpu_device() -> None:
    core = max(os.sched_getaffinity(0))
    assert open_device("cpu", [core]).describe() == f"CPU, 1 core ({core})"


@pytest.mark.parametrize("cores", ["0-3", 3, ["0"], [True], [0.0]])
@pytest.mark.parametrize("kind", ["auto", "cpu", "cuda"])
def test_cores_that_are_no_numbers_are_refused_with_an_example(kind: str, cores: object) -> None:
    with pytest.raises(TypeError, match=r"^cores are numbers, such as \[0, 1, 2\]; got "):
        open_device(kind, cores)  # type: ignore[arg-type]


def test_cuda_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(DeviceUnavailable, match="use backend = 'cpu'"):
        open_device("cuda")


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown device kind 'gpu'; expected auto, cpu or cuda"):
        open_device("gpu")


def test_install_command_is_the_script_of_a_checkout_and_pip_elsewhere(tmp_path: Path) -> None:
    assert install_command("cpu,rtx") == "scripts/install cpu,rtx"
    assert install_command("cpu,rtx", tmp_path) == f"{sys.executable} -m pip install 'greenlane[cpu,rtx]'"
