"""The Open Inference Protocol as specified, with a plain HTTP client."""

import re
import struct
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from server.config.tenant import TenantConfig

from .fixtures import served_with
from .harness import Served
from .repository import ODD_NAME
from .wire import (
    FOREVER,
    SMALL,
    Connection,
    binary,
    busy,
    client,
    infer,
    lane,
    parts,
    posted,
    request,
    spin,
    statistics,
    tensor,
    until,
)

ADD = request(tensor("a", "INT32", [2], [1, 2]), tensor("b", "INT32", [2], [30, 40]))
SUM = {"name": "sum", "datatype": "INT32", "shape": [2], "data": [31, 42]}
DIFFERENCE = {"name": "difference", "datatype": "INT32", "shape": [2], "data": [-29, -38]}
FLOATS = struct.pack("<2f", 1, 2)
LATE = "Request timeout expired: {} microseconds (parameters.timeout) passed"


single = served_with(TenantConfig(name="acme", granules=1, models=("*",), in_flight=1))
"""A server that runs one request at a time."""


@pytest.fixture
def one(single: Served) -> Iterator[httpx.Client]:
    with client(single) as http:
        yield http


def test_server_metadata(http: httpx.Client) -> None:
    metadata = http.get("/v2").json()
    assert set(metadata) == {"name", "version", "extensions"}
    assert metadata["name"] == "greenlane"
    served = {
        "binary_tensor_data",
        "classification",
        "generate",
        "logging",
        "model_configuration",
        "model_repository",
        "statistics",
        "trace",
    }
    assert served <= set(metadata["extensions"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/add/ready", {"name": "add", "ready": True}),
        ("/v2/models/add/versions/1/ready", {"name": "add", "ready": True}),
    ],
)
def test_health_in_json(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.json()) == (200, body)
    assert answer.headers["content-type"] == "application/json"


def test_metadata_lists_tensors_with_their_batch_and_all_versions(http: httpx.Client) -> None:
    assert http.get("/v2/models/rows").json() == {
        "name": "rows",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
    }
    for path in ("/v2/models/scaled", "/v2/models/scaled/versions/2"):
        assert http.get(path).json()["versions"] == ["1", "2", "10"]


def test_configuration_has_max_batch_size_and_dims_without_it(http: httpx.Client) -> None:
    config = http.get("/v2/models/rows/config").json()
    assert config["max_batch_size"] == 4
    assert config["input"][0].items() >= {"name": "x", "data_type": "TYPE_FP32", "dims": [3]}.items()
    text = http.get("/v2/models/text/config").json()["input"][0]
    assert text.items() >= {"name": "words", "data_type": "TYPE_STRING", "dims": [-1], "format": "FORMAT_NONE"}.items()
    assert http.get("/v2/models/scaled/versions/2/config").json()["version_policy"] == {"all": {}}


def test_default_version_is_the_highest(http: httpx.Client) -> None:
    document = request(tensor("x", "FP32", [1], [1]))
    for path, version, value in (("", "10", 100), ("/versions/1", "1", 10), ("/versions/2", "2", 20)):
        answer = infer(http, f"scaled{path}", document).json()
        assert answer["model_version"] == version
        assert answer["outputs"][0]["data"] == [value]


@pytest.mark.parametrize("headers", [{}, {"Accept-Encoding": "gzip"}], ids=["plain", "in a task"])
def test_a_version_in_the_query_answers_where_the_path_has_none(http: httpx.Client, headers: dict[str, str]) -> None:
    document = request(tensor("x", "FP32", [1], [1]))
    http.headers = httpx.Headers(headers)  # Without httpx's own.
    for path in ("?version=2", "?version=1&a=b&version=2", "/versions/2?version=1"):
        model, _, query = path.partition("?")
        answer = http.post(f"/v2/models/scaled{model}/infer?{query}", json=document).json()
        assert (answer["model_version"], answer["outputs"][0]["data"]) == ("2", [20])
    assert http.post("/v2/models/scaled/generate?version=2", json={"x": 1}).json()["y"] == 20
    for query, text in (
        ("version=3", "'scaled' version 3 is not found"),
        ("version=", "version '' is no number; expected digits"),
    ):
        answer = http.post(f"/v2/models/scaled/infer?{query}", json=document)
        assert (answer.status_code, text in answer.json()["error"]) == (404, True), answer.text


