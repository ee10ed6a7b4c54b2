"""A sticky CUDA error under load, in the real server: all requests are answered, and the device process is replaced."""

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

from greenlane.load.wire import Broken
from server.host.leaving import NEEDS_RESTART

from .networks import mlp, plan
from .process import PATIENCE, Client, Served, gpu_section, mps, serving

pytestmark = pytest.mark.gpu
TENANTS = ("acme", "globex")
CLIENTS = 6
"""Connections of each tenant; more than it has in flight."""
BOUND = 60.0
"""Seconds until the process has to be gone once its device is."""
ENDED = 0
"""In place of a status: the connection was closed because the process ended."""
REASONS = {
    "lost": f"the device process ended (status {NEEDS_RESTART})",
    "killed": "the device process ended (signal 9)",
    "lost, under MPS": "a kernel failed: every client of the MPS server of ",
    "killed, under MPS": "the device process for acme ended (signal 9)",
}
"""What the log says of it. Under MPS the processes of all tenants are ended, before or after they have seen it themselves."""


class Case(NamedTuple):
    """A server, and what a tenant asks it."""

    module: str
    folder: Path
    inputs: dict[str, Any]
    index: int = 0
    """The GPU's ordinal."""

    @contextmanager
    def running(self) -> Iterator[Served]:
        """The server, once it is ready, on a free port."""
        config = self.folder / "greenlane.toml"
        config.write_text(_config(self.folder / "models", self.index), encoding="utf-8")
        lose = self.folder / "lose"
        lose.unlink(missing_ok=True)
        os.mkfifo(lose)
        with serving([self.module, "--config", str(config), "--port", "0"], {"LOSE": str(lose)}) as served:
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


def _config(repository: Path, index: int) -> str:
    lines = ["[server]", 'drain_grace = "0s"', gpu_section(index=index), "[models]", f'repository = "{repository}"']
    for tenant in TENANTS:
        lines += [f"[tenants.{tenant}]", "granules = 4", 'models = ["*"]', 'memory = "32MiB"']
    return "\n".join(lines)


def _ask(client: Client, method: str, path: str, body: bytes = b"", tenant: str = "") -> tuple[int, str]:
    try:
        answer = client.ask(method, path, body, tenant)
    except Broken as error:
        return ENDED, repr(error)
    return answer.status, (answer.body or b"").decode()


def _ask_until_it_fails(case: Case, port: int, tenant: str, answered: Semaphore) -> tuple[int, str]:
    with closing(Client(port)) as client:
        while (last := case.ask(client, tenant))[0] == 200:
            answered.release()
    return last


class TestLost:
    """For every server whose device a byte in a FIFO loses."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        plan(version(tmp_path), mlp())
        inputs = {"name": "x", "shape": [1, 784], "datatype": "FP32", "data": [0.5] * 784}
        return Case("tests.gpu.losing", tmp_path, inputs)

    @pytest.mark.parametrize("how", ["lost", "killed"])
    def test_a_device_process_that_ends_answers_503_and_is_replaced_while_the_others_stay(self, case: Case, how: str) -> None:
        answered = Semaphore(0)
        with ThreadPoolExecutor(len(TENANTS) * CLIENTS) as pool, case.running() as served:
            port = served.port
            asking = [
                pool.submit(_ask_until_it_fails, case, port, tenant, answered) for tenant in TENANTS for _ in range(CLIENTS)
            ]
            for _ in range(10 * len(TENANTS) * CLIENTS):
                assert answered.acquire(timeout=PATIENCE), served.log
            if how == "lost":
                case.lose()
            else:
                for process in {served.process_of(tenant) for tenant in TENANTS}:
                    os.kill(process, signal.SIGKILL)
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
            served.process.wait_for_log(REASONS[how if mps() == "off" else f"{how}, under MPS"])
