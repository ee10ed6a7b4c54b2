"""Which models are so short that they may run on the event loop, and how much of its time they may take. Pure: no clock.

For a model of 10 us the way to the worker's thread and back costs several times as much as the model: two switches of threads,
and each has to get the GIL. But while a model runs on the event loop, the tenant's other connections wait.
"""

from engines import Memo

from ..link.messages import ModelKey, Shape

BOUND = 200_000
"""Nanoseconds that a model may take on the event loop. It is about what the way to the thread and back takes while the event
loop is busy, so other connections wait no longer than they would for the thread."""
BUDGET = 1_000_000
"""Nanoseconds that models may take of the event loop beyond their share (see `LoopTime`). Then the thread runs them: the event
loop reads what has come meanwhile, a queue forms, in which priorities and batches count, and on several cores both work."""

_UNPROVEN = 2 * BOUND
"""The bound of a model that has not run yet: it may run on the event loop after half a dozen short runs."""
_DECAY = 3
"""After each run the bound sinks by 1 / 2**3, unless the run was longer."""
_SHARE = 1, 2
"""Models may take half as long on the event loop as all else does there, where the thread has another core to run them on."""
_SHARE_OF_ONE_CORE = 4, 1
"""Where it has none, four times as long: there the thread only takes turns with the event loop, at a switch for each turn."""
_MAX_ENTRIES = 256

Key = tuple[ModelKey, tuple[Shape, ...]]


class LoopTime:
    """How long each model recently took for each set of shapes, at most: a bound that rises at once and sinks slowly. So one
    slow run sends a model to the thread, until as many short ones have followed as the run was slow.

    Models that run on the event loop may take a share of its time that depends on the number of `cores` of the tenant's
    partition, and `BUDGET` more in a burst.

    `learn` may be called by another thread than the rest. Times are in nanoseconds.
    """

    def __init__(self, cores: int) -> None:
        self._share = _SHARE if cores > 1 else _SHARE_OF_ONE_CORE
        self._longest: Memo[Key, int] = Memo(_MAX_ENTRIES)
        self._taken = self._since = 0

    def __repr__(self) -> str:
        short = [longest for longest in list(self._longest.values()) if longest <= BOUND]
        return f"<LoopTime {len(short)} of {len(self._longest)} models and shapes are short>"

    def allows(self, key: Key, now: int) -> bool:
        """Whether one more run may take place on the event loop at this time."""
        longest = self._longest.get(key)
        if longest is None or longest > BOUND:
            return False
        return self._taken - self._given(now) <= BUDGET

    def took(self, key: Key, began: int, ended: int, duration: int) -> None:
        """A run took place on the event loop from `began` to `ended`, and `duration` of that was the model's own."""
        self._taken = max(0, self._taken - self._given(began)) + duration
        self._since = ended
        self.learn(key, duration)

    def learn(self, key: Key, duration: int) -> None:
        """A run took this long, on any thread."""
        longest = self._longest.get(key, _UNPROVEN)
        self._longest.remember(key, max(duration, longest - (longest >> _DECAY)))

    def _given(self, now: int) -> int:
        """How much the models may take for the time since the last run."""
        times, parts = self._share
        return (now - self._since) * times // parts
