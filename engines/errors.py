"""The errors of this package, and what their texts share. No HTTP, no tenants."""

from collections.abc import Sequence
from difflib import get_close_matches


class EngineError(Exception):
    """Base of every error of this package."""


class ModelRefused(EngineError):
    """The model cannot be served: unreadable, truncated, an unsupported operator or type. The text has the library's error."""


class TensorMismatch(EngineError, ValueError):
    """Tensors do not fit the model's signature. The text names the tensor, what came and what was expected."""


class ExecutionFailed(EngineError):
    """The model failed while it ran."""


class OutputsTooLarge(ExecutionFailed):
    """The outputs, whose sizes the data decides, take more memory than `RuntimeSettings.memory_limit` allows: `nbytes` at
    least, with other tensors of the run if those were in the way.
    """

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__(f"the run takes at least {nbytes} bytes for its tensors; its outputs may have {limit} (memory_limit)")
        self.nbytes = nbytes


class Cancelled(EngineError):
    """The work was cancelled before it ended."""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The most similar of the known names as a question for an error's text, with a space after it; empty if none is."""
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}? " if near else ""
