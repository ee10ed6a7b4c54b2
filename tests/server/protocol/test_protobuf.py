"""Messages from tables."""

from google.protobuf import message_factory

from server.protocol.protobuf import made_at_once, message_classes

MESSAGES = {
    "Outer": ("optional string name 1", "map string:Inner inners 2", "oneof Kind kind 3", "oneof Inner inner 4"),
    "Inner": ("repeated int64 numbers 1",),
}


def test_what_protobuf_makes_at_first_use_is_made_at_once_and_kept() -> None:
    """An object that is asked for again is one of those: its references are those here, in the list, and by protobuf."""
    classes = message_classes("test", MESSAGES, {"Kind": "A B"}, syntax="proto2")
    objects = made_at_once(classes)
    held = set(map(id, objects))
    outer = classes["Outer"].DESCRIPTOR
    entry = outer.fields_by_name["inners"].message_type
    for asked in (
        outer,
        outer.fields_by_name["kind"],
        outer.fields_by_name["kind"].enum_type,
        outer.fields_by_name["kind"].enum_type.values_by_name["B"],
        outer.fields_by_name["inner"].containing_oneof,
        entry,
        entry.GetOptions(),
        entry.fields_by_name["value"],
        message_factory.GetMessageClass(entry),
        classes["Inner"].DESCRIPTOR.fields_by_name["numbers"],
    ):
        assert id(asked) in held, asked
