"""One cache of kernels for all instances of an engine, so that what one has compiled and loaded the others find ready.

Each instance that had a cache of its own loaded every kernel again, in calls of the driver that hold a lock which all tenants'
launches wait for (`cuKernelGetFunction`, a millisecond or more each), and compiled some of them again in spite of the file. On
an H200 binding MobileNetV2 a second time took 0.11 s with the first instance's cache, in place of 3.3 s and 184 such calls
(benchmarks.driver_trace, 2026-11-23).

Two threads must not use the library's cache at once, so a thread that calls the library for one of these instances holds
`RuntimeCache.lock`. Launching a captured graph is no such call. An instance without captured graphs calls the library in each
inference, and would wait while another tenant's instance compiles; so it has a cache of its own. So has each instance of a
library that keeps no kernels, where an instance may stop capturing at any time.
"""

from collections.abc import Callable
from threading import RLock

from .kernel_cache import RuntimeCache


class SharedKernels:
    """Opens a cache for the first user, and closes it once the engine is closed and no user is left. Any thread may call."""

    def __init__(self, open_cache: Callable[[], RuntimeCache]) -> None:
        self._open_cache = open_cache
        self._lock = RLock()  # Reentrant, as the garbage collector may free an instance during a call.
        self._cache: RuntimeCache | None = None
        self._users = 0
        self._retired = False

    def __repr__(self) -> str:
        return f"<SharedKernels of {self._users} instances: {self._cache!r}>"

    def take(self) -> RuntimeCache:
        """The cache, for one more user, who calls `give_back` after freeing what uses it. Blocks to read the file."""
        with self._lock:
            self._cache = self._cache or self._open_cache()
            self._users += 1
            return self._cache

    def give_back(self) -> None:
        """Count one user less. Blocks to save what was compiled if it was the last one of a closed engine."""
        with self._lock:
            self._users -= 1
        self._close_unused()

    def retire(self) -> None:
        """The engine is closed: the cache is closed now, or after its last user. Calling it again does nothing."""
        with self._lock:
            self._retired = True
        self._close_unused()

    def _close_unused(self) -> None:
        with self._lock:
            unused = self._cache if self._retired and not self._users else None
            self._cache = None if unused else self._cache
        if unused:
            unused.close()
