"""Triton's generate extension over real sockets: answers in parts as events, and as a whole, in every form of the server."""

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config.tenant import TenantConfig

from .fixtures import WAYS, served_as
from .harness import Served, configuration, serving
from .repository import in_parts, write
from .virtual import VirtualDevice
from .wire import Connection, client, failures, until

ECHO = "echo (string[n] text_input) => (string[n] text_output) { text_output = Identity(text_input) }"
MATRIX = "matrix (float[r, 2, c] x) => (float[r, 2, c] y) { y = Identity(x) }"
SOME = 3_000
"""Turns of a step that takes some milliseconds."""
LONG = 100_000_000
"""Turns of a step that does not end while a test runs."""


def fill(root: Path) -> Path:
    write(root, "echo", ECHO)
    write(root, "matrix", MATRIX)
    in_parts(root)
    return root


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=WAYS)
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every way in which requests reach a server."""
    with served_as(request.param, repository, tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture(scope="module")
def inside(repository: Path) -> Iterator[Served]:
    """A server in this process, that a test can look into."""
    with serving(
        configuration(repository, TenantConfig(name="acme", granules=1, models=("*",), queue=4)), direct=True
    ) as served:
        yield served


def count(x: float, bad: float = -1, turns: int = 0, **parameters: Any) -> dict[str, Any]:
    return {"x": x, "bad": bad, "turns": turns, "parameters": parameters}


def events(text: str) -> list[dict[str, Any]]:
    """The documents of a whole stream of events."""
    assert text.endswith("\n\n") or not text
    lines = text.removesuffix("\n\n").split("\n\n") if text else []
    assert all(line.startswith("data: ") for line in lines), text
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def stream(http: httpx.Client, body: dict[str, Any], model: str = "countdown") -> httpx.Response:
    return http.post(f"/v2/models/{model}/generate_stream", json=body)


def test_each_part_is_an_event_and_they_are_in_order(http: httpx.Client) -> None:
    answer = stream(http, count(5))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert events(answer.text) == [{"model_name": "countdown", "model_version": "1", "y": float(y)} for y in (5, 4, 3, 2, 1)]


def test_a_connection_goes_on_after_a_stream(http: httpx.Client) -> None:
    for _ in range(2):
        assert len(events(stream(http, count(3)).text)) == 3
        assert http.post("/v2/models/identity/generate", json={"x": 2}).json()["y"] == 2


def test_the_version_may_be_named(http: httpx.Client) -> None:
    answer = http.post("/v2/models/countdown/versions/1/generate_stream", json=count(1))
    assert [part["y"] for part in events(answer.text)] == [1]
    assert http.post("/v2/models/countdown/versions/2/generate_stream", json=count(1)).status_code == 404


def test_a_part_arrives_before_the_next_is_computed(http: httpx.Client) -> None:
    """The second one would take for ever."""
    body = count(2)
    with http.stream("POST", "/v2/models/countdown/generate_stream", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")


def test_an_error_in_the_middle_is_the_last_event(http: httpx.Client) -> None:
    answer = stream(http, count(5, bad=3))
    assert answer.status_code == 200
    *parts, error = events(answer.text)
    assert [part["y"] for part in parts] == [5, 4]
    assert list(error) == ["error"]
    assert "the model raised" in error["error"]


def test_an_error_before_the_first_part_is_a_status(http: httpx.Client) -> None:
    answer = stream(http, count(5, bad=5))
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/json"
    assert "the model raised" in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"x": 1, "bad": 0}, 400, "inputs: 'turns' missing; the model takes 'x', 'bad', 'turns'"),
        ({**count(1), "x": [1, 2]}, 400, "x: 2 elements, which cannot have the shape of input 'x', [1]"),
        ({**count(1), "x": "one"}, 400, 'x.data[0]: "one" is a string; expected a number for FP32'),
        ({**count(1), "x": {}}, 400, "x: {} is an object; expected a value or an array of FP32, as input 'x' is"),
        ({**count(1), "more": [1]}, 400, "more: [1] is an array; expected a string, a number or true or false"),
        ({**count(1), "parameters": 3}, 400, "parameters: 3 is an integer; expected an object"),
        ({**count(1), "parameters": {"x": 2}}, 400, "parameters.x: 'x' given twice; expected each input once"),
        ({**count(1), "triton_x": 1}, 400, "parameters.triton_x: names that begin with triton_ are reserved"),
        ({**count(1), "parameters": {"timeout": -1}}, 400, "parameters.timeout: -1; expected an integer of at least 0"),
        ([], 400, "the request body is an array; expected an object"),
    ],
    ids=["missing", "shape", "type", "object", "parameter", "parameters", "twice", "reserved", "timeout", "array"],
)
def test_a_wrong_request_is_refused_by_name(http: httpx.Client, body: Any, status: int, why: str) -> None:
    for endpoint in ("generate", "generate_stream"):
        answer = http.post(f"/v2/models/countdown/{endpoint}", json=body)
        assert (answer.status_code, answer.json()["error"][: len(why)]) == (status, why)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/countdown/generate_stream", 405),
        ("POST", "/v2/models/nothing/generate_stream", 404),
        ("POST", "/v2/models/generate", 405),
        ("POST", "/v2/models/a/b/c/generate", 404),
    ],
)
def test_other_methods_and_paths_are_refused(http: httpx.Client, method: str, path: str, status: int) -> None:
    assert http.request(method, path, json={}).status_code == status


def test_inputs_may_be_among_the_parameters_and_other_members_are_parameters(http: httpx.Client) -> None:
    body = {"x": 1, "id": "7", "temperature": 0.5, "parameters": {"bad": 9, "turns": 0, "priority": 1, "stream": True}}
    (part,) = events(stream(http, body).text)
    assert part == {"model_name": "countdown", "model_version": "1", "id": "7", "y": 1.0}


def test_a_model_that_answers_as_a_whole_streams_one_event(http: httpx.Client) -> None:
    (part,) = events(stream(http, {"text_input": "héllo"}, "echo").text)
    assert part["text_output"] == "héllo"
    assert http.post("/v2/models/echo/generate", json={"text_input": ["a", "b"]}).json()["text_output"] == ["a", "b"]


def test_flat_arrays_take_the_dimensions_that_vary(http: httpx.Client) -> None:
    answer = http.post("/v2/models/matrix/generate", json={"x": [1, 2, 3, 4, 5, 6]}).json()
    assert answer["y"] == [1, 2, 3, 4, 5, 6]
    assert http.post("/v2/models/matrix/generate", json={"x": [1, 2, 3]}).status_code == 400


def test_generate_takes_exactly_one_part(http: httpx.Client) -> None:
    assert http.post("/v2/models/countdown/generate", json=count(1)).json()["y"] == 1
    answer = http.post("/v2/models/countdown/generate", json=count(2))
    assert answer.status_code == 400
    assert "exactly one part" in answer.json()["error"]


def test_infer_refuses_a_model_that_answers_in_parts(http: httpx.Client) -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]},
        {"name": "bad", "datatype": "FP32", "shape": [1], "data": [0]},
        {"name": "turns", "datatype": "INT64", "shape": [], "data": [0]},
    ]
    answer = http.post("/v2/models/countdown/infer", json={"inputs": inputs})
    assert answer.status_code == 400
    assert answer.json()["error"] == (
        "model 'countdown' answers in parts; use generate_stream, or generate for a single part, or ModelStreamInfer over gRPC"
    )


def test_the_configuration_says_that_answers_come_in_parts(http: httpx.Client) -> None:
    assert http.get("/v2/models/countdown/config").json()["model_transaction_policy"] == {"decoupled": True}


def test_a_deadline_ends_the_stream(http: httpx.Client) -> None:
    answer = stream(http, count(100_000, turns=SOME, timeout=200_000))
    *parts, error = events(answer.text)
    assert parts
    assert "Request timeout expired: 200000 microseconds (parameters.timeout) passed" in error["error"]


def test_a_deadline_before_the_first_part_is_a_status(http: httpx.Client) -> None:
    assert stream(http, count(1, turns=LONG, timeout=50_000)).status_code == 504


def test_a_client_that_goes_away_stops_its_answer(http: httpx.Client, served: Any) -> None:
    before = failures(http, "countdown")
    with (
        client(served) as other,
        other.stream("POST", "/v2/models/countdown/generate_stream", json=count(100_000, turns=SOME)) as answer,
    ):
        lines = answer.iter_lines()
        assert [next(lines)[:6] for _ in range(3)] == ["data: ", "", "data: "]
    until(lambda: failures(http, "countdown") == before + 1)
    begun = time.monotonic()
    assert http.post("/v2/models/identity/generate", json={"x": 2}).json()["y"] == 2
    assert time.monotonic() - begun < 10


def test_streams_and_inferences_take_turns(http: httpx.Client, served: Any) -> None:
    ended: list[list[float]] = []

    def consume() -> None:
        with client(served) as mine:
            ended.append([part["y"] for part in events(stream(mine, count(100, turns=SOME)).text)])

    threads = [threading.Thread(target=consume) for _ in range(2)]
    for thread in threads:
        thread.start()
    answered = 0
    while not ended:
        assert http.post("/v2/models/identity/generate", json={"x": answered}).json()["y"] == answered
        answered += 1
    for thread in threads:
        thread.join()
    assert ended == [[float(y) for y in range(100, 0, -1)]] * 2
    assert answered > 10


# What a test sees only inside.


def idle(served: Served) -> bool:
    lane = served.service.tenants["acme"].lane
    worker = served.runtime.workers["acme"]
    return lane.slots.statistics().used == 0 and lane.statistics()[:3] == (0, 0, 0) and worker.idle


def unfinished(served: Served) -> dict[int, Any]:
    return served.runtime.frontends["acme"].link.tickets.unfinished


def test_nothing_is_left_of_an_answer_whose_client_has_gone(inside: Served) -> None:
    with (
        client(inside) as http,
        http.stream("POST", "/v2/models/countdown/generate_stream", json=count(100_000, turns=SOME)) as answer,
    ):
        assert '"y"' in next(answer.iter_lines())
    until(lambda: idle(inside))
    assert unfinished(inside) == {}


def test_a_step_that_runs_is_stopped_when_its_client_goes(inside: Served) -> None:
    with client(inside) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v2/models/countdown/generate_stream", json=count(3, turns=LONG), timeout=0.3)
    until(lambda: idle(inside))
    assert unfinished(inside) == {}


def test_a_client_that_does_not_read_is_stopped_and_holds_nothing_else(inside: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside.service.tenants["acme"].unread, "seconds", 0.5)

    async def flood() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", inside.port, limit=1)
        body = json.dumps({**count(100_000), "id": "x" * 60_000}).encode()
        head = b"POST /v2/models/countdown/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await asyncio.to_thread(until, lambda: unfinished(inside) != {} and not inside.runtime.workers["acme"].oldest)
        async with asyncio.timeout(30):
            with client(inside) as http:
                post = await asyncio.to_thread(http.post, "/v2/models/identity/generate", json={"x": 3})
                assert post.json()["y"] == 3
        await asyncio.to_thread(until, lambda: idle(inside))
        writer.close()

    asyncio.run(flood())
    assert unfinished(inside) == {}


def test_more_streams_than_the_queue_has_room_for_are_refused(inside: Served) -> None:
    with ExitStack() as stack:
        http = stack.enter_context(client(inside))
        statuses = [
            stack.enter_context(
                http.stream("POST", "/v2/models/countdown/generate_stream", json=count(100_000, turns=SOME))
            ).status_code
            for _ in range(16)
        ]
        assert statuses[0] == 200
        assert set(statuses) == {200, 429}
    until(lambda: idle(inside))


def test_statistics_count_an_answer_once_with_the_time_of_all_parts(inside: Served) -> None:
    with client(inside) as http:

        def counted() -> tuple[int, int]:
            (stats,) = http.get("/v2/models/countdown/stats").json()["model_stats"]
            return stats["inference_count"], stats["inference_stats"]["compute_infer"]["ns"]

        before = counted()
        stream(http, count(5, turns=SOME))
        stream(http, count(1, turns=SOME))
        after = counted()
    assert after[0] == before[0] + 2
    assert after[1] - before[1] > 6 * 50_000


def test_statistics_count_each_part_by_its_number(http: httpx.Client) -> None:
    def counted(number: str, what: str) -> int:
        (stats,) = http.get("/v2/models/countdown/stats").json()["model_stats"]
        return stats["response_stats"].get(number, {}).get(what, {"count": 0})["count"]

    def all_counted() -> list[int]:
        return [
            counted(number, what)
            for number, what in (("10", "success"), ("11", "success"), ("11", "empty_response"), ("11", "fail"))
        ]

    def answers() -> list[float]:
        """Those that had a first part, in Triton's histogram."""
        name = "nv_inference_first_response_histogram_ms_count{"
        return [float(line.split()[-1]) for line in http.get("/metrics").text.splitlines() if line.startswith(name)]

    stream(http, count(1))
    before, answered = all_counted(), answers()
    stream(http, count(11))
    stream(http, count(12))
    stream(http, count(12, bad=1))
    assert [now - then for now, then in zip(all_counted(), before, strict=True)] == [3, 1, 1, 1]
    assert answers() == [answered[0] + 3]
    stream(http, count(100))
    assert counted("63", "success")
    assert not counted("64", "success")


