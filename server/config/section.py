"""What every table of the configuration is, and the error of one that cannot be served."""

from collections.abc import Iterable

from pydantic import BaseModel


class ConfigError(Exception):
    """A configuration that cannot be served. `problems` are lines that name a key, its value and what was expected."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Section(BaseModel, frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, defer_build=True):
    """A table of the file; fields with `exclude` are not keys of it. Built at first use: HTTP processes only unpickle them."""
