"""Bad input is answered with a status and a sentence: the field, its value, what was expected. Nothing else is affected."""

import gzip
import json

import pytest

from .harness import Served
from .mistakes import BYTES, DATA, DEEP, INPUTS, LONG, NO_JSON, OUTPUTS, PARAMETERS, SHAPES, Case
from .wire import SMALL, Connection, posted


def headed(value: str, text: str) -> Case:
    return Case(f"Inference-Header-Content-Length: {text}", SMALL, headers=(f"Inference-Header-Content-Length: {value}",))


HEADERS = {
    "a header length past the body": headed("9999", "9999; expected at most 80, the bytes of the body"),
    "a negative header length": headed("-1", "'-1'; expected"),
    "a header length that is no number": headed("ten", "'ten'; expected"),
    "no header length": headed("", "''; expected"),
    "a header length of 40 digits": headed("1" * 40, f"'{'1' * 40}'; expected"),
    "a header length past what is unpacked": Case(
        "Inference-Header-Content-Length: 9999999; expected at most 1048576, the bytes of the body",
        gzip.compress(b" " * 2**20),
        headers=("Content-Encoding: gzip", "Inference-Header-Content-Length: 9999999"),
    ),
    "a header length in the middle of the JSON": Case(
        "the request body is not JSON: ", SMALL, headers=("Inference-Header-Content-Length: 10",)
    ),
    "a long encoding": Case(
        f"Content-Encoding: '{LONG[:40]}'; expected", SMALL, headers=(f"Content-Encoding: {LONG[:1000]}",), status=415
    ),
    "a tenant that is none": Case("X-Tenant: there is no tenant 'nobody'", SMALL, headers=("X-Tenant: nobody",), status=401),
}

INDEX, LOAD, UNLOAD = "/v2/repository/index", "/v2/repository/models/add/load", "/v2/repository/models/add/unload"
EVERYWHERE = [
    ("the request body is not JSON: ", b"{"),
    ("the request body is not JSON: ", b"\xff{}"),
    ("the request body is not JSON: ", b'{"ready": NaN}'),
    ("the request body is not JSON: depth limit exceeded", b"[" * 250_000),
    ("the request body is not JSON: depth limit exceeded", b'{"ready":' + b"[" * 250_000),
    ("the request body is an array; expected an object", b"[]"),
    ("the request body is null; expected an object", b"null"),
    ('the request body has the key "ready" twice', b'{"ready": true, "ready": false}'),
]
"""The beginning of the error and the body; the golden rows have those that are too large, after which a connection may end."""
OF_INDEX = [
    ('ready: "yes" is a string; expected true or false', {"ready": "yes"}),
    ("ready: 1 is an integer; expected true or false", {"ready": 1}),
    ("ready: [1, 1, 1", {"ready": [1] * 1000}),
    (f"ready: {'[' * 40}... is an array; expected true or false", f'{{"ready": {DEEP}}}'.encode()),
]
OF_CHANGES = [
    ("parameters: [] is an array; expected an object", {"parameters": []}),
    ("parameters.unload_dependents: null; expected a string", {"parameters": {"unload_dependents": None}}),
]
OF_UNLOAD = [
    ("parameters.config: {} is an object; expected a string, a number or", {"parameters": {"config": {}}}),
    ('parameters.unload_dependents: "no" is a string; expected true', {"parameters": {"unload_dependents": "no"}}),
]
NOT_LOADED = "failed to load 'add': the config parameter: "
OF_LOAD = [
    ("parameters.config: 1 is an integer; expected a string", {"parameters": {"config": 1}}),
    ("parameters.config: an object; expected a text that holds its JSON", {"parameters": {"config": {}}}),
    ("parameters.confg: there is no such parameter; did you mean 'config'?", {"parameters": {"confg": "{}"}}),
    ("config: stands beside 'parameters', where it means nothing; send it as parameters.config", {"config": "{}"}),
    (NOT_LOADED, {"parameters": {"config": "{"}}),
    (f"{NOT_LOADED}[]; expected an object", {"parameters": {"config": "[]"}}),
    (f"{NOT_LOADED}depth limit", {"parameters": {"config": "[" * 60_000}}),
    (f"{NOT_LOADED}250000 bytes", {"parameters": {"config": "[" * 250_000}}),
    (f"parameters.file:1/{'z' * 33}...: failed to load: put files into", {"parameters": {f"file:1/{LONG}": "AAAA"}}),
]
BODIES = {INDEX: EVERYWHERE + OF_INDEX, LOAD: EVERYWHERE + OF_CHANGES + OF_LOAD, UNLOAD: EVERYWHERE + OF_CHANGES + OF_UNLOAD}
REPOSITORY = {
    f"{path.rpartition('/')[2]}, {number}": Case(text, body, path=path)
    for path, rows in BODIES.items()
    for number, (text, body) in enumerate(rows)
} | {
    "a load of nothing": Case("failed to load '..': not in the repository", b"", path="/v2/repository/models/%2e%2e/load"),
    "a version that is no number": Case(
        "there is nothing at /v2/models/add/versions/one/infer", SMALL, path="/v2/models/add/versions/one/infer", status=404
    ),
    "a version of 20 digits": Case(
        "Request for unknown model: 'add' version", SMALL, path=f"/v2/models/add/versions/{'9' * 20}/infer", status=404
    ),
    "a model that is none": Case("Request for unknown model: '\\x00' is not found", SMALL, "%00", status=404),
}

TABLES = {
    "json": NO_JSON,
    "inputs": INPUTS,
    "shapes": SHAPES,
    "data": DATA,
    "parameters": PARAMETERS,
    "outputs": OUTPUTS,
    "bytes": BYTES,
    "headers": HEADERS,
    "repository": REPOSITORY,
}
CASES = [pytest.param(case, id=f"{table}: {name}") for table, cases in TABLES.items() for name, case in cases.items()]
GOOD = posted("identity", SMALL)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_and_the_connection_kept(served: Served, case: Case) -> None:
    with Connection(served) as connection:
        connection.send(case.bytes)
        answer = connection.answer()
        assert (answer.status, list(answer.json)) == (case.status, ["error"])
        assert answer.headers["content-type"] == "application/json"
        assert answer.json["error"].startswith(case.text), answer.json["error"]
        assert len(answer.json["error"]) < 400
        connection.send(GOOD)
        assert connection.answer().json["outputs"][0]["data"] == [1, 2]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "/;=", ""])
def test_content_type_is_ignored(served: Served, kind: str) -> None:
    with Connection(served) as connection:
        connection.send(posted("identity", SMALL, f"Content-Type: {kind}"))
        assert connection.answer().json["outputs"][0]["data"] == [1, 2]


def test_request_without_content_length_has_no_body(served: Served) -> None:
    head = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: test\r\n\r\n"
    with Connection(served) as connection:
        connection.send(head + GOOD)
        assert connection.answer().json == {"error": "the request body is empty; expected an object"}
        assert connection.answer().json["outputs"][0]["data"] == [1, 2]
        connection.send(head + json.dumps(SMALL).encode() + b"\r\n\r\n")
        assert connection.answer().status == 400


def test_unknown_fields_are_ignored(served: Served) -> None:
    with Connection(served) as connection:
        connection.send(posted("identity", SMALL | {"model_name": "other", "extra": {"inputs": [[{}]]}}))
        assert connection.answer().json["outputs"][0]["data"] == [1, 2]
