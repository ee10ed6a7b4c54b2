"""The account as Prometheus counters. Units are cores or SMs, as the label `unit` says; see GET /admin/usage."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..accounts.usage import NS
from ..control.controller import Controller
from ..observing.accountant import Accountant

_DEVICE = ["device", "unit"]
_TENANT = ["tenant", "device", "unit"]
_MODEL = ["model", "version", "tenant", "device", "unit"]


def families(controller: Controller, accountant: Accountant) -> Iterator[Metric]:
    """What the account says by the last reports."""
    devices = accountant.totals().devices
    total = _counter("greenlane_device_unit_seconds", "Seconds of every unit of the device", _DEVICE)
    free = _counter("greenlane_free_unit_seconds", "Seconds of units that no tenant was granted", _DEVICE)
    granted = _counter("greenlane_granted_unit_seconds", "Seconds of units in the tenant's share", _TENANT)
    idle = _counter("greenlane_idle_unit_seconds", "Seconds of granted units in which nothing ran on them", _TENANT)
    lent = _counter("greenlane_lent_unit_seconds", "Seconds of granted units in which other tenants ran on them", _TENANT)
    used = _counter("greenlane_used_unit_seconds", "Seconds of the tenant's own units in which the model ran", _MODEL)
    borrowed = _counter("greenlane_borrowed_unit_seconds", "Seconds of others' units in which the model ran", _MODEL)
    works = _counter("greenlane_works", "Runs of the model, failed and stopped ones included", _MODEL)
    energy = _counter("greenlane_energy_joules", "Energy by use, without the device's idle power", _MODEL)
    all_energy = _counter("greenlane_device_energy_joules", "Energy that the device took", _DEVICE)
    idle_energy = _counter("greenlane_device_idle_energy_joules", "Energy that the device takes when nothing runs", _DEVICE)
    age = GaugeMetricFamily("greenlane_usage_age_seconds", "Age of what was reported of use", labels=["tenant", "device"])
    for name, device in devices.items():
        which = [name, device.unit]
        total.add_metric(which, device.total / NS)
        free.add_metric(which, device.free / NS)
        if device.energy is not None:
            all_energy.add_metric(which, device.energy / 10**6)
            idle_energy.add_metric(which, device.idle_energy / 10**6)
        for tenant, theirs in device.tenants.items():
            whose = [tenant, *which]
            granted.add_metric(whose, theirs.granted / NS)
            idle.add_metric(whose, accountant.idle(name, tenant) / NS)
            lent.add_metric(whose, theirs.lent / NS)
            if (runtime := controller.runtime(name, tenant)) is not None:
                age.add_metric([tenant, name], accountant.age(runtime))
            for model, each in theirs.models.items():
                title, _, version = model.rpartition("/")
                labels = [title, version, *whose]
                used.add_metric(labels, each.used / NS)
                borrowed.add_metric(labels, each.borrowed / NS)
                works.add_metric(labels, each.works)
                if device.energy is not None:
                    energy.add_metric(labels, each.energy / 10**6)
    yield from (total, free, granted, idle, lent, used, borrowed, works, energy, all_energy, idle_energy, age)


def _counter(name: str, about: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(name, about, labels=labels)
