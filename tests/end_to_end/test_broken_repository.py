"""A repository of broken models: what the index, the answers and the log say of each, and that the others are served."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from server.config.tenant import TenantConfig

from . import repository
from .harness import Served, configuration, serving
from .processes import Running
from .wire import SMALL, client, data, index, infer, tensor
from .wire import request as asked

TRITONS = "tritons/config.pbtxt: ignored, as they mean nothing here: instance_group.kind"
ONE_INSTANCE = (
    "tritons/config.pbtxt: instance_group.count: 2 cannot be honoured: inferences of a tenant run one after another on its "
    "partition, and dynamic_batching joins them; it is ignored"
)
SKIPPED = "{name}: not looked into: one; a version is a number above 0 without leading zeros"

REASONS = {
    "absent": "not in the repository",
    "bare": "no version in it; expected bare/1/model.onnx",
    "contradicted": "contradicted/config.pbtxt contradicts the model: 'x' is TYPE_INT32, but TYPE_FP32 in the model",
    "garbage": "garbage/1/model.onnx: failed to load: ",
    "prose": "prose/config.pbtxt:1:1 : Message type",
    "truncated": "truncated/1/model.onnx: failed to load: ",
    "void": "void/1/model.onnx: failed to load: ",
    "word": "no version in it; expected word/1/model.onnx",
}
"""The beginning of each unavailable model's reason."""


