"""The server as a process of its own: it starts in one command, drains on SIGTERM, and loses no accepted request."""

import asyncio
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from greenlane.load.server_process import free_port
from tests.forked import Forked

from .harness import PATIENCE, Served, configuration, serving
from .wire import FOREVER, SMALL, Connection, binary, post, posted, request, tensor, until

CONFIG = """
[server]
default_tenant = "acme"
drain_grace = "{grace}"
log_format = "json"

[models]
repository = "{repository}"

[tenants.acme]
granules = 1
in_flight = 1
models = ["identity", "spin"]
"""


class Process:
    """A server process: its port, and its log so far."""

    def __init__(self, popen: "subprocess.Popen[str]", port: int) -> None:
        self.popen = popen
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log: list[dict[str, Any]] = []

    def read_until(self, text: str) -> None:
        """Wait for a line of the log with this text in it."""
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.log.append(json.loads(line) if line.startswith("{") else {"message": line})
            if text in self.log[-1]["message"]:
                return
        raise AssertionError(f"the process ended without saying {text!r}: {self.log}")


@contextmanager
def running(config: Path, command: Sequence[str], **settings: Any) -> Iterator[Process]:
    port = free_port()
    words = [sys.executable, "-m", *command, "--port", str(port)]
    environment = {**os.environ, "GREENLANE_CONFIG": str(config)}
    start = subprocess.Popen if settings else Forked
    with start(words, env=environment, stderr=subprocess.PIPE, text=True, **settings) as popen:
        process = Process(popen, port)
        try:
            process.read_until("ready: acme")
            yield process
        finally:
            popen.kill()


@pytest.fixture
def config(tmp_path: Path, standard: Path) -> Path:
    path = tmp_path / "greenlane.toml"
    path.write_text(CONFIG.format(repository=standard, grace="0s"))
    return path


OURS = ["server"]
PLAIN = ["uvicorn", "server.app:app", "--log-level", "info"]
DIRECT = [*PLAIN, "--no-access-log"]


def spin(turns: int) -> dict[str, Any]:
    x = {"name": "x", "shape": [64, 64], "datatype": "FP32", "data": [0.1] * 64 * 64}
    return {"inputs": [{"name": "turns", "shape": [], "datatype": "INT64", "data": [turns]}, x]}


async def accepted(http: aiohttp.ClientSession, count: int) -> None:
    """Return once the server holds this many requests."""
    held = 0
    async with asyncio.timeout(PATIENCE):
        while held < count:
            async with http.get("/admin/tenants") as answer:
                tenant = json.loads(await answer.read())["tenants"][0]
            held = tenant["waiting"] + tenant["in_flight"]


async def outcome_of(http: aiohttp.ClientSession, turns: int) -> int | tuple[int, str]:
    """The status, and of an error the text too."""
    async with http.post("/v2/models/spin/infer", json=spin(turns)) as answer:
        text = await answer.text()
        return answer.status if answer.status == 200 else (answer.status, text)


@pytest.mark.parametrize(("command", "status"), [(OURS, 0), (PLAIN, -signal.SIGTERM)])
def test_sigterm_under_load_loses_no_accepted_request(config: Path, command: list[str], status: int) -> None:
    async def terminate_under_load(process: Process) -> list[int | tuple[int, str]]:
        async with aiohttp.ClientSession(process.url) as http:
            endless = asyncio.ensure_future(outcome_of(http, FOREVER))  # Until its client goes, nothing else is done.
            await accepted(http, 1)
            asking = [asyncio.ensure_future(outcome_of(http, 500)) for _ in range(20)]
            await accepted(http, 21)
            process.popen.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.read_until, "draining")
            endless.cancel()
            return await asyncio.gather(*asking)

    with running(config, command) as process:
        assert asyncio.run(terminate_under_load(process)) == [200] * 20
        assert process.popen.wait(30) == status


