"""An OpenAPI document as one page of HTML, without scripts and without anything from elsewhere.

FastAPI's own page loads Swagger UI from a content delivery network. Servers often stand where that cannot be reached; and where
it can, a foreign script would run in the origin of the admin API, which without an admin key trusts pages of its own origin.
"""

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Object = Mapping[str, Any]

_PAGE = re.compile(r"(?<![\w/])(?:/admin/docs|/docs|docs/[\w/-]+\.md)(?![\w/])")
_DOCUMENTATION = "https://github.com/greenlane-server/greenlane/blob/main/"

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1b1f24; }
code, pre { font: 14px/1.5 ui-monospace, monospace; } pre { background: #f3f4f6; padding: .5rem; overflow-x: auto; }
body { overflow-wrap: anywhere; } nav ul { padding-left: 1.25rem; }
h3 { margin: 2rem 0 .25rem; } table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid #d8dce1; }
@media (prefers-color-scheme: dark) { body { background: #16191d; color: #e4e7eb; } pre { background: #23272d; }
a { color: #8ab4f8; } td, th { border-color: #3a4048; } }
"""


def render(document: Object, json_path: str) -> str:
    """The whole page; `json_path` is where the document itself is served."""
    info, title = document["info"], escape(f"{document['info']['title']} {document['info']['version']}")
    tags = "".join(_tag(document, tag) for tag in document["tags"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8>"
        f'<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f"{_paragraphs(info['description'])}"
        f'<p>For tools: <a href="{json_path}">{json_path}</a>, OpenAPI {escape(document["openapi"])}.</p>'
        f'{_contents(document)}{tags}<h2 id="authorization">Authorization</h2>{_security(document)}'
        f'<h2 id="schemas">Schemas</h2>{"".join(_schemas(document))}</html>\n'
    )


def _contents(document: Object) -> str:
    """Links to every tag and operation, and to what follows them."""
    parts = "".join(
        f'<li><a href="#{_anchor(tag)}">{escape(tag["name"])}</a><ul>'
        + "".join(
            f'<li><a href="#{escape(operation["operationId"])}"><code>{method.upper()} {escape(path)}</code></a>'
            for method, path, operation in _operations(document, tag)
        )
        + "</ul>"
        for tag in document["tags"]
    )
    last = '<li><a href="#authorization">Authorization</a><li><a href="#schemas">Schemas</a>'
    return f"<nav aria-label=Contents><h2>Contents</h2><ul>{parts}{last}</ul></nav>"


def _operations(document: Object, tag: Object) -> list[tuple[str, str, Object]]:
    return [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if tag["name"] in operation["tags"]
    ]


def _anchor(tag: Object) -> str:
    return "tag-" + re.sub(r"\W+", "-", tag["name"]).lower()


def _tag(document: Object, tag: Object) -> str:
    found = [_operation(*each) for each in _operations(document, tag)]
    return f'<h2 id="{_anchor(tag)}">{escape(tag["name"])}</h2>{_paragraphs(tag["description"])}{"".join(found)}'


def _operation(method: str, path: str, operation: Object) -> str:
    parameters = [
        (escape(f"{each['name']} ({each['in']})"), _text(each.get("description", "")))
        for each in operation.get("parameters", ())
    ]
    answers = [(escape(status), _answer(response)) for status, response in operation["responses"].items()]
    schemes = dict.fromkeys(name for each in operation.get("security", ()) for name in each)
    authorization = f"<p>Authorization: {', '.join(map(_link, schemes))}</p>" if schemes else ""
    return (
        f'<h3 id="{escape(operation["operationId"])}"><code>{method.upper()} {escape(path)}</code></h3>'
        f"<p><b>{_text(operation['summary'])}</b></p>{_paragraphs(operation.get('description', ''))}"
        f"{authorization}{_table(parameters)}{_body(operation)}{_table(answers)}"
    )


def _body(operation: Object) -> str:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        return f"<p>Body: {_kind(content['schema'])}</p>"
    return ""


def _answer(response: Object) -> str:
    kinds = [_kind(content["schema"]) for content in response.get("content", {}).values() if content.get("schema")]
    return f"{_text(response['description'])} {', '.join(kinds)}"


def _security(document: Object) -> str:
    schemes = document["components"]["securitySchemes"]
    return _table([(f'<span id="{name}">{name}</span>', _text(each["description"])) for name, each in schemes.items()])


def _schemas(document: Object) -> Iterator[str]:
    for name, schema in document["components"]["schemas"].items():
        required = schema.get("required", ())
        rows = [
            (
                escape(field if field in required else f"{field} (optional)"),
                f"{_kind(each)} {_text(each.get('description', ''))}",
            )
            for field, each in schema.get("properties", {}).items()
        ]
        yield f'<h3 id="{name}"><code>{name}</code></h3>{_paragraphs(schema.get("description", ""))}{_table(rows)}'


def _kind(schema: Object) -> str:
    """The type of a value, as HTML."""
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if "const" in schema or "enum" in schema:
        return " | ".join(f"<code>{escape(repr(value))}</code>" for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " | ".join(_kind(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    if isinstance(extra := schema.get("additionalProperties"), Mapping):
        return f"object of {_kind(extra)}"
    return escape(schema.get("type", "any"))


def _link(name: str) -> str:
    return f'<a href="#{escape(name)}">{escape(name)}</a>'


def _table(rows: list[tuple[str, str]]) -> str:
    """Two columns; the cells are HTML."""
    return f"<table>{''.join(f'<tr><td>{first}<td>{second}' for first, second in rows)}</table>" if rows else ""


def _paragraphs(text: str) -> str:
    return "".join(f"<p>{_text(part)}</p>" for part in text.split("\n\n") if part)


def _text(text: str) -> str:
    """A description as HTML; what stands between backquotes is code, and names of pages are links."""
    parts = _PAGE.sub(_page, escape(text)).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def _page(name: re.Match[str]) -> str:
    where = name[0] if name[0].startswith("/") else f"{_DOCUMENTATION}{name[0]}"
    return f'<a href="{where}">{name[0]}</a>'
