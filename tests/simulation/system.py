"""`cuda.core.system` as far as `partitions.cuda.health` uses it. Names that begin with an underscore belong to the simulation.

As documented, what a GPU does not support raises NotSupportedError when it is read, each field of `get_field_values` by itself
when its `value` is, and everything raises GpuIsLostError once the GPU has fallen off the bus. `fieldids` are NVML's numbers.
"""

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

CUDA_BINDINGS_NVML_IS_COMPATIBLE = True


class NvmlError(Exception):
    pass


class NotSupportedError(NvmlError):
    pass


class GpuIsLostError(NvmlError):
    pass


class TimeoutError(NvmlError):
    pass


class FieldId(IntEnum):
    DEV_ECC_SBE_VOL_TOTAL = 3
    DEV_ECC_DBE_VOL_TOTAL = 4
    DEV_TOTAL_ENERGY_CONSUMPTION = 83
    DEV_POWER_AVERAGE = 185
    DEV_POWER_INSTANT = 186
    DEV_POWER_CURRENT_LIMIT = 190


class Device:
    """A GPU. `state`, which a test may change, has the values to give by name: what is missing there is not supported, "xids"
    are the numbers of errors that come next, and with "lost" it is gone.
    """

    def __init__(self, *, pci_bus_id: str, state: dict[str, Any] | None = None) -> None:
        self.pci_bus_id = pci_bus_id
        self._state = {} if state is None else state

    def _ask(self, name: str) -> Any:
        if "lost" in self._state:
            raise GpuIsLostError("GPU is lost")
        if name not in self._state:
            raise NotSupportedError("Not Supported")
        return self._state[name]

    @property
    def uuid(self) -> str:
        return self._ask("uuid")

    @property
    def utilization(self) -> SimpleNamespace:
        """Both in percent."""
        return SimpleNamespace(gpu=self._ask("busy"), memory=self._ask("memory_busy"))

    @property
    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(total=self._ask("total"), used=self._ask("used"))

    @property
    def temperature(self) -> SimpleNamespace:
        return SimpleNamespace(get_sensor=lambda: self._ask("temperature"))

    @property
    def current_clock_event_reasons(self) -> list[str]:
        return self._ask("reasons")

    def get_clock(self, clock_type: str) -> SimpleNamespace:
        return SimpleNamespace(get_current_mhz=lambda: self._ask(clock_type))

    def get_field_values(self, field_ids: list[int]) -> list["FieldValue"]:
        if "lost" in self._state:
            raise GpuIsLostError("GPU is lost")
        return [FieldValue(self, each) for each in field_ids]

    def register_events(self, events: list[str]) -> "DeviceEvents":
        self._ask("events")
        return DeviceEvents(self)


class FieldValue:
    def __init__(self, device: Device, field: int) -> None:
        self._device = device
        self.field_id = FieldId(field)

    @property
    def value(self) -> int:
        return self._device._ask(self.field_id.name)


class DeviceEvents:
    def __init__(self, device: Device) -> None:
        self._device = device

    def wait(self, timeout_ms: int = 0) -> SimpleNamespace:
        """Returns at once here: with an event, or as if the time had passed."""
        if not (xids := self._device._ask("xids")):
            raise TimeoutError("Timeout")
        return SimpleNamespace(event_data=xids.pop(0), event_type="xid_critical_error")
