"""The progress of a build: from the library's nested phases to a share of the whole, printed to a terminal."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO


class Step(NamedTuple):
    """The library's name for what it is doing, and the share of the build that is done, from 0 to 1."""

    phase: str
    share: float


Progress = Callable[[Step], bool]
"""Called during a build, from the building thread or one of the library's. Returning False cancels the build."""


class _Phase(NamedTuple):
    name: str
    steps: int
    done: int


class Tracker:
    """The phases that have begun and not ended, outermost first. Not thread-safe."""

    def __init__(self) -> None:
        self._phases: list[_Phase] = []
        self._share = 0.0

    def start(self, name: str, steps: int) -> None:
        """A phase begins, nested in those that are open."""
        self._phases.append(_Phase(name, max(1, steps), 0))

    def step(self, name: str, index: int) -> Step:
        """A phase has completed one of its steps, counted from 0."""
        self._phases = [phase._replace(done=index + 1) if phase.name == name else phase for phase in self._phases]
        self._share = max(self._share, self._measure())
        return Step(name, self._share)

    def finish(self, name: str) -> None:
        """A phase ends, perhaps before its last step."""
        self._phases = [phase for phase in self._phases if phase.name != name]

    def _measure(self) -> float:
        """An inner phase counts as part of one step of the phase around it."""
        share = 0.0
        for phase in reversed(self._phases):
            share = min(1.0, (phase.done + share) / phase.steps)
        return share


class BuildWatch:
    """Calls `progress` with each step of a build, under a lock, and keeps the exceptions it raises from the library."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tracker = Tracker()
        self._lock = threading.Lock()
        self.cancelled = False
        self.error: BaseException | None = None

    def start(self, name: str, steps: int) -> None:
        with self._lock:
            self._tracker.start(name, steps)

    def finish(self, name: str) -> None:
        with self._lock:
            self._tracker.finish(name)

    def step(self, name: str, index: int) -> bool:
        """Returns whether to continue."""
        with self._lock:
            try:
                self.cancelled = self.cancelled or not self._progress(self._tracker.step(name, index))
            except BaseException as error:  # The library would print and drop it, so the build raises it.
                self.error, self.cancelled = error, True
            return not self.cancelled


def monitor(module: Any, watch: BuildWatch) -> Any:
    """An IProgressMonitor of the library that calls `watch`."""

    class Monitor(module.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            watch.start(name, steps)

        def phase_finish(self, name: str) -> None:
            watch.finish(name)

        def step_complete(self, name: str, step: int) -> bool:
            return watch.step(name, step)

    return Monitor()


class Printer:
    """Prints steps: on a terminal in one line that is overwritten, elsewhere a line for every 10 %."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._tenths = -1

    def __call__(self, step: Step) -> None:
        line = f"{step.share:4.0%} {step.phase}"
        if self._is_terminal:
            self._write(f"\r\x1b[K{line}")
        elif (tenths := int(step.share * 10)) > self._tenths:
            self._tenths = tenths
            self._write(f"{line}\n")

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._is_terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
