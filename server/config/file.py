"""Reads a configuration from its TOML file, and reports every problem of the file at once. Everything here blocks."""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from partitions.regular_file import nearest_there, read_regular

from .forms import form_of, shown
from .rules import Problem, problems_between, problems_within
from .schema import Config, DeviceConfig, ModelOptions, ModelsConfig, is_url
from .server import ServerConfig
from .tables import ConfigError, KeyPath, Section, dotted, near_to, nearest
from .tenant import TenantConfig

Table = Mapping[str, Any]
_WHERE = re.compile(r" \(at line (?P<line>[0-9]+), column (?P<column>[0-9]+)\)$")
MOST_BYTES = 4 << 20
"""Bytes of the file; more of it would keep the interpreter, which other threads need too, for seconds."""
MOST_WHOLE = 2**63 - 1
"""Of a whole number: processes send each other no larger ones."""
_GONE: Mapping[KeyPath, str] = MappingProxyType(
    {
        ("server", "fronts"): "this key is gone, as each tenant has an HTTP process; leave it out "
        "(`uvicorn server.app:app` serves all tenants in one process)"
    }
)
"""Keys that there were, and what to do in their place."""
_AT_END = "(at end of document)"
_LINE = 80
"""Characters of a line that are shown."""
_MAY_BE_SECRET = "key"
"""In lines of keys and their digests: a key itself may have been pasted there."""


def load(path: Path) -> Config:
    """The configuration in a file. Raises ConfigError with every problem of it."""
    document, folder = _parse(path), path.absolute().parent
    sections, corrected, found = _examine(document, folder)
    wrong = {key for key, _ in found}
    found += [(key, text) for key, text in _missing(corrected, folder) if key not in wrong]
    if found:
        raise ConfigError([f"{path.name}: {dotted(key)}: {text}" for key, text in found])
    return _assembled(sections, path.name)


def _missing(document: Table, folder: Path) -> Iterator[Problem]:
    """What is not there, or of another kind, of the files and directories that a document names. Blocks."""
    named: dict[tuple[str, str], str] = {}
    for key in [("models", "repository"), ("server", "audit"), ("server", "usage_dir")]:
        table = document.get(key[0])
        value = table.get(key[1]) if isinstance(table, dict) else None
        if isinstance(value, str) and value:
            named[key] = value
    for key, value in named.items():
        there = folder / value
        match key[1]:
            case "repository" if not is_url(value) and not os.path.isdir(there):
                yield key, f"{shown(value)} is not an existing directory: {there}"
            case "audit" if not os.path.isdir(there.parent):
                yield key, f"{shown(value)} is in no existing directory: {there.parent}"
            case "audit" if os.path.exists(there) and not os.path.isfile(there):
                yield key, f'{shown(value)} is there, and no file: {there}; expected a file, or "-" for the log'
            case "usage_dir" if not os.path.isdir(found := nearest_there(there)):
                yield key, f"{shown(value)}: {found} is there, and no directory; expected a directory, or where one can be made"


def salvage(path: Path) -> tuple[Config, frozenset[KeyPath]] | None:
    """The configuration that remains of a file that `load` refuses, without the keys that are wrong, and the paths of these.

    `check` uses it to find further problems. A mistyped key is read as the key it resembles, and the repository need not exist.
    None if no repository or no tenant remains. Raises ConfigError if the file is not TOML.
    """
    folder = path.absolute().parent
    _, document, _ = _examine(_parse(path), folder)
    dropped: set[KeyPath] = set()
    while True:
        sections, _, found = _examine(document, folder)
        if not found:
            return _assembled(sections, path.name), frozenset(dropped)
        key, _ = found[0]
        if not _drop(document, key):
            return None
        dropped.add(key)


def keys(model: type[Section]) -> list[str]:
    """The keys that a table of this model may have in a file."""
    return [name for name, field in model.model_fields.items() if not field.exclude]


def read(model: type[Section], key: str, value: object) -> Any:
    """Validate the value of one key of a table, and convert it to the type that the program uses.

    All other keys of the table must have defaults. Raises ValueError with what came and what was expected.
    """
    try:
        return getattr(model.model_validate({key: value}, context=Path()), key)
    except ValidationError:
        raise ValueError(_problem(model, key, {key: value})) from None


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = read_regular(path, MOST_BYTES)
        return tomllib.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"{path.name or path}: cannot be read at {path.absolute()}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{path.name}: line {line} is not UTF-8, as TOML has to be"]) from error
    except ValueError as error:  # A TOMLDecodeError, or about a number of thousands of digits.
        lines = content.decode("utf-8-sig").split("\n")
        raise ConfigError([f"{path.name}: {_not_toml(str(error), lines)}"]) from error
    except RecursionError as error:
        raise ConfigError([f"{path.name}: not TOML: nested too deeply"]) from error


def _not_toml(text: str, lines: list[str]) -> str:
    """What the parser says of these lines, with where, and how that line begins."""
    text = text.replace("Cannot overwrite a value", "a key or table is there twice")
    if found := _WHERE.search(text):
        number, where = int(found["line"]), f"line {found['line']}, column {found['column']}: "
        text = text[: found.start()]
    elif text.endswith(_AT_END):
        number = max((number for number, line in enumerate(lines, 1) if line.strip()), default=0)
        where = f"line {number}: " if number else ""
    else:  # About a number of thousands of digits.
        return f"not TOML: {text}"
    line = _without_key(lines[:number])
    line = line if line.isprintable() else repr(line)[1:-1]
    line = line if len(line) <= _LINE else f"{line[:_LINE]}..."
    return f"{where}not TOML: {text}{line and f': {line}'}"


