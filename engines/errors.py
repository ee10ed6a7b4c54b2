"""What can go wrong with models; no HTTP, no tenants."""


class EngineError(Exception):
    """Base of every error of this package."""


class ModelRefused(EngineError):
    """The file cannot be served: unreadable, truncated, an unsupported operator or type; with the library's words."""


class TensorMismatch(EngineError, ValueError):
    """Tensors that do not fit the model's signature; the text names the tensor, what came and what was expected."""


class ExecutionFailed(EngineError):
    """The model raised while it ran."""


class Cancelled(EngineError):
    """The work was told to stop before it ended."""
