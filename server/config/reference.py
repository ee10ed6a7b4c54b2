"""Writes what is generated from the configuration's models: `python -m server.config.reference`.

docs/configuration.md explains every key, deploy/greenlane.toml is an example that has all of them, and
deploy/greenlane.schema.json is for editors. A test compares these files with what `files` returns.
"""

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from .file import keys
from .forms import Form, form_of, literal
from .schema import Config, DeviceConfig, ModelOptions, ModelsConfig
from .server import ServerConfig
from .tables import Section
from .tenant import SHARES, TenantConfig
from .values import Cores, Digest, Duration, Names, Origins, Size

ROOT = Path(__file__).parents[2]

_WIDTH = 120
_TABLES: Mapping[str, type[Section]] = {
    "server": ServerConfig,
    "device": DeviceConfig,
    "models": ModelsConfig,
    "models.NAME": ModelOptions,
    "tenants.NAME": TenantConfig,
}
_VALUES: tuple[Any, ...] = (Size, Duration, Cores, Digest, Names, Origins)
_EXAMPLE: tuple[tuple[str, type[Section], Mapping[str, object], tuple[str, ...]], ...] = (
    ("server", ServerConfig, {"default_tenant": "acme"}, ()),
    ("device", DeviceConfig, {}, ()),
    ("models", ModelsConfig, {"repository": "models"}, ()),
    ("models.resnet50", ModelOptions, {}, ()),
    ("tenants.acme", TenantConfig, {"granules": 6, "models": ["resnet50"]}, ("cores", "sms")),
)
"""Tables of the example: their keys that are set, and those that are left out, as each tenant has one share."""

_SHARES: tuple[tuple[str, str, int], ...] = (("globex", "cores", 2), ("initech", "sms", 16))
"""Further tenants of the example, one for each of the other ways to write a share."""


_ABOUT = """An example of a configuration with every key, written by `python -m server.config.reference`. Keys that are \
commented out show their default or, where there is none, an example. Not to be served as it is: a device is shared out in \
cores or in sms, never in both. `greenlane check FILE` says everything that is wrong with FILE."""


def files() -> dict[Path, str]:
    """The generated files, as paths below the repository's root and their text."""
    return {
        Path("docs/configuration.md"): _markdown(),
        Path("deploy/greenlane.toml"): _toml(),
        Path("deploy/greenlane.schema.json"): json.dumps(schema(), indent=2) + "\n",
    }


def schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file."""
    whole = Config.model_json_schema(schema_generator=_Schema)
    tables: dict[str, Any] = whole["$defs"]
    for model in _TABLES.values():
        table = tables[model.__name__]
        table["description"] = _sentences(model.__doc__)
        table.pop("title", None)
        properties = table["properties"] = {key: table["properties"][key] for key in keys(model)}
        for key, each in properties.items():
            each.pop("examples", None)
            if (default := _default(model, key)) is not None:
                each["default"] = default
        table["required"] = [key for key in table.get("required", ()) if key in properties]
    models = tables["ModelsConfig"]
    models["additionalProperties"] = {"$ref": "#/$defs/ModelOptions"}
    cache = models["properties"]["cache"]
    models["properties"]["cache"] = {
        "description": cache.pop("description"),
        "anyOf": [cache, {"$ref": "#/$defs/ModelOptions"}],  # A model may be called so.
    }
    tables["TenantConfig"]["oneOf"] = [{"required": [share]} for share in SHARES]
    del whole["properties"]["source"]
    whole["properties"]["tenants"]["minProperties"] = 1
    whole["properties"]["devices"]["minProperties"] = 1
    whole["not"] = {"required": ["device", "devices"]}
    whole["required"] = ["models", "tenants"]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Greenlane's configuration"}
    return {**head, **{key: value for key, value in whole.items() if key not in ("title", "description")}}


class _Schema(GenerateJsonSchema):
    """Without titles, which only repeat the keys, and without null, which TOML does not have."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _markdown() -> str:
    return "\n".join([_HEAD, *_kinds(), *(line for name, model in _TABLES.items() for line in _table(name, model))]) + "\n"


_HEAD = """\
# Configuration

<!-- Written by `python -m server.config.reference` from the models in server/config: change those, not this. -->

Greenlane reads one TOML file: `greenlane --config FILE`, or the file that `GREENLANE_CONFIG` names, or greenlane.toml of the
folder in which it is started. Without one it serves the demo. `greenlane check FILE` prints what a file would serve and
everything that is wrong with it, all at once.
[deploy/greenlane.toml](../deploy/greenlane.toml) is an example with every key. For completion and checks in an editor (taplo,
VS Code's Even Better TOML) put `#:schema` and the path of [greenlane.schema.json](../deploy/greenlane.schema.json) into the
file's first line. Only `models.repository`, and for each tenant `models` and a share of the device, have to be there.

## Values
"""


def _kinds() -> Iterator[str]:
    """What an error expects of the types that have a form of their own."""
    for annotation in _VALUES:
        form = next(note for note in reversed(annotation.__metadata__) if isinstance(note, Form))
        yield f"- **{form.name}**: {form.expected.removeprefix(f'a {form.name}: ').removeprefix('a SHA-256 digest: ')}"


def _table(name: str, model: type[Section]) -> Iterator[str]:
    yield f"\n## `[{name}]`\n\n{_sentences(model.__doc__)}\n\n| key | type | default | meaning |\n|---|---|---|---|"
    for key in keys(model):
        field = model.model_fields[key]
        default = _default(model, key)
        given = "required" if field.is_required() else "none" if default is None else f"`{literal(default)}`"
        cells = (f"`{key}`", form_of(field).name, given, field.description or "")
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _toml() -> str:
    lines = ["#:schema greenlane.schema.json", *_comment(_ABOUT)]
    for name, model, given, without in _EXAMPLE:
        lines += ["", *_comment(_sentences(model.__doc__)), f"[{name}]"]
        for key in keys(model):
            if key not in without:
                lines += _entry(model, key, given)
    for name, share, count in _SHARES:
        lines += ["", f"[tenants.{name}]", *_entry(TenantConfig, share, {share: count}), 'models = ["*"]']
    return "\n".join(lines) + "\n"


def _entry(model: type[Section], key: str, given: Mapping[str, object]) -> list[str]:
    field = model.model_fields[key]
    value = given.get(key, _default(model, key))
    if value is None:
        value = (field.examples or [None])[0]
    return ["", *_comment(field.description or ""), f"{'' if key in given else '# '}{key} = {literal(value)}"]


def _comment(text: str) -> Iterable[str]:
    return (f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False, break_long_words=False))


def _default(model: type[Section], key: str) -> object:
    """The default as a file has it; None where there is none."""
    field = model.model_fields[key]
    return None if field.is_required() or field.default is None else form_of(field).write(field.default)


def _sentences(doc: str | None) -> str:
    return " ".join((doc or "").split())


def main() -> None:
    """Write the files into the checkout that this module is in."""
    if not (ROOT / "pyproject.toml").is_file():
        raise SystemExit(f"{ROOT} is no checkout of Greenlane")
    for path, text in files().items():
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
