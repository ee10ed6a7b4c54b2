"""The TOML file that a configuration comes from, and everything that can be wrong with it.

Every problem of a file is told at once, those between keys too. Files speak in units ("64MiB", "1.5s"). What reads a file
blocks.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .schema import Config, ConfigError, DeviceConfig, ModelOptions, ModelsConfig, ServerConfig, TenantConfig, share_faults
from .tables import Fault, KeyPath, as_meant, build, dotted, faults, keys, nearest, not_a_table, unknown
from .values import DIGEST, shown

_SECTIONS = ("server", "device", "models", "tenants")
_NO_FRONT = "with server.fronts = 'inline' the tenant has no HTTP process of its own; use 'per-tenant', or leave it out"


def load(path: Path) -> Config:
    """Read a configuration file; reads files, so it blocks. Raises ConfigError with every problem there is."""
    document, folder = _parse(path), path.absolute().parent
    found = (*_faults(document), *_repository_faults(document, folder))
    problems = [f"{path.name}: {dotted(key)}: {text}" for key, text in found]
    if problems:
        raise ConfigError(problems)
    return _build(document, folder, path.name)


def salvage(path: Path) -> tuple[Config, frozenset[KeyPath]] | None:
    """What is left of a file that `load` refuses, so that more can be said about it, and the paths of what was left out.

    Keys are read as they seem to be meant. Blocks. None where too little is left; the repository may not be there. Raises
    ConfigError where the file is no TOML.
    """
    document, folder = _as_meant(_parse(path)), path.absolute().parent
    dropped: set[KeyPath] = set()
    while fault := next(_faults(document), None):
        if not _drop(document, fault[0]):
            return None
        dropped.add(fault[0])
    return _build(document, folder, path.name), frozenset(dropped)


def _as_meant(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its mistyped keys under the names that they are near to."""
    meant = as_meant(document, _SECTIONS)
    for section, known in (("server", keys(ServerConfig)), ("device", keys(DeviceConfig)), ("models", keys(ModelsConfig))):
        if isinstance(table := meant.get(section), dict):
            meant[section] = as_meant(table, known)
    for section, known in (("models", keys(ModelOptions)), ("tenants", keys(TenantConfig))):
        if isinstance(table := meant.get(section), dict):
            meant[section] = {name: as_meant(one, known) if isinstance(one, dict) else one for name, one in table.items()}
    return meant


def _drop(document: dict[str, Any], path: KeyPath) -> bool:
    """Remove the key at fault, or the table that lacks it; whether there was any."""
    first, *rest = path
    if first not in document:
        return False
    inner = document[first]
    if not (rest and isinstance(inner, dict) and _drop(inner, tuple(rest))):
        del document[first]
    return True


def _build(document: Mapping[str, Any], folder: Path, source: str) -> Config:
    return Config(
        server=build(ServerConfig, document.get("server", {})),
        device=build(DeviceConfig, document.get("device", {})),
        models=_models(document["models"], folder),
        tenants=MappingProxyType({name: build(TenantConfig, t, name=name) for name, t in document["tenants"].items()}),
        source=source,
    )


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        return tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError([f"{path.name or path}: cannot be read at {path.absolute()}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{path.name}: line {line} is not UTF-8, as TOML has to be"]) from error
    except ValueError as error:  # A TOMLDecodeError, or about a number of thousands of digits.
        raise ConfigError([f"{path.name}: not TOML: {error}"]) from error
    except RecursionError as error:
        raise ConfigError([f"{path.name}: not TOML: nested too deeply"]) from error


def _models(table: Mapping[str, Any], folder: Path) -> ModelsConfig:
    """Of a table without faults, where only models are tables: one may be called `cache`."""
    options = {name: build(ModelOptions, value) for name, value in table.items() if isinstance(value, dict)}
    plain = build(ModelsConfig, {name: value for name, value in table.items() if name not in options})
    cache = folder / plain.cache if plain.cache else None
    return replace(plain, repository=folder / plain.repository, cache=cache, options=MappingProxyType(options))


