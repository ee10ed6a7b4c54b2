"""Notices models whose files have changed on disk, once they stand still."""

import os
import stat
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

_DEEPEST = 16
"""Directories below a model's that are looked into."""
_MOST_FILES = 100_000
"""Files of one model that are looked at: links may show the same ones in very many places."""
Stamp = frozenset[tuple[str, int, int, int]]
"""A model's directory as stat shows it: of each file the path, inode, size and time of change in ns."""


def stamps(root: Path, names: list[str]) -> dict[str, Stamp]:
    """The stamp of each of these models. Blocks. What cannot be read is in its stamp, with the number of the error."""
    return {name: frozenset(islice(_files(f"{root}/{name}", "", ()), _MOST_FILES)) for name in names}


def _files(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int, int, int]]:
    """The files below a directory, and no deeper than `_DEEPEST`; names that begin with a dot are left out.

    `above` are the devices and inodes of the directories that lead here: a link to one of these is not followed.
    """
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError as error:  # It has just been removed, or may not be read.
        yield prefix, 0, 0, error.errno or 0
        return
    for name in names:
        path = f"{folder}/{name}"
        try:
            found = os.stat(path)
        except OSError as error:  # The same, or a dangling link.
            yield f"{prefix}{name}", 0, 0, error.errno or 0
            continue
        if stat.S_ISDIR(found.st_mode):
            yield f"{prefix}{name}/", 0, 0, 0
            if (this := (found.st_dev, found.st_ino)) not in above and len(above) < _DEEPEST:
                yield from _files(path, f"{prefix}{name}/", (*above, this))
        else:
            yield f"{prefix}{name}", found.st_ino, found.st_size, found.st_mtime_ns


class Settling:
    """Pure: says which models have changed and stand still, given the stamps of each look."""

    def __init__(self, served: Mapping[str, Stamp]) -> None:
        self._acted_on = dict(served)
        self._last = dict(served)

    def settled(self, now: Mapping[str, Stamp]) -> list[str]:
        """The models, sorted, that are others than when they were last returned, and the same as at the look before."""
        names = sorted({*now, *self._acted_on})
        changed = [n for n in names if now.get(n) == self._last.get(n) and now.get(n) != self._acted_on.get(n)]
        self._last = dict(now)
        for name in changed:
            if name in now:
                self._acted_on[name] = now[name]
            else:
                del self._acted_on[name]
        return changed