def test_statistics_count_rows_as_inferences_and_runs_as_executions(http: httpx.Client) -> None:
    before = statistics(http, "rows")
    for rows in (1, 3, 3):
        answer = infer(http, "rows", request(tensor("x", "FP32", [rows, 3], [1] * 3 * rows)))
        assert answer.json()["outputs"][0]["shape"] == [rows, 3]
    assert infer(http, "rows", request()).status_code == 400
    after = statistics(http, "rows")
    assert after["inference_count"] - before["inference_count"] == 7
    assert after["execution_count"] - before["execution_count"] == 3
    times = after["inference_stats"]
    for kind in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert times[kind]["count"] - before["inference_stats"][kind]["count"] == 3
    assert times["fail"] == before["inference_stats"]["fail"], "a request that is wrong itself is no failure of the model"
    assert times["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    assert [batch["batch_size"] for batch in after["batch_stats"]] == [1, 3]
    assert after["last_inference"] >= before["last_inference"]


def test_statistics_come_for_all_models_for_one_or_for_one_version(http: httpx.Client) -> None:
    def listed(path: str) -> list[tuple[str, str]]:
        return [(entry["name"], entry["version"]) for entry in http.get(path).json()["model_stats"]]

    scaled = [("scaled", "10"), ("scaled", "2"), ("scaled", "1")]
    assert {*scaled, ("add", "1")} < set(listed("/v2/models/stats"))
    assert listed("/v2/models/scaled/stats") == scaled
    assert listed("/v2/models/scaled/versions/2/stats") == [("scaled", "2")]


def test_json_in_json_out_with_every_output_and_the_id(http: httpx.Client) -> None:
    answer = infer(http, "add", ADD | {"id": "r-1"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"model_name": "add", "model_version": "1", "id": "r-1", "outputs": [SUM, DIFFERENCE]}
    assert "id" not in infer(http, "add", ADD).json()


def test_outputs_come_in_the_order_that_was_asked_for(http: httpx.Client) -> None:
    wanted = [{"name": "difference"}, {"name": "sum"}]
    assert infer(http, "add", ADD | {"outputs": wanted}).json()["outputs"] == [DIFFERENCE, SUM]
    assert infer(http, "add", ADD | {"outputs": wanted[:1]}).json()["outputs"] == [DIFFERENCE]


def test_data_may_be_flat_or_nested(http: httpx.Client) -> None:
    for data in ([1, 2, 3, 4], [[1, 2], [3, 4]]):
        answer = infer(http, "identity", request(tensor("x", "FP32", [2, 2], data)))
        assert answer.json()["outputs"][0]["data"] == [1, 2, 3, 4]


def test_binary_tensors_both_ways(http: httpx.Client) -> None:
    document = request(tensor("x", "FP32", [1, 2], binary_data_size=8), parameters={"binary_data_output": True})
    answer = http.post("/v2/models/identity/infer", **binary(document, FLOATS))
    assert answer.headers["content-type"] == "application/octet-stream"
    head, tensors = parts(answer)
    assert tensors == [FLOATS]
    assert head["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}]


def test_one_request_may_mix_json_and_binary_tensors_both_ways(http: httpx.Client) -> None:
    inputs = [tensor("b", "INT32", [2], binary_data_size=8), tensor("a", "INT32", [2], [1, 2])]
    outputs = [{"name": "sum", "parameters": {"binary_data": True}}, {"name": "difference"}]
    answer = http.post("/v2/models/add/infer", **binary(request(*inputs, outputs=outputs), struct.pack("<2i", 30, 40)))
    head, tensors = parts(answer)
    assert tensors == [struct.pack("<2i", 31, 42), b""]
    assert head["outputs"][1] == DIFFERENCE


def test_a_binary_tensor_of_no_elements_has_no_bytes(http: httpx.Client) -> None:
    document = request(tensor("x", "FP32", [0, 3], binary_data_size=0), parameters={"binary_data_output": True})
    head, tensors = parts(http.post("/v2/models/identity/infer", **binary(document)))
    assert (head["outputs"][0]["shape"], tensors) == ([0, 3], [b""])


@pytest.mark.parametrize(
    ("on_request", "on_output", "is_binary"),
    [(None, None, False), (True, None, True), (False, True, True), (True, False, False), (False, None, False)],
)
def test_binary_data_of_an_output_overrides_the_request(
    http: httpx.Client, on_request: bool | None, on_output: bool | None, is_binary: bool
) -> None:
    output: dict[str, Any] = {"name": "sum"} | ({} if on_output is None else {"parameters": {"binary_data": on_output}})
    parameters = {} if on_request is None else {"binary_data_output": on_request}
    answer = infer(http, "add", ADD | {"outputs": [output], "parameters": parameters})
    assert ("inference-header-content-length" in answer.headers) is is_binary


def test_the_raw_form_is_one_input_and_nothing_else(http: httpx.Client) -> None:
    raw = {"Inference-Header-Content-Length": "0"}
    row = struct.pack("<3f", 1, -2, 3)
    head, tensors = parts(http.post("/v2/models/rows/infer", content=row, headers=raw))
    assert head["outputs"][0]["shape"] == [1, 3]
    assert tensors == [struct.pack("<3f", -1, 2, -3)]
    for model in ("add", "identity"):  # Two inputs; two variable dimensions.
        answer = http.post(f"/v2/models/{model}/infer", content=row, headers=raw)
        assert answer.status_code == 400
        assert "raw body" in answer.json()["error"]


def test_half_precision_travels_as_binary_tensors_only(http: httpx.Client) -> None:
    halves = struct.pack("<2e", 1.5, -2)
    whole = request(tensor("x", "FP16", [2], binary_data_size=4), parameters={"binary_data_output": True})
    assert parts(http.post("/v2/models/half/infer", **binary(whole, halves)))[1] == [halves]
    for document in (whole | {"parameters": {}}, request(tensor("x", "FP16", [2], [1.5, -2]))):
        answer = http.post("/v2/models/half/infer", **binary(document, halves))
        assert answer.status_code == 400
        assert "no JSON form" in answer.json()["error"]


def test_successful_inference_has_server_timing(http: httpx.Client) -> None:
    answers = [infer(http, "add", ADD), infer(http, "add", request()), infer(http, "nope", ADD)]
    answers += [http.get("/v2/models/add/infer"), infer(http, "add", ADD, headers={"X-Tenant": "nobody"})]
    assert [answer.status_code for answer in answers] == [200, 400, 404, 405, 401]
    assert ["server-timing" in answer.headers for answer in answers] == [True, False, False, False, False]
    assert re.fullmatch(r"queue;dur=\d+(\.\d+)?, execute;dur=\d+(\.\d+)?", answers[0].headers["server-timing"])
    timing = infer(http, "spin", spin(500)).headers["server-timing"]
    assert float(timing.rpartition("=")[2]) > 0.1


def test_deadline_of_a_queued_request_is_answered_on_time(single: Served, one: httpx.Client) -> None:
    with busy(single, one):
        answer = infer(one, "identity", SMALL | {"parameters": {"timeout": 1000}})
        assert (answer.status_code, answer.json()) == (504, {"error": LATE.format(1000)})
        assert (lane(one)["in_flight"], lane(one)["waiting"]) == (1, 0)


def test_deadline_stops_running_work(one: httpx.Client) -> None:
    answer = infer(one, "spin", spin(FOREVER, parameters={"timeout": 20_000}))
    assert (answer.status_code, answer.json()["error"]) == (504, LATE.format(20_000))
    assert infer(one, "identity", SMALL).status_code == 200


def test_deadline_that_does_not_expire_has_no_effect(one: httpx.Client) -> None:
    for timeout in (0, 60_000_000, 2**63):
        assert infer(one, "identity", SMALL | {"parameters": {"timeout": timeout}}).status_code == 200


def test_lower_priority_numbers_run_first_and_requests_without_one_last(single: Served, one: httpx.Client) -> None:
    with Connection(single) as unranked, Connection(single) as second, Connection(single) as first:
        with busy(single, one):
            queued = [
                (unranked, posted("identity", SMALL)),
                (second, posted("spin", spin(FOREVER, parameters={"priority": 2}))),
                (first, posted("identity", SMALL | {"parameters": {"priority": 1}})),
            ]
            for waiting, (connection, data) in enumerate(queued, 1):
                connection.send(data)
                until(lambda waiting=waiting: lane(one)["waiting"] == waiting)  # type: ignore[misc]
        assert first.answer().status == 200
        until(lambda: lane(one)["in_flight"] == 1)
        assert lane(one)["waiting"] == 1, "the one without a priority waits for the endless one with a priority"
        second.close()
        assert unranked.answer().status == 200


def test_query_is_ignored(http: httpx.Client) -> None:
    assert http.post("/v2/models/add/infer?test_1=1&test_2=2", json=ADD).json()["outputs"] == [SUM, DIFFERENCE]
    assert http.get("/v2/models/add?x=/infer").json()["name"] == "add"


@pytest.mark.parametrize("path", ["", "/versions/1", "/ready", "/config", "/stats", "/versions/1/infer"])
def test_a_models_name_may_be_percent_encoded(http: httpx.Client, path: str) -> None:
    method, body = ("POST", SMALL) if path.endswith("infer") else ("GET", None)
    answer = http.request(method, f"/v2/models/{quote(ODD_NAME)}{path}", json=body)
    assert answer.status_code == 200
    assert ODD_NAME in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/v3",
        "/v2/models",
        "/v2/models/",
        "/v2/models/infer",
        "/v2/models/add/",
        "/v2/models/add/ready/",
        "/v2/models/add/versions/one",
        "/v2/models/add/versions/-1/stats",
        "/v2/models/add/versions/%D9%A1/ready",
        "/v2/models/add/versions/infer",
    ],
)
def test_unknown_paths_are_404(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, list(answer.json())) == (404, ["error"])


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models//infer",
        "/v2/models/add/infer/",
        "/v2/models/add%2Finfer",
        "/v2/models/add/versions/infer",
        "/v2/models/add/versions/one/infer",
        "/v2/models/add/versions/1/extra/infer",
    ],
)
def test_infer_paths_without_a_model_are_404(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=ADD)
    assert (answer.status_code, list(answer.json())) == (404, ["error"])


