"""A sticky CUDA error under load, in the real server: all requests are answered, and the device is started again.

With processes of their own the device process exits with 70 and is replaced; a server of one process exits with 70 itself.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Semaphore
from typing import Any, NamedTuple

import pytest

from server.host.exit_codes import NEEDS_RESTART

from .networks import mlp, plan
from .process import PATIENCE, Client, _wait_until_ready

pytestmark = pytest.mark.gpu
TENANTS = ("acme", "globex")
CLIENTS = 6
"""Connections of each tenant; more than it has in flight."""
BOUND = 60.0
"""Seconds until the process has to be gone once its device is."""
ENDED = 0
"""In place of a status: the connection was closed because the process ended."""


class Case(NamedTuple):
    """A server, and what a tenant asks it."""

    command: Sequence[str]
    folder: Path
    inputs: dict[str, Any]

    @property
    def log(self) -> str:
        """The log of all its processes."""
        return (self.folder / "server.log").read_text()

    @contextmanager
    def running(self, fronts: str, port: int) -> "Iterator[subprocess.Popen[bytes]]":
        """The process, once it is ready."""
        config = self.folder / "greenlane.toml"
        config.write_text(_config(self.folder / "models", fronts), encoding="utf-8")
        command = [*self.command, "--config", str(config), "--port", str(port)]
        log, lose = self.folder / "server.log", self.folder / "lose"
        lose.unlink(missing_ok=True)
        os.mkfifo(lose)
        environment = {**os.environ, "LOSE": str(lose)}
        with log.open("a") as said, subprocess.Popen(command, stderr=said, stdout=said, env=environment) as process:
            try:
                _wait_until_ready(process, port, log)
                yield process
            finally:
                process.kill()

    def lose(self) -> None:
        """Lose the device."""
        (self.folder / "lose").write_bytes(b".")

    def ask(self, client: Client, tenant: str) -> tuple[int, str]:
        body = json.dumps({"inputs": [self.inputs]}).encode()
        return _ask(client, "POST", "/v2/models/m/infer", body, tenant)


def version(folder: Path) -> Path:
    """Where the file of the only model goes."""
    made = folder / "models" / "m" / "1"
    made.mkdir(parents=True)
    return made


def _config(repository: Path, fronts: str) -> str:
    lines = ["[server]", f'fronts = "{fronts}"', 'drain_grace = "0s"', "[device]", 'backend = "cuda"']
    lines += ["[models]", f'repository = "{repository}"']
    for tenant in TENANTS:
        lines += [f"[tenants.{tenant}]", "granules = 4", 'models = ["*"]']
    return "\n".join(lines)


def _ask(client: Client, method: str, path: str, body: bytes = b"", tenant: str = "") -> tuple[int, str]:
    try:
        status, answer, _ = client.ask(method, path, body, tenant)
    except (OSError, http.client.HTTPException) as error:
        return ENDED, repr(error)
    return status, answer.decode()


def _ask_until_it_fails(case: Case, port: int, tenant: str, answered: Semaphore) -> tuple[int, str]:
    with closing(Client(port)) as client:
        while (last := case.ask(client, tenant))[0] == 200:
            answered.release()
    return last


def _look_until_not_ready(port: int) -> tuple[int, str]:
    with closing(Client(port)) as client:
        while (last := _ask(client, "GET", "/v2/health/ready"))[0] == 200:
            pass
    return last


def free_port() -> int:
    """A port on which no process listens at present."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def device_process(supervisor: int) -> int:
    """The device process of this server."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if path.read_text().startswith("greenlane dev") and supervisor in _parents(int(path.parent.name)):
                return int(path.parent.name)
    raise AssertionError("there is no device process")


def _parents(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


class TestLost:
    """For every server whose device a byte in a FIFO loses."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        plan(version(tmp_path), mlp())
        inputs = {"name": "x", "shape": [1, 784], "datatype": "FP32", "data": [0.5] * 784}
        return Case([sys.executable, "-m", "tests.gpu.losing"], tmp_path, inputs)

    def test_a_lost_device_answers_503_exits_with_70_and_can_be_started_again(self, case: Case) -> None:
        fronts, port, answered = "inline", free_port(), Semaphore(0)
        with ThreadPoolExecutor(1 + len(TENANTS) * CLIENTS) as pool, case.running(fronts, port) as process:
            asking = {
                tenant: [pool.submit(_ask_until_it_fails, case, port, tenant, answered) for _ in range(CLIENTS)]
                for tenant in TENANTS
            }
            looking = pool.submit(_look_until_not_ready, port)
            for _ in range(10 * len(TENANTS) * CLIENTS):
                assert answered.acquire(timeout=PATIENCE), case.log
            case.lose()
            answers = {tenant: [asked.result(BOUND) for asked in several] for tenant, several in asking.items()}
            assert_lost(looking.result(BOUND), case, "lost")
            assert process.wait(BOUND) == NEEDS_RESTART == 70, case.log
        for several in answers.values():
            for answer in several:
                assert_lost(answer, case, "the device is lost: ")
            assert any(status == 503 for status, _ in several), f"no request was answered with 503: {several}\n{case.log}"
        assert "the device is lost, this process will exit" in case.log
        self.check_that_it_serves_again(case, fronts, port)

    @pytest.mark.parametrize("how", ["lost", "killed"])
    def test_a_device_process_that_ends_answers_503_and_is_replaced_while_the_others_stay(self, case: Case, how: str) -> None:
        port, answered = free_port(), Semaphore(0)
        with ThreadPoolExecutor(len(TENANTS) * CLIENTS) as pool, case.running("per-tenant", port) as process:
            asking = [
                pool.submit(_ask_until_it_fails, case, port, tenant, answered) for tenant in TENANTS for _ in range(CLIENTS)
            ]
            for _ in range(10 * len(TENANTS) * CLIENTS):
                assert answered.acquire(timeout=PATIENCE), case.log
            if how == "lost":
                case.lose()
            else:
                os.kill(device_process(process.pid), signal.SIGKILL)
            begun = time.monotonic()
            for asked in asking:
                status, text = asked.result(BOUND)
                assert status == 503, f"{status}: {text}\n{case.log}"
            refused = time.monotonic() - begun
            with closing(Client(port)) as client:
                ends = time.monotonic() + PATIENCE
                while any(case.ask(client, tenant)[0] != 200 for tenant in TENANTS):
                    assert time.monotonic() < ends, case.log
            served = time.monotonic() - begun
            print(f"{how}: every client had its 503 after {refused:.2f} s, and was served after {served:.1f} s")
            reason = f"status {NEEDS_RESTART}" if how == "lost" else "signal 9"
            assert f"the device process ended ({reason})" in case.log
            process.terminate()
            assert process.wait(BOUND) == 0, case.log

    def check_that_it_serves_again(self, case: Case, fronts: str, port: int) -> None:
        """What a supervisor does: the same command on the same port."""
        with case.running(fronts, port) as process, closing(Client(port)) as client:
            for tenant in TENANTS:
                status, body = case.ask(client, tenant)
                assert status == 200, f"{body}\n{case.log}"
            process.terminate()
            assert process.wait(BOUND) == 0, case.log


def assert_lost(answer: tuple[int, str], case: Case, words: str) -> None:
    """The answer is a 503 with these words, or the process is gone."""
    status, text = answer
    assert status in (503, ENDED), f"{answer}\n{case.log}"
    assert status == ENDED or words in json.loads(text)["error"], text
