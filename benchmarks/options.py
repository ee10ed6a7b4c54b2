"""Types of options that several benchmarks have, besides those of the commands (`greenlane.options`)."""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence


def cores(text: str) -> tuple[int, ...]:
    """Core numbers and ranges of them with commas between, in the order of the text. Raises ValueError."""
    parts = [re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part, re.ASCII) for part in text.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    if not (len(ranges) == len(parts) and all(ranges)):
        raise ValueError(f"{text!r}; expected cores such as 12-15 or 0,2")
    return tuple(core for each in ranges for core in each)


def named(there: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of these names, with commas between."""

    def convert(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in there]:
            raise ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(there)}")
        return names

    return convert
