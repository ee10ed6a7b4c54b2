"""The errors that a request can be answered with, and the only table from exception to status, of HTTP and of gRPC."""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from engines import EngineError, TensorMismatch
from partitions import DeviceLost, DoesNotFit, PartitionError, Unsupported

log = logging.getLogger("greenlane.infer")


class RequestError(Exception):
    """Base of all errors for clients; the text is what the client reads."""


class BadRequest(RequestError):
    """The request is wrong; the text names the field, what came and what was expected."""


class Ambiguous(BadRequest):
    """The headers can be read in two ways, so nothing that follows on the connection can be trusted either."""


class Unauthorized(RequestError):
    """No key, a wrong key, or no such tenant."""


class NotFound(RequestError):
    """No such model, version or path, or not one of this tenant's."""


class WrongMethod(RequestError):
    """The path exists, for another method."""

    def __init__(self, method: str, allowed: str, path: str = "") -> None:
        super().__init__(f"{method} is not possible here; use {allowed}{path and f' {path}'}")
        self.allowed = allowed


class Conflict(RequestError):
    """The request conflicts with the current state."""


class Misdirected(RequestError):
    """The request is for another tenant than its connection."""


class TooSlow(RequestError):
    """Headers or a body took too long to arrive."""


class TooLarge(RequestError):
    """A body, compressed or decompressed, is over a limit."""


class UnsupportedEncoding(RequestError):
    """A Content-Encoding that is not supported."""


class QueueFull(RequestError):
    """The tenant's queue is full."""


class LimitExceeded(QueueFull):
    """One of the tenant's limits, by its key in the configuration; the request is admitted in `retry_after` seconds."""

    def __init__(self, text: str, limit: str, retry_after: float = 1.0) -> None:
        super().__init__(text)
        self.limit = limit
        self.retry_after = retry_after


class MemoryFull(QueueFull):
    """The tenant's other requests hold so much of its tensor memory that this one does not fit now."""


class Outgrown(RequestError):
    """The outputs, whose size no shape determines, need more memory than was reserved: `nbytes` in all, with the inputs."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"the inputs and outputs need {nbytes} bytes of memory, which is more than was expected")
        self.nbytes = nbytes


class Failed(RequestError):
    """The model or the server failed; not the client's fault."""


class Unavailable(RequestError):
    """Not ready, draining, or the device is lost; the client may try again."""


class DeadlineExceeded(RequestError):
    """The request's timeout has passed."""


class ClientGone(RequestError):
    """The client has disconnected, so no answer is sent."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An error response: its HTTP status, the name of its gRPC status, its text, and HTTP headers besides the usual ones."""

    status: int
    code: str
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


_STATUSES: dict[type[Exception], tuple[int, str]] = {
    BadRequest: (400, "INVALID_ARGUMENT"),
    TensorMismatch: (400, "INVALID_ARGUMENT"),
    ClientGone: (400, "CANCELLED"),
    Unauthorized: (401, "UNAUTHENTICATED"),
    NotFound: (404, "NOT_FOUND"),
    WrongMethod: (405, "UNIMPLEMENTED"),
    TooSlow: (408, "DEADLINE_EXCEEDED"),
    Conflict: (409, "FAILED_PRECONDITION"),
    DoesNotFit: (409, "FAILED_PRECONDITION"),
    Unsupported: (409, "FAILED_PRECONDITION"),
    TooLarge: (413, "INVALID_ARGUMENT"),
    UnsupportedEncoding: (415, "UNIMPLEMENTED"),
    Misdirected: (421, "PERMISSION_DENIED"),
    QueueFull: (429, "RESOURCE_EXHAUSTED"),
    Outgrown: (500, "INTERNAL"),
    Failed: (500, "INTERNAL"),
    EngineError: (500, "INTERNAL"),
    PartitionError: (500, "INTERNAL"),
    Unavailable: (503, "UNAVAILABLE"),
    DeviceLost: (503, "UNAVAILABLE"),
    DeadlineExceeded: (504, "DEADLINE_EXCEEDED"),
}
"""The HTTP status and the name of the gRPC status of each error."""

_HEADERS: dict[int, dict[str, str]] = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    415: {"accept-encoding": "gzip, deflate"},
    421: {"connection": "close"},
    429: {"retry-after": "1"},
    503: {"retry-after": "1"},
}


def status_of(error: BaseException) -> int:
    """The HTTP status for an exception: that of its nearest base class in the table, else 500."""
    return _statuses(error)[0]


def code_of(status: int) -> str:
    """The name of the gRPC status for an HTTP status of at least 400."""
    return next((code for known, code in _STATUSES.values() if known == status), "INTERNAL" if status >= 500 else "UNKNOWN")


def _statuses(error: BaseException) -> tuple[int, str]:
    return next((_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES), (500, "INTERNAL"))


MOST_TEXT = 2000
"""Bytes of a line of an error for clients, who may have sent what it repeats, and of a whole error in gRPC: three times as many
fit into its trailers, of 8 KiB.
"""


def shortened(text: str) -> str:
    """The same without its middle, if it has more than MOST_TEXT bytes."""
    if len(data := text.encode(errors="replace")) <= MOST_TEXT:
        return text
    return f"{data[: MOST_TEXT // 2].decode(errors='ignore')} ... {data[-MOST_TEXT // 2 :].decode(errors='ignore')}"


def answer(error: Exception, request_id: str) -> Answer:
    """The error response for an exception. The text of an exception that is not in the table goes to the log only.

    A line of more than MOST_TEXT bytes loses its middle.
    """
    status, code = _statuses(error)
    headers = dict(_HEADERS.get(status, {}))
    if isinstance(error, Ambiguous):
        headers["connection"] = "close"
    if isinstance(error, WrongMethod):
        headers["allow"] = error.allowed
    if isinstance(error, LimitExceeded):
        headers["retry-after"] = str(max(1, ceil(error.retry_after)))
    text = str(error) if isinstance(error, RequestError | EngineError | PartitionError) else "internal error"
    text = "\n".join(map(shortened, text.split("\n")))
    if status == 500:
        text = f"{text} (request {request_id})"
        headers["x-request-id"] = request_id
    return Answer(status, code, text, headers)


def refuse(error: Exception, tenant: str | None) -> Answer:
    """The answer to this error of a tenant's request, which has an id if its status is 500; logs those, with the id."""
    request_id = uuid.uuid4().hex
    refused = answer(error, request_id)
    if refused.status == 500:
        unexpected = error if not isinstance(error, Failed) else None
        log.error("%s", error, exc_info=unexpected, extra={"tenant": tenant or "-", "request_id": request_id})
    return refused
