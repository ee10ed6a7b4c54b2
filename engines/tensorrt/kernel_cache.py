"""Keeps the kernels that a library compiled at run time from one process to the next.

The library's cache is one opaque blob. Many engines, processes and tenants share a file, so the file holds a blob for each key
(engine, library, device, namespace). Four rules keep every saved kernel:

1. A save replaces its own key only. It reads the current file under `<file>.lock` and renames a complete new file into place.
2. If another process saved the same key meanwhile, both blobs are merged by a scratch cache of the library. If the library
   keeps only the last one, that is ours. The cache in use is never touched.
3. An empty blob never replaces anything.
4. No error of the cache fails an inference: it is logged as a warning, and kernels are compiled again.

Reading takes no lock, since a rename shows either the old file or the new one. The file is also how caches of one engine share
kernels: see `shared_kernels` for which instances have a cache of their own.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from partitions.cuda.driver_memory import Taken
from partitions.cuda.kernel_loads import KERNEL_LOADS

from ..cuda.locks import TurnLock
from ..model_files.cache_folder import replace_file
from ..model_files.frame import Frame, FrameError
from ..settings import RuntimeSettings

log = logging.getLogger("greenlane.engines")

_FILE = Frame(b"\x89GLKRNL\n", 1)
MOST = 1 << 30
"""Bytes of all kernels of a file."""

Combine = Callable[[bytes, bytes], bytes]
"""Merges the stored blob and ours into one."""

Warn = Callable[[str], None]
"""Logs the text of a warning."""


class LibraryCache(Protocol):
    """The part of the library's cache that is used here."""

    def serialize(self) -> Any:
        """Its contents in memory that bytes can be read from, or None."""

    def deserialize(self, blob: bytes, /) -> bool:
        """Add what `serialize` returned. False, and unchanged, if it does not fit this library, driver and GPU."""


class CacheKey(NamedTuple):
    """Identifies a blob: the digest of the engine or of what its kernels depend on, the library with its version, the device,
    and perhaps a tenant's namespace.

    The device is a GPU's UUID: TensorRT-RTX 1.6.1 refuses what was compiled on another GPU of the same kind and host ("device
    properties mismatch", two H100s).
    """

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


class RuntimeCache:
    """A cache of the library and its store; several engines may share it. Methods may be called from any thread.

    The library's object must not be used by two threads at once, though: if two first inferences compile into one cache,
    TensorRT-RTX 1.6.1 crashes the process. So a thread holds `lock` while it calls the library for a context that uses it.

    `save` and `close` write it to the `store`; without a store it is kept in memory only. `warn` is called with errors; by
    default it logs them. `maker` is the library's engine that makes the cache; by default the first engine that uses it does.
    `taken` counts the device memory that its kernels take; without `taken` nothing counts it.
    """

    def __init__(
        self, store: "FileStore | None" = None, warn: Warn = log.warning, maker: Any = None, taken: Taken | None = None
    ) -> None:
        self.maker = maker
        self.taken = taken
        self.lock = TurnLock()
        """Hold it to make, run or free what uses the cache. Taken after `EXECUTION_LOCK`, before `LIBRARY_LOCK`."""
        self._store = store
        self._warn = warn
        self._known = store.read() if store else b""  # Was read at the start or saved last, so it need not be merged again.
        self._found = len(self._known)
        self._saved = 0
        self._refused = False
        self._saving = threading.Lock()
        """Held while saving, before `lock`: the file's lock may take seconds."""
        self._cache: LibraryCache | None = None
        self._make: Callable[[], LibraryCache] | None = None
        self._owner: object = None
        self._closed = False
        self._said = False

    def __enter__(self) -> "RuntimeCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def loading(self, key: Hashable) -> Iterator[None]:
        """The library may load kernels within the block, the same for each key. Their context must be current."""
        with self.taken.measuring(key, patient=True) if self.taken else nullcontext():
            yield

    def statistics(self) -> CacheStatistics:
        """The statistics so far."""
        return CacheStatistics(self._found, self._saved, self._refused)

    def materialize(self, make: Callable[[], LibraryCache], owner: object = None) -> LibraryCache:
        """The library's cache, created and filled on the first call. A CUDA context must be current. Blocks.

        `make` is called again for scratch caches. `owner`, the engine, is kept alive until this is closed, as the library's
        objects do not do so. Raises RuntimeError once closed.
        """
        with self.lock:
            if self._closed:
                raise RuntimeError("this kernel cache is closed")
            if self._cache is None:
                cache = make()
                self._refused = bool(self._known) and not cache.deserialize(self._known)
                if self._refused:
                    self._warn(f"{self._store}: the kernels kept there do not fit this library, driver and GPU; starting empty")
                self._cache, self._make, self._owner = cache, make, owner
            return self._cache

    def save(self) -> None:
        """Save new kernels. Blocks for up to ten seconds for the lock. Never raises: errors are warnings."""
        with self._saving:
            self._save()

    def close(self) -> None:
        """Save new kernels and release the library's objects; call it before the engine is freed. Calling it again does
        nothing.
        """
        with self._saving:
            if self._closed:
                return
            self._save()
            freeing = self.taken.freeing() if self.taken else nullcontext()
            with self.lock, KERNEL_LOADS.freeing(), freeing:
                self._closed = True
                self._make = None  # Refers to the runtime configuration, which is freed first; then the cache, then the engine.
                self._cache = None
                self._owner = None

    def _save(self) -> None:
        cache, make = self._cache, self._make
        if self._store is None or cache is None or make is None:
            return
        try:
            with self.lock, KERNEL_LOADS.hurrying():
                blob = _bytes(cache)
            if blob and blob != self._known:
                self._store.write(blob, self._known, lambda theirs, ours: combine(make, theirs, ours))
                self._known, self._saved = blob, len(blob)
        except Exception as error:
            warn, self._said = log.debug if self._said else self._warn, True
            warn(f"{self._store}: the kernel cache was not saved: {error}")


