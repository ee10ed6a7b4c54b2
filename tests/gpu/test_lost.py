"""A sticky CUDA error under load, in the real server: all requests are answered, and the device is started again.

With processes of their own the device process exits with 70 and is replaced; a server of one process exits with 70 itself.
"""

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Semaphore
from typing import Any, NamedTuple

import pytest

from server.host.exit_codes import NEEDS_RESTART

from .networks import mlp, plan
from .process import PATIENCE, Client, Served, serving

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

    module: str
    folder: Path
    inputs: dict[str, Any]
    index: int = 0
    """The GPU's ordinal."""

    @contextmanager
    def running(self, fronts: str, port: int = 0, status: int = 0) -> Iterator[Served]:
        """The server, once it is ready; it has to end with this status. Port 0 is a free one."""
        config = self.folder / "greenlane.toml"
        config.write_text(_config(self.folder / "models", fronts, self.index), encoding="utf-8")
        lose = self.folder / "lose"
        lose.unlink(missing_ok=True)
        os.mkfifo(lose)
        command = [self.module, "--config", str(config), "--port", str(port)]
        with serving(command, {"LOSE": str(lose)}, status) as served:
            yield served

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


def _config(repository: Path, fronts: str, index: int) -> str:
    lines = ["[server]", f'fronts = "{fronts}"', 'drain_grace = "0s"', "[device]", 'backend = "cuda"', f"index = {index}"]
    lines += ["[models]", f'repository = "{repository}"']
    for tenant in TENANTS:
        lines += [f"[tenants.{tenant}]", "granules = 4", 'models = ["*"]', 'memory = "32MiB"']
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


class TestLost:
    """For every server whose device a byte in a FIFO loses."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        plan(version(tmp_path), mlp())
        inputs = {"name": "x", "shape": [1, 784], "datatype": "FP32", "data": [0.5] * 784}
        return Case("tests.gpu.losing", tmp_path, inputs)

    def test_a_lost_device_answers_503_exits_with_70_and_can_be_started_again(self, case: Case) -> None:
        fronts, answered = "inline", Semaphore(0)
        running = case.running(fronts, status=NEEDS_RESTART)
        with ThreadPoolExecutor(1 + len(TENANTS) * CLIENTS) as pool, running as served:
            port = served.port
            asking = {
                tenant: [pool.submit(_ask_until_it_fails, case, port, tenant, answered) for _ in range(CLIENTS)]
                for tenant in TENANTS
            }
            looking = pool.submit(_look_until_not_ready, port)
            for _ in range(10 * len(TENANTS) * CLIENTS):
                assert answered.acquire(timeout=PATIENCE), served.log
            case.lose()
            answers = {tenant: [asked.result(BOUND) for asked in several] for tenant, several in asking.items()}
            assert_lost(looking.result(BOUND), served, "lost")
            assert served.process.popen.wait(BOUND) == NEEDS_RESTART == 70, served.log
        for several in answers.values():
            for answer in several:
                assert_lost(answer, served, "the device is lost: ")
            assert any(status == 503 for status, _ in several), f"no request was answered with 503: {several}\n{served.log}"
        assert "the device is lost, this process will exit" in served.log
        self.check_that_it_serves_again(case, fronts, port)

    @pytest.mark.parametrize("how", ["lost", "killed"])
    def test_a_device_process_that_ends_answers_503_and_is_replaced_while_the_others_stay(self, case: Case, how: str) -> None:
        answered = Semaphore(0)
        with ThreadPoolExecutor(len(TENANTS) * CLIENTS) as pool, case.running("per-tenant") as served:
            port = served.port
            asking = [
                pool.submit(_ask_until_it_fails, case, port, tenant, answered) for tenant in TENANTS for _ in range(CLIENTS)
            ]
            for _ in range(10 * len(TENANTS) * CLIENTS):
                assert answered.acquire(timeout=PATIENCE), served.log
            if how == "lost":
                case.lose()
            else:
                os.kill(served.device_process("0"), signal.SIGKILL)
            begun = time.monotonic()
            for asked in asking:
                status, text = asked.result(BOUND)
                assert status == 503, f"{status}: {text}\n{served.log}"
            refused = time.monotonic() - begun
            with closing(Client(port)) as client:
                ends = time.monotonic() + PATIENCE
                while any(case.ask(client, tenant)[0] != 200 for tenant in TENANTS):
                    assert time.monotonic() < ends, served.log
            took = time.monotonic() - begun
            print(f"{how}: every client had its 503 after {refused:.2f} s, and was served after {took:.1f} s")
            reason = f"status {NEEDS_RESTART}" if how == "lost" else "signal 9"
            served.process.wait_for_log(f"the device process ended ({reason})")

    def check_that_it_serves_again(self, case: Case, fronts: str, port: int) -> None:
        """What a supervisor does: the same command on the same port."""
        with case.running(fronts, port) as served, closing(Client(port)) as client:
            for tenant in TENANTS:
                status, body = case.ask(client, tenant)
                assert status == 200, f"{body}\n{served.log}"


def assert_lost(answer: tuple[int, str], served: Served, words: str) -> None:
    """The answer is a 503 with these words, or the process is gone."""
    status, text = answer
    assert status in (503, ENDED), f"{answer}\n{served.log}"
    assert status == ENDED or words in json.loads(text)["error"], text