@pytest.mark.parametrize("suffix", ["", "/ready", "/config", "/stats", "/infer"])
def test_an_unknown_model_or_version_is_named(http: httpx.Client, suffix: str) -> None:
    method = "POST" if suffix == "/infer" else "GET"
    answer = http.request(method, f"/v2/models/foo{suffix}")
    assert (answer.status_code, answer.json()["error"]) == (404, "Request for unknown model: 'foo' is not found")
    answer = http.request(method, f"/v2/models/add/versions/99{suffix}")
    assert (answer.status_code, answer.json()["error"]) == (
        404,
        "Request for unknown model: 'add' version 99 is not found",
    )


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v2", {"GET", "HEAD"}),
        ("DELETE", "/v2/health/live", {"GET", "HEAD"}),
        ("PUT", "/v2/models/add/config", {"GET"}),
        ("GET", "/v2/models/add/infer", {"POST"}),
        ("HEAD", "/v2/models/add/infer", {"POST"}),
        ("OPTIONS", "/v2/models/add/versions/1/infer", {"POST"}),
        ("OPTIONS", "/v2", {"GET", "HEAD"}),
        ("GET", "/v2/repository/index", {"POST"}),
        ("GET", "/v2/repository/models/add/load", {"POST"}),
        ("DELETE", "/admin/partitions", {"GET", "PUT"}),
    ],
)
def test_wrong_method_is_405_with_the_allowed_ones(http: httpx.Client, method: str, path: str, allowed: set[str]) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed
    if method != "HEAD":
        assert method in answer.json()["error"]


def test_head_has_the_headers_of_an_answer_and_no_body(http: httpx.Client) -> None:
    answer = http.head("/v2/models/add/infer")
    assert answer.content == b""
    assert infer(http, "add", ADD).status_code == 200
