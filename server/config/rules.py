"""Rules between keys of a file. They look at the file's values, not at models, so that no wrong value hides their problems."""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from partitions.installing import install_command

from .schema import ServerConfig, share_problem
from .tables import KeyPath, dotted, nearest
from .values import shown

Problem = tuple[KeyPath, str]
"""A key, and what is wrong with it."""

_NAME = re.compile("[A-Za-z0-9._-]+")
_DIGEST = re.compile("[0-9A-Fa-f]{64}")
_NO_PROCESS = "with server.fronts = 'inline' the tenant has no HTTP process of its own; use 'per-tenant', or leave it out"


def problems_within(path: KeyPath, table: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems between keys of one table."""
    match path:
        case "models", _:
            yield from _batches(path, table)
        case "tenants", name:
            if not _NAME.fullmatch(name):
                yield path, "not a tenant's name; it travels in headers: use letters, digits, '.', '_' and '-'"
            if problem := share_problem(table):
                yield path, problem


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


def _batches(path: KeyPath, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Sizes above the largest batch, if the file sets one: the model's own is not known here."""
    most = model.get("max_batch")
    if type(most) is not int:
        return
    for key in ("preferred_batches", "warm_up") if most else ("preferred_batches",):
        sizes = model.get(key)
        above = [size for size in sizes if type(size) is int and size > most] if type(sizes) is list else []
        if above:
            yield (*path, key), f"{above[0]} is above max_batch, which is {most}"


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
    """A port belongs to one socket; ports and cores are given only to HTTP processes that exist."""
    owners: dict[object, KeyPath] = {server.get("port", ServerConfig().port): ("server", "port")}
    for name in tenants:
        tenant = _table(tenants, name)
        for key in ("port", "grpc_port"):
            port, path = tenant.get(key), ("tenants", name, key)
            if type(port) is int and (owner := owners.setdefault(port, path)) != path:
                yield path, f"{port} is also {dotted(owner)}; each listens on a port of its own"
        if "grpc_port" in tenant and find_spec("grpc") is None:
            command = install_command("grpc")
            yield ("tenants", name, "grpc_port"), f"gRPC is not installed; install it with `{command}`, or leave it out"
        for key in ("port", "front_cores") if server.get("fronts") == "inline" else ():
            if key in tenant:
                yield ("tenants", name, key), _NO_PROCESS


def _table(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}
