"""Types of the commands' options, for argparse: what an experiment cannot do is refused before it begins."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from math import isfinite


def checked(read: Callable[[str], object]) -> Callable[[str], object]:
    """As argparse wants it: what is wrong is told in the words of the error."""

    def convert(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error

    return convert


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"{text!r}; expected a whole number from 1 on")
    return int(text)


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (isfinite(number) and number > 0):
        raise ArgumentTypeError(f"{text!r}; expected a number above 0")
    return number
