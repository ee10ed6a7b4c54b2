"""Kernels that a library compiled at run time, kept from one process to the next.

The library's cache is one opaque blob. Many engines, processes and tenants share a file, so the file holds a blob for
each key (engine, library, device, namespace), and four laws keep anybody from losing what others saved:

1. A save replaces its own key only. It reads the file anew, under `<file>.lock`, and renames a whole new file into place.
2. Where another process saved the same key meanwhile, both blobs go through a scratch cache of the library's, which
   takes in what it can; if it keeps only the last, that is ours. The cache in use is never touched.
3. An empty blob never replaces anything.
4. No trouble with the cache reaches an inference: it is a warning, and kernels are compiled again.

Reading takes no lock, since a rename shows the old file or the new one.

In the file is also where the executors of one engine meet: each has a cache of its own, for the reason at `RuntimeCache`.
"""

import io
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from filelock import FileLock

from ..model_files.atomic import replace_file
from ..model_files.frame import Frame, FrameError

log = logging.getLogger("greenlane.engines")

_FILE = Frame(b"\x89GLKRNL\n", 1)

Combine = Callable[[bytes, bytes], bytes]
"""Theirs and ours, in one."""

Warn = Callable[[str], None]
"""Takes the text of a warning."""


class LibraryCache(Protocol):
    """What is used of the library's cache."""

    def serialize(self) -> Any:
        """Its contents in memory that bytes can be read from, or None."""

    def deserialize(self, blob: bytes, /) -> bool:
        """Take in what `serialize` gave; False, and unchanged, where it does not fit this library, driver and GPU."""


class CacheKey(NamedTuple):
    """Whose blob it is: an engine's digest, the library with its version, the device's name, and the tenant's if any."""

    engine: str
    library: str
    device: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Bytes found at the start, bytes last saved by this cache, and whether the library refused what was found."""

    found: int
    saved: int
    refused: bool


class Store(Protocol):
    """Where one blob is kept. Both methods block and raise OSError."""

    def read(self) -> bytes:
        """The blob, empty if there is none."""

    def write(self, blob: bytes, known: bytes, combine: Combine) -> None:
        """Keep `blob`; what is there by then and is not `known` is combined with it."""


class RuntimeCache:
    """One cache of the library's and where it is kept; several engines may share it. Methods may be called from any thread.

    The library's own object must not be used by two threads at once, though: where two first inferences compile into one,
    TensorRT-RTX 1.6.1 crashes the process. So what runs on several threads has a RuntimeCache for each, kept in one place.

    It is saved when it is closed, and failing that when it is collected or the interpreter ends, but once. `warn` is told
    what went wrong; by default it is logged.
    """

    def __init__(self, store: Store, found: bytes = b"", warn: Warn = log.warning) -> None:
        self._kept = _Kept(store, found, warn)
        self._finalizer = weakref.finalize(self, self._kept.close)

    def __enter__(self) -> "RuntimeCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RuntimeCache {self._kept!r}>"

    def leave_to_owner(self) -> None:
        """When the interpreter ends, leave it to what uses it to close this, after all that was made with it."""
        self._finalizer.atexit = False

    def statistics(self) -> CacheStatistics:
        """What became of it so far."""
        return self._kept.statistics()

    def materialize(self, make: Callable[[], LibraryCache], owner: object = None) -> LibraryCache:
        """The library's cache, made and filled by whoever asks first. A CUDA context must be current. Blocks.

        `make` is called again for scratch caches. `owner` is held until this is closed: the engine, which the library's
        own objects do not keep alive. Raises RuntimeError once closed.
        """
        return self._kept.materialize(make, owner)

    def save(self) -> None:
        """Save what is new. Blocks, up to ten seconds for the lock. Never raises: what went wrong is a warning."""
        self._kept.save()

    def close(self) -> None:
        """Save what is new and let go of the library's objects, so before the engine goes. Again, it does nothing."""
        self._finalizer()


def open_cache(where: object, key: CacheKey, timeout: float = 10.0, warn: Warn = log.warning) -> RuntimeCache:
    """A cache kept at `where`: a file's path, "" for nowhere, or a seekable binary stream, which is read now and written
    when saved, as the blob alone. Blocks. A file that is missing is a first run, one that is damaged a warning.

    `timeout` is in seconds, for the lock. `warn` is told what goes wrong. Raises TypeError on anything else.
    """
    store = _store(where, key, timeout, warn)
    return RuntimeCache(store, store.read(), warn)


def kept_kernels(path: Path, key: CacheKey) -> int:
    """How many bytes of kernels a file keeps for this key. Blocks to read it. What is damaged counts as empty."""
    return len(FileStore(path, key, warn=lambda _: None).read())


def _store(where: object, key: CacheKey, timeout: float, warn: Warn) -> Store:
    if isinstance(where, (str, os.PathLike)):
        return FileStore(Path(where).expanduser(), key, timeout, warn=warn) if os.fspath(where) else MemoryStore()
    if isinstance(where, (io.BufferedIOBase, io.RawIOBase)):
        return StreamStore(where)
    raise TypeError(f"a cache is kept in a file, a binary stream or ''; got {where!r}")


