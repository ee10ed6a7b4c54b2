"""What may be configured, as frozen objects; `server.config.file` reads them from a TOML file.

Only keys that do something exist. Sizes are bytes and durations seconds; objects made in code are not checked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from .tables import Fault, as_meant, dotted, keys
from .values import (
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
    size_from,
    whole,
)

MOST_INSTANCES = 16
"""Executors that a tenant may bind of one model: each has memory of its own on the device and on the host."""

_SHARES = ("granules", "cores", "sms")
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

    `cache` is the directory of built plans and compiled kernels, absolute, or None for what `server.device.cache_paths` says.
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
        if problems := [f"{dotted(path)}: {text}" for path, text in share_faults(self.name, shares)]:
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


def share_faults(name: str, tenant: Mapping[str, object]) -> Iterator[Fault]:
    """What is wrong with the share that a tenant's table or object asks for: it has to be exactly one."""
    shares = [key for key in _SHARES if key in tenant]
    if not shares and not set(_SHARES) & set(as_meant(tenant, keys(TenantConfig))):
        yield ("tenants", name), f"no share of the device; expected one of {', '.join(_SHARES)}"
    if len(shares) > 1:
        yield ("tenants", name), f"{' and '.join(shares)} given; a share is only one of them"
