"""Types of the commands' options, for argparse: what an experiment cannot do is refused before it begins."""

import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

WRONG_COMMAND_LINE = 64
"""The exit status (EX_USAGE of sysexits.h) of commands that need argparse's 2 for something else."""


class CommandParser(ArgumentParser):
    """The parser of such a command; in `examples`, {program} stands for its name."""

    def __init__(self, program: str, description: str, examples: str) -> None:
        super().__init__(
            prog=program,
            description=description,
            epilog=examples.replace("{program}", program),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """End with WRONG_COMMAND_LINE."""
        self.print_usage(sys.stderr)
        self.exit(WRONG_COMMAND_LINE, f"{self.prog}: error: {message}\n")


def check_writable(*paths: Path | str | None) -> None:
    """Raise OSError for a file that cannot be written: better now than in a minute. None and - are none. Leaves no new file."""
    for path in paths:
        try:
            if path and str(path) != "-":
                new = not os.path.lexists(path)
                open(path, "ab").close()
                if new:
                    os.unlink(path)
        except OSError as error:
            raise OSError(f"{path} cannot be written: {error.strerror}") from error


def checked(read: Callable[[str], object]) -> Callable[[str], object]:
    """For argparse: an ArgumentTypeError with the text of the error."""

    def convert(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error

    return convert


def count(text: str) -> int:
    """A whole number from 1 on."""
    return _whole(text, 1, None, "a whole number from 1 on")


def whole(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, 0, None, "a whole number from 0 on")


def port(text: str) -> int:
    """A TCP port, except 0, on which no server listens."""
    return _whole(text, 1, 65535, "a port from 1 to 65535")


def positive(text: str) -> float:
    """A number above 0, of seconds or of requests a second: no more than a clock can wait for."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e9:
        raise ArgumentTypeError(f"{text!r}; expected a number above 0" + " and up to 1e9" * (number > 0))
    return number


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The name of an input, and its shape. Raises ValueError."""
    name, colon, sizes = text.rpartition(":")
    if not (colon and name) or not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", sizes, re.ASCII):
        raise ValueError(f"{text!r} is no shape; expected INPUT:1x3x224x224")
    return name, tuple(map(int, sizes.split("x")))


DEFAULT_URL = "http://127.0.0.1:8000"


def server_url(text: str, key: str) -> str:
    """The address of a server, without a slash at its end. A host alone is asked on the port that servers have by default.

    `key` says where a key is given. Raises ValueError, which repeats no password.
    """
    whole = text if "://" in text else f"http://{text}"
    if "@" in whole:
        raise ValueError(f"an address with a name or a password; give the address alone, and the admin key in {key}")
    expected = f"{text!r}; expected the address of a server, such as {DEFAULT_URL}"
    try:
        parts = urlsplit(whole)
        port = parts.port
    except ValueError as error:
        raise ValueError(expected) from error
    if parts.scheme not in ("http", "https") or not parts.netloc or port == 0:
        raise ValueError(expected)
    if port is None and whole != text:
        parts = parts._replace(netloc=f"{parts.netloc}:{urlsplit(DEFAULT_URL).port}")
    return parts.geturl().rstrip("/")


def _whole(text: str, least: int, most: int | None, expected: str) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) and (most is None or int(text) <= most)):
        raise ArgumentTypeError(f"{text!r}; expected {expected}")
    return int(text)
