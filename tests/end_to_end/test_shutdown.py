"""How a server starts, drains and ends, in each form: it loses no accepted request, leaves no process, and says why it ends."""

import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.watched_server import alive
from server.host.leaving import GAVE_UP
from server.tenants.auth import digest

from .harness import Served, configuration, cores, serving
from .processes import Load, Running, configure, running, running_asgi, running_folder, running_plain, tenant
from .wire import (
    BODY,
    FOREVER,
    PATH,
    SMALL,
    Connection,
    binary,
    chunked,
    client,
    infer,
    lane,
    post,
    post_binary,
    posted,
    request,
    spin,
    tensor,
    until,
)

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")
Start = Callable[..., AbstractContextManager[Running]]
ENDS = {running: 0, running_plain: -signal.SIGTERM, running_asgi: -signal.SIGTERM}
"""The status with which each form ends: uvicorn ends by the signal that it got."""
both_forms = pytest.mark.parametrize("start", [running, running_plain])
ACME = tenant("acme", "identity", "spin", in_flight=1)


@pytest.fixture
def config(standard: Path, tmp_path: Path) -> Path:
    settings = {"default_tenant": '"acme"', "log_format": '"json"'}
    return configure(tmp_path / "greenlane.toml", standard, ACME, **settings)


@pytest.fixture
def keyed(config: Path) -> Path:
    """With an admin key."""
    config.write_text(config.read_text().replace("[server]", f'[server]\nadmin_key_sha256 = "{digest("admin")}"'))
    return config


def test_a_repartition_under_load_loses_nothing(standard: Path, tmp_path: Path) -> None:
    config = configure(tmp_path / "one.toml", standard, tenant("acme", "identity"))
    with running(config) as server, client(server) as admin, Load(server, "acme") as load:
        for count in (2, 1, 2, 1):
            assert admin.put("/admin/partitions", json={"acme": count}).json()["moved"] == ["acme"]
            load.more()
        assert load.wrong == []


@pytest.mark.parametrize(
    ("start", "number"), [(running, signal.SIGTERM), (running, signal.SIGINT), (running_asgi, signal.SIGTERM)]
)
def test_a_signal_under_load_loses_no_request_and_ends_with_its_status(keyed: Path, start: Start, number: int) -> None:
    with start(keyed) as server, client(server, Authorization="Bearer admin") as admin:
        assert admin.get("/metrics", headers={"Authorization": "none"}).status_code == 401
        endless, *connections = [Connection(server) for _ in range(13)]
        endless.send(posted("spin", spin(FOREVER)))  # Until its client goes, nothing else is done.
        until(lambda: lane(admin)["in_flight"] == 1)
        for connection in connections:
            connection.send(posted("spin", spin(500)))
        until(lambda: lane(admin)["waiting"] + lane(admin)["in_flight"] == 13)
        family = server.family()
        server.signal(number)
        server.wait_for_log("draining")
        endless.close()
        assert [connection.answer().status for connection in connections] == [200] * 12
        for connection in connections:
            connection.close()
        assert server.wait() == ENDS[start]
        until(lambda: not alive(family))
        assert [line for line in server.log if '"error"' in line or "Traceback" in line] == []


@pytest.mark.parametrize("start", [running, running_asgi])
def test_sighup_of_a_closed_terminal_drains_as_sigterm_does(config: Path, start: Start) -> None:
    """The server is what the terminal started; when it closes, the kernel sends SIGHUP."""
    ours, theirs = pty.openpty()
    settings = {
        "start_new_session": True,
        "preexec_fn": lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
        "pass_fds": [theirs],
    }
    with start(config, **settings) as server, Connection(server) as accepted, client(server) as http:
        os.close(theirs)
        endless = Connection(server)
        endless.send(posted("spin", spin(FOREVER)))
        until(lambda: lane(http)["in_flight"] == 1)
        accepted.send(posted("identity", SMALL))
        until(lambda: lane(http)["waiting"] == 1)
        http.close()
        os.close(ours)
        server.wait_for_log("draining")
        endless.close()
        assert accepted.answer().status == 200
        assert server.wait() == ENDS[start]