def _faults(document: Mapping[str, Any]) -> Iterator[Fault]:
    yield from unknown(document, _SECTIONS, ())
    document = as_meant(document, _SECTIONS)  # What follows from a mistyped name is no mistake of its own.
    yield from faults(ServerConfig, document.get("server", {}), "server")
    yield from faults(DeviceConfig, document.get("device", {}), "device")
    yield from _models_faults(document.get("models", {}))
    yield from _tenants_faults(document.get("tenants", {}))
    for between in (_default_tenant_faults, _key_faults, _front_faults):
        yield from between(_table(document, "server"), _table(document, "tenants"))


def _models_faults(table: object) -> Iterator[Fault]:
    if not isinstance(table, dict):
        yield not_a_table(table, ("models",))
        return
    options = {name: value for name, value in table.items() if isinstance(value, dict) and name != "repository"}
    yield from faults(ModelsConfig, {name: value for name, value in table.items() if name not in options}, "models")
    for name, value in options.items():
        yield from faults(ModelOptions, value, "models", name)
        yield from _batch_faults(name, value)


def _repository_faults(document: Mapping[str, Any], folder: Path) -> Iterator[Fault]:
    repository = _table(document, "models").get("repository")
    if isinstance(repository, str) and repository and not os.path.isdir(folder / repository):
        yield ("models", "repository"), f"{shown(repository)} is not an existing directory: {folder / repository}"


def _batch_faults(name: str, model: Mapping[str, Any]) -> Iterator[Fault]:
    """Sizes that no batch reaches. Where the file sets no largest batch, the model's own does, which is not known here."""
    most = model.get("max_batch")
    if type(most) is not int:
        return
    for key in ("preferred_batches", "warm_up") if most else ("preferred_batches",):
        sizes = model.get(key)
        above = [size for size in sizes if type(size) is int and size > most] if type(sizes) is list else []
        if above:
            yield ("models", name, key), f"{above[0]} is above max_batch, which is {most}"


def _tenants_faults(table: object) -> Iterator[Fault]:
    if not isinstance(table, dict):
        yield not_a_table(table, ("tenants",))
        return
    if not table:
        yield ("tenants",), "missing; at least one tenant is needed, as in [tenants.acme]"
    for name, tenant in table.items():
        yield from _name_faults(name)
        yield from faults(TenantConfig, tenant, "tenants", name)
        if isinstance(tenant, dict):
            yield from share_faults(name, tenant)


def _name_faults(name: str) -> Iterator[Fault]:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        yield ("tenants", name), "not a tenant's name; it travels in headers: use letters, digits, '.', '_' and '-'"


def _default_tenant_faults(server: Mapping[str, object], tenants: Mapping[str, object]) -> Iterator[Fault]:
    default = server.get("default_tenant")
    if isinstance(default, str) and default and default not in tenants:
        hint = nearest(default, tenants) if tenants else "there is none"
        yield ("server", "default_tenant"), f"{shown(default)} is not a configured tenant; {hint}"


def _key_faults(server: Mapping[str, object], tenants: Mapping[str, object]) -> Iterator[Fault]:
    """Who a key speaks for has to be clear, so nobody's key is another's."""
    admin: KeyPath = ("server", "admin_key_sha256")
    owners = dict.fromkeys(_digests([server.get("admin_key_sha256")]), admin)
    for name in tenants:
        path = ("tenants", name, "keys_sha256")
        for digest in _digests(_table(tenants, name).get("keys_sha256")):
            if (owner := owners.setdefault(digest, path)) != path:
                yield path, f"the key {digest[:8]}... is also in {dotted(owner)}; a key belongs to one of them"


def _front_faults(server: Mapping[str, object], tenants: Mapping[str, object]) -> Iterator[Fault]:
    """Every socket is one's own, and cores are given only to HTTP processes that there are."""
    owners: dict[object, KeyPath] = {server.get("port", ServerConfig().port): ("server", "port")}
    for name in tenants:
        tenant, path = _table(tenants, name), ("tenants", name, "port")
        port = tenant.get("port")
        if type(port) is int and (owner := owners.setdefault(port, path)) != path:
            yield path, f"{port} is also {dotted(owner)}; each listens on a port of its own"
        for key in ("port", "front_cores") if server.get("fronts") == "inline" else ():
            if key in tenant:
                yield ("tenants", name, key), _NO_FRONT


def _digests(value: object) -> Iterator[str]:
    """The good ones of a list that may hold anything."""
    for item in value if isinstance(value, list) else ():
        try:
            yield DIGEST.read(item)
        except ValueError:
            continue


def _table(parent: Mapping[str, object], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}
