"""Limits of configurations in requests, which are read in the process that all tenants share."""

import json
import re
from typing import Any

import pytest

from server.repository import pbtxt
from server.repository.pbtxt import MOST_BYTES, MOST_VALUES, ConfigRefused, read_json, read_text


def versions(count: int) -> str:
    return json.dumps({"version_policy": {"specific": {"versions": list(range(1, count + 1))}}})


def test_a_configuration_of_too_many_bytes_is_refused_before_it_is_read() -> None:
    text = "[" * (MOST_BYTES + 1)
    with pytest.raises(ConfigRefused, match=f"^m: {MOST_BYTES + 1} bytes; expected at most {MOST_BYTES}$"):
        read_json(text, "m")
    with pytest.raises(ConfigRefused, match=f"^m: {2 * MOST_BYTES} bytes"):
        read_json("é" * MOST_BYTES, "m")


def test_a_configuration_of_too_many_values_is_refused() -> None:
    around = 4  # The document, version_policy, specific and versions.
    assert read_json(versions(MOST_VALUES - around), "m").message.version_policy.specific.versions[-1] == MOST_VALUES - around
    for text in (versions(MOST_VALUES - around + 1), json.dumps({"zzz": [[]] * MOST_VALUES})):
        with pytest.raises(ConfigRefused, match=f"^m: more than {MOST_VALUES} values, objects and arrays included"):
            read_json(text, "m")


def test_suggestions_are_limited_to_the_first_unknown_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def near(name: str, *rest: Any, **options: Any) -> list[str]:
        asked.append(name)
        return ["max_batch_size"]

    monkeypatch.setattr(pbtxt, "get_close_matches", near)
    names = [f"max_batch_siz{number}" for number in range(100)]
    expected = tuple(
        f"{name} ({'did you mean max_batch_size?' if index < 4 else 'there is no such field'})"
        for index, name in enumerate(names)
    )
    assert read_json(json.dumps(dict.fromkeys(names, 1)), "m").unread == expected
    assert read_text("\n".join(f"{name}: 1" for name in names), "m").unread == expected
    assert asked == names[:4] * 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"max_batch_size": 8, "max_batch_size": 4}', 'it has the key "max_batch_size" twice in one object'),
        ('{"input": [{"name": "x", "name": "y"}]}', 'it has the key "name" twice in one object'),
        ('{"max_batch_size": 8, "maxBatchSize": 4}', "maxBatchSize: given beside max_batch_size, which is the same"),
        ('{"input": [{"data_type": "TYPE_FP32", "dataType": "TYPE_INT8"}]}', "input[0].dataType: given beside data_type"),
    ],
)
def test_a_field_given_twice_in_json_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigRefused, match=f"^m: {re.escape(why)}"):
        read_json(text, "m")


def test_a_file_of_many_unknown_fields_keeps_its_places() -> None:
    unknown = "".join(f"zzz{number} {{ a: 1 }}\n" for number in range(5_000))
    assert len(read_text(unknown, "m").unread) == 5_000
    with pytest.raises(ConfigRefused, match=r"^m:5001:17 : "):
        read_text(unknown + "max_batch_size: many", "m")
