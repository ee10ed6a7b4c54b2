"""Command lines of `python -m server`, `greenlane serve` and `greenlane check`, read without importing the server.

So `--help` and mistakes are answered at once.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

BESIDE = "greenlane.toml"
"""The configuration that is served where no other is named, if the current folder has it."""

_DESCRIPTION = "Serve models to tenants, each on its own share of a device. Without a configuration: a demo."
_EXAMPLES = """\
examples:
  {program}                            greenlane.toml of this folder, or else the demo, on http://127.0.0.1:8000
  {program} --config greenlane.toml    your models and tenants
  {program} --port 0                   on a free port, which the log names

exit status: 0 stopped by a signal after draining; 1 not started, such as for a port in use; 2 the command line or the
configuration is wrong; 70 it hung, as the stacks in its log show, and has to be started again
"""


_BY_ITSELF = f"$GREENLANE_CONFIG, else {BESIDE} of this folder"
DEFAULT_CONFIGURATION = f"{_BY_ITSELF}, else the demo"
"""`configuration_file` as the help of commands says it."""


def configuration_file(named: str | None) -> str | None:
    """The configuration to serve: the one named, or that of GREENLANE_CONFIG, or greenlane.toml of the current folder.

    None is the demo.
    """
    return named or os.environ.get("GREENLANE_CONFIG") or (BESIDE if Path(BESIDE).is_file() else None)


def file_name(text: str) -> str:
    """For argparse: the name of a file. An empty one, as of a shell's variable that is not set, is not as good as none."""
    if not text:
        raise argparse.ArgumentTypeError("empty; expected the name of a file")
    return text


@dataclass(frozen=True, slots=True)
class Options:
    """Check the configuration file `check`, or serve `config` with these values in place of its own."""

    check: str | None = None
    config: str | None = None
    host: str | None = None
    port: int | None = None
    log_level: str | None = None
    autopilot: str | None = None


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line of `python -m server [check]`, by default this process's. Raises SystemExit."""
    program = "python -m server"
    parser = _parser(program, _DESCRIPTION, _EXAMPLES)
    _add_serve_options(parser)
    about = "check: print what the configuration in FILE would serve, and everything wrong with it; without it: serve"
    parser.add_argument("command", metavar="COMMAND", nargs="?", help=about)
    parser.add_argument("file", metavar="FILE", nargs="?", type=file_name, help="the file to check; the same as --config FILE")
    words = parser.parse_intermixed_args(arguments)
    if words.command == "check":
        overrides = words.host, words.port, words.log_level, words.autopilot
        if any(given is not None for given in overrides) or (words.file is None) == (words.config is None):
            parser.error("check takes one FILE and no other options, as in: check greenlane.toml")
        return Options(check=words.file or words.config)
    if words.command:
        parser.error(_not_a_command(words.command, alone=not words.file))
    return Options(config=words.config, host=words.host, port=words.port, log_level=words.log_level, autopilot=words.autopilot)


def parse_serve(arguments: Sequence[str], program: str) -> Options:
    """Read what follows `greenlane serve`. Raises SystemExit."""
    parser = _parser(program, _DESCRIPTION, _EXAMPLES)
    _add_serve_options(parser)
    words = only_options(parser, arguments)
    return Options(config=words.config, host=words.host, port=words.port, log_level=words.log_level, autopilot=words.autopilot)


def only_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Read a command line that has `--config` and no words by themselves. Raises SystemExit."""
    words, unknown = parser.parse_known_args(arguments)
    if unknown and os.path.exists(unknown[0]):
        parser.error(f"unexpected {unknown[0]!r}; did you mean --config {unknown[0]}?")
    if unknown and not unknown[0].startswith("-"):
        parser.error(f"unexpected {unknown[0]!r}; a configuration is given as --config FILE")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return words


def parse_check(arguments: Sequence[str], program: str) -> Options:
    """Read what follows `greenlane check`. Raises SystemExit."""
    description = "Load every model that a configuration names, print what would be served, and everything wrong with it."
    status = "exit status: 0 all of it can be served; 1 some of it cannot; 2 the configuration is wrong or does not fit"
    parser = _parser(program, description, status)
    parser.add_argument("file", metavar="FILE", nargs="?", type=file_name, help=f"TOML configuration; default: {_BY_ITSELF}")
    parser.add_argument("--config", metavar="FILE", type=file_name, help="the same")
    words = parser.parse_args(arguments)
    file = None if words.file and words.config else configuration_file(words.file or words.config)
    if file is None:
        parser.error(f"expected one FILE, as in: {program} greenlane.toml")
    return Options(check=file)


def _parser(program: str, description: str, epilog: str) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    text = epilog.replace("{program}", program)
    return argparse.ArgumentParser(prog=program, description=description, epilog=text, formatter_class=formatter)


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    about = f"TOML configuration; default: {DEFAULT_CONFIGURATION}"
    parser.add_argument("--config", metavar="FILE", type=file_name, help=about)
    parser.add_argument("--host", type=_address, help="address to listen on, instead of server.host")
    parser.add_argument("--port", type=_port, help="port to listen on, instead of server.port; 0 for a free one")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="instead of server.log_level")
    parser.add_argument("--autopilot", choices=["off", "dry-run", "on"], help="instead of server.autopilot")


def _not_a_command(word: str, alone: bool) -> str:
    if alone and os.path.exists(word):
        return f"{word!r} is not a command; did you mean --config {word}?"
    hint = "did you mean 'check'?" if get_close_matches(word, ["check"]) else "expected check"
    return f"{word!r} is not a command; {hint}"


def _port(text: str) -> int:
    if len(text) <= 5 and text.isdecimal() and text.isascii() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}; expected 0 to 65535")


def _address(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("empty, which would be every address of this machine; write 0.0.0.0 for that")
    return text
