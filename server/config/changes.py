"""What may change in a configuration while it is served, and what differs between two. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .forms import cut, form_of, literal
from .schema import Config, ModelOptions
from .server import ServerConfig
from .tables import KeyPath, Section, dotted
from .tenant import FENCES, SHARES, TenantConfig

LIVE_OF_SERVER = ("admin_key_sha256", "allowed_hosts", "cors_origins", "default_tenant", "drain_grace", "drain_timeout")
"""Keys of [server] that may change while it serves."""
LIVE_OF_MODELS = ("watch",)
"""Keys of [models] that may."""
LIMITS_OF_TENANT = (
    "requests_per_second",
    "burst_requests",
    "bytes_per_second",
    "burst_bytes",
    "max_connections",
    "max_large_bodies",
)
LIVE_OF_TENANT = ("keys_sha256", "models", "weights", "target_p99", "target_rate", *LIMITS_OF_TENANT, *SHARES, *FENCES)
"""Keys of [tenants.NAME] that may."""
WITHOUT_LOADING = ("weights", "text")
"""Keys of [models.NAME] for which the model is not loaded again. All of them may change."""
ABSENT = "(not set)"
_DIGITS = 8
"""Digits of a digest that are shown."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key of the file, and its values as text; of keys' digests only the first digits. `live`: it needs no restart.

    `why` says why it does, where that is not plain.
    """

    key: str
    old: str
    new: str
    live: bool
    why: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def compare(old: Config, new: Config) -> list[Change]:
    """Every key whose value differs, in the order of the tables."""
    found = list(_within(("server",), old.server, new.server, LIVE_OF_SERVER))
    found += _tables("devices" if old.devices or new.devices else "", old.named_devices, new.named_devices, ())
    found += _within(("models",), old.models, new.models, LIVE_OF_MODELS)
    for name in dict.fromkeys((*old.models.options, *new.models.options)):  # An empty table says what no table does.
        before, after = (each.models.options.get(name, ModelOptions()) for each in (old, new))
        found += _within(("models", name), before, after, tuple(ModelOptions.model_fields))
    return found + list(_tables("tenants", old.tenants, new.tenants, LIVE_OF_TENANT, _fixed(old, new)))


def arrivals(old: Config, new: Config) -> list[str]:
    """The tenants that come."""
    return [name for name in new.tenants if name not in old.tenants]


def removals(old: Config, new: Config) -> list[str]:
    """The tenants that go."""
    return [name for name in old.tenants if name not in new.tenants]


def resized(old: Config, new: Config) -> list[str]:
    """The tenants that stay, and whose share is another one in the file."""
    return [
        name
        for name, tenant in new.tenants.items()
        if name in old.tenants and any(getattr(tenant, key) != getattr(old.tenants[name], key) for key in SHARES)
    ]


def _fixed(old: Config, new: Config) -> Callable[[str], str]:
    """Says why a tenant cannot come or go while the server runs; "" if it can."""
    going = {old.tenants[name].port: name for name in removals(old, new)}
    tenants = [each for config in (old, new) for each in config.tenants.values()]
    borrower = next((each.name for each in tenants if each.burst is not None), "")

    def why(name: str) -> str:
        tenant = new.tenants[name] if name in new.tenants else old.tenants[name]
        if name in new.tenants and tenant.grpc_port is not None:
            return "it has a grpc_port"
        if name in new.tenants and tenant.port is not None and (had := going.get(tenant.port)):
            return f"its port is that of tenant {had} until that has gone, which a reload before can have it do"
        if borrower:
            return f"tenant {borrower} has a burst, and who may lend to whom is settled at the start"
        return ""

    return why


def with_tables(config: Config, server: ServerConfig, tenants: Mapping[str, TenantConfig]) -> Config:
    """The same with these tables."""
    return config.model_copy(update={"server": server, "tenants": MappingProxyType(dict(tenants))})


def loaded_again(old: Config, new: Config) -> dict[str, ModelOptions]:
    """The tables [models.NAME] that are others in a way for which the model has to be loaded again."""
    found = {}
    for name in dict.fromkeys((*old.models.options, *new.models.options)):
        before, after = (each.models.options.get(name, ModelOptions()) for each in (old, new))
        if before.model_copy(update={key: getattr(after, key) for key in WITHOUT_LOADING}) != after:
            found[name] = after
    return found


def with_options(config: Config, options: Mapping[str, ModelOptions]) -> Config:
    """The same with these tables [models.NAME]."""
    return config.model_copy(update={"models": config.models.model_copy(update={"options": MappingProxyType(dict(options))})})


def _tables(
    parent: str,
    old: Mapping[str, Section],
    new: Mapping[str, Section],
    live: tuple[str, ...],
    fixed: Callable[[str], str] | None = None,
) -> Iterator[Change]:
    """The changes of tables by name. `fixed` says why a whole one cannot come or go; without it none can."""
    for name in dict.fromkeys((*old, *new)):
        path = (parent, name) if parent else ("device",)
        if name in old and name in new:
            yield from _within(path, old[name], new[name], live)
        else:
            why = fixed(name) if fixed else ""
            values = ("a table", ABSENT) if name in old else (ABSENT, "a table")
            yield Change(dotted(path), *values, bool(fixed) and not why, why)


def _within(path: KeyPath, old: Section, new: Section, live: tuple[str, ...]) -> Iterator[Change]:
    for key, field in type(old).model_fields.items():
        before, after = getattr(old, key), getattr(new, key)
        if not field.exclude and before != after:
            yield Change(dotted((*path, key)), _text(field, before), _text(field, after), key in live)


def written(section: Section, keys: Iterable[str]) -> list[str]:
    """These keys of a section as a file has them, such as `lend = "1ms"`, without those that have their default."""
    fields = {key: type(section).model_fields[key] for key in keys}
    values = {key: getattr(section, key) for key, field in fields.items() if getattr(section, key) != field.default}
    return [f"{key} = {_text(fields[key], value)}" for key, value in values.items()]


def _text(field: Any, value: Any) -> str:
    """A value as a file has it; all but tables cut off where they are long."""
    if value is None:
        return ABSENT
    form = form_of(field)
    if form.secret:
        return ", ".join(f"{each[:_DIGITS]}..." for each in ((value,) if isinstance(value, str) else value)) or "none"
    found = form.write(value)
    return literal(found) if isinstance(found, dict) else cut(literal(found))
