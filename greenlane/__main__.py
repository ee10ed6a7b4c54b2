"""The command `greenlane`, and `python -m greenlane`: finds the subcommand and imports only what that one needs."""

import errno
import os
import select
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

HELP = """\
Greenlane serves models to several tenants from one device, and gives each tenant its own share of it:
cores of a CPU, or SMs of an NVIDIA GPU. It speaks the Open Inference Protocol v2, as Triton and KServe do.

usage: greenlane [COMMAND] [OPTIONS]

commands:
  serve                serve a configuration; this is the default, so that `greenlane --config FILE` does it
  init [FOLDER]        write a configuration of two tenants, and two small models, to start from
  check FILE           load what a configuration names, print what would be served, and everything wrong with it
  curve MODEL          measure a model on shares of the device, and find the smallest that keeps a target
  verify MODEL         compare a model's answers with a reference, for many shapes of its inputs
  prove                find out in minutes whether the tenants of a configuration are isolated on this machine
  top [URL]            show what each tenant of a running server has and uses, live
  build MODEL.onnx     build an engine file for a GPU ahead of time
  inspect FILE.plan    print what an engine file takes, gives and was built from

options:
  -h, --help           print this; `greenlane COMMAND --help` explains one command
  --version            print the version

try it:
  greenlane            serves a demo on http://127.0.0.1:8000: two tenants, two small models
  curl -s localhost:8000/v2/models/stripes

then your own:
  greenlane init       writes greenlane.toml and models/
  greenlane check greenlane.toml
  greenlane --config greenlane.toml
"""

OUTPUT_LOST = 120
"""Python's own exit status for output that could not be written."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What the disk says to which output goes."""
COMMANDS = ("serve", "init", "check", "curve", "verify", "prove", "top", "build", "inspect")
_MAINS = {
    "build": "engines.build",
    "init": "server.starting",
    "inspect": "engines.inspect",
    "prove": "greenlane.prove.command",
    "top": "greenlane.top.command",
}
"""The modules whose `main` gets a command's words; the other commands are in `_run`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status. Without `arguments` it is this process's, which then ends with the status.

    1 where another package hides one of Greenlane's, or the current folder is gone; 2 for a command that does not exist; 120
    where what it prints cannot be written, or no program reads it any more; the rest is each command's.
    """
    try:
        return _main(arguments)
    except BrokenPipeError:
        if not _output_is_lost():
            raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        print(f"greenlane: output cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Where what is left of it goes.
    return _ended(OUTPUT_LOST, arguments)


def _main(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        print(HELP, end="", flush=True)
        return 0
    if first == "--version":
        from . import __version__

        print(f"greenlane {__version__}")
        return 0
    if first and not first.startswith("-") and first not in COMMANDS:
        print(f"greenlane: {_unknown(first)}", file=sys.stderr)
        return 2
    try:
        os.getcwd()
    except FileNotFoundError:
        print("greenlane: the current folder is not there any more; change to another one", file=sys.stderr)
        return 1
    from . import own

    try:
        own.require_own_packages()
    except own.ForeignPackage as error:
        print(f"greenlane: {error}", file=sys.stderr)
        return 1
    own.protect_children()
    if arguments is None:
        from server.host.signals import exit_on_interrupt

        exit_on_interrupt()  # Until what a command needs is imported, which takes seconds, and handles Ctrl-C itself.
    status = _run(first, words[1:]) if first in COMMANDS else _run("serve", words)
    if sys.stdout:
        sys.stdout.flush()
    return _ended(status, arguments)


def _ended(status: int, arguments: Sequence[str] | None) -> int:
    """The status, with which a process of its own ends."""
    if arguments is None:
        from server.host.leaving import leave

        leave(status)
    return status


def _output_is_lost() -> bool:
    """Whether no program reads standard output any more, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _run(command: str, words: list[str]) -> int:
    from server.host import signals

    program = f"greenlane {command}"
    if command in _MAINS:
        module = import_module(_MAINS[command])
        signals.raise_keyboard_interrupt()
        return int(module.main(words, program))
    if command == "curve":
        from .curve.options import parse

        asked = parse(words, program)
        from .curve import command as curve  # Not before the words are known to be right: this imports the server.

        signals.raise_keyboard_interrupt()
        return curve.run(asked, " ".join([program, *words]))
    if command == "verify":
        from .verify.options import parse as parse_verify

        shapes = parse_verify(words, program)
        from .verify import command as verify  # As for curve.

        signals.raise_keyboard_interrupt()
        return verify.run(shapes)
    from server import command_line
    from server.host import forkserver

    signals.exit_on_interrupt()  # Until the server is imported, and handles it.
    options = command_line.parse_check(words, program) if command == "check" else command_line.parse_serve(words, program)
    if options.check is None:
        forkserver.start_early()
    from server.__main__ import run  # Not before the words are known to be right: this imports the server.

    return run(options)


def _unknown(word: str) -> str:
    if Path(word).exists():
        return f"{word!r} is not a command; did you mean `greenlane check {word}` or `greenlane --config {word}`?"
    near = get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(COMMANDS)}"
    return f"{word!r} is not a command; {hint} (greenlane --help)"


if __name__ == "__main__":
    sys.exit(main())
