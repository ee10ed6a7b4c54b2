"""A server of several processes as a whole: startup failures, signals, draining, and that no request is lost."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from greenlane.load.server_process import alive
from server.host.exit_codes import GAVE_UP
from server.tenants.auth import digest

from .harness import cores
from .processes import Load, Running, client, configure, running, running_plain
from .wire import FOREVER, SMALL, Connection, infer, lane, post, posted, spin, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")


def test_a_repartition_under_load_loses_nothing(standard: Path, tmp_path: Path) -> None:
    config = configure(tmp_path / "one.toml", standard, '[tenants.acme]\ngranules = 1\nmodels = ["identity"]')
    with running(config) as server, client(server) as admin, Load(server, **{"X-Tenant": "acme"}) as load:
        for count in (2, 1, 2, 1):
            assert admin.put("/admin/partitions", json={"acme": count}).json()["moved"] == ["acme"]
            load.more()
        assert load.wrong == []


@pytest.fixture
def keyed(standard: Path, tmp_path: Path) -> Path:
    """With an admin key and a default tenant."""
    tenants = '[tenants.acme]\ngranules = 1\nin_flight = 1\nmodels = ["identity", "spin"]'
    settings = {"admin_key_sha256": f'"{digest("admin")}"', "default_tenant": '"acme"', "log_format": '"json"'}
    return configure(tmp_path / "keyed.toml", standard, tenants, **settings)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_loses_no_request_and_ends_with_0(keyed: Path, number: int) -> None:
    with running(keyed) as server, client(server, Authorization="Bearer admin") as admin:
        assert admin.get("/metrics", headers={"Authorization": "none"}).status_code == 401
        endless, *connections = [Connection(server) for _ in range(13)]
        endless.send(posted("spin", spin(FOREVER)))  # Until its client goes, nothing else is done.
        until(lambda: lane(admin)["in_flight"] == 1)
        for connection in connections:
            connection.send(posted("spin", spin(500)))
        until(lambda: _held(lane(admin)) == 13)
        family = server.family()
        server.signal(number)
        server.wait_for_log("draining")
        endless.close()
        assert [connection.answer().status for connection in connections] == [200] * 12
        for connection in connections:
            connection.close()
        assert server.wait() == 0
        until(lambda: not alive(family))
        assert [line for line in server.log if '"error"' in line or "Traceback" in line] == []


def _held(tenant: dict[str, Any]) -> int:
    found: int = tenant["waiting"] + tenant["in_flight"]
    return found


def test_a_second_signal_ends_the_server_at_once(keyed: Path) -> None:
    with running(keyed) as server, Connection(server) as connection, client(server, Authorization="Bearer admin") as admin:
        connection.send(posted("spin", spin(FOREVER)))
        until(lambda: lane(admin)["in_flight"] == 1)
        server.signal()
        server.wait_for_log("draining")
        server.signal()
        assert server.wait() == GAVE_UP
        assert connection.ended()
        server.wait_for_log("second signal: exiting with 1 accepted request(s) unanswered")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_during_startup_ends_the_server_quietly(keyed: Path, number: int) -> None:
    """As Ctrl-C in a terminal: also to the forkserver, which is still importing then."""
    words = [sys.executable, "-m", "server", "--config", str(keyed), "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True) as popen:
        children = Path(f"/proc/{popen.pid}/task")
        try:
            until(lambda: _has_forkserver(children))
            os.killpg(popen.pid, number)
            _, said = popen.communicate(timeout=30)
        finally:
            popen.kill()
    assert popen.returncode in (0, -number)  # It catches signals once it has imported what serves.
    assert [line for line in said.splitlines() if "Traceback" in line or '"error"' in line] == []


def _has_forkserver(tasks: Path) -> bool:
    """Whether this process has started its forkserver."""
    for pid in " ".join((task / "children").read_text() for task in tasks.iterdir()).split():
        with suppress(OSError):  # It ended meanwhile.
            if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
    return False


def test_a_killed_server_leaves_no_process(keyed: Path) -> None:
    with running(keyed) as server, Connection(server) as connection:
        connection.send(posted("identity", SMALL))
        assert connection.answer().status == 200
        family = server.family()
        assert len(family) >= 6
        server.signal(signal.SIGKILL)
        assert connection.ended()
        until(lambda: not alive(family))


def test_readiness_turns_503_before_new_work_is_refused(standard: Path, tmp_path: Path) -> None:
    tenants = '[tenants.acme]\ngranules = 1\nmodels = ["identity"]'
    config = configure(tmp_path / "grace.toml", standard, tenants, drain_grace='"60s"')
    with running(config) as server, client(server, **{"X-Tenant": "acme"}) as http, client(server) as anonymous:
        begun = time.monotonic()
        assert anonymous.post("/admin/drain").status_code == 202
        for asker in (http, anonymous):
            until(lambda asker=asker: asker.get("/v2/health/ready").status_code == 503)  # type: ignore[misc]
        assert infer(http, "identity", SMALL).status_code == 200
        assert http.get("/v2/health/live").status_code == 200
        assert time.monotonic() - begun < 30, "it waited for the end of the drain"


@pytest.mark.parametrize("start", [running, running_plain], ids=["processes", "plain"])
def test_each_answer_in_the_grace_closes_its_connection_so_that_its_client_goes_elsewhere(
    standard: Path, tmp_path: Path, start: Callable[[Path], AbstractContextManager[Running]]
) -> None:
    tenants = '[tenants.acme]\ngranules = 1\nmodels = ["identity"]'
    settings = {"drain_grace": '"60s"', "default_tenant": '"acme"'}
    body = json.dumps(SMALL).encode()
    chunked = post("/v2/models/identity/infer", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    requests = [posted("identity", SMALL), re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", chunked)]
    with start(configure(tmp_path / "kept.toml", standard, tenants, **settings)) as server, client(server) as http:
        kept = [(Connection(server), request) for request in requests]
        assert [_asked(*each) for each in kept] == [(200, None)] * 2
        assert http.post("/admin/drain").status_code == 202
        until(lambda: http.get("/v2/health/ready").status_code == 503)
        assert [_asked(*each) for each in kept] == [(200, "close")] * 2
        for connection, _ in kept:
            assert connection.ended()
            connection.close()


def _asked(connection: Connection, request: bytes) -> tuple[int, str | None]:
    """The status of the answer to this request, and what it says of the connection."""
    connection.send(request)
    answer = connection.answer()
    return answer.status, answer.headers["connection"]


def test_a_port_in_use_is_reported_in_one_line(keyed: Path) -> None:
    keyed.write_text(f"{keyed.read_text()}\n[device]\nbackend = 'cpu'")  # So that no GPU is missed.
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        words = [sys.executable, "-m", "server", "--config", str(keyed), "--port", port]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    remedy = "choose another with --port or server.port"
    assert ended.stderr == f"greenlane: cannot listen on 127.0.0.1:{port}: another program listens there; {remedy}\n"


def test_a_server_that_cannot_start_exits_and_leaves_no_process(standard: Path, tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
from partitions.cpu import open_cpu
from server.config.file import load
from server.processes.serve import serve
from server.processes.supervision.listen import listen

class Broken(Exception): ...

def opener(config):
    device = open_cpu()
    def carve(*_): raise Broken("no granules today")
    device.carve = carve
    return device

if __name__ == "__main__":
    config = load(Path({str(tmp_path / "c.toml")!r}))
    asyncio.run(serve(config, opener, *listen(config.server.host, config.server.port, {{}})))
"""
    configure(tmp_path / "c.toml", standard, '[tenants.acme]\ngranules = 1\nmodels = ["identity"]')
    (tmp_path / "broken.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    words = [sys.executable, str(tmp_path / "broken.py")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=30, env=environment)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert ended.stderr.endswith("Broken: no granules today\n")


def test_log_records_of_an_http_process_name_its_tenant(keyed: Path) -> None:
    with running(keyed) as server, Connection(server) as connection:
        connection.send(posted("identity", SMALL))
        assert connection.answer().status == 200
        connection.send(b"garbage\r\n\r\n")
        assert connection.answer().status == 400
        server.wait_for_log("Invalid HTTP request received.")
        line = next(line for line in server.log if "Invalid HTTP" in line)
        assert json.loads(line)["tenant"] == "acme"