@pytest.mark.parametrize(("command", "status"), [(OURS, 0), (PLAIN, -signal.SIGTERM)])
def test_sighup_of_a_closed_terminal_drains_as_sigterm_does(config: Path, command: list[str], status: int) -> None:
    """The server is what the terminal started; when it closes, the kernel sends SIGHUP."""
    config.write_text(config.read_text().replace("drain_grace", 'drain_timeout = "1s"\ndrain_grace'))
    ours, theirs = pty.openpty()
    settings = {
        "start_new_session": True,
        "preexec_fn": lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
        "pass_fds": [theirs],
    }
    with running(config, command, **settings) as process, Connection(process) as connection:
        os.close(theirs)
        connection.send(posted("spin", spin(FOREVER)))
        with httpx.Client(timeout=60, base_url=process.url) as http:
            until(lambda: http.get("/admin/tenants").json()["tenants"][0]["in_flight"] == 1)
        os.close(ours)
        answer = connection.answer()
        assert (answer.status, b"the server is draining" in answer.body) == (503, True), answer
        assert process.popen.wait(30) == status


def test_readiness_turns_503_before_new_work_is_refused(tmp_path: Path, standard: Path) -> None:
    config = tmp_path / "greenlane.toml"
    config.write_text(CONFIG.format(repository=standard, grace="60s"))
    small = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    with running(config, OURS) as process, httpx.Client(timeout=60, base_url=process.url) as http:
        assert http.get("/v2/health/ready").status_code == 200
        process.popen.send_signal(signal.SIGTERM)
        process.read_until("draining")
        ready = http.get("/v2/health/ready")
        assert ready.status_code == 503
        assert ready.headers["retry-after"]
        assert http.get("/v2/health/live").status_code == 200
        assert http.post("/v2/models/identity/infer", json=small).status_code == 200
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(30) == 0