def test_http_1_0_gets_no_events(served: Any) -> None:
    body = json.dumps(count(1)).encode()
    for path, status in (("generate_stream", 400), ("generate", 200)):
        with Connection(served) as connection:
            head = f"POST /v2/models/countdown/{path} HTTP/1.0\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.send(head.encode() + body)
            assert connection.answer().status == status


def test_a_repartition_does_not_end_an_answer(repository: Path) -> None:
    tenants = [TenantConfig(name=name, granules=1, models=("*",)) for name in ("acme", "globex")]
    with (
        serving(configuration(repository, *tenants), VirtualDevice(4)) as served,
        client(served) as http,
        http.stream("POST", "/v2/models/countdown/generate_stream", json=count(400, turns=SOME)) as answer,
    ):
        lines = answer.iter_lines()
        first = next(lines)
        assert http.put("/admin/partitions", json={"acme": 3, "globex": 1}).status_code == 200
        parts = [json.loads(line.removeprefix("data: "))["y"] for line in (first, *lines) if line]
        assert parts == [float(y) for y in range(400, 0, -1)]


@pytest.mark.parametrize("form", ["processes", "uvicorn"])
def test_a_drain_waits_for_an_answer(form: str, repository: Path, tmp_path: Path) -> None:
    with (
        served_as(form, repository, tmp_path) as server,
        client(server) as http,
        http.stream("POST", "/v2/models/countdown/generate_stream", json=count(200, turns=SOME)) as answer,
    ):
        lines = answer.iter_lines()
        first = next(lines)
        server.signal()
        parts = [json.loads(line.removeprefix("data: "))["y"] for line in (first, *lines) if line]
        assert parts == [float(y) for y in range(200, 0, -1)]
        assert server.wait() == (0 if form == "processes" else -signal.SIGTERM)  # uvicorn ends by the signal that it got.


def test_a_stream_ends_with_its_http_process_and_the_next_process_serves_another(repository: Path, tmp_path: Path) -> None:
    with served_as("processes", repository, tmp_path) as server, client(server) as http:
        with http.stream("POST", "/v2/models/countdown/generate_stream", json=count(100_000, turns=SOME)) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.kill("acme")
            with pytest.raises(httpx.TransportError):
                list(lines)

        def serves() -> bool:
            with suppress(httpx.TransportError):
                answer = stream(http, count(3))
                return answer.status_code == 200 and len(events(answer.text)) == 3
            return False

        until(serves)
