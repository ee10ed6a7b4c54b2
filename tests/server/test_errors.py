import pytest

from engines import EngineError, ExecutionFailed, ModelRefused, TensorMismatch
from partitions import DeviceLost, DoesNotFit, PartitionError
from server.errors import (
    Ambiguous,
    BadRequest,
    ClientGone,
    Conflict,
    DeadlineExceeded,
    Failed,
    Misdirected,
    NotFound,
    Outgrown,
    QueueFull,
    RequestError,
    TooLarge,
    TooSlow,
    Unauthorized,
    Unavailable,
    UnsupportedEncoding,
    WrongMethod,
    answer,
    status_of,
)

SAID: list[tuple[Exception, int, dict[str, str]]] = [
    (BadRequest("said"), 400, {}),
    (TensorMismatch("said"), 400, {}),
    (Unauthorized("said"), 401, {"www-authenticate": "Bearer"}),
    (NotFound("said"), 404, {}),
    (Misdirected("said"), 421, {"connection": "close"}),
    (TooSlow("said"), 408, {"connection": "close"}),
    (Conflict("said"), 409, {}),
    (DoesNotFit("said"), 409, {}),
    (Ambiguous("said"), 400, {"connection": "close"}),
    (TooLarge("said"), 413, {}),
    (UnsupportedEncoding("said"), 415, {"accept-encoding": "gzip, deflate"}),
    (QueueFull("said"), 429, {"retry-after": "1"}),
    (Unavailable("said"), 503, {"retry-after": "1"}),
    (DeviceLost("said"), 503, {"retry-after": "1"}),
    (DeadlineExceeded("said"), 504, {}),
]
OURS: list[Exception] = [
    Failed("said"),
    EngineError("said"),
    ModelRefused("said"),
    ExecutionFailed("said"),
    PartitionError("said"),
]
SECRET = "/srv/models/secret key=abc"
STRANGERS: list[Exception] = [ValueError(SECRET), KeyError(SECRET), OSError(2, SECRET), MemoryError(SECRET), Exception(SECRET)]


@pytest.mark.parametrize(("error", "status", "headers"), SAID, ids=lambda value: type(value).__name__)
def test_what_a_client_did_has_a_status_and_its_text(error: Exception, status: int, headers: dict[str, str]) -> None:
    answered = answer(error, "r1")
    assert (answered.status, answered.text, answered.headers) == (status, "said", headers)
    assert status_of(error) == status


@pytest.mark.parametrize("error", OURS, ids=lambda error: type(error).__name__)
def test_what_went_wrong_here_is_500_with_its_text_and_the_request(error: Exception) -> None:
    answered = answer(error, "r1")
    assert (answered.status, answered.text, answered.headers) == (500, "said (request r1)", {"x-request-id": "r1"})


@pytest.mark.parametrize(("kind", "end"), [(NotFound, ""), (Failed, " (request r1)")])
def test_a_long_text_has_its_beginning_and_its_end(kind: type[RequestError], end: str) -> None:
    text = answer(kind(f"model {'n' * 30_000} is not here; there is stripes"), "r1").text
    assert text.startswith("model nnn")
    assert text.endswith(f"n is not here; there is stripes{end}")
    assert len(text) == 2005 + len(end)
    assert answer(kind("n" * 2000), "r1").text == "n" * 2000 + end


def test_a_text_of_many_lines_has_all_of_them() -> None:
    """POST /admin/reload answers with every problem of the file."""
    text = "\n".join(f"tenants.t{number}.models: unknown key" for number in range(200))
    assert answer(Conflict(text), "r1").text == text


@pytest.mark.parametrize("error", STRANGERS, ids=lambda error: type(error).__name__)
def test_an_unexpected_exception_is_500_without_its_text(error: Exception) -> None:
    answered = answer(error, "r1")
    assert (answered.status, answered.text, answered.headers) == (500, "internal error (request r1)", {"x-request-id": "r1"})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequest("said"), "INVALID_ARGUMENT"),
        (TensorMismatch("said"), "INVALID_ARGUMENT"),
        (TooLarge("said"), "INVALID_ARGUMENT"),
        (ClientGone("said"), "CANCELLED"),
        (Unauthorized("said"), "UNAUTHENTICATED"),
        (Misdirected("said"), "PERMISSION_DENIED"),
        (NotFound("said"), "NOT_FOUND"),
        (WrongMethod("One", "another"), "UNIMPLEMENTED"),
        (QueueFull("said"), "RESOURCE_EXHAUSTED"),
        (Unavailable("said"), "UNAVAILABLE"),
        (DeadlineExceeded("said"), "DEADLINE_EXCEEDED"),
        (TooSlow("said"), "DEADLINE_EXCEEDED"),
        (Failed("said"), "INTERNAL"),
        (ValueError(SECRET), "INTERNAL"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_a_status_of_grpc(error: Exception, code: str) -> None:
    assert answer(error, "r1").code == code


def test_a_wrong_method_names_the_right_one() -> None:
    answered = answer(WrongMethod("GET", "POST"), "r1")
    assert (answered.status, answered.text, answered.headers) == (405, "GET is not possible here; use POST", {"allow": "POST"})


def test_every_error_for_clients_is_in_the_table() -> None:
    """One is about a client that is gone; after the other the request runs again, with more memory."""
    answered = {type(error) for error, _, _ in SAID} | {type(error) for error in OURS} | {WrongMethod}
    assert set(RequestError.__subclasses__()) - answered == {ClientGone, Outgrown}


def test_an_error_made_of_another_is_answered_as_that_one() -> None:
    class OneOfOurs(QueueFull):
        pass

    assert status_of(OneOfOurs("said")) == 429


def test_interruptions_are_500() -> None:
    assert status_of(KeyboardInterrupt()) == 500


def test_each_answer_has_its_own_headers() -> None:
    first = answer(QueueFull("said"), "r1")
    assert isinstance(first.headers, dict)
    first.headers["x-mine"] = "1"
    assert answer(QueueFull("said"), "r2").headers == {"retry-after": "1"}
