"""How far a build is: from the library's nested phases to a share of the whole, and from there to a terminal."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO


class Step(NamedTuple):
    """Where a build is: the library's name for what it does, and the share of the whole that is done, from 0 to 1."""

    phase: str
    share: float


Progress = Callable[[Step], bool]
"""Called as a build goes on, from the thread that builds or one of the library's; False cancels it."""


class _Phase(NamedTuple):
    name: str
    steps: int
    done: int


class Tracker:
    """Phases that were begun and not ended, outermost first. Not safe for several threads."""

    def __init__(self) -> None:
        self._phases: list[_Phase] = []
        self._share = 0.0

    def start(self, name: str, steps: int) -> None:
        """A phase begins, inside those that are open."""
        self._phases.append(_Phase(name, max(1, steps), 0))

    def step(self, name: str, index: int) -> Step:
        """A phase did one of its steps, counted from 0."""
        self._phases = [phase._replace(done=index + 1) if phase.name == name else phase for phase in self._phases]
        self._share = max(self._share, self._measure())
        return Step(name, self._share)

    def finish(self, name: str) -> None:
        """A phase ends, perhaps before its last step."""
        self._phases = [phase for phase in self._phases if phase.name != name]

    def _measure(self) -> float:
        """An inner phase is a part of one step of the phase around it."""
        share = 0.0
        for phase in reversed(self._phases):
            share = min(1.0, (phase.done + share) / phase.steps)
        return share


class Watch:
    """Hands a build's steps to whoever asked for them, under a lock, and keeps what they raise away from the library."""

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
        """Whether to go on."""
        with self._lock:
            try:
                self.cancelled = self.cancelled or not self._progress(self._tracker.step(name, index))
            except BaseException as error:  # Past the library it would be printed and lost; the build raises it when it ends.
                self.error, self.cancelled = error, True
            return not self.cancelled


def monitor(module: Any, watch: Watch) -> Any:
    """The library's progress monitor that calls `watch`."""

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
    """Prints steps: on a terminal in one line that is written over, elsewhere a line for every tenth of the whole."""

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
