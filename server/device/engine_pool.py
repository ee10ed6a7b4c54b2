"""The engines that were loaded: shared by tenants, and kept for a while after the last model that uses one was unloaded.

To free an engine keeps the interpreter for up to some 100 ms, in which no tenant is served. So an unloaded model's engine
stays: loading the same file again finds it with everything compiled. It is freed at a moment at which no inference waits.
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
"""How long an engine is kept at least after it was last used: an unload is often the first half of a reload."""
MOST_UNUSED = 8
"""Unused engines from which on the oldest is freed although inferences wait: their memory on the device is not for ever."""


class EnginePool:
    """Engines by key: whatever tells one loaded file from another. Every method may be called from any thread.

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
        """The engine of this key, from `read` if there is none. It is not freed before `let_go` of it, until when it is bound.

        `parts` are engines of the pool that it is made of, and that are in use now: they are not freed before it either. Two
        threads that ask at once may both read; the first to end counts. Blocks as `read` does, and raises what that does.
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
        """It has been bound, or will not be."""
        with self._lock:
            self._let_go(engine)

    def release(self, in_use: Iterable[Engine], quiet: bool) -> bool:
        """Free one engine that is in nobody's use, if there is one to be freed now; whether it did.

        `in_use` are the engines of all executors there are, `quiet` whether no inference waits or runs. Blocks.
        """
        engine, unused = self._choose(in_use, quiet)
        if engine is None:
            return False
        begun = self._clock()
        self._free(engine)
        with self._lock:
            for part in self._parts.pop(id(engine), ()):
                self._let_go(part)
        if not quiet:
            held = (self._clock() - begun) * 1000
            log.warning("%d unloaded engines were kept, so one was freed while requests wait, which took %.0f ms", unused, held)
        return True

    def close(self) -> None:
        """Free all of them, whatever fails, and wait for one that is being freed; no executor may be left. Blocks."""
        with self._lock:
            engines, self._engines = self._engines, {}
        for engine in reversed(engines.values()):  # What is made of others came after them.
            self._free(engine)
        with self._freeing:  # That of `release`, on another thread, too.
            pass

    def _let_go(self, engine: Engine) -> None:
        self._held[id(engine)] -= 1
        for key in [key for key, each in self._engines.items() if each is engine]:
            self._used[key] = self._clock()

    def _free(self, engine: Engine) -> None:
        """What goes wrong is a warning: where one cannot be freed, as on a device that is lost, the others are all the same."""
        with self._freeing:
            try:
                engine.close()
            except (EngineError, PartitionError) as error:
                log.warning("freeing %r: %s", engine, error)

    def _choose(self, in_use: Iterable[Engine], quiet: bool) -> tuple[Engine | None, int]:
        """Take out the one unused for longest, and say how many there were."""
        busy = {id(engine) for engine in in_use}
        with self._lock:
            idle = [key for key, each in self._engines.items() if id(each) not in busy and not self._held[id(each)]]
            old = [key for key in idle if self._clock() - self._used[key] >= KEEP_SECONDS]
            if not old or not (quiet or len(idle) > MOST_UNUSED):
                return None, len(idle)
            key = min(old, key=lambda each: self._used[each])
            engine = self._engines.pop(key)
            del self._used[key], self._held[id(engine)]
            return engine, len(idle)