class FileStore:
    """One key of a file. `limit` is the most bytes the file's blobs may have together: what was saved longest ago goes."""

    def __init__(
        self, path: Path, key: CacheKey, timeout: float = 10.0, limit: int = 1 << 30, warn: Warn = log.warning
    ) -> None:
        self._path = path
        self._key = json.dumps(key)
        self._timeout = timeout
        self._limit = limit
        self._warn = warn

    def __repr__(self) -> str:
        return str(self._path)

    def read(self) -> bytes:
        return self._entries().get(self._key, b"")

    def write(self, blob: bytes, known: bytes, combine: Combine) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self._path}.lock", timeout=self._timeout):
            entries = self._entries()
            theirs = entries.pop(self._key, b"")
            entries[self._key] = blob if theirs in (b"", known) else combine(theirs, blob)
            fields = [part for key, kept in within(entries, self._limit).items() for part in (key.encode(), kept)]
            replace_file(self._path, _FILE.pack(fields))

    def _entries(self) -> dict[str, bytes]:
        """Every key's blob, in the order they were saved."""
        try:
            fields = _FILE.unpack(self._path.read_bytes())
            return {bytes(key).decode(): bytes(blob) for key, blob in zip(fields[::2], fields[1::2], strict=True)}
        except FileNotFoundError:
            return {}
        except (FrameError, UnicodeDecodeError, OSError) as error:
            self._warn(f"{self._path}: the kernel cache cannot be read, so kernels are compiled again: {error}")
            return {}


class MemoryStore:
    """Nowhere."""

    def __repr__(self) -> str:
        return "in memory"

    def read(self) -> bytes:
        return b""

    def write(self, blob: bytes, known: bytes, combine: Combine) -> None:
        """Nothing to write."""


class StreamStore:
    """A stream that is this blob's alone, in which nobody else writes."""

    def __init__(self, stream: io.BufferedIOBase | io.RawIOBase) -> None:
        self._stream = stream

    def __repr__(self) -> str:
        return repr(self._stream)

    def read(self) -> bytes:
        return self._stream.read() or b""

    def write(self, blob: bytes, known: bytes, combine: Combine) -> None:
        self._stream.seek(0)
        self._stream.truncate()
        self._stream.write(blob)


class _Kept:
    """What has to outlive a RuntimeCache that nobody closed, so that it can still be saved."""

    def __init__(self, store: Store, found: bytes, warn: Warn) -> None:
        self._store = store
        self._warn = warn
        self._known = found  # What the cache in use has taken in, or refused: it need not be combined with.
        self._found = len(found)
        self._saved = 0
        self._refused = False
        self._lock = threading.Lock()
        self._cache: LibraryCache | None = None
        self._make: Callable[[], LibraryCache] | None = None
        self._owner: object = None
        self._closed = False
        self._said = False

    def __repr__(self) -> str:
        return f"{self._store!r}{', closed' if self._closed else ''}"

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(self._found, self._saved, self._refused)

    def materialize(self, make: Callable[[], LibraryCache], owner: object) -> LibraryCache:
        with self._lock:
            if self._closed:
                raise RuntimeError("this kernel cache is closed")
            if self._cache is None:
                cache = make()
                self._refused = bool(self._known) and not cache.deserialize(self._known)
                if self._refused:
                    self._warn(
                        f"{self._store!r}: the kernels kept there do not fit this library, driver and GPU; starting empty"
                    )
                self._cache, self._make, self._owner = cache, make, owner
            return self._cache

    def save(self) -> None:
        with self._lock:
            self._save()

    def close(self) -> None:
        with self._lock:
            self._save()
            self._closed = True
            self._make = None  # It holds the engine's runtime configuration, which goes first, then the cache, then the engine.
            self._cache = None
            self._owner = None

    def _save(self) -> None:
        cache, make = self._cache, self._make
        if cache is None or make is None:
            return
        try:
            blob = _bytes(cache)
            if blob and blob != self._known:
                self._store.write(blob, self._known, lambda theirs, ours: combine(make, theirs, ours))
                self._known, self._saved = blob, len(blob)
        except Exception as error:
            warn, self._said = log.debug if self._said else self._warn, True
            warn(f"{self._store!r}: the kernel cache was not saved: {error}")


def combine(make: Callable[[], LibraryCache], theirs: bytes, ours: bytes) -> bytes:
    """Both blobs in one as far as the library takes them in, and at least ours."""
    scratch = make()
    if not (scratch.deserialize(theirs) and scratch.deserialize(ours)):
        return ours
    return max(ours, _bytes(scratch), key=len)


def within(entries: dict[str, bytes], limit: int) -> dict[str, bytes]:
    """Entries without the first ones, so that the rest has at most `limit` bytes; the last one stays however large."""
    total = sum(map(len, entries.values()))
    while total > limit and len(entries) > 1:
        total -= len(entries.pop(next(iter(entries))))
    return entries


def _bytes(cache: LibraryCache) -> bytes:
    memory = cache.serialize()
    return b"" if memory is None else bytes(memoryview(memory))
