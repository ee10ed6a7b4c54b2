"""Many clients of one model at once: right answers in fewer runs, and no client's mistake affects another.

A work that ends only when its client goes holds the partition, so that what comes meanwhile waits and can be joined.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.bare import session
from benchmarks.models import build, model_path
from server.config.tenant import TenantConfig

from .harness import Served, configuration, serving
from .repository import SPIN, write
from .wire import Connection, Document, busy, data, infer, lane, parts, posted, request, statistics, tensor, until
from .wire import binary as in_binary

PICK = "pick (float[b, 4] x, int64[b, 1] at) => (float[b, 1] y) { y = GatherElements <axis = 1> (x, at) }"
TEXT = "text (string[b, 2] words, float[b] x) => (string[b, 2] same, float[b] y) { same = Identity(words)  y = Neg(x) }"
WIDE = "wide (float[b, n] x) => (float[b, n] y) { y = Neg(x) }"
CLIENTS = 32


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("batching") / "models"
    build(root)
    (root / "mlp" / "config.pbtxt").write_text("max_batch_size: 64")
    for name, text in (("pick", PICK), ("text", TEXT), ("wide", WIDE)):
        write(root, name, text, config="max_batch_size: 8")
    write(root, "spin", SPIN)
    return root


@pytest.fixture(scope="module", params=[False, True], ids=["asgi", "direct"])
def served(root: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    config = configuration(root, TenantConfig(name="acme", granules=1, models=("*",), in_flight=1))
    with serving(config, direct=request.param) as served:
        yield served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=served.url, timeout=60, verify=False, limits=httpx.Limits(max_connections=CLIENTS + 8)
    ) as client:
        yield client


@contextmanager
def together(served: Served, http: httpx.Client, waiting: int) -> Iterator[ThreadPoolExecutor]:
    """What is asked inside waits until so many do, and then runs."""
    with ThreadPoolExecutor(CLIENTS) as clients, busy(served, http):
        yield clients
        until(lambda: lane(http)["waiting"] == waiting)


def answers(served: Served, http: httpx.Client, model: str, documents: Sequence[Document]) -> list[httpx.Response]:
    """Ask for these at once; those that are refused never wait."""
    with together(served, http, sum(not document.get("wrong") for document in documents)) as clients:
        asked = [clients.submit(infer, http, model, document) for document in documents]
    return [each.result() for each in asked]


def runs(http: httpx.Client, model: str) -> tuple[int, int]:
    """Runs and rows so far."""
    counted = statistics(http, model)
    return counted["execution_count"], counted["inference_count"]


def picks(*at: int) -> Document:
    rows = len(at)
    x = [[float(4 * row + column) for column in range(4)] for row in range(rows)]
    return request(tensor("x", "FP32", [rows, 4], x), tensor("at", "INT64", [rows, 1], list(at)))


def test_32_clients_get_right_answers_in_fewer_runs(served: Served, http: httpx.Client, root: Path) -> None:
    x = np.random.default_rng(3).random((CLIENTS, 784), np.float32)
    head = request(tensor("x", "FP32", [1, 784], binary_data_size=784 * 4), parameters={"binary_data_output": True})
    before = runs(http, "mlp")
    with together(served, http, CLIENTS) as clients:
        send: list[Future[httpx.Response]] = [
            clients.submit(http.post, "/v2/models/mlp/infer", **in_binary(head, row.tobytes())) for row in x
        ]
    (expected,) = session(model_path(root, "mlp")).run(None, {"x": x})
    for each, row in zip(send, expected, strict=True):
        document, (y,) = parts(each.result())
        assert document["outputs"][0]["shape"] == [1, 10]
        assert np.allclose(np.frombuffer(y, np.float32), row, atol=1e-5)
    after = runs(http, "mlp")
    assert after[1] - before[1] == CLIENTS
    assert after[0] - before[0] == 1
    assert statistics(http, "mlp")["batch_stats"][-1]["batch_size"] == CLIENTS


def test_json_requests_of_several_rows_are_batched_and_split(served: Served, http: httpx.Client) -> None:
    before = runs(http, "pick")
    found = answers(served, http, "pick", [picks(0), picks(1, 2), picks(3, 0, 1)])
    assert [data(each) for each in found] == [[0.0], [1.0, 6.0], [3.0, 4.0, 9.0]]
    after = runs(http, "pick")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 6)


def test_an_invalid_request_is_refused_alone(served: Served, http: httpx.Client) -> None:
    wrong = [picks(*[0] * 9) | {"wrong": True}, picks(0) | {"inputs": [], "wrong": True}]
    found = answers(served, http, "pick", [picks(1), *wrong, picks(2)])
    assert [each.status_code for each in found] == [200, 400, 400, 200]
    assert "batch of 9" in found[1].json()["error"]


def test_a_request_whose_data_make_the_model_raise_fails_alone(served: Served, http: httpx.Client) -> None:
    found = answers(served, http, "pick", [picks(1), picks(99), picks(2)])
    assert [each.status_code for each in found] == [200, 500, 200]
    assert [data(found[0]), data(found[2])] == [[1.0], [2.0]]


def test_requests_of_different_shapes_are_batched_separately(served: Served, http: httpx.Client) -> None:
    before = runs(http, "wide")
    rows = [[float(place)] * (1 + place % 2) for place in range(6)]
    found = answers(served, http, "wide", [request(tensor("x", "FP32", [1, len(row)], row)) for row in rows])
    assert [data(each) for each in found] == [[-value for value in row] for row in rows]
    after = runs(http, "wide")
    assert (after[0] - before[0], after[1] - before[1]) == (2, 6)


def test_bytes_tensors_are_batched(served: Served, http: httpx.Client) -> None:
    before = runs(http, "text")
    words = [["a" * place, "é" * (7 - place)] for place in range(5)]
    documents = [
        request(tensor("words", "BYTES", [1, 2], pair), tensor("x", "FP32", [1], [place])) for place, pair in enumerate(words)
    ]
    found = answers(served, http, "text", documents)
    assert [data(each) for each in found] == words
    assert [data(each, 1) for each in found] == [[-float(place)] for place in range(5)]
    assert runs(http, "text")[0] - before[0] == 1


def test_a_disconnected_client_is_left_out_of_the_batch(served: Served, http: httpx.Client) -> None:
    before = runs(http, "pick")
    with together(served, http, 2) as clients:
        asked = [clients.submit(infer, http, "pick", picks(place)) for place in (1, 2)]
        until(lambda: lane(http)["waiting"] == 2)
        with Connection(served) as gone:
            gone.send(posted("pick", picks(3)))
            until(lambda: lane(http)["waiting"] == 3)
    assert [data(each.result()) for each in asked] == [[1.0], [2.0]]
    after = runs(http, "pick")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 2)


def test_under_load_with_deadlines_every_request_is_answered_and_no_slot_is_lost(served: Served, http: httpx.Client) -> None:
    def keep_asking(client: int) -> list[tuple[int, bool]]:
        draw = np.random.default_rng(client)
        found = []
        for _ in range(25):
            at = [int(each) for each in draw.integers(0, 4, draw.integers(1, 5))]
            late = {"parameters": {"timeout": int(draw.integers(1, 4000))}} if draw.random() < 0.3 else {}
            answer = infer(http, "pick", picks(*at) | late)
            right = answer.status_code != 200 or data(answer) == [4.0 * row + column for row, column in enumerate(at)]
            found.append((answer.status_code, right))
        return found

    with ThreadPoolExecutor(16) as clients:
        found = [each for client in clients.map(keep_asking, range(16)) for each in client]
    assert all(right for _, right in found)
    assert {status for status, _ in found} <= {200, 504}
    quiet = {"waiting": 0, "in_flight": 0, "abandoned": 0}
    until(lambda: lane(http).items() >= quiet.items())
    used = served.service.tenants["acme"].lane.slots.statistics().used
    assert used == 0


def test_the_configuration_shows_dynamic_batching(http: httpx.Client) -> None:
    shown = json.loads(http.get("/v2/models/mlp/config").content)
    assert (shown["max_batch_size"], "dynamic_batching" in shown) == (64, True)
    assert "dynamic_batching" not in http.get("/v2/models/spin/config").json()
