"""The loaded engines: shared by tenants, and kept for a while after the last model that uses one was unloaded.

Freeing an engine holds the GIL for up to about 100 ms, in which no tenant is served. So the engine of an unloaded model is kept
(loading the same file again then needs no compilation) and is freed when no inference is queued or runs.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock

from engines import Engine, EngineError
from partitions import PartitionError

log = logging.getLogger("greenlane.models")

KEEP_SECONDS = 30.0
"""An engine is kept at least this long after its last use: an unload is often the first half of a reload."""
MAX_UNUSED = 8
"""With more unused engines than this, the oldest is freed even while inferences wait, because each takes device memory."""


class EnginePool:
    """Engines by a key that identifies the loaded file. Every method may be called from any thread.

    `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[Hashable, Engine] = {}
        self._used: dict[Hashable, float] = {}
        self._held: Counter[int] = Counter()
        self._parts: dict[int, tuple[Engine, ...]] = {}
        self._lock = Lock()
        self._freeing = Lock()

    def __len__(self) -> int:
        return len(self._engines)

    def hold(self, key: Hashable, read: Callable[[], Engine], parts: Sequence[Engine] = ()) -> Engine:
        """The engine with this key, made by `read` if there is none. It is not freed before `let_go`, called after binding it.

        `parts` are the pool's engines that it consists of; they are not freed before it either. If two threads ask at once,
        both may read, and the first result is used. Blocks and raises as `read` does.
        """
        with self._lock:
            if engine := self._engines.get(key):
                self._held[id(engine)] += 1
                return engine
        fresh = read()
        with self._lock:
            if key not in self._engines and parts:
                self._parts[id(fresh)] = tuple(parts)
                self._held.update(map(id, parts))
            engine = self._engines.setdefault(key, fresh)
            self._used.setdefault(key, self._clock())
            self._held[id(engine)] += 1
            return engine

    def let_go(self, engine: Engine) -> None:
        """The engine was bound, or will not be."""
        with self._lock:
            self._let_go(engine)

    def release(self, in_use: Iterable[Engine], quiet: bool) -> bool:
        """Free one unused engine, if one should be freed now; whether it did. Blocks.

        `in_use` are the engines of all executors; `quiet`: no inference is queued or runs.
        """
        engine, unused = self._choose(in_use, quiet)
        if engine is None:
            return False
        begun = self._clock()
        self._free(engine)
        if not quiet:
            held = (self._clock() - begun) * 1000
            log.warning("freed one of %d unused engines under load, which held up all tenants for %.0f ms", unused, held)
        return True

    def discard(self, engine: Engine, in_use: Iterable[Engine]) -> bool:
        """Free this engine now, unless it is used, or held by a thread that binds it; whether it was freed. Blocks.

        `in_use` are the engines of all executors.
        """
        busy = {id(each) for each in in_use}
        with self._lock:
            keys = [key for key, each in self._engines.items() if each is engine]
            if not keys or id(engine) in busy or self._held[id(engine)]:
                return False
            del self._engines[keys[0]], self._used[keys[0]], self._held[id(engine)]
        self._free(engine)
        return True

    def close(self) -> None:
        """Free all engines, and wait for one that is being freed; no executor may be left. Blocks. Failures are logged."""
        with self._lock:
            engines, self._engines = self._engines, {}
        for engine in reversed(engines.values()):  # Chains come after the engines that they consist of.
            self._free(engine)
        with self._freeing:  # `release` may be freeing one on another thread.
            pass

    def _let_go(self, engine: Engine) -> None:
        self._held[id(engine)] -= 1
        for key in [key for key, each in self._engines.items() if each is engine]:
            self._used[key] = self._clock()

    def _free(self, engine: Engine) -> None:
        """And let go of its parts. Failures are logged as warnings: if one cannot be freed, as on a lost device, the others
        still are.
        """
        with self._freeing:
            try:
                engine.close()
            except (EngineError, PartitionError) as error:
                log.warning("freeing %r: %s", engine, error)
        with self._lock:
            for part in self._parts.pop(id(engine), ()):
                self._let_go(part)

    def _choose(self, in_use: Iterable[Engine], quiet: bool) -> tuple[Engine | None, int]:
        """Remove the engine that has been unused the longest, if one should be freed; also how many are unused."""
        busy = {id(engine) for engine in in_use}
        with self._lock:
            idle = [key for key, each in self._engines.items() if id(each) not in busy and not self._held[id(each)]]
            old = [key for key in idle if self._clock() - self._used[key] >= KEEP_SECONDS]
            if not old or not (quiet or len(idle) > MAX_UNUSED):
                return None, len(idle)
            key = min(old, key=lambda each: self._used[each])
            engine = self._engines.pop(key)
            del self._used[key], self._held[id(engine)]
            return engine, len(idle)
