"""Facts, what the server knows and shows: one class gives what processes send each other, an answer's JSON, and its schema.

Times in facts are milliseconds where their names end so, else seconds; they are rounded where they are made.
"""

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, get_origin

from msgspec import NODEFAULT, Meta, Struct, structs
from pydantic import BaseModel, ConfigDict, Field, create_model


class Fact(Struct, forbid_unknown_fields=True):
    """Base of facts. The docstring and a text in a field's annotation are their descriptions: `Annotated[int, "In units."]`.

    With `omit_defaults` a field that may be left out is documented as one that may be null as well.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        """What FastAPI documents an answer by."""
        return handler(_schema(cls))


@cache
def _schema(fact: type[Fact]) -> type[BaseModel]:
    """The same fields for pydantic. Cached, as a document names each class once."""
    fields: dict[str, Any] = {}
    for each in structs.fields(fact):
        kind, notes = each.type, list[Any]()
        if get_origin(kind) is Annotated:
            kind, notes = kind.__origin__, kind.__metadata__
        about: dict[str, Any] = {}
        for note in notes:
            about |= {"examples": note.examples} if isinstance(note, Meta) else {"description": note}
        if each.default is not NODEFAULT:
            kind, about["default"] = kind | None, None
        elif each.default_factory is not NODEFAULT:
            about["default_factory"] = each.default_factory
        fields[each.encode_name] = kind, Field(**about)
    rules = ConfigDict(extra="forbid", protected_namespaces=())
    return create_model(fact.__name__, __doc__=fact.__doc__, __config__=rules, **fields)


def milliseconds(seconds: float) -> float:
    """The same time in milliseconds, to the microsecond."""
    return round(1e3 * seconds, 3)
