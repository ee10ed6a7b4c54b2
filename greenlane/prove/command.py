"""`greenlane prove`, from a command line to an exit status."""

import json
import shlex
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from signal import SIGINT
from time import perf_counter
from typing import Any

from server.command_line import configuration_file

from ..load import wire
from ..options import check_writable
from . import server, text
from .access import Access, CannotProve, ServerEnded
from .command_line import Options, parse
from .document import document
from .findings import Findings
from .lend import lending
from .page import render
from .proving import Run, prove


class Say:
    """Progress on standard error, a line each, with the seconds since it began."""

    def __init__(self) -> None:
        self._began = perf_counter()

    def say(self, what: str) -> None:
        """Say what happens now."""
        print(f"[{perf_counter() - self._began:3.0f} s] {what}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str], program: str) -> int:
    """Run a command line and return the exit status; see `command_line`."""
    options = parse(arguments, program)
    try:
        check_writable(options.json, options.html)
        findings = _prove(options, f"{program} {shlex.join(arguments)}".strip())
    except (CannotProve, OSError, ServerEnded) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + SIGINT
    print(text.render(findings))
    if options.json:
        Path(options.json).write_text(json.dumps(document(findings), indent=2) + "\n", encoding="utf-8")
    if options.html:
        Path(options.html).write_text(render(findings), encoding="utf-8")
    return findings.status


def _prove(options: Options, command: str) -> Findings:
    say = Say().say
    if options.url is not None:
        keys, admin = _keys(options.keys)
        access, alive = server.running(options.url, keys, admin)
        return _run(options, command, access, alive, False, options.url, say)
    source = configuration_file(options.config) or "the demo"
    if options.lending:
        return lending(options, source, command, say)
    say(f"starting a server of {source}")
    with server.started(options.config, say) as started:
        return _run(options, command, started.access, started.alive, True, source, say)


def _run(options: Options, command: str, access: Access, alive: Any, own: bool, source: str, say: Any) -> Findings:
    names = [each["name"] for each in access.administer("GET", "/admin/tenants")["tenants"]]
    if options.only is not None and options.only not in names:
        raise CannotProve(f"--only {options.only!r}: there is no such tenant; there are {', '.join(names)}")
    return prove(Run(access, alive, own, source, options.seconds, options.only, command, say, options.memory, options.strains))


def _keys(path: str | None) -> tuple[dict[str, str], str | None]:
    """The tenants' keys and the administrator's. Raises CannotProve."""
    if path is None:
        return {}, None
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotProve(f"--keys {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CannotProve(f"--keys {path}: {error}") from error
    tenants, admin = found.get("tenants", {}), found.get("admin")
    if not isinstance(tenants, dict) or not all(isinstance(each, str) for each in (*tenants.values(), admin or "")):
        raise CannotProve(f"--keys {path}: expected `admin = KEY` and, in [tenants], `NAME = KEY`, each in quotes")
    try:
        for key in (*tenants.values(), admin or ""):
            wire.bearer(key)
    except ValueError as error:
        raise CannotProve(f"--keys {path}: {error}") from error
    return tenants, admin
