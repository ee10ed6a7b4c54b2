"""The state of the server, from its start to its end."""

from collections.abc import Callable

from .frontend import State


class Lifecycle:
    """The state that the server is in. Every change of it is passed to `tell`. Belongs to the event loop."""

    def __init__(self, tell: Callable[[State], None]) -> None:
        self.state: State = "starting"
        self._tell = tell

    def __repr__(self) -> str:
        return f"<Lifecycle {self.state}>"

    @property
    def ready(self) -> bool:
        """Whether new work is welcome: every model was tried, or loaded if that is asked for, and nobody asked for the end."""
        return self.state == "serving"

    def set_state(self, state: State) -> None:
        self.state = state
        self._tell(state)
