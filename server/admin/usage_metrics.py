"""The account as Prometheus counters. Units are cores or SMs, as the label `unit` says; see GET /admin/usage."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from ..accounts.usage import NS
from ..control.controller import Controller
from ..observing.accountant import Accountant
from .exposition import counter, gauge

_DEVICE = ["device", "unit"]
_TENANT = ["tenant", *_DEVICE]
_MODEL = ["model", "version", *_TENANT]


def families(controller: Controller, accountant: Accountant) -> Iterator[Metric]:
    """What the account says by the last reports."""
    devices = [((name, each.unit), each) for name, each in accountant.totals().devices.items()]
    tenants = [((tenant, *labels), each) for labels, device in devices for tenant, each in device.tenants.items()]
    models = [((*key.rsplit("/", 1), *labels), each) for labels, tenant in tenants for key, each in tenant.models.items()]
    metered = [(labels, each) for labels, each in devices if each.energy is not None]
    with_meter = {labels for labels, _ in metered}

    def of_devices(name: str, about: str, field: str) -> Metric:
        return counter(name, about, _DEVICE, ((labels, getattr(each, field) / NS) for labels, each in devices))

    def of_models(name: str, about: str, field: str) -> Metric:
        return counter(name, about, _MODEL, ((labels, getattr(each, field) / NS) for labels, each in models))

    yield of_devices("greenlane_device_unit_seconds", "Seconds of every unit of the device", "total")
    yield of_devices("greenlane_free_unit_seconds", "Seconds of units that no tenant was granted", "free")
    granted = ((labels, each.granted / NS) for labels, each in tenants)
    yield counter("greenlane_granted_unit_seconds", "Seconds of units in the tenant's share", _TENANT, granted)
    idle = (((tenant, device, unit), accountant.idle(device, tenant) / NS) for (tenant, device, unit), _ in tenants)
    yield counter("greenlane_idle_unit_seconds", "Seconds of granted units in which nothing ran on them", _TENANT, idle)
    lent = ((labels, each.lent / NS) for labels, each in tenants)
    yield counter("greenlane_lent_unit_seconds", "Seconds of granted units in which other tenants ran on them", _TENANT, lent)
    yield of_models("greenlane_used_unit_seconds", "Seconds of the tenant's own units in which the model ran", "used")
    yield of_models("greenlane_borrowed_unit_seconds", "Seconds of others' units in which the model ran", "borrowed")
    works = ((labels, each.works) for labels, each in models)
    yield counter("greenlane_works", "Runs of the model, failed and stopped ones included", _MODEL, works)
    energy = ((labels, each.energy / 10**6) for labels, each in models if labels[-2:] in with_meter)
    yield counter("greenlane_energy_joules", "Energy by use, without the device's idle power", _MODEL, energy)
    taken = ((labels, (each.energy or 0) / 10**6) for labels, each in metered)
    yield counter("greenlane_device_energy_joules", "Energy that the device took", _DEVICE, taken)
    at_rest = ((labels, each.idle_energy / 10**6) for labels, each in metered)
    yield counter("greenlane_device_idle_energy_joules", "Energy that the device takes when nothing runs", _DEVICE, at_rest)
    served = ((tenant, device, controller.runtime(device, tenant)) for (tenant, device, _), _ in tenants)
    ages = (((tenant, device), accountant.age(runtime)) for tenant, device, runtime in served if runtime is not None)
    yield gauge("greenlane_usage_age_seconds", "Age of what was reported of use", ["tenant", "device"], ages)