class Listener(logging.Handler):
    """Keeps every record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def logged(name: str) -> Iterator[list[logging.LogRecord]]:
    """The records of a logger from now on; Greenlane's loggers do not propagate to pytest's handler."""
    listener = Listener()
    logging.getLogger(name).addHandler(listener)
    try:
        yield listener.records
    finally:
        logging.getLogger(name).removeHandler(listener)


@pytest.fixture(scope="module")
def broken_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository.broken(tmp_path_factory.mktemp("broken"))


@pytest.fixture(scope="module")
def records(broken_root: Path) -> Iterator[list[logging.LogRecord]]:
    with logged("greenlane.models") as records:
        yield records


@pytest.fixture(scope="module")
def broken_served(broken_root: Path, records: list[logging.LogRecord]) -> Iterator[Served]:
    names = sorted(path.name for path in broken_root.iterdir())
    everything_and_more = TenantConfig(name="acme", granules=1, models=(*names, "absent"))
    with serving(configuration(broken_root, everything_and_more)) as served:
        yield served


@pytest.fixture(scope="module")
def broken(broken_served: Served) -> Iterator[httpx.Client]:
    with client(broken_served) as http:
        yield http


@pytest.mark.parametrize("name", REASONS)
def test_the_index_has_the_reason_of_an_unavailable_model(broken: httpx.Client, name: str) -> None:
    (entry,) = [entry for entry in index(broken) if entry["name"] == name]
    assert entry["state"] == "UNAVAILABLE"
    assert entry["reason"].startswith(REASONS[name])


def test_reasons_do_not_reveal_the_path_of_the_repository(broken: httpx.Client, broken_root: Path) -> None:
    assert str(broken_root) not in broken.post("/v2/repository/index").text


@pytest.mark.parametrize("name", ["whole", "mixed", "tritons"])
def test_working_models_are_served_beside_broken_ones(broken: httpx.Client, name: str) -> None:
    assert broken.get("/v2/health/ready").status_code == 200
    assert data(infer(broken, name, SMALL)) == [1, 2]


def test_a_directory_that_is_no_version_is_not_in_the_index_and_logged_once(
    broken: httpx.Client, records: list[logging.LogRecord]
) -> None:
    assert [entry for entry in index(broken) if entry["name"] == "mixed"] == [
        {"name": "mixed", "version": "2", "state": "READY"},
    ]
    for name in ("mixed", "word"):
        assert [record.getMessage() for record in records].count(SKIPPED.format(name=name)) == 1


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("suffix", ["", "/ready", "/config", "/stats", "/infer"])
def test_a_request_for_a_broken_model_is_503_with_the_reason(broken: httpx.Client, name: str, suffix: str) -> None:
    answer = broken.request("POST" if suffix == "/infer" else "GET", f"/v2/models/{name}{suffix}")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"].startswith(f"model '{name}' is unavailable: {REASONS[name]}")


def test_ignored_fields_share_one_warning_and_unsupported_ones_have_one_each(
    broken: httpx.Client, records: list[logging.LogRecord]
) -> None:
    warnings = [(record.levelname, record.getMessage()) for record in records if "tritons" in record.getMessage()]
    assert warnings == [("WARNING", TRITONS), ("WARNING", ONE_INSTANCE)]


def test_every_problem_is_in_the_log_once(broken: httpx.Client, records: list[logging.LogRecord]) -> None:
    for name, reason in REASONS.items():
        lines = [r for r in records if re.match(rf"model {name} \S* ?is unavailable: {re.escape(reason)}", r.getMessage())]
        assert [record.levelname for record in lines] == ["WARNING"], name


def test_the_index_can_be_limited_to_ready_models(broken: httpx.Client) -> None:
    whole = index(broken)
    assert [entry["name"] for entry in index(broken, '{"ready": true}')] == ["mixed", "tritons", "whole"]
    assert index(broken, '{"ready": false}') == index(broken, "{}") == index(broken, " \r\n") == whole
    assert [entry["name"] for entry in whole] == sorted(entry["name"] for entry in whole)


INDEX, LOAD, UNLOAD = (f"/v2/repository/{what}" for what in ("index", "models/whole/load", "models/whole/unload"))


@pytest.mark.parametrize("path", [INDEX, LOAD, UNLOAD])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_body_of_two_megabytes_is_413(broken: httpx.Client, path: str, in_chunks: bool) -> None:
    body = [b" " * 65536] * 32
    answer = broken.post(path, content=iter(body) if in_chunks else b"".join(body))
    assert (answer.status_code, list(answer.json())) == (413, ["error"])
    assert data(infer(broken, "whole", SMALL)) == [1, 2]


def test_a_repository_missing_at_startup_is_logged_and_served_as_empty(tmp_path: Path) -> None:
    named = TenantConfig(name="acme", granules=1, models=("identity",))
    with (
        logged("greenlane.models") as lines,
        serving(configuration(tmp_path / "gone", named)) as served,
        client(served) as http,
    ):
        assert http.get("/v2/health/ready").status_code == 503, "its only tenant asks for a model, and is served none"
        assert index(http) == [{"name": "identity", "state": "UNAVAILABLE", "reason": "not in the repository"}]
    assert [record.levelname for record in lines] == ["ERROR", "WARNING"]
    assert str(tmp_path / "gone") in lines[0].getMessage()


def levels(served: Served | Running, lines: list[logging.LogRecord], request_id: str) -> list[str]:
    """The levels of the records about a request, from this process's log or from that of a server process."""
    if isinstance(served, Running):
        served.wait_for_log(f"request_id={request_id}")
        return [line.split()[1] for line in served.log if f"request_id={request_id}" in line]
    return [record.levelname for record in lines if getattr(record, "request_id", "") == request_id]


def test_a_model_that_raises_is_500_with_the_request_id_of_the_log(served: Served | Running, http: httpx.Client) -> None:
    def pick(at: int) -> httpx.Response:
        return infer(http, "pick", asked(tensor("x", "FP32", [4], [1, 2, 3, 4]), tensor("at", "INT64", [1], [at])))

    with logged("greenlane.infer") as lines:
        answer = pick(9)
    assert answer.status_code == 500
    text, request_id = answer.json()["error"], answer.headers["x-request-id"]
    assert text.startswith("the model raised: ")
    assert "out of data bounds" in text
    assert text.endswith(f"(request {request_id})")
    assert not re.search(r"Traceback|\.py|File ", answer.text)
    assert levels(served, lines, request_id) == ["ERROR"]
    assert data(pick(2)) == [3], "the lane goes on"
    assert pick(9).headers["x-request-id"] != request_id
