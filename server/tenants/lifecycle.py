"""The state of the server, from its start to its end."""

from collections.abc import Callable

from .frontend import State


class Lifecycle:
    """The server's state; `on_change` is called with every new state. Belongs to the event loop."""

    def __init__(self, on_change: Callable[[State], None]) -> None:
        self.state: State = "starting"
        self._on_change = on_change

    def __repr__(self) -> str:
        return f"<Lifecycle {self.state}>"

    @property
    def ready(self) -> bool:
        """Whether the server is ready: loading has finished (`strict_readiness`: succeeded), and it is not stopping."""
        return self.state == "serving"

    def set_state(self, state: State) -> None:
        self.state = state
        self._on_change(state)
