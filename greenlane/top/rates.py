"""What happened between two looks at a server, by tenant. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .source import Look, Requests

_ADJUSTED = 1.0
"""Seconds by which a server's clock of the day may have been adjusted between two looks, so that it was not started again."""


@dataclass(frozen=True, slots=True)
class Moving:
    """Bytes a second: of the device's memory, and over PCIe in and out together. `estimated`: not measured."""

    memory: float
    pcie: float
    estimated: bool


@dataclass(frozen=True, slots=True)
class ModelRates:
    """A model over an interval: `used` and `borrowed` in units on average, `works` a second."""

    name: str
    version: str
    used: float
    borrowed: float
    works: float
    watts: float | None
    moving: Moving | None = None


@dataclass(frozen=True, slots=True)
class TenantRates:
    """A tenant on a device over an interval: units on average, and counts a second. `p99` in seconds, None without requests."""

    tenant: str
    device: str
    unit: str
    share: int
    granted: float
    used: float
    idle: float
    lent: float
    borrowed: float
    works: float
    answered: float
    refused: float
    waiting: int
    p99: float | None
    memory: int
    watts: float | None
    age: float
    models: tuple[ModelRates, ...]
    moving: Moving | None = None
    narrow: float | None = None
    """Inferences on fewer granules, for a share of bandwidth; None for a tenant without one."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """A device over an interval: units on average, and watts."""

    name: str
    unit: str
    units: int
    granted: float
    used: float
    lent: float
    watts: float | None
    idle_watts: float | None
    moving: Moving | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Everything over an interval that ended at `until`."""

    until: str
    seconds: float
    ready: bool
    devices: tuple[DeviceRates, ...]
    tenants: tuple[TenantRates, ...]


def between(before: Look, after: Look) -> Rates | None:
    """What happened between two looks; None if the server was started again between them."""
    seconds = after.usage["seconds"] - before.usage["seconds"]
    if seconds <= 0 or abs(_since(after) - _since(before)) > _ADJUSTED:
        return None
    devices = {each["name"]: each for each in before.usage["devices"]}
    tenants = {(each["tenant"], each["device"]): each for each in before.usage["tenants"]}
    counted = {
        each["name"]: each.get("moved_seconds", 0.0) - devices.get(each["name"], {}).get("moved_seconds", 0.0)
        for each in after.usage["devices"]
    }
    return Rates(
        after.usage["until"],
        seconds,
        after.ready,
        tuple(_device(devices.get(each["name"], {}), each, seconds) for each in after.usage["devices"]),
        tuple(
            _tenant(tenants.get((each["tenant"], each["device"]), {}), each, before, after, seconds, counted[each["device"]])
            for each in after.usage["tenants"]
        ),
    )


def _since(look: Look) -> float:
    """When the server began to count, in seconds since 1970, by its clock of the day."""
    return datetime.fromisoformat(look.usage["since"]).timestamp()


def quantile(buckets: Mapping[float, float], part: float) -> float | None:
    """The time that this part of the requests took at most, by lines between the buckets' bounds.

    None without requests. Those beyond the last bound count as that.
    """
    added = sorted(buckets.items())
    if not added or added[-1][1] <= 0:
        return None
    wanted, low, below = part * added[-1][1], 0.0, 0.0
    for bound, count in added:
        if count >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


def _device(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> DeviceRates:
    def rate(key: str) -> float:
        return float(after[key] - before.get(key, 0.0)) / seconds

    measured = after["energy_joules"] is not None and before.get("energy_joules") is not None
    watts, idle = (rate("energy_joules"), rate("idle_energy_joules")) if measured else (None, None)
    units = rate("granted"), rate("used"), rate("lent")
    counted = after.get("moved_seconds", 0.0) - before.get("moved_seconds", 0.0)
    return DeviceRates(after["name"], after["unit"], after["units"], *units, watts, idle, _moving(before, after, counted))


def _tenant(
    before: Mapping[str, Any], after: Mapping[str, Any], first: Look, second: Look, seconds: float, counted: float
) -> TenantRates:
    name = after["tenant"]
    old, new = (look.requests.get(name, Requests()) for look in (first, second))
    known = {(each["name"], each["version"]): each for each in before.get("models", ())}
    models = tuple(_model(known.get((each["name"], each["version"]), {}), each, seconds, counted) for each in after["models"])
    units = {key: (after[key] - before.get(key, 0.0)) / seconds for key in ("granted", "used", "idle", "lent", "borrowed")}
    answered = _answered(old, new)
    return TenantRates(
        name,
        after["device"],
        after["unit"],
        after["share"],
        **units,
        works=sum(each.works for each in models),
        answered=answered.get(math.inf, 0.0) / seconds,
        refused=sum(_grown(old.refused.get(each), count) for each, count in new.refused.items()) / seconds,
        waiting=int(new.waiting),
        p99=quantile(answered, 0.99),
        memory=after["device_memory_bytes"],
        watts=_watts(before, after, seconds),
        age=after["age_seconds"],
        models=models,
        moving=_moving(before, after, counted),
        narrow=None if new.narrow is None else _grown(old.narrow, new.narrow) / seconds,
    )


def _answered(before: Requests, after: Requests) -> dict[float, float]:
    """Requests answered between two looks, by the longest time that they took; of a model that began to count again since all
    that it has counted.
    """
    added: dict[float, float] = {}
    for model, buckets in after.buckets.items():
        known = before.buckets.get(model, {})
        if any(count < known.get(bound, 0.0) for bound, count in buckets.items()):
            known = {}
        for bound, count in buckets.items():
            added[bound] = added.get(bound, 0.0) + count - known.get(bound, 0.0)
    return added


def _grown(before: float | None, after: float) -> float:
    """By how much a counter has grown, which may have begun at 0 again."""
    return after if before is None or after < before else after - before


def _model(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float, counted: float) -> ModelRates:
    used, borrowed, works = ((after[key] - before.get(key, 0.0)) / seconds for key in ("used", "borrowed", "works"))
    watts, moving = _watts(before, after, seconds), _moving(before, after, counted)
    return ModelRates(after["name"], after["version"], used, borrowed, works, watts, moving)


def _moving(before: Mapping[str, Any], after: Mapping[str, Any], counted: float) -> Moving | None:
    """None where it is not counted, or was not read in the interval, which it is each two seconds; and of an older server."""
    now, was = after.get("moved"), before.get("moved") or {}
    if not now or counted <= 0:
        return None
    memory, into, out = (max(0, now[path] - was.get(path, 0)) / counted for path in ("memory", "pcie_in", "pcie_out"))
    return Moving(memory, into + out, now["by"] == "estimated")


def _watts(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> float | None:
    now = after["energy_joules"]
    return None if now is None else (now - (before.get("energy_joules") or 0.0)) / seconds
