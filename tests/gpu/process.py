"""`python -m server --config`, or `uvicorn server.app:app`, in a process of its own, as it is run on a GPU box.

With MPS=on in the environment the tenants of these servers have a device process each.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.watched_server import ServerProcess, server_process
from greenlane.load.jobs import Ask
from greenlane.load.wire import Answer, Caller, ask, post

PATIENCE = 180.0
"""Seconds for which an answer, or a process, is waited for."""


def mps() -> str:
    """The value of `device.mps` in the configuration of every server that runs as processes: "off" unless $MPS says "on"."""
    found = os.environ.get("MPS", "off")
    assert found in ("off", "on"), f"MPS={found}, but it has to be off or on"
    return found


def gpu_section(header: str = "[device]", index: int = 0) -> str:
    """A GPU's section of such a configuration."""
    return f'{header}\nbackend = "cuda"\nindex = {index}\nmps = "{mps()}"\n'


class Client:
    """A connection for each tenant, kept open: one connection is one tenant's."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._callers: dict[str, Caller] = {}

    def ask(self, method: str, path: str, body: bytes = b"", tenant: str = "", **headers: str) -> Answer:
        """The answer; "" is the default tenant. Raises Broken."""
        caller = self._callers.setdefault(tenant, Caller(self.port, PATIENCE))
        sent = {name.replace("_", "-"): value for name, value in headers.items()} | ({"X-Tenant": tenant} if tenant else {})
        return caller.ask(Ask(post(path, sent, body, method=method)))

    def infer(self, model: str, tenant: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """FP32 in and out, all of it binary."""
        inputs = [
            {"name": name, "shape": array.shape, "datatype": "FP32", "parameters": {"binary_data_size": array.nbytes}}
            for name, array in given.items()
        ]
        header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        body = b"".join([header, *(array.tobytes() for array in given.values())])
        path, length = f"/v2/models/{model}/infer", str(len(header))
        answer = self.ask("POST", path, body, tenant, Inference_Header_Content_Length=length)
        assert answer.status == 200, answer.body
        return _outputs(*answer.parts)

    def close(self) -> None:
        for caller in self._callers.values():
            caller.close()


def _outputs(document: bytes, tensors: bytes) -> dict[str, np.ndarray]:
    found, at = {}, 0
    for output in json.loads(document)["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = np.frombuffer(tensors[at : at + size], np.float32).reshape(output["shape"])
        at += size
    return found


class Served:
    """A server that is ready, and questions of an administrator to it."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.port = process.port

    @property
    def log(self) -> str:
        """The log of all its processes so far."""
        return "".join(self.process.log)

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        answer = ask(self.port, method, f"/admin/{path}", {}, json.dumps(body).encode() if body else b"", PATIENCE)
        assert answer.status == 200, f"{answer.status}: {answer.body.decode()}\n{self.log}"
        return json.loads(answer.body)

    def process_of(self, tenant: str, device: str = "0") -> int:
        """The process that has this tenant's side on a device, once there is one."""
        return self.device_process(tenant if mps() == "on" else device)

    def device_process(self, name: str) -> int:
        """The process of this device, or of this tenant on any device, once there is one; the kernel keeps 15 bytes of it."""
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            for one in self.process.family():
                if one.name == f"greenlane dev {name}"[:15]:
                    return one.pid
        raise AssertionError(f"{name} has no device process\n{self.log}")


@contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str] | None = None, status: int = 0) -> Iterator[Served]:
    """A server by this command, once it is ready. After the block it has to end with this status, on SIGTERM if not before."""
    with server_process([sys.executable, "-m", *command], environment) as process:
        yield Served(process)
    assert process.popen.returncode == status, "".join(process.log)


@contextmanager
def running(folder: Path, repository: Path, *tenants: str, granules: int = 4, plain: bool = False) -> Iterator[Served]:
    """The server with these tenants.

    `plain` is whether it runs as `uvicorn server.app:app`, which ends by the signal that it was sent.
    """
    config = folder / "greenlane.toml"
    if plain:
        command, status, device = ["uvicorn", "server.app:app"], -signal.SIGTERM, '[device]\nbackend = "cuda"\nmps = "off"'
    else:
        command, status, device = ["server", "--config", str(config)], 0, gpu_section()
    config.write_text(_config(repository, tenants, granules, device), encoding="utf-8")
    with serving([*command, "--port", "0"], {"GREENLANE_CONFIG": str(config)}, status) as served:
        yield served


def _config(repository: Path, tenants: tuple[str, ...], granules: int, device: str) -> str:
    lines = ["[server]", f'default_tenant = "{tenants[0]}"', device]
    lines += ["[models]", f'repository = "{repository}"']
    for tenant in tenants:
        lines += [f"[tenants.{tenant}]", f"granules = {granules}", 'models = ["*"]']
    return "\n".join(lines)
