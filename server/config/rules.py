"""Rules between keys of a file. They look at the file's values, not at models, so that no wrong value hides their problems."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from partitions.installing import install_command
from partitions.mps import MOST_CLIENTS
from partitions.plan import ranges

from .forms import shown
from .schema import has_password
from .server import ServerConfig
from .tables import KeyPath, dotted, nearest
from .tenant import SHARES, below_share, share_problem
from .values import core_numbers

Problem = tuple[KeyPath, str]
"""A key, and what is wrong with it."""

_NAME = re.compile("[A-Za-z0-9._-]{1,128}")
_LETTERS = "use up to 128 letters, digits, '.', '_' and '-'"
_DIGEST = re.compile("[0-9A-Fa-f]{64}")


def problems_within(path: KeyPath, table: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems between keys of one table."""
    match path:
        case ("models",) if has_password(table.get("repository")):
            how = "give it by the environment, as the libraries for the address read it"
            yield (*path, "repository"), f"a password in a URL, which logs and the copy's directory would show; {how}"
        case "models", _:
            yield from _batches(path, table)
        case "tenants", name:
            if not _NAME.fullmatch(name):
                yield path, f"not a tenant's name; it travels in headers: {_LETTERS}"
            if problem := share_problem(table):
                yield path, problem
            else:
                yield from _burst(path, table)
            for burst, rate in (("burst_requests", "requests_per_second"), ("burst_bytes", "bytes_per_second")):
                if burst in table and rate not in table:
                    yield (*path, burst), f"given, but nothing is limited without {rate}; set that, or leave it out"
            if table.get("paging") is True and "device_memory" not in table:
                yield (*path, "paging"), "true, but nothing is paged out without a device_memory; set that, or leave it out"
        case "devices", name if not _NAME.fullmatch(name):
            yield path, f"not a device's name; {_LETTERS}"