def test_a_second_signal_ends_the_server_at_once(config: Path) -> None:
    with running(config) as server, Connection(server) as connection, client(server) as admin:
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


def test_a_killed_server_leaves_no_process_and_its_log_has_named_the_tenant(config: Path) -> None:
    with running(config) as server, Connection(server) as connection:
        connection.send(posted("identity", SMALL))
        assert connection.answer().status == 200
        with Connection(server) as other:
            other.send(posted("identity", SMALL) + b"garbage\r\n\r\n")
            assert [other.answer().status for _ in range(2)] == [200, 400]
        server.wait_for_log("Invalid HTTP request received.")
        assert json.loads(next(line for line in server.log if "Invalid HTTP" in line))["tenant"] == "acme"
        family = server.family()
        assert len(family) >= 6
        server.signal(signal.SIGKILL)
        assert connection.ended()
        until(lambda: not alive(family))


def test_readiness_turns_503_before_new_work_is_refused(standard: Path, tmp_path: Path) -> None:
    config = configure(tmp_path / "grace.toml", standard, ACME, drain_grace='"60s"')
    with running(config) as server, client(server, "acme") as http, client(server) as anonymous:
        begun = time.monotonic()
        server.signal()
        for asker in (http, anonymous):
            until(lambda asker=asker: asker.get("/v2/health/ready").status_code == 503)
            assert asker.get("/v2/health/ready").headers["retry-after"]
        assert infer(http, "identity", SMALL).status_code == 200
        assert http.get("/v2/health/live").status_code == 200
        assert time.monotonic() - begun < 30, "it waited for the end of the drain"
        server.signal()
        assert server.wait() == 0


@both_forms
def test_each_answer_in_the_grace_closes_its_connection_so_that_its_client_goes_elsewhere(
    standard: Path, tmp_path: Path, start: Start
) -> None:
    settings = {"drain_grace": '"60s"', "default_tenant": '"acme"'}
    with start(configure(tmp_path / "kept.toml", standard, ACME, **settings)) as server, client(server) as http:
        kept = [(Connection(server), request) for request in (posted("identity", SMALL), chunked(BODY))]
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


@pytest.fixture(params=[False, True], ids=["asgi", "direct"])
def drained(standard: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server that the test drains, and that does not exit afterwards."""
    with serving(configuration(standard), direct=request.param) as served:
        yield served


def is_refused(connection: Connection) -> None:
    refused = connection.answer()
    assert (refused.status, refused.json) == (503, {"error": "the server is draining"})
    assert refused.headers.get_all("connection") == ["close"]
    assert connection.ended()


def test_requests_to_a_drained_server_are_503(drained: Served) -> None:
    with Connection(drained) as connection:
        connection.send(posted("identity", SMALL))
        assert connection.answer().headers["connection"] is None
        drained.call(drained.controller.drain(0))
        connection.send(posted("identity", SMALL))
        is_refused(connection)


BEGUN = {
    "small": post(PATH, b"{", length=100),
    "large": post(PATH, b"{", "Inference-Header-Content-Length: 100", length=2**26),
    "negotiating": post(PATH, b"{", "Accept-Encoding: gzip", length=100),
    "chunked": chunked(b"{", end=b""),
}


def test_unfinished_uploads_are_refused_at_once_when_draining_refuses_new_work(drained: Served) -> None:
    uploads = drained.service.tenants["acme"].uploads
    connections = [Connection(drained) for _ in BEGUN]
    for connection, begun in zip(connections, BEGUN.values(), strict=True):
        connection.send(begun)
    until(lambda: repr(uploads).startswith(f"<Uploads {len(BEGUN)} on their way"))
    drained.call(drained.controller.drain(0))
    for connection in connections:
        with connection:
            is_refused(connection)


@pytest.mark.parametrize(
    ("start", "way"), [(running_plain, "Accept: */*"), (running_plain, "Connection: close"), (running, "Accept: */*")]
)
def test_clients_that_do_not_read_do_not_delay_shutdown(config: Path, start: Start, way: str) -> None:
    data = bytes(2**24)
    document = request(tensor("x", "FP32", [2**22, 1], binary_data_size=len(data)), parameters={"binary_data_output": True})
    with start(config) as server, Connection(server) as silent, Connection(server) as late:
        silent.send(post_binary(PATH, binary(document, data), way))
        assert silent.socket.recv(1) == b"H", "it is answered"
        late.send(post("/v2/repository/index") + post("/v2/repository/index", b"{", length=100))
        assert late.answer().status == 200, "so the other one has begun"
        server.signal()
        assert server.wait() == ENDS[start]
        assert late.answer().status == 503


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (False, ["the demo, as no configuration was named by ", "ready: acme is served identity 1 and stripes 1"]),
        (True, ["the configuration is greenlane.toml", "ready: acme is served identity 1"]),
    ],
)
def test_without_an_option_greenlane_toml_of_the_folder_is_served_or_else_the_demo(
    beside: bool, said: list[str], config: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running_folder(config.parent if beside else tmp_path_factory.mktemp("empty")) as server:
        for each in said:
            server.wait_for_log(each)
        server.signal(signal.SIGINT)
        assert server.wait() == 0


def ended(*words: str, config: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """What Python said with these words when it ended by itself, which begins with no traceback."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()} | ({"GREENLANE_CONFIG": str(config)} if config else {})
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=60)


