"""What a request can be told instead of an answer, and the only table from exception to HTTP status."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engines import EngineError, TensorMismatch
from partitions import DoesNotFit, PartitionError


class RequestError(Exception):
    """Base of everything that is said to a client; the text is what it reads."""


class BadRequest(RequestError):
    """The request is wrong; the text names the field, what came and what was expected."""


class Ambiguous(BadRequest):
    """The headers say two things at once, so that nothing that follows on the connection is trusted either."""


class Unauthorized(RequestError):
    """No key, a wrong key, or no such tenant."""


class NotFound(RequestError):
    """No such model, version or path, or none of this tenant's."""


class WrongMethod(RequestError):
    """The path exists, for another method."""

    def __init__(self, method: str, allowed: str, path: str = "") -> None:
        super().__init__(f"{method} is not possible here; use {allowed}{path and f' {path}'}")
        self.allowed = allowed


class Conflict(RequestError):
    """What was asked for does not fit what is there."""


class Misdirected(RequestError):
    """The request is another tenant's than the connection it came on."""


class TooSlow(RequestError):
    """Headers or a body took too long to come."""


class TooLarge(RequestError):
    """A body, or what it unpacks to, is over a limit."""


class UnsupportedEncoding(RequestError):
    """A Content-Encoding that is not spoken here."""


class QueueFull(RequestError):
    """The tenant has as many requests waiting as it may."""


class MemoryFull(QueueFull):
    """The tenant's other requests hold so much of its memory that this one does not fit now."""


class Outgrown(RequestError):
    """The outputs need more memory than was left for them, since no shape tells their size: `nbytes` with the inputs."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"the inputs and outputs need {nbytes} bytes of memory, which is more than was expected")
        self.nbytes = nbytes


class Failed(RequestError):
    """The model, or the server, went wrong; nothing the client did."""


class Unavailable(RequestError):
    """Not ready, draining, or the device is lost; worth another try."""


class DeadlineExceeded(RequestError):
    """The request's own timeout passed."""


class ClientGone(RequestError):
    """The client closed its connection; nobody is there to answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, headers beyond the usual ones, and the text of `{"error": ...}`."""

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


_STATUSES: dict[type[Exception], int] = {
    BadRequest: 400,
    TensorMismatch: 400,
    ClientGone: 400,
    Unauthorized: 401,
    NotFound: 404,
    WrongMethod: 405,
    TooSlow: 408,
    Conflict: 409,
    DoesNotFit: 409,
    TooLarge: 413,
    UnsupportedEncoding: 415,
    Misdirected: 421,
    QueueFull: 429,
    Outgrown: 500,
    Failed: 500,
    EngineError: 500,
    PartitionError: 500,
    Unavailable: 503,
    DeadlineExceeded: 504,
}

_HEADERS: dict[int, dict[str, str]] = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    415: {"accept-encoding": "gzip, deflate"},
    421: {"connection": "close"},
    429: {"retry-after": "1"},
    503: {"retry-after": "1"},
}


def status_of(error: BaseException) -> int:
    """The HTTP status for an exception: that of its nearest class in the table, 500 for strangers."""
    return next((_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES), 500)


def answer(error: Exception, request_id: str) -> Answer:
    """What to tell the client about this exception. Strangers keep their text to themselves: it goes to the log."""
    status = status_of(error)
    headers = dict(_HEADERS.get(status, {}))
    if isinstance(error, Ambiguous):
        headers["connection"] = "close"
    if isinstance(error, WrongMethod):
        headers["allow"] = error.allowed
    text = str(error) if isinstance(error, RequestError | EngineError | PartitionError) else "internal error"
    if status == 500:
        text = f"{text} (request {request_id})"
        headers["x-request-id"] = request_id
    return Answer(status, text, headers)
