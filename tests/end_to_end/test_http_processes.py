"""HTTP in processes of its own: which process serves a connection, and what happens when one of the processes ends."""

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from benchmarks.watched_server import alive
from greenlane.load.server_process import free_port
from server.http.connection_limits import REFUSAL_RATE
from server.processes.http_side.http_process import UNAUTHENTICATED_RATE
from server.tenants.auth import digest

from .harness import cores
from .processes import Load, Running, configure, holder, running, tenant, threads
from .wire import (
    BODY,
    FOREVER,
    SMALL,
    Connection,
    answered,
    as_before,
    binary,
    chunked,
    client,
    get,
    infer,
    lane,
    parts,
    post,
    posted,
    request,
    spin,
    tensor,
    until,
)

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

KEY = {"Authorization": "Bearer secret"}
ACME = "X-Tenant: acme"
GLOBEX = "Authorization: Bearer secret"
ELSEWHERE = "send requests of {!r} to the server's common port{} on another connection"
LIVE = get("/v2/health/live")


def ends_up_at(server: Running, connection: Connection, name: str) -> None:
    """Wait until only this process has the connection: the process that handed it off may close its copy a moment later."""
    until(lambda: holder(server, connection) == name)


@pytest.fixture(scope="module")
def own_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def config(standard: Path, own_port: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"keys_sha256": [digest("secret")], "port": own_port, "front_cores": f"{cores()[0]}"}
    tenants = tenant() + tenant("globex", "identity", "spin", **keys)
    return configure(tmp_path_factory.mktemp("served") / "greenlane.toml", standard, tenants)


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[Running]:
    with running(config) as server:
        yield server


@pytest.fixture
def globex(server: Running) -> Iterator[httpx.Client]:
    with client(server, **KEY) as http:
        yield http


def test_a_flood_of_connections_that_are_no_tenants_is_answered_at_a_limited_rate(server: Running) -> None:
    """All in full, and each at once while they are few; the others wait, so that tenants get the cores."""
    beyond = UNAUTHENTICATED_RATE // 2

    def refused(_: int) -> int:
        with Connection(server) as connection:
            connection.send(b"\x16\x03\x01\r\n\r\n")
            return connection.answer().status

    began = time.monotonic()
    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(refused, range(UNAUTHENTICATED_RATE + beyond))) == {400}
    assert time.monotonic() - began >= beyond / UNAUTHENTICATED_RATE


@pytest.mark.parametrize(
    "refused",
    [
        pytest.param(posted("identity", SMALL, "Authorization: Bearer wrong"), id="inference"),
        pytest.param(post("/v2/repository/index", b"{}", "Authorization: Bearer wrong"), id="the index"),
        pytest.param(get("/admin/tenants", "Via: 1.1 proxy"), id="administration, in the shared process"),
        pytest.param(post("/admin/tenants", b"", "Via: 1.1 proxy").replace(b"POST", b"PATCH"), id="the same by uvicorn"),
    ],
)
def test_refusals_on_a_kept_connection_come_at_a_limited_rate(server: Running, globex: httpx.Client, refused: bytes) -> None:
    """All of them, also where a client sends them without reading; tenants are served meanwhile."""
    beyond = REFUSAL_RATE
    with Connection(server) as connection, ThreadPoolExecutor(1) as client:
        began = time.monotonic()
        connection.send(refused * (REFUSAL_RATE + beyond))
        flood = client.submit(lambda: {connection.answer().status for _ in range(REFUSAL_RATE + beyond)})
        assert [infer(globex, "identity", SMALL).status_code for _ in range(10)] == [200] * 10
        assert not flood.done(), "the tenant waited for the refusals of others"
        assert flood.result() == {401}
        assert time.monotonic() - began >= 0.9 * beyond / REFUSAL_RATE  # The event loop rounds to milliseconds.
    with Connection(server) as leaving:
        leaving.send(refused * REFUSAL_RATE)  # And does not wait for the answers.
    assert infer(globex, "identity", SMALL).status_code == 200


def test_each_tenant_is_served_by_a_process_of_its_own(server: Running) -> None:
    for header, name in ((ACME, "greenlane acme"), (GLOBEX, "greenlane globe")):
        with Connection(server) as connection:
            connection.send(posted("identity", SMALL, header))
            assert connection.answer().status == 200
            ends_up_at(server, connection, name)


