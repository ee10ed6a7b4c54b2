"""Writes each message to the log once."""

import logging
from threading import Lock

log = logging.getLogger("greenlane.engines")


class LogOnce:
    """Remembers the messages of one engine. Any thread may call."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<LogOnce, {len(self._logged)} messages>"

    def __call__(self, level: int, text: str) -> None:
        """Log the text, unless it was logged before."""
        with self._lock:
            if text in self._logged:
                return
            self._logged.add(text)
        log.log(level, "%s", text)