def problems_between(document: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems between tables of a document whose mistyped keys were corrected."""
    server, tenants = _table(document, "server"), _table(document, "tenants")
    if tenants == document["tenants"] == {}:
        yield ("tenants",), "missing; at least one tenant is needed, as in [tenants.acme]"
    default = server.get("default_tenant")
    if isinstance(default, str) and default and default not in tenants:
        hint = nearest(default, tenants) if tenants else "there is none"
        yield ("server", "default_tenant"), f"{shown(default)} is not a configured tenant; {hint}"
    yield from _keys(server, tenants)
    yield from _ports(server, tenants)
    yield from _tracing(server)
    yield from _devices(document)
    yield from _devices_of_tenants(document, tenants)


def _batches(path: KeyPath, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Batch sizes above `max_batch`, if the file sets that: what the model itself allows is not known here."""
    most = model.get("max_batch")
    if type(most) is not int:
        return
    for key in ("preferred_batches", "warm_up") if most else ("preferred_batches",):
        sizes = model.get(key)
        above = [size for size in sizes if type(size) is int and size > most] if type(sizes) is list else []
        if above:
            yield (*path, key), f"{above[0]} is above max_batch, which is {most}"


def _burst(path: KeyPath, tenant: Mapping[str, Any]) -> Iterator[Problem]:
    """A burst below the share that the tenant has."""
    burst, (key, share) = tenant.get("burst"), next((key, tenant[key]) for key in SHARES if key in tenant)
    if type(burst) is int and type(share) is int and 1 <= burst < share:
        yield (*path, "burst"), below_share(burst, key, share)


def _keys(server: Mapping[str, Any], tenants: Mapping[str, Any]) -> Iterator[Problem]:
    """A key identifies one tenant or the administrator."""
    owners: dict[str, KeyPath] = {}
    for path, value in _secrets(server, tenants):
        if isinstance(value, str) and _DIGEST.fullmatch(value) and (owner := owners.setdefault(value.lower(), path)) != path:
            yield path, f"the key {value.lower()[:8]}... is also in {dotted(owner)}; a key belongs to one of them"


def _secrets(server: Mapping[str, Any], tenants: Mapping[str, Any]) -> Iterator[tuple[KeyPath, object]]:
    yield ("server", "admin_key_sha256"), server.get("admin_key_sha256")
    for name in tenants:
        digests = _table(tenants, name).get("keys_sha256")
        yield from ((("tenants", name, "keys_sha256"), each) for each in (digests if isinstance(digests, list) else ()))


def _ports(server: Mapping[str, Any], tenants: Mapping[str, Any]) -> Iterator[Problem]:
    """A port belongs to one socket."""
    common = server.get("port", ServerConfig().port)
    owners: dict[int, KeyPath] = {common: ("server", "port")} if type(common) is int else {}
    for name in tenants:
        tenant = _table(tenants, name)
        for key in ("port", "grpc_port"):
            port, path = tenant.get(key), ("tenants", name, key)
            if type(port) is int and (owner := owners.setdefault(port, path)) != path:
                yield path, f"{port} is also {dotted(owner)}; each listens on a port of its own"
        if "grpc_port" in tenant and find_spec("grpc") is None:
            command = install_command("grpc")
            yield ("tenants", name, "grpc_port"), f"gRPC is not installed; install it with `{command}`, or leave it out"


def _tracing(server: Mapping[str, Any]) -> Iterator[Problem]:
    """Spans are made by a library that need not be installed."""
    if "tracing_endpoint" in server and not _has_otel():
        command = install_command("otel")
        yield ("server", "tracing_endpoint"), f"OpenTelemetry is not installed; install it with `{command}`, or leave it out"


def _has_otel() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def _devices(document: Mapping[str, Any]) -> Iterator[Problem]:
    """A file has one device, or several with names. Of several, each says what it is, and none has a part of another."""
    if "devices" not in document or not isinstance(document["devices"], dict):
        return
    devices = _table(document, "devices")
    if not devices:
        yield ("devices",), "there is no device in it; write [devices.0], or [device] for the only one"
    if devices and document.get("device"):
        yield ("device",), "given besides [devices]; move its keys into a table such as [devices.0], or leave [devices] out"
    if len(devices) < 2:
        return
    gpus: dict[int, str] = {}
    of_cores: dict[int, str] = {}
    for name in devices:
        device = _table(devices, name)
        match device.get("backend", "auto"):
            case "auto":
                yield ("devices", name, "backend"), "with several devices each says what it is; expected 'cpu' or 'cuda'"
            case "cuda":
                index, path = device.get("index", 0), ("devices", name, "index")
                if type(index) is int and (owner := gpus.setdefault(index, name)) != name:
                    yield path, f"{shown(index)} is also {dotted(('devices', owner, 'index'))}; each is a GPU of its own"
            case "cpu":
                yield from _cores_of_device(name, device, of_cores)


def _cores_of_device(name: str, device: Mapping[str, Any], owners: dict[int, str]) -> Iterator[Problem]:
    """The problems of the cores of one of several devices; `owners` are the devices before it, by core, and get this one."""
    path = ("devices", name, "cores")
    if "cores" not in device:
        yield path, "missing; without it the device is all cores, but there are several devices"
    cores = core_numbers(device.get("cores"))
    if shared := sorted(cores.intersection(owners)):
        yield path, f"{ranges(shared)} is also in {dotted(('devices', owners[shared[0]], 'cores'))}; a core is of one device"
    owners.update((core, name) for core in cores if core not in owners)


def _devices_of_tenants(document: Mapping[str, Any], tenants: Mapping[str, Any]) -> Iterator[Problem]:
    """A tenant names a device that there is, and has to where there are several: a default would fill one of them."""
    devices = _table(document, "devices") or {"0": document.get("device")}
    known, held = list(devices), Counter[object]()
    for name in tenants:
        tenant, path = _table(tenants, name), ("tenants", name, "device")
        device = tenant.get("device", known[0])
        if isinstance(device, str) and device and device not in known:
            yield path, f"{shown(device)} is not a configured device; {nearest(device, known)}"
        elif isinstance(device, str):
            held[device or known[0]] += 1
        if "device" not in tenant and len(known) > 1:
            yield path, f"missing; there are several devices, so name one of {', '.join(map(repr, known))}"
    for name in known:
        if _table(devices, name).get("mps") == "on" and held[name] > MOST_CLIENTS:
            why = f"it has {held[name]} tenants, and a daemon takes the processes of {MOST_CLIENTS}"
            key = ("devices", name) if "devices" in document else ("device",)
            yield (*key, "mps"), f'"on", but {why}; have fewer tenants there, or leave it out'


def _table(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}
