"""uvicorn as Greenlane runs it."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any

import uvicorn

from ...host.shutdown_timer import give_up


class Server(uvicorn.Server):
    """uvicorn whose process exits with status 0 after an orderly shutdown, also after one by a signal.

    With `unanswered` it handles SIGINT and SIGTERM: the first one shuts down, a second one exits at once and logs how many
    accepted requests `unanswered()` are dropped by that. (uvicorn would wait for the tenants' threads, which nothing closes
    then.) Without it signals are left alone, and `should_exit` is set by other means.
    """

    def __init__(self, config: uvicorn.Config, unanswered: Callable[[], int] | None = None) -> None:
        super().__init__(config)
        self._unanswered = unanswered

    def capture_signals(self) -> Any:
        return super().capture_signals() if self._unanswered else nullcontext()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for signals, and without a frame at the end of a drain."""
        if self.should_exit and frame and self._unanswered:
            os._exit(give_up(self._unanswered()))
        self.should_exit = True
