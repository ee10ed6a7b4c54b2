import json
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.errors import BadRequest
from server.protocol.json_document import parameters, parse, refuse, short, show

from .messages import nested

TEXT = st.text(alphabet='ab:",\\{}[]é\n', max_size=6)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=9)


@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_valid_object_is_parsed_whatever_its_strings_contain(document: dict[str, object]) -> None:
    assert parse(json.dumps(document).encode()) == document


@given(st.dictionaries(TEXT, JSON, min_size=1, max_size=3), st.data())
def test_repeated_key_is_refused_in_any_object(document: dict[str, object], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(document)))
    inside = json.dumps(document)[:-1] + f", {json.dumps(key)}: 0}}"
    wrapping = data.draw(
        st.sampled_from(["%s", '{"a": %s}', '{"inputs": [%s]}', '{"inputs": [{"data": [[%s]]}]}', '{"data": %s}'])
    )
    with pytest.raises(BadRequest) as refusal:
        parse((wrapping % inside).encode())
    assert str(refusal.value) == f"the request body has the key {show(key)} twice in one object"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("[]", "an array"),
        ('"a"', "a string"),
        ("1", "an integer"),
        ("1.5", "a number"),
        ("true", "a boolean"),
        ("null", "null"),
    ],
)
def test_non_object_body_is_refused_with_its_type(body: str, kind: str) -> None:
    with pytest.raises(BadRequest, match=f"^the override is {kind}; expected an object$"):
        parse(body.encode(), "the override")


@pytest.mark.parametrize("levels", [2, 100, 1000])
@pytest.mark.parametrize("leaf", ["1", '"no:key"'])
def test_a_document_is_read_or_refused_however_deeply_it_is_nested(levels: int, leaf: str) -> None:
    body = f'{{"deep": {nested(levels, leaf)}}}'.encode()
    try:
        document = parse(body)
    except BadRequest as refusal:
        assert levels > 100
        assert str(refusal) == "the request body is nested too deeply"  # noqa: PT017
    else:
        assert list(document) == ["deep"]


@given(JSON)
@example(1e23)
@example(-(2.0**63))
def test_what_is_shown_is_short_json(value: object) -> None:
    text, whole = show(value), json.dumps(value, ensure_ascii=False)
    if type(value) is float and value.is_integer() and abs(value) >= 2**63:  # So the parser has integers beyond 64 bits.
        whole = f"{Decimal(repr(value)):f}"
    assert text == whole or (len(text) == 43 and whole.startswith(text.removesuffix("...")))


def test_long_names_are_shortened_in_messages() -> None:
    assert short("a" * 40) == "a" * 40
    assert short("a" * 41) == "a" * 40 + "..."
    with pytest.raises(BadRequest, match=r"^parameters\.a{40}\.\.\.: null; expected a string"):
        parameters({"parameters": {"a" * 100_000: None}})


def test_deeply_nested_value_is_refused_without_being_quoted() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(BadRequest, match=r"^a: something nested very deeply is an array; expected a string$"):
        refuse("a", value, "a string")