def _without_key(lines: list[str]) -> str:
    """The last of these lines; of one in a list of keys, or of a key's digest, only what that is called."""
    if not lines:
        return ""
    begins = (line for line in reversed(lines) if "=" in line or line.lstrip().startswith("["))
    begin = next(begins, lines[-1])
    return f"{begin.partition('=')[0].strip()} = ..." if _MAY_BE_SECRET in begin.casefold() else lines[-1].strip()


def _examine(document: Table, folder: Path) -> tuple[dict[KeyPath, Any], dict[str, Any], list[Problem]]:
    """Validate a document. `folder` is the one that relative paths in it start from.

    Returns the valid tables by path, as pydantic models; the document with mistyped keys corrected; and every problem.
    """
    valid: dict[KeyPath, Any] = {}
    found: list[Problem] = []
    document = _renamed(document, ("server", "device", "devices", "models", "tenants"), (), found)
    corrected: dict[str, Any] = {**document, "models": {}, "tenants": {}}
    if "devices" in document:
        corrected["devices"] = {}
    for path, model, table in _tables(document):
        *parents, name = path
        parent = corrected[parents[0]] if parents else corrected
        if not isinstance(table, dict):
            named = path if path not in (("devices",), ("tenants",)) else (*path, "NAME")
            found.append((path, f"{shown(table)} is not a table; write [{dotted(named)}]"))
            parent[name] = table
            continue
        parent[name] = known = _renamed(table, keys(model), path, found)
        try:
            given = {"name": name} if model is TenantConfig else {}
            valid[path] = section = model.model_validate({**known, **given}, context=folder)
            large = [key for key in known if any(each > MOST_WHOLE for each in _whole_numbers(getattr(section, key)))]
            found += [((*path, key), f"{shown(known[key])} is more than {MOST_WHOLE}, the largest there is") for key in large]
        except ValidationError as error:
            wrong = dict.fromkeys(str(each["loc"][0]) for each in error.errors(include_url=False, include_input=False))
            found += [((*path, key), _problem(model, key, known)) for key in wrong]
        found += problems_within(path, known)
    found += problems_between(corrected)
    return valid, corrected, found


def _whole_numbers(value: object) -> Iterator[int]:
    """Those in a value and its lists."""
    if isinstance(value, tuple):
        for each in value:
            yield from _whole_numbers(each)
    elif isinstance(value, int):
        yield value


def _tables(document: Table) -> Iterator[tuple[KeyPath, type[Section], object]]:
    """Every table that a file has or needs: its path, its pydantic model, and its content.

    In [models], a value that is a table has the options of one served model, even if that is called like a key (`cache`).
    """
    yield ("server",), ServerConfig, document.get("server", {})
    yield ("device",), DeviceConfig, document.get("device", {})
    devices = document.get("devices", {})
    if isinstance(devices, dict):
        yield from ((("devices", name), DeviceConfig, each) for name, each in devices.items())
    else:
        yield ("devices",), DeviceConfig, devices
    models, tenants = document.get("models", {}), document.get("tenants", {})
    options = {}
    if isinstance(models, dict):
        options = {name: each for name, each in models.items() if isinstance(each, dict) and name != "repository"}
        models = {name: each for name, each in models.items() if name not in options}
    yield ("models",), ModelsConfig, models
    yield from ((("models", name), ModelOptions, each) for name, each in options.items())
    if not isinstance(tenants, dict):
        yield ("tenants",), TenantConfig, tenants
        return
    yield from ((("tenants", name), TenantConfig, each) for name, each in tenants.items())


def _renamed(table: Table, known: Iterable[str], path: KeyPath, found: list[Problem]) -> dict[str, Any]:
    """A copy of a table with mistyped keys corrected and other unknown keys removed; all of these are added to `found`.

    If the corrected key exists too, its value is kept; if both values are tables, they are merged.
    """
    known = list(known)
    renamed = {key: value for key, value in table.items() if key in known}
    for key, value in table.items():
        if key in known:
            continue
        gone = _GONE.get((*path, key))
        found.append(((*path, key), gone or f"unknown key; {nearest(key, known)}"))
        if not gone and (name := near_to(key, known)):
            both = isinstance(value, dict) and isinstance(renamed.get(name), dict)
            renamed[name] = {**value, **renamed[name]} if both else renamed.get(name, value)
    return renamed


def _problem(model: type[Section], key: str, table: Table) -> str:
    """The problem with a key that validation refused."""
    form = form_of(model.model_fields[key])
    return f"{shown(table[key], form.secret)} is not {form.expected}" if key in table else f"missing; expected {form.expected}"


def _assembled(valid: Mapping[KeyPath, Any], source: str) -> Config:
    """The configuration made of these tables, by path."""
    options, devices, tenants = (
        {path[1]: each for path, each in valid.items() if path[0] == section and len(path) == 2}
        for section in ("models", "devices", "tenants")
    )
    server = valid["server",]
    if server.default_tenant is None and [bool(each.keys_sha256) for each in tenants.values()] == [False]:
        server = server.model_copy(update={"default_tenant": next(iter(tenants))})
    return Config(
        server=server,
        device=next(iter(devices.values()), valid["device",]),
        devices=devices,
        models=valid["models",].model_copy(update={"options": MappingProxyType(options)}),
        tenants=tenants,
        source=source,
    )


def _drop(table: dict[str, Any], path: KeyPath) -> bool:
    """Remove the key at this path; if it is missing, remove the innermost table on the path, which lacks it.

    Returns False if not even the outermost table exists, so that nothing was removed.
    """
    first, *rest = path
    if first not in table:
        return False
    inner = table[first]
    if not (rest and isinstance(inner, dict) and _drop(inner, tuple(rest))):
        del table[first]
    return True
