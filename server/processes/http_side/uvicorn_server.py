"""uvicorn as Greenlane runs it."""

from contextlib import nullcontext
from typing import Any

import uvicorn


class Server(uvicorn.Server):
    """uvicorn that leaves signals alone: `should_exit` is set by other means."""

    def capture_signals(self) -> Any:
        return nullcontext()
