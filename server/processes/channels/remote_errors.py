"""Errors that cross from one process to another: by the name of their class and their text."""

from typing import Final

from partitions import DeviceLost, DeviceUnavailable, DoesNotFit, Misplaced, PartitionError

from ...config.tables import ConfigError
from ...errors import BadRequest, Conflict, Failed, NotFound, QueueFull, Unavailable

KINDS: Final = {
    kind.__name__: kind
    for kind in (
        BadRequest,
        Conflict,
        DeviceLost,
        DeviceUnavailable,
        DoesNotFit,
        Failed,
        Misplaced,
        NotFound,
        PartitionError,
        QueueFull,
        Unavailable,
    )
}
"""Errors that arrive as what they were; they are made of their text alone."""


def describe(error: Exception) -> tuple[str, str]:
    """The name of the error's class and its text."""
    return type(error).__name__, str(error)


def rebuild(kind: str, text: str) -> Exception:
    """The error again; one of another class becomes Failed, with its name in the text."""
    if kind == ConfigError.__name__:
        return ConfigError(text.split("\n"))
    known = KINDS.get(kind)
    return known(text) if known else Failed(f"{kind}: {text}")
