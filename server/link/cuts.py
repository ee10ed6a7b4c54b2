"""How many rows a batch may have so that it runs on the tenant's wide partition, by batch key: words in the tenant's link.

The device side alone writes them (`server.workers.cutting` decides), and the HTTP side reads them when it joins requests,
without a lock. A word has the checksum of a batch key and the rows, so words of two writings may be mixed without harm;
whatever a word holds, `most` returns a number from 1 to that which it is given. A tenant that borrows nothing has no word here.
"""

import zlib
from collections.abc import Mapping

from .messages import ModelKey, Shape

COUNT = 32
"""Batch keys that have a word at a time."""
_ROWS = 32
"""Bits of a word for the rows, below those of the checksum."""
_MOST_ROWS = (1 << _ROWS) - 1
_MOST_REMEMBERED = 256

BatchKey = tuple[ModelKey, tuple[Shape, ...]]
"""A model, and the shapes of its inputs without the first dimension."""


class Cuts:
    """`words` are COUNT 64-bit integers; those up to the first that is 0 are in use. One thread writes, one other reads."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._checksums: dict[BatchKey, int] = {}

    def __repr__(self) -> str:
        return f"<Cuts of {len([word for word in self._words if word])} batch keys>"

    def write(self, rows: Mapping[BatchKey, int]) -> None:
        """Have batches of these keys, of which the first COUNT count, be joined up to so many rows, and no others be cut."""
        count = 0
        for key, each in list(rows.items())[:COUNT]:
            self._words[count] = _checksum(key) << _ROWS | each
            count += 1
        if count < COUNT:
            self._words[count] = 0

    def most(self, key: BatchKey, most: int) -> int:
        """The most rows that a batch of this key may have now: from 1 to `most`."""
        if not self._words[0]:
            return most
        checksum = self._checksums.get(key)
        if checksum is None:
            if len(self._checksums) >= _MOST_REMEMBERED:
                self._checksums.clear()
            checksum = self._checksums[key] = _checksum(key)
        for word in self._words:
            if not word:
                break
            if word >> _ROWS == checksum:
                return min(most, max(1, word & _MOST_ROWS))
        return most


def _checksum(key: BatchKey) -> int:
    """The same in all processes, and not 0: then the word would not be in use."""
    return zlib.crc32(repr(key).encode()) or 1
