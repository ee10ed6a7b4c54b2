"""Protobuf messages from a table in code, so that nothing has to be generated from others' sources.

A field is a text of label, type, name and number: `optional string name 1`, `repeated int64 dims 4`. The type of a map is those
of its keys and its values: `map string:string metric_tags 10`. A message has at most one of the fields labelled `oneof`. A type
that begins with a capital is another message, or an enum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def message_classes(
    package: str, messages: Mapping[str, Sequence[str]], enums: Mapping[str, str] | None = None, syntax: str = "proto3"
) -> dict[str, Any]:
    """The classes of these messages by name. The values of an enum are numbered from 0.

    They are in a pool of their own, because classes of the same names may be loaded in this process too, such as a client's.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax=syntax)
    for name, values in (enums or {}).items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add_field(message, package, *field.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def made_at_once(classes: Mapping[str, Any]) -> list[object]:
    """Every object that protobuf would make at first use of these classes, on whichever thread that is: keep the list.

    Descriptors, their options, and the classes of maps' entries are made when they are asked for, and while nothing refers to
    them they are made and freed again and again, in tables that all threads share and that no lock guards but the GIL.
    """
    found: list[object] = []
    messages = [each.DESCRIPTOR for each in classes.values()]
    for message in messages:
        found += (message, message.GetOptions(), message_factory.GetMessageClass(message))
        messages += message.nested_types
        for field in message.fields:
            found += (field, field.GetOptions(), field.containing_oneof)
            if (enum := field.enum_type) is not None:
                found += (enum, enum.GetOptions(), enum.values_by_number, *enum.values)
        found += (message.fields, message.fields_by_name, message.oneofs)
    return found


def _add_field(message: descriptor_pb2.DescriptorProto, package: str, label: str, kind: str, name: str, number: str) -> None:
    field = message.field.add(name=name, number=int(number))
    field.label = field.LABEL_REPEATED if label in ("repeated", "map") else field.LABEL_OPTIONAL
    if label == "map":
        kind = f"{message.name}.{_add_entry(message, package, kind, name)}"
    if kind.islower():
        field.type = field.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type_name = f".{package}.{kind}"
    if label == "oneof":
        field.oneof_index = 0
        if not message.oneof_decl:
            message.oneof_decl.add(name="choice")


def _add_entry(message: descriptor_pb2.DescriptorProto, package: str, kinds: str, name: str) -> str:
    """Add the message that protobuf requires for the entries of a map; return its name, which protobuf prescribes."""
    key, _, kind = kinds.partition(":")
    entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    _add_field(entry, package, "optional", key, "key", "1")
    _add_field(entry, package, "optional", kind, "value", "2")
    return entry.name
