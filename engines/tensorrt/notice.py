"""Says, once for an engine, that its inputs or outputs go through a copy in the host's pinned memory."""

import logging
from threading import Lock

log = logging.getLogger("greenlane.engines")


class StagingNotice:
    """One engine's, whatever partitions it is bound to. Any thread may call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said = False
        self._saying = Lock()

    def __repr__(self) -> str:
        return f"<StagingNotice of {self._name}, {'said' if self._said else 'not said'}>"

    def say(self) -> None:
        """Log it if it was not said yet."""
        with self._saying:
            said, self._said = self._said, True
        if not said:
            log.info("%s: inputs or outputs are staged through the host, as their memory is not pinned", self._name)
