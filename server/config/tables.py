"""Tables of a TOML file, and the error of one that cannot be served.

How a path of keys is written, and which known key a mistyped one is near to.
"""

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import BaseModel

KeyPath = tuple[str, ...]

_MOST_LISTED = 12
_NEAR = 0.7  # Of 1, which is equal: `prot` is near `port`, `priority` is not.
_BARE = re.compile("[A-Za-z0-9_-]+")


def dotted(path: KeyPath) -> str:
    """The path as TOML writes it: parts that are no bare keys are quoted."""
    return ".".join(part if _BARE.fullmatch(part) else json.dumps(part, ensure_ascii=False) for part in path)


def nearest(name: str, known: Iterable[str]) -> str:
    """A question with the known name that is nearest to this one, or a list of known names where none is near."""
    known = list(known)
    if near := near_to(name, known):
        return f"did you mean {near!r}?"
    listed = " or ".join(known[:_MOST_LISTED])
    return f"expected {listed}" if len(known) <= _MOST_LISTED else f"expected one of {len(known)}, such as {listed}"


def near_to(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one is probably a typo of, or that has it as one of its words; None where none is near."""
    folded = {text.casefold(): text for text in known}
    name = name.casefold()
    near = get_close_matches(name, folded, n=1, cutoff=_NEAR) or [text for text in folded if name in text.split("_")]
    return folded[near[0]] if near else None


class ConfigError(Exception):
    """A configuration that cannot be served. `problems` are lines that name a key, its value and what was expected."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Section(BaseModel, frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, defer_build=True):
    """A table of the file; fields with `exclude` are not keys of it. Built at first use: HTTP processes only unpickle them."""
