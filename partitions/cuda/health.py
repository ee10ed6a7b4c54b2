"""Reads GPUs by `cuda.core.system`, which asks NVML, and by NVML itself what they moved: the body of a process of its own; see
`partitions.health`.

`python -m partitions.cuda.health ADDRESS ...` writes a line for each GPU every two seconds, and when the driver reports an
error of it. It opens no CUDA context and takes no memory of the GPU. Where `cuda.core.system` is missing, or its bindings are
too old, the lines have only what the GPUs moved and took.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ..health import INTERVAL, Health, to_line
from .nvml import Nvml, Traffic, open_nvml

NEEDS = "needs cuda-core 1.2 and cuda-bindings 13.2 or newer"
_NOT_THROTTLED = ("none", "gpu_idle")
"""Reasons for low clocks that slow no work down."""
_ECC = {"corrected": "DEV_ECC_SBE_VOL_TOTAL", "uncorrected": "DEV_ECC_DBE_VOL_TOTAL"}


def main(addresses: list[str]) -> None:
    """Watch these GPUs until standard input ends, or say in one line why they cannot be read."""
    devices: dict[str, Any] = dict.fromkeys(addresses)
    system, missing = _system()
    try:
        if system:
            devices = {address: system.Device(pci_bus_id=address) for address in addresses}
        elif not any(nvml and nvml.traffic() for nvml in map(open_nvml, addresses)):
            raise ImportError(missing)
    except Exception as error:
        raise SystemExit(f"the health of GPUs cannot be read: {error}") from error
    os.nice(10)
    lock = threading.Lock()

    def write(line: str) -> None:
        with lock:
            sys.stdout.write(line)
            sys.stdout.flush()

    for address, device in devices.items():
        threading.Thread(target=watch, args=(system, address, device, write, missing), daemon=True).start()
    sys.stdin.read()
    os._exit(0)  # A thread may be in a call that does not return.


def _system() -> tuple[Any, str]:
    """`cuda.core.system`; None, and why, if it is missing or its bindings are too old."""
    try:
        system = import_module("cuda.core.system")
    except Exception as error:
        return None, str(error)
    return (system, "") if system.CUDA_BINDINGS_NVML_IS_COMPATIBLE else (None, NEEDS)


def watch(system: Any, address: str, device: Any, write: Callable[[str], object], missing: str = "") -> None:
    """Write readings of a GPU until they cannot be written any more. Blocks; each GPU has a thread.

    `system` and `device` are None where most of them cannot be read; `missing` says why.
    """
    xids: dict[str, int] = {}
    nvml = open_nvml(address)
    traffic = nvml.traffic() if nvml else None
    events = _events(system, device)
    try:
        while True:
            found = read(system, device, xids, traffic) if system else _read_traffic(nvml, traffic, missing)
            write(to_line(address, found))
            if events is None:
                time.sleep(INTERVAL)
            else:
                events = _wait(system, events, xids)
    except (OSError, ValueError):  # The other end of standard output is gone.
        return


def _events(system: Any, device: Any) -> Any:
    """What reports errors of the driver; None where nothing does, as for virtual GPUs."""
    if system is None:
        return None
    try:
        return device.register_events([system.typing.EventType.XID_CRITICAL_ERROR])
    except system.NvmlError:
        return None


def _wait(system: Any, events: Any, xids: dict[str, int]) -> Any:
    """Wait for errors until it is time to read again, and count them. Returns the events to wait for next; None if they end."""
    until = time.monotonic() + INTERVAL
    while (left := until - time.monotonic()) > 0:
        try:
            event = events.wait(timeout_ms=max(1, int(left * 1000)))
        except system.TimeoutError:
            break
        except system.NvmlError:  # It is lost; `read` says so.
            return None
        name = str(event.event_data)
        xids[name] = xids.get(name, 0) + 1
    return events


def read(system: Any, device: Any, xids: Mapping[str, int], traffic: Traffic | None = None) -> Health:
    """One reading. What the GPU does not support is left out. What it moved is asked last, so that this is as of now."""
    lost = False

    def ask(question: Callable[[], Any]) -> Any:
        nonlocal lost
        try:
            return question()
        except system.GpuIsLostError:
            lost = True
        except system.NvmlError:
            pass
        return None

    names = system.typing
    asked = (
        "DEV_POWER_INSTANT",
        "DEV_POWER_AVERAGE",
        "DEV_POWER_CURRENT_LIMIT",
        "DEV_TOTAL_ENERGY_CONSUMPTION",
        *_ECC.values(),
    )
    fields = ask(lambda: device.get_field_values([getattr(names.FieldId, name) for name in asked]))
    found = {name: ask(lambda at=at: fields[at].value) if fields else None for at, name in enumerate(asked)}  # type: ignore[misc]
    power = found["DEV_POWER_AVERAGE"] if found["DEV_POWER_INSTANT"] is None else found["DEV_POWER_INSTANT"]
    utilization, memory = ask(lambda: device.utilization), ask(lambda: device.memory_info)
    clocks = {name: ask(lambda name=name: device.get_clock(name).get_current_mhz()) for name in ("sm", "memory")}  # type: ignore[misc]
    reasons = ask(lambda: device.current_clock_event_reasons)
    known = [each.value for each in names.ClocksEventReasons if each.value not in _NOT_THROTTLED]
    return Health(
        uuid=ask(lambda: device.uuid) or "",
        utilization=utilization and utilization.gpu / 100,
        memory_utilization=utilization and utilization.memory / 100,
        memory_total=memory and memory.total,
        memory_used=memory and memory.used,
        power=_in_thousands(power),
        power_limit=_in_thousands(found["DEV_POWER_CURRENT_LIMIT"]),
        energy=_in_thousands(found["DEV_TOTAL_ENERGY_CONSUMPTION"]),
        temperature=ask(lambda: device.temperature.get_sensor()),
        clocks={name: mhz * 1e6 for name, mhz in clocks.items() if mhz is not None},
        throttled={name: name in {str(each) for each in reasons} for name in known} if reasons is not None else {},
        ecc={kind: int(count) for kind, name in _ECC.items() if (count := found[name]) is not None},
        xids=dict(xids),
        moved=traffic.read() if traffic and not lost else {},
        memory_bandwidth=traffic.bandwidth if traffic else None,
        lost=lost,
    )


def _read_traffic(nvml: Nvml | None, traffic: Traffic | None, missing: str) -> Health:
    """One reading of what NVML says without `cuda.core.system`."""
    taken = nvml.energy() if nvml else None
    return Health(
        energy=None if taken is None else taken / 1e6,
        moved=traffic.read() if traffic else {},
        memory_bandwidth=traffic.bandwidth if traffic else None,
        missing=missing,
    )


def _in_thousands(value: float | None) -> float | None:
    """Milliwatts and millijoules in watts and joules."""
    return None if value is None else value / 1000


if __name__ == "__main__":
    main(sys.argv[1:])
