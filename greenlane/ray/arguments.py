"""What the application is given: the configuration of all servers, how many there are, and which tenants are on which."""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PATHS = (("models", "repository"), ("models", "cache"), ("server", "audit"), ("server", "usage_dir"))
"""Keys with paths, which a file of its own would make relative to its own folder on each machine."""
_PORTS = ("port", "grpc_port")


class WrongArguments(ValueError):
    """An argument of the application, or the configuration, cannot be used; the text has every mistake."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """`toml`: the text of the configuration. A server has `gpus` GPUs or, if that is 0, `cores` cores.

    `tenants`: by tenant the numbers of the servers that get its requests, all where it is not named.
    """

    toml: str
    servers: int
    gpus: int
    cores: int
    ingresses: int
    tenants: Mapping[str, tuple[int, ...]]

    @property
    def version(self) -> str:
        """Identifies the configuration: servers of another one do not share what was changed while serving."""
        return hashlib.sha256(self.toml.encode()).hexdigest()


def read(given: Mapping[str, Any]) -> Arguments:
    """Check the arguments, which are texts where they come from a command line. Blocks. Raises WrongArguments."""
    mistakes = [f"{name}: unknown; expected {', '.join(_KNOWN)}" for name in given.keys() - set(_KNOWN)]
    counts = {name: _count(name, given.get(name, default), least, mistakes) for name, (default, least) in _COUNTS.items()}
    toml = _toml(given.get("config"), mistakes)
    if not counts["gpus"] and not counts["cores"]:
        mistakes.append("gpus, cores: a server needs gpus=1, or gpus=0 and the number of its cores, such as cores=4")
    tenants = _tenants(given.get("tenants", {}), toml, counts["servers"], mistakes)
    if mistakes:
        raise WrongArguments("\n".join(mistakes))
    return Arguments(toml, tenants=tenants, **counts)


_COUNTS = {"servers": (1, 1), "gpus": (1, 0), "cores": (0, 0), "ingresses": (1, 1)}
"""By name the default and the least."""
_KNOWN = ("config", "tenants", *_COUNTS)


def _count(name: str, value: Any, least: int, mistakes: list[str]) -> int:
    try:
        if isinstance(value, bool) or int(value) != float(value) or int(value) < least:
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        mistakes.append(f"{name}: {value!r}; expected a whole number of {least} or more")
        return 0


def _toml(path: Any, mistakes: list[str]) -> str:
    """The text of the configuration, which is to hold on every machine; its own checks are each server's."""
    if not isinstance(path, str) or not path:
        mistakes.append("config: missing; expected the path of greenlane.toml")
        return ""
    try:
        text = Path(path).read_text()
        document = tomllib.loads(text)
    except (OSError, ValueError) as error:
        mistakes.append(f"config: {path} cannot be read: {error}")
        return ""
    for table, key in _PATHS:
        value = document.get(table, {}).get(key)
        if isinstance(value, str) and value not in ("", "-") and not Path(value).is_absolute():
            mistakes.append(f"{table}.{key}: {value!r}; expected an absolute path, as each server reads it on its own machine")
    for name, tenant in document.get("tenants", {}).items():
        mistakes += [
            f"tenants.{name}.{key}: leave it out, as requests come through Ray Serve" for key in _PORTS if key in tenant
        ]
    return text


def _tenants(given: Any, toml: str, servers: int, mistakes: list[str]) -> dict[str, tuple[int, ...]]:
    if not isinstance(given, Mapping):
        mistakes.append(f"tenants: {given!r}; expected numbers of servers by tenant, such as {{acme: [0, 1]}}")
        return {}
    known, found = tomllib.loads(toml).get("tenants", {}), {}
    for name, numbers in given.items():
        if name not in known:
            mistakes.append(f"tenants.{name}: the configuration has no such tenant")
        if not isinstance(numbers, list) or not numbers or any(number not in range(servers) for number in numbers):
            mistakes.append(f"tenants.{name}: {numbers!r}; expected a list of numbers from 0 to {servers - 1}")
        else:
            found[name] = tuple(numbers)
    return found
