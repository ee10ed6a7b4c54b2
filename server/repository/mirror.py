"""Keeps a copy of a remote repository (`models.repository` as a URL) up to date, by a process of its own."""

import json
import logging
import subprocess
import sys
from contextlib import closing, suppress
from threading import Lock

from ..config.schema import ModelsConfig
from ..config.section import ConfigError
from . import remote
from .model_repository import some
from .remote import STATE, Outcome

log = logging.getLogger("greenlane.models")


class Mirror:
    """The copy of one remote repository. `fetch` blocks; one thread at a time calls it, and any other may `close`."""

    def __init__(self, models: ModelsConfig) -> None:
        assert models.remote
        self._url = models.remote
        self._root = models.repository
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._running = Lock()
        """Held while the process copies."""
        self._failed = ""

    def __repr__(self) -> str:
        return f"<Mirror of {self._url} in {self._root}>"

    def fetch(self) -> Outcome:
        """Copy what has changed, and log what came of it, a failure only once. The copy stays as it was where that fails."""
        outcome = self._run()
        failed = outcome.error or "; ".join(outcome.problems)
        if failed and failed != self._failed and not self._closed:
            log.error("models.repository: %s", failed)
        self._failed = failed
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

    def _run(self) -> Outcome:
        """Have the process copy once. It stays for the next time, as its libraries take long to import."""
        with self._running:
            process = self._process = self._process or self._start()
            if self._closed:
                process.kill()
            assert process.stdin
            assert process.stdout
            with suppress(OSError, ValueError, TypeError):  # If it has ended.
                process.stdin.write("copy\n")
                process.stdin.flush()
                return Outcome(**json.loads(process.stdout.readline()))
            self._end()
            ended = f"ended with status {process.returncode}, and the log has what it printed"
            return Outcome(error=f"{self._url}: the process that copies it {ended}")

    def _start(self) -> "subprocess.Popen[str]":
        words = [sys.executable, "-P", remote.__file__, self._url, str(self._root)]
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
