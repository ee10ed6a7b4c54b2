"""One cache of kernels for all instances of engines of one structure, so that what one has compiled and loaded the others find.

Each instance that had a cache of its own loaded every kernel again, in calls of the driver that hold a lock which all tenants'
launches wait for (`cuKernelGetFunction`, a millisecond or more each), and compiled some of them again in spite of the file. On
an H200 binding MobileNetV2 a second time took 0.11 s with the first instance's cache, in place of 3.3 s and 184 such calls
(2026-11-23, docs/lab/2026-11-25-change.md).

Kernels do not depend on weights, so engines of one network that was trained several times share a cache, too: versions of a
model, and models that were tuned from the same one. On an H200 a half-width ResNet-18 was bound in 2.7 s, and each of four with
other weights in 0.03 s (tests/gpu/test_engines.py, 2026-11-24). A cache is made from an engine, and TensorRT-RTX 1.6.1
crashed when a cache was saved after its engine was freed. So `load_cache_maker` keeps a small engine that makes all caches.

Two threads must not use the library's cache at once, so a thread that calls the library for one of these instances holds
`RuntimeCache.lock`. Launching a captured graph is no such call. An instance without captured graphs calls the library in each
inference, and would wait while another tenant's instance compiles; so it has a cache of its own. So has each instance of a
library that keeps no kernels, where an instance may stop capturing at any time.
"""

from collections.abc import Callable, Hashable
from threading import Lock, RLock
from typing import Any
from weakref import WeakValueDictionary, finalize

from .kernel_cache import RuntimeCache


class SharedKernels:
    """Opens a cache for the first user, and closes it once all its engines are closed and no user is left.

    It is made for one engine; `join` counts more. Any thread may call.
    """

    def __init__(self, open_cache: Callable[[], RuntimeCache]) -> None:
        self._open_cache = open_cache
        self._lock = RLock()  # Reentrant, as the garbage collector may free an instance during a call.
        self._cache: RuntimeCache | None = None
        self._users = 0
        self._engines = 1

    def join(self) -> bool:
        """Count one more engine. False if all were closed already."""
        with self._lock:
            self._engines += bool(self._engines)
            return bool(self._engines)

    def take(self) -> RuntimeCache:
        """The cache, for one more user, who calls `give_back` after freeing what uses it. Blocks to read the file."""
        with self._lock:
            self._cache = self._cache or self._open_cache()
            self._users += 1
            return self._cache

    def give_back(self) -> None:
        """Count one user less. Blocks to save what was compiled if it was the last one of closed engines."""
        with self._lock:
            self._users -= 1
        self._close_unused()

    def retire(self) -> None:
        """Count one engine less, which is closed: with the last one the cache is closed, now or after its last user."""
        with self._lock:
            self._engines -= 1
        self._close_unused()

    def _close_unused(self) -> None:
        with self._lock:
            unused = self._cache if not (self._engines or self._users) else None
            self._cache = None if unused else self._cache
        if unused:
            unused.close()


class KernelCaches:
    """The caches that engines share, by what their kernels depend on. Any thread may call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._shared: WeakValueDictionary[Hashable, SharedKernels] = WeakValueDictionary()
        self._making = Lock()
        self._makers: dict[int, Any] = {}
        finalize(self, self._makers.clear)  # Before the interpreter takes the library down.

    def maker(self, gpu: int, load: Callable[[], Any]) -> Any:
        """The engine to make caches of on this GPU, which `load` returns when it is first asked for. Blocks and raises as
        `load` does.
        """
        with self._making:
            if gpu not in self._makers:
                self._makers[gpu] = load()
            return self._makers[gpu]

    def of(self, key: Hashable, open_cache: Callable[[], RuntimeCache]) -> SharedKernels:
        """The cache with this key, for one more engine, which calls `SharedKernels.retire`; `open_cache` opens a new one."""
        with self._lock:
            found = self._shared.get(key)
            if found is None or not found.join():
                found = self._shared[key] = SharedKernels(open_cache)
            return found