def open_cache(
    where: str | os.PathLike[str],
    key: CacheKey,
    timeout: float = 10.0,
    warn: Warn = log.warning,
    maker: Any = None,
    taken: Taken | None = None,
) -> RuntimeCache:
    """A cache that is stored at `where`: a file's path, or "" for nowhere. Blocks to read it.

    A missing file is normal for the first run, a damaged one is a warning. `timeout` is in seconds, for the file's lock.
    `warn`, `maker` and `taken` are as in `RuntimeCache`.
    """
    store = FileStore(Path(where).expanduser(), key, timeout, warn=warn) if os.fspath(where) else None
    return RuntimeCache(store, warn, maker, taken)


def cached_kernel_bytes(path: Path, key: CacheKey) -> int:
    """The size of the blob that a file has for this key. Blocks to read it. A damaged file counts as empty."""
    return len(FileStore(path, key, warn=lambda _: None).read())


class FileStore:
    """The blob of one key of a file. All its blobs have MOST bytes at most: those saved longest ago are dropped. Both methods
    block.
    """

    def __init__(self, path: Path, key: CacheKey, timeout: float = 10.0, warn: Warn = log.warning) -> None:
        self._path = path
        self._key = json.dumps(key)
        self._timeout = timeout
        self._warn = warn

    def __repr__(self) -> str:
        return str(self._path)

    def read(self) -> bytes:
        """The blob, empty if there is none."""
        return self._entries().get(self._key, b"")

    def write(self, blob: bytes, known: bytes, combine: Combine) -> None:
        """Store `blob`. If the stored blob is no longer `known`, the two are combined. Raises OSError."""
        from filelock import FileLock  # Only installed where TensorRT is.

        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self._path}.lock", timeout=self._timeout):
            entries = self._entries()
            theirs = entries.pop(self._key, b"")
            entries[self._key] = blob if theirs in (b"", known) else combine(theirs, blob)
            fields = [part for key, kept in within(entries, MOST).items() for part in (key.encode(), kept)]
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


def combine(make: Callable[[], LibraryCache], theirs: bytes, ours: bytes) -> bytes:
    """Both blobs merged as far as the library can; at least ours."""
    scratch = make()
    if not (scratch.deserialize(theirs) and scratch.deserialize(ours)):
        return ours
    return max(ours, _bytes(scratch), key=len)


def within(entries: dict[str, bytes], limit: int) -> dict[str, bytes]:
    """Entries without the oldest ones, so that the rest has at most `limit` bytes. The last one stays, however large."""
    total = sum(map(len, entries.values()))
    while total > limit and len(entries) > 1:
        total -= len(entries.pop(next(iter(entries))))
    return entries


def _bytes(cache: LibraryCache) -> bytes:
    memory = cache.serialize()
    return b"" if memory is None else bytes(memoryview(memory))


@dataclass(frozen=True, slots=True)
class KernelsRequest:
    """The request to compile a plan's kernels for a partition of `granules` granules of `granule_sms` SMs each,
    in another process, so that the process that serves finds them on disk.

    A library that compiles at run time also loads each kernel as soon as it is compiled. While the driver loads a kernel, it
    holds a lock that every tenant's launches wait for: for milliseconds if the driver itself still has to compile for the GPU,
    and for a fraction of that if it finds the result in its own cache on disk ($CUDA_CACHE_PATH), which that process fills too.
    `settings` are those to run the plan with; their `cache_path` is the file to save the kernels in, by this `key`.
    """

    plan_path: Path
    settings: RuntimeSettings
    granules: int
    granule_sms: int
    key: CacheKey
