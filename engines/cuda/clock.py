"""What the GPU itself measures of an executor's works: the time from their first kernel to their last, by %globaltimer.

The copies before and after an inference are kernels (`copies.SOURCE`). The first notes when it begins, the last adds what has
passed since. Both are on one stream, so a work that waits for the one before it has not begun, and works do not overlap. The
sums stay on the GPU; the first kernel of each inference writes them to host memory, at its beginning, so that nothing waits for
that, and no program is asked for anything. So they lack each executor's last work until the next one, or until it is closed.
"""

import logging
from collections.abc import Callable

import numpy as np

log = logging.getLogger("greenlane.engines")


class DeviceClock:
    """One executor's sums, in slot `number` of its copies; see `engines.base.DeviceTime`.

    `seen` are the two numbers in host memory, nanoseconds and works. `free` gives the slot back.
    """

    def __init__(
        self,
        number: int,
        seen: "np.ndarray[tuple[int], np.dtype[np.uint64]]",
        fetch: Callable[[], None],
        free: Callable[[int], None],
    ) -> None:
        self.number = number
        self.closed = False
        self._seen = seen
        self.fetch = fetch
        """Have the GPU write the sums now. Nothing may be in flight. Blocks until the stream is done. Raises CUDAError."""
        self._free = free
        self._final = (0, 0)
        self._base = int(seen[0]), int(seen[1])  # What the executor before it has left.

    @property
    def ns(self) -> int:
        return self._now()[0]

    @property
    def works(self) -> int:
        return self._now()[1]

    def start(self) -> None:
        """Count from now on. Blocks until the stream is done. Raises CUDAError."""
        self._base = (0, 0)
        self.fetch()
        self._base = self._now()

    def agrees(self, works: int, host_ns: int) -> bool:
        """Whether so many works were measured since `start`, which the host saw take this long at most. Blocks."""
        self.fetch()
        found = self._now()
        if found[1] == works and 0 < found[0] <= host_ns:
            return True
        log.warning("the GPU's timer is not used: it says %d ns for %d works, the host %d for %d", *found, host_ns, works)
        return False

    def close(self) -> None:
        """Keep the sums, and give the slot back; nothing is in flight."""
        if not self.closed:
            try:
                self.fetch()
            finally:
                self._final, self.closed = self._now(), True
                self._free(self.number)

    def _now(self) -> tuple[int, int]:
        if self.closed:
            return self._final
        return int(self._seen[0]) - self._base[0], int(self._seen[1]) - self._base[1]
