"""Which device a configuration asks for; what the application does with it is in tests/end_to_end."""

import os
import sys
from pathlib import Path

import pytest

from engines import has_tensorrt
from engines.tensorrt.api import LIBRARIES
from partitions import Device, DeviceUnavailable
from server.app import open_configured
from server.config.schema import DeviceConfig
from tests.fakes import FakeDevice

NO_SUCH = 4095
"""The number of a GPU that no machine has."""


def asking(backend: str) -> DeviceConfig:
    return DeviceConfig(backend=backend, index=NO_SUCH)


@pytest.fixture
def tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT, as far as whether it is installed goes."""
    (tmp_path / "tensorrt_rtx.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert has_tensorrt()


@pytest.mark.usefixtures("tensorrt")
def test_fallback_to_the_cpu_is_a_warning_where_tensorrt_is_installed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert open_configured(asking("auto")).kind == "cpu"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("the device is the CPU, though TensorRT is installed: CUDA ")


def test_the_cpu_without_tensorrt_is_no_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "path", [])
    for name in (name for names in LIBRARIES.values() for name in names):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not has_tensorrt()
    with caplog.at_level("INFO"):
        assert open_configured(asking("auto")).kind == "cpu"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "the device is the CPU: TensorRT is not installed")
    ]


def test_backend_cuda_does_not_fall_back_to_the_cpu() -> None:
    with pytest.raises(DeviceUnavailable):
        open_configured(asking("cuda"))


@pytest.mark.parametrize("backend", ["auto", "cuda", "cpu"])
@pytest.mark.usefixtures("tensorrt")
def test_every_tenants_stream_has_a_hardware_queue_before_the_device_is_opened(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads it once, when it is initialised; with its default of 8, tenants would share queues."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # To be restored, whatever it was.
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    found: list[str | None] = []

    def look(backend: str, cores: tuple[int, ...] | None = None, index: int = 0) -> Device:
        found.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return FakeDevice()

    monkeypatch.setattr("server.app.open_device", look)
    open_configured(asking(backend))
    assert found == ["32"]


@pytest.mark.usefixtures("tensorrt")
def test_cuda_device_max_connections_is_not_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    with pytest.raises(DeviceUnavailable):
        open_configured(asking("cuda"))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
