"""Facts, what the server knows and shows: one class gives what processes send each other, an answer's JSON, and its schema.

Times in facts are milliseconds where their names end so, else seconds; they are rounded where they are made.
"""

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, get_origin

from msgspec import NODEFAULT, Meta, Struct, structs
from pydantic import BaseModel, ConfigDict, Field, create_model


class Fact(Struct, forbid_unknown_fields=True):
    """Base of facts. The docstring and a text in a field's annotation are their descriptions: `Annotated[int, "In units."]`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        """What FastAPI documents an answer by."""
        return handler(_schema(cls))


@cache
def _schema(fact: type[Fact]) -> type[BaseModel]:
    """The same fields for pydantic. Cached, as a document names each class once."""
    fields: dict[str, Any] = {}
    for each in structs.fields(fact):
        is_noted = get_origin(each.type) is Annotated
        kind = each.type.__origin__ if is_noted else each.type
        for note in each.type.__metadata__ if is_noted else ():
            kind = Annotated[kind, _note(note)]
        fields[each.encode_name] = kind, ... if each.default is NODEFAULT else each.default
    rules = ConfigDict(extra="forbid", protected_namespaces=())
    return create_model(fact.__name__, __doc__=fact.__doc__, __config__=rules, **fields)


def _note(note: Any) -> Any:
    """A note on a field as pydantic has it."""
    if isinstance(note, Meta):
        return Field(examples=note.examples)
    return Field(description=note) if isinstance(note, str) else note


def milliseconds(seconds: float) -> float:
    """The same time in milliseconds, to the microsecond."""
    return round(1e3 * seconds, 3)
