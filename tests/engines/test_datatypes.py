import pytest

from engines import DATATYPES

PROTOCOL = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2, "BYTES": 0,
}  # fmt: skip
KINDS = {"BO": "bool", "UI": "uint", "IN": "int", "FP": "float", "BF": "float", "BY": "bytes"}


def test_the_types_are_those_of_the_protocol() -> None:
    assert {name: datatype.size for name, datatype in DATATYPES.items()} == PROTOCOL


@pytest.mark.parametrize("name", PROTOCOL)
def test_a_type_shows_its_protocol_name_and_kind(name: str) -> None:
    assert repr(DATATYPES[name]) == DATATYPES[name].name == name
    assert DATATYPES[name].kind == KINDS[name[:2]]


@pytest.mark.parametrize("name", sorted(PROTOCOL.keys() - {"BYTES"}))
def test_an_array_of_a_type_is_its_wire_form(name: str) -> None:
    datatype = DATATYPES[name]
    assert datatype.numpy.itemsize == datatype.size
    assert datatype.numpy == datatype.numpy.newbyteorder("<")


@pytest.mark.parametrize(("name", "config"), [("BYTES", "TYPE_STRING"), ("FP32", "TYPE_FP32"), ("BOOL", "TYPE_BOOL")])
def test_triton_s_configuration_has_names_of_its_own(name: str, config: str) -> None:
    assert DATATYPES[name].config_name == config