UVICORN = ("-m", "uvicorn", "server.app:app", "--port", "0")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[server]\nprot = 1", "wrong.toml: server.prot: unknown key; did you mean 'port'?"),
        (
            "[models]\nrepository = '.'\n[tenants.acme]\ngranules = 4096\nmodels = ['*']",
            "wrong.toml: tenants.acme.granules 4096 = 4096 cores, but the device has ",
        ),
    ],
    ids=["a key", "granules"],
)
def test_plain_uvicorn_reports_a_wrong_configuration_without_a_traceback(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    found = ended(*UVICORN, config=tmp_path / "wrong.toml")
    assert found.returncode == 3  # uvicorn's own status for a start that failed
    said = found.stderr.replace(":\n  ", ":\n")  # As a part of a log's line it is indented.
    assert f"greenlane: the configuration cannot be served:\n{line}" in said
    assert "Traceback" not in said


def test_plain_uvicorn_warns_of_settings_it_does_not_honour_and_serves_every_tenant(config: Path) -> None:
    config.write_text(config.read_text().replace("port = 0\n", "") + tenant("globex", "identity", front_cores="0"))
    with running_plain(config) as server:
        for name in ("acme", "globex"):
            with client(server, name) as http:
                assert infer(http, "identity", SMALL).status_code == 200
    (warning,) = _unhonoured(server)
    first, *others = warning["message"].splitlines()
    assert (warning["level"], first) == ("warning", "not all of greenlane.toml is honoured by uvicorn server.app:app:")
    assert [line.split(":")[0].strip() for line in others] == ["tenants", "tenants.globex.front_cores"]
    assert "`greenlane` gives each an HTTP process of its own" in warning["message"]


def _unhonoured(server: Running) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log if "honoured" in line]


def test_a_port_in_use_is_reported_in_one_line(keyed: Path) -> None:
    keyed.write_text(f"{keyed.read_text()}\n[device]\nbackend = 'cpu'")  # So that no GPU is missed.
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        found = ended("-m", "server", "--config", str(keyed), "--port", port)
    assert found.returncode == 1
    remedy = "choose another with --port or server.port"
    assert found.stderr == f"greenlane: cannot listen on 127.0.0.1:{port}: another program listens there; {remedy}\n"


def test_a_server_that_cannot_start_exits_and_leaves_no_process(config: Path, tmp_path: Path) -> None:
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
    config = load(Path({str(config)!r}))
    asyncio.run(serve(config, opener, *listen(config.server.host, config.server.port, {{}})))
"""
    (tmp_path / "broken.py").write_text(script)
    found = ended(str(tmp_path / "broken.py"))
    assert found.returncode == 1
    assert found.stderr.count("Traceback") == 1
    assert found.stderr.endswith("Broken: no granules today\n")
