"""The messages are those of Triton's own client."""

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import service_pb2

from server.grpc.messages import MESSAGES
from server.repository.triton_schema import MESSAGE as ModelConfig

ENCODED = {"ModelStreamInferResponse.infer_response", "ModelConfigResponse.config"}
"""Fields that are messages there, and here the bytes of those messages."""


SETTINGS = {"LogSetting": "LogSettingsRequest", "TraceSetting": "TraceSettingRequest"}
"""The messages in which Triton has those of these names, each as SettingValue."""


def theirs(name: str) -> Descriptor:
    if name in SETTINGS:
        return theirs(SETTINGS[name]).nested_types_by_name["SettingValue"]
    for message in service_pb2.DESCRIPTOR.message_types_by_name.values():
        for each in (message, *message.nested_types):
            if each.name == name:
                return each
    raise KeyError(name)


def told(message: Descriptor) -> dict[str, tuple[int, int, bool, str, bool]]:
    """Number, type, label, type of message and membership of a choice of each field, by name."""
    return {field.name: _declared(field) for field in message.fields if f"{message.name}.{field.name}" not in ENCODED}


def _declared(field: FieldDescriptor) -> tuple[int, int, bool, str, bool]:
    kind = field.message_type.name if field.message_type else ""
    return field.number, field.type, field.is_repeated, kind, field.containing_oneof is not None


@pytest.mark.parametrize("name", [name for name in MESSAGES if name != "HealthCheckResponse"])
def test_every_message_is_as_tritons(name: str) -> None:
    assert told(MESSAGES[name].DESCRIPTOR) == told(theirs(name))


@pytest.mark.parametrize("name", sorted(ENCODED))
def test_encoded_fields_have_tritons_numbers(name: str) -> None:
    message, field = name.split(".")
    assert MESSAGES[message].DESCRIPTOR.fields_by_name[field].number == theirs(message).fields_by_name[field].number


def test_a_model_configuration_is_the_same_on_the_wire() -> None:
    config = ModelConfig(name="m", max_batch_size=8)
    config.input.add(name="x", dims=[2, -1], data_type=11)
    answer = MESSAGES["ModelConfigResponse"](config=config.SerializeToString()).SerializeToString()
    read = service_pb2.ModelConfigResponse.FromString(answer).config
    assert (read.name, read.max_batch_size, list(read.input[0].dims)) == ("m", 8, [2, -1])
