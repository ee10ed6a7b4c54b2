"""Tables of the configuration as messages have them: plain values by key, which msgspec turns into MessagePack and back."""

from collections.abc import Sequence
from typing import Any

from ...config.schema import ModelOptions
from ...config.tables import Section
from ...config.tenant import TenantConfig
from ...config.text import TextOptions


def tenant_of(fields: dict[str, Any]) -> TenantConfig:
    """The tenant's configuration of these values."""
    return TenantConfig.model_construct(**tuples_of(fields))


def options_of(fields: dict[str, Any]) -> ModelOptions:
    """The table [models.NAME] of these values, with the class of `text` again."""
    options = ModelOptions.model_construct(**tuples_of(fields))
    return options if options.text is None else options.model_copy(update={"text": TextOptions(*options.text)})


def values_of(table: Section, keys: Sequence[str]) -> dict[str, Any]:
    return {key: getattr(table, key) for key in keys}


def tuples_of(values: dict[str, Any]) -> dict[str, Any]:
    """These values with tuples again where MessagePack has made lists of them."""
    return {key: _tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _tuple(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(each) if isinstance(each, list) else each for each in value)
