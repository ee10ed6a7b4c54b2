"""Keeps a local copy of a remote model repository up to date, where `models.repository` is a URL.

A child process copies (`server.repository.remote`). Here are its start and end, the pauses after failures, and the log.
"""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from math import inf
from threading import Lock

from ..config.schema import ModelsConfig
from ..config.tables import ConfigError
from ..host.backoff import Backoff
from . import remote
from .model_repository import some
from .remote import LIMIT, STATE, Outcome

log = logging.getLogger("greenlane.models")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds after a failure in which the same is not tried again; it doubles with each failure."""
_WHOLE = ""
"""In place of a model's name: the repository."""


class _Failing:
    """Something that fails: since when it is left alone for how long, and which kinds of its failures the log has."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, stable=inf)
        self.until = 0.0
        self._logged: set[str] = set()

    def again(self, kind: str, text: str, now: float) -> None:
        """It has failed again. Logged once for each kind, as a bucket that is away for a night would fill the log."""
        self.until = now + self._backoff.delay(now)
        if kind not in self._logged:
            again = f"tried again after {FIRST_PAUSE:g} s, then after twice that each time, up to {LONGEST_PAUSE:g} s"
            log.error("models.repository: %s (%s)", text, again)
        self._logged.add(kind)


class Mirror:
    """The copy of one remote repository. `fetch` blocks; one thread at a time calls it, and any other may `close`."""

    def __init__(self, models: ModelsConfig, clock: Callable[[], float] = time.monotonic, limit: float = LIMIT) -> None:
        """`clock` is in seconds; `limit` is that of `remote.copy`."""
        assert models.remote
        self._url = models.remote
        self._root = models.repository
        self._clock = clock
        self._limit = limit
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._running = Lock()
        """Held while the process copies."""
        self._failing: dict[str, _Failing] = {}
        """By model; `_WHOLE` for the repository."""
        self._error = ""
        """What was wrong with the repository the last time."""
        self._problems: list[str] = []

    def fetch(self) -> Outcome:
        """Copy what has changed, and log the outcome. The same failure is logged once. Blocks.

        A model that cannot be copied stays as it was. It is not tried again until a pause is over, and the pause becomes longer
        with each failure. If the repository itself cannot be read, all of it pauses so; a call during that pause returns the
        error of the last try.
        """
        now = self._clock()
        paused = {name for name, each in self._failing.items() if now < each.until}
        if _WHOLE in paused:
            return Outcome(error=self._error)
        outcome = self._run(sorted(paused))
        if self._closed:
            return outcome
        self._error = outcome.error
        failed = {_WHOLE: (outcome.kind, outcome.error)} if outcome.error else outcome.failed
        self._note(failed, paused if not outcome.error else {*self._failing})
        if outcome.problems and outcome.problems != self._problems:
            log.error("models.repository: %s", "; ".join(outcome.problems))
        self._problems = outcome.problems
        if outcome.changed or outcome.removed:
            log.info(
                "models.repository: copied from %s: %s (%d files, %d bytes); removed: %s",
                self._url,
                some(outcome.changed) or "nothing",
                outcome.files,
                outcome.nbytes,
                some(outcome.removed) or "nothing",
            )
        return outcome

    def _note(self, failed: Mapping[str, tuple[str, str]], untried: set[str]) -> None:
        """Keep a pause for each model that failed now, and drop those of models that were copied again."""
        now = self._clock()
        for name, (kind, text) in failed.items():
            self._failing.setdefault(name, _Failing()).again(kind, text, now)
        for name in self._failing.keys() - failed.keys() - untried:
            del self._failing[name]
            log.info("models.repository: %s can be copied again", f"{name} of {self._url}" if name else self._url)

    def _run(self, left_alone: list[str]) -> Outcome:
        """Have the process copy once. It stays for the next time, as its libraries take long to import, unless it hangs."""
        with self._running:
            process = self._process = self._process or self._start()
            if self._closed:
                process.kill()
            assert process.stdin
            assert process.stdout
            with suppress(OSError, ValueError, TypeError):  # If it has ended.
                process.stdin.write(json.dumps(left_alone) + "\n")
                process.stdin.flush()
                outcome = Outcome(**json.loads(process.stdout.readline()))
                if outcome.hangs:
                    self._end()
                return outcome
            self._end()
            ended = f"ended with status {process.returncode}, and the log has what it printed"
            return Outcome(error=f"{self._url}: the process that copies it {ended}", kind="ended")

    def _start(self) -> "subprocess.Popen[str]":
        words = [sys.executable, "-P", remote.__file__, self._url, str(self._root), str(self._limit)]
        return subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )  # A terminal's Ctrl-C is for the server.

    def _end(self) -> None:
        """Kill the process, if there is one, and wait until it has ended."""
        process, self._process = self._process, None
        if process:
            process.kill()
            with suppress(BrokenPipeError), process:
                pass

    def close(self) -> None:
        """Break off a copy that is being made; what is complete of it stays. Blocks for a moment."""
        self._closed = True
        if process := self._process:
            process.kill()
        with self._running:
            self._end()


def fetch_first(models: ModelsConfig) -> None:
    """Copy a remote repository before it is served, if it is one. Blocks.

    If it cannot be read now, the copy of an earlier time is served. Raises ConfigError if there is none.
    """
    if models.remote:
        with closing(Mirror(models)) as mirror:
            outcome = mirror.fetch()
        if outcome.error and not (models.repository / STATE).exists():
            raise ConfigError([f"models.repository: {outcome.error}"])
