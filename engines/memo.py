"""A bounded cache of values that can be computed again."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """A dict to which `remember` adds: at most `limit` entries, the oldest of which is dropped for a new one.

    Looking up is a plain dict lookup and changes nothing, so that it may be done by several threads. Adding is for one
    thread at a time.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def remember(self, key: K, value: V) -> None:
        """Add or replace an entry."""
        if key not in self and len(self) >= self.limit:
            del self[next(iter(self))]
        self[key] = value