def test_oom_scores_protect_the_device_process_most_and_tenants_more_than_others(server: Running) -> None:
    def adjusted(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    device = adjusted(server.popen.pid)
    assert {adjusted(server.pid(name)) for name in ("acme", "globex")} == {500}
    assert {adjusted(server.pid(name)) for name in ("(shared)", "(unauthenticated)")} == {800}
    assert device < 500


def test_headers_may_come_in_pieces(server: Running) -> None:
    with Connection(server) as connection:
        data = posted("identity", SMALL, ACME)
        for index in range(len(data)):
            connection.send(data[index : index + 1])
        assert connection.answer().status == 200
        ends_up_at(server, connection, "greenlane acme")


def test_a_connection_is_handed_off_between_tenants_by_its_requests(server: Running) -> None:
    with Connection(server) as connection:
        for header, name in ((ACME, "greenlane acme"), (GLOBEX, "greenlane globe")) * 3:
            for asked in (posted("identity", SMALL, header), posted("identity", SMALL, header), get("/v2/models/spin", header)):
                connection.send(asked)
                assert connection.answer().status == 200
                ends_up_at(server, connection, name)


def test_a_client_that_keeps_changing_tenants_leaks_nothing(server: Running) -> None:
    def opened() -> int:
        return sum(len(os.listdir(f"/proc/{server.pid(name)}/fd")) for name in ("acme", "globex", "(dispatcher)"))

    before = opened()
    with Connection(server) as connection:
        for _ in range(50):
            for header in (ACME, GLOBEX):
                connection.send(posted("identity", SMALL, header))
                assert connection.answer().status == 200
        until(lambda: opened() <= before + 10)


def test_requests_of_several_tenants_may_be_pipelined(server: Running) -> None:
    with Connection(server) as connection:
        connection.send(posted("identity", SMALL, ACME) + posted("identity", SMALL, GLOBEX) + posted("identity", SMALL, ACME))
        assert [connection.answer().status for _ in range(3)] == [200] * 3


def test_a_request_in_chunks_goes_to_its_tenant_too(server: Running) -> None:
    with Connection(server) as connection:
        connection.send(posted("identity", SMALL, ACME))
        assert connection.answer().status == 200
        connection.send(chunked(BODY, headers=[GLOBEX]))
        assert connection.answer().status == 200
        ends_up_at(server, connection, "greenlane globe")


GENERATED = b'{"x": [1, 2]}'
KINDS: dict[str, tuple[bytes, int]] = {
    "chunked": (chunked(BODY, headers=[ACME]), 200),
    "expect": (posted("identity", SMALL, ACME, "Expect: 100-continue"), 200),
    "repeated headers": (posted("identity", SMALL, ACME, "X-Forwarded-For: a", "X-Forwarded-For: b", "Via: a", "Via: b"), 200),
    "absolute": (post("http://localhost/v2/models/identity/infer", BODY, ACME), 200),
    "put": (get("/v2/models/identity", ACME).replace(b"GET", b"PUT"), 405),
    "patch": (post("/v2/models/identity", b"{}", ACME).replace(b"POST", b"PATCH"), 405),
    "no length": (get("/v2/models/identity/infer", ACME).replace(b"GET", b"POST"), 400),
    "http 1.0": (posted("identity", SMALL, ACME, "Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
    "generate": (post("/v2/models/identity/generate", GENERATED, ACME), 200),
    "origin": (posted("identity", SMALL, ACME, "Origin: http://localhost"), 200),
    "upgrade": (posted("identity", SMALL, ACME, "Connection: Upgrade", "Upgrade: h2c"), 200),
    "every path": (get("*", ACME).replace(b"GET", b"OPTIONS"), 404),
    "empty lines": (b"\r\n\r\n" + posted("identity", SMALL, ACME) + b"\r\n", 200),
}
"""Requests of acme, and the status of the answer."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_of_any_kind_leaves_its_connection_to_any_tenant(server: Running, kind: str) -> None:
    asked, status = KINDS[kind]
    with Connection(server) as connection:
        for _ in range(2):
            connection.send(asked)
            answer = connection.answer()
            if answer.status == 100:
                answer = connection.answer()
            assert (answer.status, answer.headers.get("connection") in (None, "keep-alive")) == (status, True), answer.body
            connection.send(posted("identity", SMALL, GLOBEX))
            assert connection.answer().status == 200
            ends_up_at(server, connection, "greenlane globe")


def test_events_leave_their_connection_to_any_tenant(server: Running) -> None:
    with Connection(server) as connection:
        connection.send(post("/v2/models/identity/generate_stream", GENERATED, ACME))
        head = connection.answer(bare=True)
        assert (head.status, head.headers["transfer-encoding"]) == (200, "chunked")
        while connection.line() != b"0\r\n":
            pass
        assert connection.line() == b"\r\n"
        connection.send(posted("identity", SMALL, GLOBEX))
        assert connection.answer().status == 200
        ends_up_at(server, connection, "greenlane globe")


def test_a_request_for_another_tenant_waits_until_the_answers_before_it_are_read(server: Running) -> None:
    """They are more than the sockets hold, so the connection cannot be handed over before."""
    with Connection(server) as connection:
        connection.send(posted("spin", spin(1), ACME) * 200 + posted("identity", SMALL, GLOBEX))
        assert [connection.answer().status for _ in range(201)] == [200] * 201


def test_a_tenants_own_port_reaches_no_other_tenant(own_port: int, server: Running) -> None:
    with Connection(SimpleNamespace(port=own_port)) as connection:
        connection.send(posted("identity", SMALL, GLOBEX))
        assert connection.answer().status == 200
        connection.send(posted("identity", SMALL, ACME))
        answer = connection.answer()
        assert (answer.status, connection.ended()) == (421, True)
        assert answer.json["error"] == f"this connection belongs to tenant 'globex'; {ELSEWHERE.format('acme', '')}"


def test_health_is_answered_on_every_tenants_connection(server: Running) -> None:
    with Connection(server) as connection:
        connection.send(posted("identity", SMALL, GLOBEX))
        assert connection.answer().status == 200
        for asked, status in ((LIVE, 200), (posted("identity", SMALL, "Authorization: Bearer wrong"), 401)):
            connection.send(asked)
            assert connection.answer().status == status
            ends_up_at(server, connection, "greenlane globe")


@pytest.mark.parametrize("first", [LIVE, posted("identity", SMALL, GLOBEX)], ids=["health", "globex"])
@pytest.mark.parametrize("rows", [1, 5000, 100_000])
def test_a_handoff_keeps_all_bytes_of_the_connection(server: Running, first: bytes, rows: int) -> None:
    x = np.arange(rows * 2, dtype=np.float32).tobytes()
    asked = binary(request(tensor("x", "FP32", [rows, 2], binary_data_size=len(x)), outputs=[{"name": "y"}]), x)
    length = asked["headers"]["Inference-Header-Content-Length"]
    with Connection(server) as connection:
        connection.send(first)
        assert connection.answer().status == 200
        ends_up_at(server, connection, "greenlane (shar" if first == LIVE else "greenlane globe")
        connection.send(post("/v2/models/identity/infer", asked["content"], ACME, f"Inference-Header-Content-Length: {length}"))
        answer = connection.answer()
        assert (answer.status, len(answer.json["outputs"][0]["data"])) == (200, rows * 2)
        ends_up_at(server, connection, "greenlane acme")


def test_an_unauthenticated_connection_is_served_once_its_key_is_right(server: Running) -> None:
    with Connection(server) as connection:
        connection.send(posted("identity", SMALL, "Authorization: Bearer wrong"))
        assert connection.answer().status == 401
        ends_up_at(server, connection, "greenlane (unau")
        connection.send(posted("identity", SMALL))
        assert connection.answer().status == 401
        connection.send(posted("identity", SMALL, GLOBEX))
        assert connection.answer().status == 200
        ends_up_at(server, connection, "greenlane globe")


def test_administration_and_metrics_answer_on_every_connection(
    server: Running, acme: httpx.Client, globex: httpx.Client
) -> None:
    with client(server) as anonymous:
        for http in (anonymous, acme, globex):
            assert [tenant["name"] for tenant in http.get("/admin/tenants").json()["tenants"]] == ["acme", "globex"]
            assert "nv_inference_request_success" in http.get("/metrics").text
            assert http.get("/v2/health/ready").status_code == 200
            assert http.get("/admin/nothing").status_code == 404
            assert http.delete("/admin/partitions").status_code == 405


def test_counts_of_a_tenants_process_reach_the_metrics(acme: httpx.Client) -> None:
    def counted() -> float:
        lines = acme.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if "_request_success" in line and 'model="pick"' in line)

    before = counted()
    asked = request(tensor("x", "FP32", [4], [1, 2, 3, 4]), tensor("at", "INT64", [1], [2]))
    assert infer(acme, "pick", asked).status_code == 200
    assert counted() == before + 1


def test_models_are_loaded_and_unloaded_through_an_http_process(acme: httpx.Client, globex: httpx.Client) -> None:
    assert acme.post("/v2/repository/models/add/unload").status_code == 200
    assert acme.get("/v2/models/add/ready").status_code == 503
    assert acme.post("/v2/repository/models/add/load").status_code == 200
    assert acme.get("/v2/models/add/ready").status_code == 200
    assert globex.post("/v2/repository/models/add/load").status_code == 404


def test_a_tenants_own_port_leads_to_its_process(server: Running, own_port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{own_port}", timeout=30) as http:
        assert infer(http, "identity", SMALL, headers=KEY).status_code == 200
        assert infer(http, "identity", SMALL).status_code == 401


def test_front_cores_are_where_a_tenants_http_runs(server: Running, acme: httpx.Client) -> None:
    """Its event loop; the threads that run its models are on its partition's cores."""
    (granule,) = acme.get("/admin/partitions").json()["partitions"]["globex"]["granules"]
    assert os.sched_getaffinity(server.pid("globex")) == {cores()[0]}
    assert threads(server.pid("globex")) == {frozenset(cores()[:1]), frozenset({cores()[granule]})}


def test_bodies_of_38_megabytes_are_received_and_sent(acme: httpx.Client) -> None:
    x = np.random.default_rng(0).random((2375, 4000), np.float32)
    document = request(
        tensor("x", "FP32", list(x.shape), binary_data_size=x.nbytes),
        outputs=[{"name": "y", "parameters": {"binary_data": True}}],
    )
    answer = acme.post("/v2/models/identity/infer", **binary(document, x.tobytes()))
    assert answer.status_code == 200, answer.text
    assert parts(answer)[1] == [x.tobytes()]


def test_a_slow_reader_does_not_delay_others(server: Running, acme: httpx.Client, globex: httpx.Client) -> None:
    ones = [1.0] * 60_000
    with Connection(server) as slow:
        for _ in range(20):
            slow.send(posted("identity", request(tensor("x", "FP32", [1, 60_000], ones)), ACME))
            assert infer(acme, "identity", SMALL).status_code == 200
        assert infer(globex, "identity", SMALL).status_code == 200
        assert all(slow.answer().status == 200 for _ in range(20))


def test_a_flood_of_unauthenticated_connections_does_not_affect_tenants(server: Running) -> None:
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with Connection(server) as connection:
                connection.send(posted("identity", SMALL, "Authorization: Bearer wrong") * 20)
                assert connection.answer().status == 401

    flooding = [threading.Thread(target=flood, daemon=True) for _ in range(4)]
    for thread in flooding:
        thread.start()
    try:
        with Load(server, "acme") as load:
            load.more(50)
        assert load.wrong == []
    finally:
        stop.set()
        for thread in flooding:
            thread.join()


def test_each_of_2000_connections_at_once_is_answered(server: Running) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with ExitStack() as stack:
            connections = []
            for _ in range(2000):
                connections.append(stack.enter_context(Connection(server)))
                connections[-1].send(posted("identity", SMALL, ACME))
            assert {connection.answer().status for connection in connections} <= {200, 429, 503}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_killing_a_tenants_process_disconnects_only_its_clients(server: Running) -> None:
    deaths = _deaths(server, "acme")
    with Load(server, **KEY) as other, Connection(server) as connection, client(server) as admin:
        connection.send(posted("spin", spin(FOREVER), ACME))
        until(lambda: lane(admin)["in_flight"] == 1)
        server.kill("acme")
        assert connection.ended()
        killed = time.monotonic()
        with client(server, "acme") as http:
            until(lambda: answered(http) == 200)
        assert time.monotonic() - killed < 10, "it takes less than a second where nothing else runs"
        other.more()
        assert other.wrong == []
        assert lane(admin)["in_flight"] == 0
    server.wait_for_log("the HTTP process of acme ended (signal 9); starting another", deaths + 1)


def test_a_tenant_whose_process_is_killed_under_load_is_served_again(server: Running) -> None:
    for _ in range(3):
        with Load(server, "acme") as load, Load(server, **KEY) as other:
            server.kill("acme")
            load.more()
            other.more()
        assert other.wrong == []
        refused = [wrong[0] for wrong in load.wrong if isinstance(wrong, tuple)]
        assert set(refused) <= {503}, "where the model is not loaded within two seconds"
        assert len(load.wrong) - len(refused) <= 2, "connections that ended"


def test_connections_that_a_killed_process_has_not_taken_are_answered_by_the_next(server: Running) -> None:
    pid = server.pid("acme")
    os.kill(pid, signal.SIGSTOP)  # So that all of them are still in its socket when it is killed.
    with ExitStack() as stack:
        connections = [stack.enter_context(Connection(server)) for _ in range(40)]
        for connection in connections:
            connection.send(posted("identity", SMALL, ACME))
        with client(server, **KEY) as globex:  # It is handed over after all of those.
            assert infer(globex, "identity", SMALL).status_code == 200
        os.kill(pid, signal.SIGKILL)
        answers = [connection.answer() for connection in connections]
    assert {answer.status for answer in answers} <= {200, 503}, "503 only where the model is not loaded within two seconds"
    assert all(answer.headers["Retry-After"] for answer in answers if answer.status == 503)


def test_a_replacement_process_has_the_models_loaded_and_unloaded_before(server: Running, acme: httpx.Client) -> None:
    until(lambda: acme.post("/v2/repository/models/brain/unload").status_code == 200)
    acme.close()
    server.kill("acme")
    with client(server, "acme") as http:
        until(lambda: http.get("/v2/models/add/ready").status_code == 200)
        until(lambda: as_before(http))
        assert http.get("/v2/models/brain/ready").status_code == 503
        assert http.get("/v2/health/ready").status_code == 200
        assert http.post("/v2/repository/models/brain/load").status_code == 200
        assert http.get("/v2/models/brain/ready").status_code == 200


def test_the_shared_and_the_unauthenticated_process_are_replaced_too(server: Running) -> None:
    for name, headers in (("(shared)", {}), ("(unauthenticated)", {"Authorization": "Bearer wrong"})):
        server.kill(name)
        with client(server) as http:
            path, status = ("/v2/health/ready", 200) if name == "(shared)" else ("/v2/models/identity", 401)
            until(lambda path=path, headers=headers, status=status: http.get(path, headers=headers).status_code == status)


def test_without_a_dispatcher_connections_stay_open_and_new_ones_wait_for_the_next(server: Running, acme: httpx.Client) -> None:
    assert infer(acme, "identity", SMALL).status_code == 200
    server.kill("(dispatcher)")
    assert infer(acme, "identity", SMALL).status_code == 200
    with client(server, **KEY) as http:
        assert infer(http, "identity", SMALL).status_code == 200
    server.wait_for_log("the dispatcher ended (signal 9); starting another")


def test_processes_that_parse_what_clients_send_get_no_new_privileges(server: Running) -> None:
    for name in ("(dispatcher)", "(shared)", "(unauthenticated)", "acme"):
        assert "NoNewPrivs:\t1" in Path(f"/proc/{server.pid(name)}/status").read_text(), name


@pytest.mark.parametrize("fails", [False, True], ids=["killed", "fails"])
def test_the_end_of_the_forkserver_ends_no_other_process_and_no_connection(standard: Path, tmp_path: Path, fails: bool) -> None:
    with running(configure(tmp_path / "greenlane.toml", standard, tenant())) as server, client(server, "acme") as http:
        assert answered(http) == 200
        processes = [one for one in server.family() if one.name.startswith("greenlane")]
        shared = next(one for one in processes if one.name == "greenlane (shar")
        forkserver = [one for one in server.family() if one.pid == shared.parent]
        if fails:  # The next request to fork does not come whole, and ends it as a fork does for which there is no memory.
            used = set(map(int, os.listdir(f"/proc/{shared.parent}/fd")))
            limit = min(set(range(len(used) + 1)) - used) + 1
            resource.prlimit(shared.parent, resource.RLIMIT_NOFILE, (limit, limit))
        for pid in (shared.pid,) if fails else (shared.parent, shared.pid):
            os.kill(pid, signal.SIGKILL)
        server.wait_for_log("the shared HTTP process ended (")
        until(lambda: not alive(forkserver))
        assert answered(http) == 200, "on the same connection"
        assert {one.pid for one in alive(processes)} == {one.pid for one in processes} - {shared.pid}


def test_a_process_is_replaced_after_the_forkserver_was_killed(server: Running) -> None:
    parent = {one.parent for one in server.family() if one.name == "greenlane acme"}.pop()
    children = [one for one in server.family() if one.name in ("greenlane acme", "greenlane (disp")]
    for pid in (parent, *(child.pid for child in children)):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(children))
    with client(server, "acme") as http:
        until(lambda: answered(http) == 200)


def _deaths(server: Running, name: str) -> int:
    return sum(f"the HTTP process of {name} ended" in line for line in list(server.log))
