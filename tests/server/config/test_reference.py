import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from server.config.reference import ROOT, files, schema

EXAMPLE = tomllib.loads((ROOT / "deploy" / "greenlane.toml").read_text())


@pytest.mark.parametrize(("path", "text"), files().items(), ids=lambda each: each.name if isinstance(each, Path) else "")
def test_generated_files_are_current(path: Path, text: str) -> None:
    assert (ROOT / path).read_text() == text, "run python -m server.config.reference"


def test_the_schema_is_valid_and_the_example_keeps_to_it() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(EXAMPLE, schema())


@pytest.mark.parametrize(
    "change",
    [
        {"sever": {}},
        {"server": {"prot": 1}},
        {"server": {"port": "8000"}},
        {"server": {"max_body": "64 MiB"}},
        {"server": {"keep_alive": 75}},
        {"device": {"cores": "0-"}},
        {"tenants": {}},
        {"tenants": {"acme": {"granules": 1}}},
        {"tenants": {"acme": {"granules": 1, "models": ["*"], "name": "acme"}}},
        {"tenants": {"acme": {"models": ["*"]}}},
        {"tenants": {"acme": {"granules": 1, "cores": 1, "models": ["*"]}}},
        {"models": {"repository": "models", "resnet50": {"max_bacth": 1}}},
        {"models": {"repository": "models", "resnet50": {"profiles": [{"x": {"most": [8]}}]}}},
    ],
)
def test_the_schema_refuses_what_the_server_refuses(change: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**EXAMPLE, **change}, schema())


def test_the_schema_has_a_model_that_is_called_like_a_key() -> None:
    jsonschema.validate({**EXAMPLE, "models": {"repository": "models", "cache": {"max_batch": 1}}}, schema())


def test_every_key_in_the_schema_is_described_and_none_may_be_null() -> None:
    tables = schema()["$defs"].values()
    assert all(each["description"] for table in tables for each in table["properties"].values())
    assert '"null"}' not in json.dumps(schema())
