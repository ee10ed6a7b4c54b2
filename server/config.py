"""What may be configured, as frozen objects, and the TOML file they come from.

Rule 1: only keys that do something exist. Rule 2: every problem of a file is told at once, those between keys too.
Rule 3: files speak in units ("64MiB", "1.5s"), objects in bytes and seconds; objects made in code are not checked.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from .tables import Fault, KeyPath, as_meant, build, dotted, faults, keys, nearest, not_a_table, unknown
from .units import (
    BATCHES,
    CORES,
    DIGEST,
    DIGESTS,
    DURATION,
    FLAG,
    HOSTS,
    NAMES,
    ORIGINS,
    PROFILES,
    SIZE,
    TEXT,
    WARM_UP,
    duration_from,
    one_of,
    shown,
    size_from,
    whole,
)

MOST_INSTANCES = 16
"""Executors that a tenant may bind of one model: each has memory of its own on the device and on the host."""

_SECTIONS = ("server", "device", "models", "tenants")
_SHARES = ("granules", "cores", "sms")
_NO_FRONT = "with server.fronts = 'inline' the tenant has no HTTP process of its own; use 'per-tenant', or leave it out"
_SHARE_OF_UNIT = {"core": "cores", "SM": "sms"}


class ConfigError(Exception):
    """A configuration that cannot be served; `problems` are its lines, each naming a key and what was expected."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side. `max_body` and `max_json_tensor` are bytes.

    `max_string_elements` is how many elements all BYTES tensors of one request may have: on a core ONNX Runtime takes a
    microsecond and 100 bytes or more for each, however short it is.
    `nonfinite_json` is what JSON has for NaN and infinity that a model computed: the words that Triton writes, or null.
    `allowed_hosts` are names, without a port, under which the server is asked for what needs no key but is for this machine,
    besides this machine's own. `fronts` is where HTTP is spoken: in a process of each tenant's own, or inline, in the one that
    holds the device.
    `front_cores` is whether such processes get cores of their own where the device has none for tenants, or run on any.
    `keep_alive` is the seconds for which a connection may say nothing between two requests; one that showed no tenant is kept
    5 s at most. `cors_origins` are those whose web pages may call the models' API, or "*" for any.
    `strict_readiness` is whether the server is ready only while no model is unavailable, but for those that were unloaded.
    `drain_grace` is the seconds between readiness turning 503 and the refusal of new work, `drain_timeout` those after that in
    which the process ends, whatever still runs. `max_execution` is the seconds for which an inference may run, 0 for ever.
    `max_pause` is the seconds for which a repartition may keep a tenant from being served. `watchdog` is the seconds for
    which the event loop of the device's process may not turn before that process is ended, 0 for ever; after a quarter of
    them the server is not ready.
    """

    host: Annotated[str, TEXT] = "127.0.0.1"
    port: Annotated[int, whole(0, 65535)] = 8000
    max_body: Annotated[int, SIZE] = 64 * 2**20
    max_json_tensor: Annotated[int, SIZE] = 2**20
    max_string_elements: Annotated[int, whole(1)] = 2**18
    nonfinite_json: Annotated[str, one_of("literal", "null")] = "literal"
    admin_key_sha256: Annotated[str | None, DIGEST] = None
    allowed_hosts: Annotated[tuple[str, ...], HOSTS] = ()
    default_tenant: Annotated[str | None, TEXT] = None
    fronts: Annotated[str, one_of("per-tenant", "inline")] = "per-tenant"
    front_cores: Annotated[str, one_of("auto", "any")] = "auto"
    log_format: Annotated[str, one_of("text", "json")] = "text"
    log_level: Annotated[str, one_of("debug", "info", "warning", "error")] = "info"
    keep_alive: Annotated[float, duration_from(1)] = 75.0
    cors_origins: Annotated[tuple[str, ...], ORIGINS] = ()
    strict_readiness: Annotated[bool, FLAG] = False
    drain_grace: Annotated[float, DURATION] = 1.0
    drain_timeout: Annotated[float, DURATION] = 10.0
    max_execution: Annotated[float, DURATION] = 300.0
    max_pause: Annotated[float, DURATION] = 5.0
    watchdog: Annotated[float, DURATION] = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The hardware to carve; `cores` are core numbers, ascending, or None for all that the process may use.

    `copies` is what moves tensors to and from a GPU: the partition's own SMs, the copy engines that all tenants share, or
    the better of both for the GPU at hand.
    """

    backend: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"
    index: Annotated[int, whole(0)] = 0
    cores: Annotated[tuple[int, ...] | None, CORES] = None
    copies: Annotated[str, one_of("auto", "sm", "engine")] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the files of one model do not say; None where they decide.

    `batch_delay` is the seconds that requests may wait for others to share their batch though the partition is idle,
    `preferred_batches` are the sizes, ascending, at which a batch waits for no more.

    The rest says how the model runs, see `engines.RuntimeSettings`: `strategy` is when kernels for new shapes are compiled,
    `cuda_graphs` whether the library's own graphs are used, `allocation` who gives an execution context its memory,
    `profiles` the optimization profiles that an ONNX file is built with, as `RuntimeSettings.build_profiles` has them,
    `weight_budget` the bytes of weights to keep on the GPU. `instances` is how many executors each tenant binds, which
    take turns.
    """

    max_batch: Annotated[int | None, whole(0)] = None
    batch_delay: Annotated[float | None, DURATION] = None
    preferred_batches: Annotated[tuple[int, ...] | None, BATCHES] = None
    graphs: Annotated[str | None, one_of("on", "off", "required")] = None
    strategy: Annotated[str | None, one_of("lazy", "eager", "none")] = None
    cuda_graphs: Annotated[str | None, one_of("on", "off")] = None
    allocation: Annotated[str | None, one_of("static", "on_profile_change", "user_managed")] = None
    profile: Annotated[int | None, whole(0)] = None
    profiles: Annotated[tuple[Any, ...] | None, PROFILES] = None
    instances: Annotated[int | None, whole(1, MOST_INSTANCES)] = None
    weight_budget: Annotated[int | None, SIZE] = None
    copies: Annotated[str | None, one_of("auto", "sm", "engine")] = None
    warm_up: Annotated[str | tuple[int, ...] | None, WARM_UP] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    """The model repository, an absolute path, and the options of models by their names.

    `cache` is the directory of built plans and compiled kernels, an absolute path, or None for what `server.keeping` says.
    `build_timeout` is the seconds that the build of one ONNX file may take on a GPU, 0 for as many as it takes.
    """

    repository: Annotated[Path, TEXT]
    cache: Annotated[Path | None, TEXT] = None
    build_timeout: Annotated[float, DURATION] = 900.0
    options: Mapping[str, ModelOptions] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """A tenant: its share of the device as exactly one of `granules`, `cores` and `sms`, its limits and its rights.

    `memory` is the bytes that its requests and their answers may take at a time where they wait and run, which on a GPU are
    pinned from the start. `port` is a socket of its own, besides the server's; `front_cores` are the core numbers, ascending,
    that its HTTP process runs on, None for what `ServerConfig.front_cores` says; as much is None for `max_execution`.
    """

    name: str
    port: Annotated[int | None, whole(1, 65535)] = None
    front_cores: Annotated[tuple[int, ...] | None, CORES] = None
    granules: Annotated[int | None, whole(1)] = None
    cores: Annotated[int | None, whole(1)] = None
    sms: Annotated[int | None, whole(1)] = None
    max_execution: Annotated[float | None, DURATION] = None
    queue: Annotated[int, whole(1)] = 64
    in_flight: Annotated[int, whole(1)] = 2
    memory: Annotated[int, size_from(2**20)] = 512 * 2**20
    models: Annotated[tuple[str, ...], NAMES]
    keys_sha256: Annotated[tuple[str, ...], DIGESTS] = ()

    def may_call(self, model: str) -> bool:
        """Whether this tenant sees the model of this name."""
        return model in self.models or "*" in self.models

    def share(self, unit: str, sizes: Sequence[int]) -> int:
        """Return how many granules this is on a device whose granules have these sizes in `unit`s (`core` or `SM`).

        Raises ConfigError when the device counts in other units, or the share is no whole number of granules.
        """
        key, asked = self._asked()
        if key == "granules":
            return asked
        if key != _SHARE_OF_UNIT.get(unit):
            instead = _SHARE_OF_UNIT.get(unit, "granules")
            raise self._problem(key, f"this device is shared out in {unit}s; use '{instead}' instead")
        if asked % sizes[0]:
            multiples = ", ".join(str(sizes[0] * count) for count in range(1, len(sizes) + 1))
            raise self._problem(key, f"{asked} is not in whole granules of {sizes[0]}; expected one of {multiples}")
        return asked // sizes[0]

    def term(self, count: int) -> str:
        """The share as the file says it, and how many granules that is where it says another number."""
        key, asked = self._asked()
        return f"{dotted(('tenants', self.name, key))} {asked}{f' ({count} granules)' if count != asked else ''}"

    def _asked(self) -> tuple[str, int]:
        shares = {key: value for key in _SHARES if (value := getattr(self, key)) is not None}
        if problems := [f"{dotted(path)}: {text}" for path, text in _share_faults(self.name, shares)]:
            raise ConfigError(problems)
        return next(iter(shares.items()))

    def _problem(self, key: str, text: str) -> ConfigError:
        return ConfigError([f"{dotted(('tenants', self.name, key))}: {text}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything configured; `tenants` by name in the file's order, `source` names the file for people."""

    server: ServerConfig = field(default_factory=ServerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    models: ModelsConfig
    tenants: Mapping[str, TenantConfig]
    source: str

    def counts(self, unit: str, sizes: Sequence[int]) -> tuple[dict[str, int], list[str]]:
        """Granules by tenant on such a device, see `TenantConfig.share`, and what is wrong with shares, alone and together."""
        counts: dict[str, int] = {}
        problems: list[str] = []
        for name, tenant in self.tenants.items():
            try:
                counts[name] = tenant.share(unit, sizes)
            except ConfigError as error:
                problems += error.problems
        if sum(counts.values()) > len(sizes):
            problems.append(self._too_many(counts, unit, sizes))
        return counts, [f"{self.source}: {text}" for text in problems]

    def fit(self, unit: str, sizes: Sequence[int]) -> None:
        """Raise ConfigError with all that is wrong with the shares on such a device."""
        _, problems = self.counts(unit, sizes)
        if problems:
            raise ConfigError(problems)

    def _too_many(self, counts: Mapping[str, int], unit: str, sizes: Sequence[int]) -> str:
        terms = " + ".join(self.tenants[name].term(count) for name, count in counts.items())
        wanted, there = sum(counts.values()), len(sizes)
        of = f"{unit}s" if sizes[0] == 1 else f"granules of {sizes[0]} {unit}s"
        lower = f"lower {'them' if len(counts) > 1 else 'it'} by {wanted - there}"
        return f"{terms} = {wanted} {of}, but the device has {there}: {lower}"


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
            yield from _share_faults(name, tenant)


def _name_faults(name: str) -> Iterator[Fault]:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        yield ("tenants", name), "not a tenant's name; it travels in headers: use letters, digits, '.', '_' and '-'"


def _share_faults(name: str, tenant: Mapping[str, object]) -> Iterator[Fault]:
    shares = [key for key in _SHARES if key in tenant]
    if not shares and not set(_SHARES) & set(as_meant(tenant, keys(TenantConfig))):
        yield ("tenants", name), f"no share of the device; expected one of {', '.join(_SHARES)}"
    if len(shares) > 1:
        yield ("tenants", name), f"{' and '.join(shares)} given; a share is only one of them"


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
