"""What msgspec does not know to encode.

It checks what arrives by the annotations of fields, which classes compiled by mypyc do not keep: so those that are sent are
Python's in a compiled wheel too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from engines import DATATYPES

from ...config.schema import ModelOptions
from ...config.tables import Section
from ...config.tenant import TenantConfig
from ...config.text import TextOptions
from ...protocol.classification import Labels

_NUMPY = {each.numpy.str: each.numpy for each in DATATYPES.values()}
"""NumPy parses what it is given as a type, and may raise a SyntaxError."""


def encode_hook(value: Any) -> Any:
    """Encode the types that msgspec does not know: data types of numpy, in signatures, tables of the configuration, labels of
    classes, and views of dicts.
    """
    if isinstance(value, np.dtype):
        return value.str
    if isinstance(value, (ModelOptions, TenantConfig, TextOptions)):
        return values_of(value, list(type(value).model_fields))
    if isinstance(value, Labels):
        return dict(value.files)
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def decode_hook(kind: Any, value: Any) -> Any:
    """Decode them again. Raises TypeError or ValueError."""
    if kind is ModelOptions:
        return _options_of(msgspec.convert(value, dict[str, Any]))
    if kind is TenantConfig:
        return _tenant_of(msgspec.convert(value, dict[str, Any]))
    if kind is Labels:
        return Labels(msgspec.convert(value, dict[str, bytes]))
    if value not in _NUMPY:
        raise ValueError("expected a data type of the protocol")
    return _NUMPY[value]


def _tenant_of(fields: dict[str, Any]) -> TenantConfig:
    """The tenant's configuration of these values."""
    return TenantConfig.model_construct(**tuples_of(fields))


def _options_of(fields: dict[str, Any]) -> ModelOptions:
    """The table [models.NAME] of these values, with the class of `text` again."""
    text = fields.get("text")
    return ModelOptions.model_construct(**tuples_of(fields) | {"text": text and TextOptions.model_construct(**text)})


def values_of(table: Section, keys: Sequence[str]) -> dict[str, Any]:
    return {key: getattr(table, key) for key in keys}


def tuples_of(values: dict[str, Any]) -> dict[str, Any]:
    """These values with tuples again where MessagePack has made lists of them."""
    return {key: _tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _tuple(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(each) if isinstance(each, list) else each for each in value)
