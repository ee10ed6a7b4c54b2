"""A tenant with three HTTP processes over a device process: one queue, one set of limits, and what ends with each of them."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from . import repository
from .harness import cores
from .processes import Load, Running, configure, holder_pid, running_device, tenant
from .test_generate import count, events
from .wire import (
    FOREVER,
    SMALL,
    Answer,
    Connection,
    client,
    infer,
    lane,
    post,
    posted,
    request,
    spin,
    statistics,
    tensor,
    until,
)

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

QUEUE, IN_FLIGHT = 4, 2
LONG = 2000
"""Iterations of `spin` that take so long that works are not launched ahead of them."""
TENANTS = tenant(queue=QUEUE, http_processes=3) + tenant("globex", "identity")
ACME, GLOBEX = "X-Tenant: acme", {"X-Tenant": "globex"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = repository.standard(tmp_path_factory.mktemp("models"))
    repository.in_parts(root)
    return configure(tmp_path_factory.mktemp("several") / "greenlane.toml", root, TENANTS)


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[Running]:
    with running_device(config) as server:
        yield server


@pytest.fixture
def admin(server: Running) -> Iterator[httpx.Client]:
    with client(server, "acme") as http:
        yield http
        until(lambda: idle(http))


def idle(http: httpx.Client) -> bool:
    found = lane(http)
    return all(not found[key] for key in ("waiting", "in_flight", "abandoned"))


def each_process(server: Running, stack: ExitStack) -> dict[int, Connection]:
    """A connection to each of acme's three processes, by process id, the lead's first.

    Connections that are handed to a process while it ends are lost.
    """
    found: dict[int, Connection] = {}

    def connect() -> bool:
        connection = stack.enter_context(Connection(server))
        with suppress(ConnectionError):
            connection.send(posted("identity", SMALL, ACME))
            if connection.answer().status == 200:
                found.setdefault(holder_pid(server, connection), connection)
        return len(found) == 3

    until(connect)
    return dict(sorted(found.items()))


def answers(connections: Sequence[Connection]) -> list[Answer]:
    return [connection.answer() for connection in connections]


def test_every_process_answers_with_its_own_requests_data_and_the_counts_add_up(server: Running, admin: httpx.Client) -> None:
    before = statistics(admin, "identity")["inference_count"]
    with ExitStack() as stack:
        connections = list(each_process(server, stack).values())
        there = statistics(admin, "identity")["inference_count"]
        assert there >= before + 3
        for turn in range(4):
            for number, connection in enumerate(connections):
                value = 10.0 * turn + number
                connection.send(posted("identity", request(tensor("x", "FP32", [200, 200], [value] * 40_000)), ACME))
            for number, answer in enumerate(answers(connections)):
                assert set(answer.json["outputs"][0]["data"]) == {10.0 * turn + number}
        counted = {int(post_statistics(each)["inference_count"]) for each in connections}
        assert counted == {there + 12}, "each of them answers for all"
    lines = [line for line in admin.get("/metrics").text.splitlines() if line.startswith("nv_inference_request_success")]
    (line,) = [line for line in lines if 'model="identity"' in line and 'tenant="acme"' in line]
    assert float(line.split()[-1]) == there + 12


def post_statistics(connection: Connection) -> dict[str, object]:
    connection.send(f"GET /v2/models/identity/stats HTTP/1.1\r\nHost: x\r\n{ACME}\r\n\r\n".encode())
    return connection.answer().json["model_stats"][0]


def test_the_queue_is_one_its_order_too_and_who_leaves_makes_room(server: Running, admin: httpx.Client) -> None:
    with ExitStack() as stack:
        lead, one, other = each_process(server, stack).values()
        lead.send(posted("spin", spin(LONG), ACME))  # After some dozen short works alone, more than two would be in flight.
        assert lead.answer().status == 200
        running = [stack.enter_context(Connection(server)) for _ in range(IN_FLIGHT)]
        for connection in running:
            connection.send(posted("spin", spin(FOREVER), ACME))
        until(lambda: lane(admin)["in_flight"] == IN_FLIGHT)
        waiting = [stack.enter_context(Connection(server)) for _ in range(QUEUE)]
        for number, connection in enumerate(waiting):
            connection.send(posted("identity", SMALL, ACME))
            until(lambda number=number: lane(admin)["waiting"] == number + 1)  # type: ignore[misc]
        assert len({holder_pid(server, connection) for connection in waiting}) > 1
        for connection in (lead, one, other):
            connection.send(posted("identity", SMALL, ACME))
            answer = connection.answer()
            assert (answer.status, answer.json["error"].split(":")[0]) == (429, "Exceeds maximum queue size")
        waiting[0].close()
        until(lambda: lane(admin)["waiting"] == QUEUE - 1)
        one.send(posted("identity", SMALL, ACME))
        until(lambda: lane(admin)["waiting"] == QUEUE)
        for connection in running:
            connection.close()
        assert [answer.status for answer in answers([*waiting[1:], one])] == [200] * QUEUE
    until(lambda: idle(admin))


def test_deadlines_and_streams_pass_through_every_process(server: Running, admin: httpx.Client) -> None:
    with ExitStack() as stack:
        for connection in each_process(server, stack).values():
            connection.send(posted("spin", spin(FOREVER, parameters={"timeout": 20_000}), ACME))
            assert connection.answer().status == 504
            connection.send(post("/v2/models/countdown/generate_stream", json.dumps(count(4)).encode(), ACME))
            assert connection.answer().status == 200
            chunks = b""
            while (size := int(connection.file.readline(), 16)) > 0:
                chunks += connection.file.read(size + 2)[:-2]
            connection.file.readline()
            assert [each["y"] for each in events(chunks.decode())] == [4.0, 3.0, 2.0, 1.0]
            connection.send(posted("identity", SMALL, ACME))
            assert connection.answer().status == 200
    until(lambda: idle(admin))


def test_a_killed_helper_takes_only_its_own_connections_and_its_memory_is_free_again(
    server: Running, admin: httpx.Client
) -> None:
    with ExitStack() as stack, Load(server, **GLOBEX) as globex:
        found = each_process(server, stack)
        (_, lead), (_, one), (pid, dying) = found.items()
        counted = statistics(admin, "identity")["inference_count"]
        dying.send(posted("spin", spin(FOREVER), ACME))
        until(lambda: lane(admin)["in_flight"] == 1)
        os.kill(pid, signal.SIGKILL)
        assert dying.ended()
        for connection in (lead, one):
            connection.send(posted("identity", SMALL, ACME))
        assert [answer.status for answer in answers([lead, one])] == [200, 200]
        until(lambda: idle(admin))
        assert statistics(admin, "identity")["inference_count"] >= counted + 2, "what it counted is not lost"
        globex.more()
        assert globex.wrong == []
    with ExitStack() as stack:
        assert pid not in each_process(server, stack), "another one has taken its place"


def test_the_lead_takes_all_of_them_along_and_the_tenant_is_served_again(server: Running, admin: httpx.Client) -> None:
    with ExitStack() as stack, Load(server, **GLOBEX) as globex:
        found = each_process(server, stack)
        pid = next(pid for pid in found if is_lead(server, pid))
        next(iter(found.values())).send(posted("spin", spin(FOREVER), ACME))
        until(lambda: lane(admin)["in_flight"] == 1)
        os.kill(pid, signal.SIGKILL)
        assert all(connection.ended() for connection in found.values())
        with ExitStack() as again:
            assert found.keys().isdisjoint(each_process(server, again))
        globex.more()
        assert globex.wrong == []


def is_lead(server: Running, pid: int) -> bool:
    return pid == server.pid("acme")


def test_the_device_process_is_replaced_under_all_of_them(server: Running, admin: httpx.Client) -> None:
    with ExitStack() as stack:
        connections = list(each_process(server, stack).values())
        for connection in connections:
            connection.send(posted("spin", spin(FOREVER), ACME))
        until(lambda: lane(admin)["waiting"] + lane(admin)["in_flight"] == len(connections))
        server.kill("dev 0")
        assert [answer.status for answer in answers(connections)] == [503] * 3
    until(lambda: infer(admin, "identity", SMALL).status_code == 200)
    with ExitStack() as stack:
        each_process(server, stack)


def test_a_helper_that_hangs_is_replaced_and_the_others_serve_meanwhile(server: Running, admin: httpx.Client) -> None:
    with ExitStack() as stack:
        found = each_process(server, stack)
        pid = next(pid for pid in found if not is_lead(server, pid))
        os.kill(pid, signal.SIGSTOP)
        for other, connection in found.items():
            if other != pid:
                connection.send(posted("identity", SMALL, ACME))
                assert connection.answer().status == 200
        assert found[pid].ended()
    with ExitStack() as stack:
        assert pid not in each_process(server, stack)


def test_a_signal_under_load_loses_no_request(config: Path) -> None:
    with running_device(config) as server, ExitStack() as stack, client(server) as admin:
        connections = list(each_process(server, stack).values())
        endless = stack.enter_context(Connection(server))
        endless.send(posted("spin", spin(FOREVER), ACME))  # Until its client goes, little else is done.
        until(lambda: lane(admin)["in_flight"] == 1)
        for connection in connections:
            connection.send(posted("spin", spin(500), ACME))
        until(lambda: lane(admin)["waiting"] + lane(admin)["in_flight"] == 4)
        server.signal()
        server.wait_for_log("draining")
        endless.close()
        assert [answer.status for answer in answers(connections)] == [200] * 3
        admin.close()
        for connection in connections:
            connection.close()
        assert server.wait() == 0
        assert [line for line in server.log if "ERROR" in line or "Traceback" in line] == []
