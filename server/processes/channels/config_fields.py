"""Tables of the configuration as messages have them: plain values by key, which msgspec turns into MessagePack and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...config.schema import ModelOptions
from ...config.section import Section
from ...config.tenant import TenantConfig
from ...config.text import TextOptions


def fields_of(tenant: TenantConfig) -> dict[str, Any]:
    """A tenant's configuration as a message has it."""
    return values_of(tenant, list(TenantConfig.model_fields))


def tenant_of(fields: dict[str, Any]) -> TenantConfig:
    """The tenant's configuration again."""
    return TenantConfig.model_construct(**tuples_of(fields))


def options_fields(options: Mapping[str, ModelOptions]) -> dict[str, dict[str, Any]]:
    """Tables [models.NAME] as a message has them."""
    return {name: values_of(each, list(ModelOptions.model_fields)) for name, each in options.items()}


def options_of(fields: Mapping[str, dict[str, Any]]) -> dict[str, ModelOptions]:
    """The tables again."""
    tables = {name: ModelOptions.model_construct(**tuples_of(each)) for name, each in fields.items()}
    return {name: _with_text(each) for name, each in tables.items()}


def _with_text(options: ModelOptions) -> ModelOptions:
    """The same with the class of `text` again."""
    return options if options.text is None else options.model_copy(update={"text": TextOptions(*options.text)})


def values_of(table: Section, keys: Sequence[str]) -> dict[str, Any]:
    return {key: getattr(table, key) for key in keys}


def tuples_of(values: dict[str, Any]) -> dict[str, Any]:
    """These values with tuples again where MessagePack has made lists of them."""
    return {key: _tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _tuple(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(each) if isinstance(each, list) else each for each in value)