@pytest.fixture(params=[False, True], ids=["asgi", "direct"])
def drained(standard: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server that the test drains, and that does not exit afterwards."""
    with serving(configuration(standard), direct=request.param) as served:
        yield served


def test_requests_to_a_drained_server_are_503(drained: Served) -> None:
    with Connection(drained) as connection:
        connection.send(posted("identity", SMALL))
        assert connection.answer().headers["connection"] is None
        drained.call(drained.controller.drain(0))
        connection.send(posted("identity", SMALL))
        refused = connection.answer()
        assert (refused.status, refused.json) == (503, {"error": "the server is draining"})
        assert refused.headers.get_all("connection") == ["close"]
        assert connection.ended()


PATH = "/v2/models/identity/infer"


@pytest.mark.parametrize(
    "begun",
    [
        post(PATH, b"{", length=100),
        post(PATH, b"{", length=2**26),
        post(PATH, b"{", "Accept-Encoding: gzip", length=100),
        f"POST {PATH} HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n".encode(),
    ],
    ids=["small", "large", "negotiating", "chunked"],
)
def test_an_unfinished_upload_is_refused_at_once_when_draining_refuses_new_work(drained: Served, begun: bytes) -> None:
    with Connection(drained) as connection:
        uploads = drained.service.tenants["acme"].uploads
        connection.send(begun)
        until(lambda: repr(uploads).startswith("<Uploads 1 on their way"))
        drained.call(drained.controller.drain(0))
        refused = connection.answer()
        assert (refused.status, refused.json) == (503, {"error": "the server is draining"})
        assert refused.headers.get_all("connection") == ["close"]
        assert connection.ended()


@pytest.mark.parametrize(
    ("command", "way", "status"),
    [(DIRECT, "Accept: */*", -signal.SIGTERM), (DIRECT, "Connection: close", -signal.SIGTERM), (OURS, "Accept: */*", 0)],
)
def test_clients_that_do_not_read_do_not_delay_shutdown(config: Path, command: list[str], way: str, status: int) -> None:
    data = bytes(2**24)
    document = request(tensor("x", "FP32", [2**22, 1], binary_data_size=len(data)), parameters={"binary_data_output": True})
    sent = binary(document, data)
    headers = (f"{name}: {value}" for name, value in sent["headers"].items())
    with running(config, command) as process, Connection(process) as silent, Connection(process) as late:
        silent.send(post(PATH, sent["content"], way, *headers))
        assert silent._socket.recv(1) == b"H", "it is answered"
        late.send(post("/v2/repository/index") + post("/v2/repository/index", b"{", length=100))
        assert late.answer().status == 200, "so the other one has begun"
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(30) == status
        assert late.answer().status == 503


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (
            False,
            ["the demo, as no configuration was named by ", "ready: acme is served identity 1 and stripes 1"],
        ),
        (True, ["the configuration is greenlane.toml", "ready: acme is served identity 1"]),
    ],
)
def test_without_an_option_greenlane_toml_of_the_folder_is_served_or_else_the_demo(
    beside: bool, said: list[str], config: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "GREENLANE_CONFIG"}
    words = [sys.executable, "-m", "server", "--port", "0"]
    folder = config.parent if beside else tmp_path_factory.mktemp("empty")
    with Forked(words, env=environment, stderr=subprocess.PIPE, text=True, cwd=folder) as popen:
        process = Process(popen, 0)
        for each in said:
            process.read_until(each)
        popen.send_signal(signal.SIGINT)
        assert popen.wait(30) == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[server]\nprot = 1", "wrong.toml: server.prot: unknown key; did you mean 'port'?"),
        (
            "[models]\nrepository = '.'\n[tenants.acme]\ngranules = 4096\nmodels = ['*']",
            "wrong.toml: tenants.acme.granules 4096 = 4096 cores, but the device has ",
        ),
    ],
)
def test_plain_uvicorn_reports_a_wrong_configuration_without_a_traceback(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    environment = {**os.environ, "GREENLANE_CONFIG": str(tmp_path / "wrong.toml")}
    words = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", "0"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3  # uvicorn's own status for a start that failed
    said = ended.stderr.replace(":\n  ", ":\n")  # As a part of a log's line it is indented.
    assert f"greenlane: the configuration cannot be served:\n{line}" in said
    assert "Traceback" not in ended.stderr


SECOND = """
[tenants.globex]
granules = 1
models = ["identity"]
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two tenants need two cores")
def test_plain_uvicorn_warns_of_settings_it_does_not_honour_and_serves_every_tenant(config: Path) -> None:
    config.write_text(config.read_text() + SECOND + "front_cores = '0'")
    with running(config, PLAIN) as process, httpx.Client(base_url=process.url, timeout=30) as client:
        for tenant in ("acme", "globex"):
            assert client.post(PATH, json=SMALL, headers={"X-Tenant": tenant}).status_code == 200
    (warning,) = [entry for entry in process.log if entry.get("level") == "warning" and "honoured" in entry["message"]]
    first, *others = warning["message"].splitlines()
    assert first == "not all of greenlane.toml is honoured by uvicorn server.app:app:"
    assert [line.split(":")[0].strip() for line in others] == ["tenants", "tenants.globex.front_cores"]
    assert "python -m server gives each an HTTP process of its own" in warning["message"]


def test_plain_uvicorn_has_no_warning_where_it_honours_every_setting(config: Path) -> None:
    with running(config, PLAIN) as process:
        pass
    assert [entry for entry in process.log if "honoured" in entry["message"]] == []


def test_plain_uvicorn_refuses_a_tenants_own_port(config: Path) -> None:
    config.write_text(config.read_text() + f"port = {free_port()}")
    environment = {**os.environ, "GREENLANE_CONFIG": str(config)}
    words = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", "0"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3  # uvicorn's own status for a start that failed
    lines = [line for line in ended.stderr.splitlines() if "greenlane" in line]
    assert "the configuration cannot be served:\\ngreenlane.toml: tenants.acme.port: " in lines[-1]
    assert "serve it with python -m server, or leave it out" in ended.stderr
    assert "Traceback" not in ended.stderr
