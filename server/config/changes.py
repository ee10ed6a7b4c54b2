"""What may change in a configuration while it is served, and what differs between two. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .schema import Config, ModelOptions
from .section import Section
from .server import ServerConfig
from .tables import KeyPath, dotted
from .tenant import TenantConfig
from .values import form_of, shown

LIVE_OF_SERVER = ("admin_key_sha256", "allowed_hosts", "cors_origins", "default_tenant", "drain_grace", "drain_timeout")
"""Keys of [server] that may change while it serves."""
LIMITS_OF_TENANT = (
    "requests_per_second",
    "burst_requests",
    "bytes_per_second",
    "burst_bytes",
    "max_connections",
    "max_large_bodies",
)
LIVE_OF_TENANT = ("keys_sha256", "models", "weights", "target_p99", "target_rate", *LIMITS_OF_TENANT)
"""Keys of [tenants.NAME] that may."""
LIVE_OF_MODEL = ("weights",)
"""Keys of [models.NAME] that may."""
ABSENT = "(not set)"
_DIGITS = 8
"""Digits of a digest that are shown."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key of the file, and its values as text; of keys' digests only the first digits. `live`: it needs no restart."""

    key: str
    old: str
    new: str
    live: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def compare(old: Config, new: Config) -> list[Change]:
    """Every key whose value differs, in the order of the tables."""
    found = list(_within(("server",), old.server, new.server, LIVE_OF_SERVER))
    found += _tables("devices" if old.devices or new.devices else "", old.named_devices, new.named_devices, ())
    found += _within(("models",), old.models, new.models, ())
    for name in dict.fromkeys((*old.models.options, *new.models.options)):  # An empty table says what no table does.
        before, after = (each.models.options.get(name, ModelOptions()) for each in (old, new))
        found += _within(("models", name), before, after, LIVE_OF_MODEL)
    return found + list(_tables("tenants", old.tenants, new.tenants, LIVE_OF_TENANT))


def with_tables(config: Config, server: ServerConfig, tenants: Mapping[str, TenantConfig]) -> Config:
    """The same with these tables."""
    return config.model_copy(update={"server": server, "tenants": MappingProxyType(dict(tenants))})


def with_weights(config: Config, weights: Mapping[str, Mapping[str, float]]) -> Config:
    """The same with these weights in [models.NAME], by model, and no others."""
    options = dict(config.models.options)
    for name in dict.fromkeys((*options, *weights)):
        given = tuple(weights[name].items()) if name in weights else None
        options[name] = options.get(name, ModelOptions()).model_copy(update={"weights": given})
    return config.model_copy(update={"models": config.models.model_copy(update={"options": MappingProxyType(options)})})


def _tables(parent: str, old: Mapping[str, Section], new: Mapping[str, Section], live: tuple[str, ...]) -> Iterator[Change]:
    """The changes of tables by name."""
    for name in dict.fromkeys((*old, *new)):
        path = (parent, name) if parent else ("device",)
        if name in old and name in new:
            yield from _within(path, old[name], new[name], live)
        else:
            yield Change(dotted(path), *(("a table", ABSENT) if name in old else (ABSENT, "a table")), False)


def _within(path: KeyPath, old: Section, new: Section, live: tuple[str, ...]) -> Iterator[Change]:
    for key, field in type(old).model_fields.items():
        before, after = getattr(old, key), getattr(new, key)
        if not field.exclude and before != after:
            yield Change(dotted((*path, key)), _text(field, before), _text(field, after), key in live)


def _text(field: Any, value: Any) -> str:
    """A value as a file has it."""
    if value is None:
        return ABSENT
    form = form_of(field)
    if form.secret:
        return ", ".join(f"{each[:_DIGITS]}..." for each in ((value,) if isinstance(value, str) else value)) or "none"
    return _inline(form.write(value))


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_inline(each)}' for key, each in value.items())} }}"
    return shown(value)
