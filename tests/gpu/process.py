"""`python -m server --config`, or `uvicorn server.app:app`, in a process of its own, as it is run on a GPU box."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

PATIENCE = 180.0
"""Seconds within which the server has to be ready, or to end."""


class Client:
    """A connection for each tenant, kept open: one connection is one tenant's."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connections: dict[str, http.client.HTTPConnection] = {}

    def ask(self, method: str, path: str, body: bytes = b"", tenant: str = "", **headers: str) -> tuple[int, bytes, Any]:
        """The status, the body, and the headers; "" is the default tenant."""
        if tenant not in self._connections:
            self._connections[tenant] = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        sent = {name.replace("_", "-"): value for name, value in headers.items()} | ({"X-Tenant": tenant} if tenant else {})
        self._connections[tenant].request(method, path, body, sent)
        answer = self._connections[tenant].getresponse()
        return answer.status, answer.read(), answer.headers

    def infer(self, model: str, tenant: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """FP32 in and out, all of it binary."""
        inputs = [
            {"name": name, "shape": array.shape, "datatype": "FP32", "parameters": {"binary_data_size": array.nbytes}}
            for name, array in given.items()
        ]
        header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        body = b"".join([header, *(array.tobytes() for array in given.values())])
        length, path = str(len(header)), f"/v2/models/{model}/infer"
        status, body, headers = self.ask("POST", path, body, tenant, Inference_Header_Content_Length=length)
        assert status == 200, body
        return _outputs(body, int(headers["Inference-Header-Content-Length"]))

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def _outputs(body: bytes, length: int) -> dict[str, np.ndarray]:
    found, at = {}, length
    for output in json.loads(body[:length])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = np.frombuffer(body[at : at + size], np.float32).reshape(output["shape"])
        at += size
    return found


@contextmanager
def running(folder: Path, repository: Path, *tenants: str, granules: int = 4, plain: bool = False) -> Iterator[Client]:
    """The server with these tenants, once it is ready; it has to exit well on SIGTERM.

    `plain` is whether it runs as `uvicorn server.app:app`, which ends by the signal that it was sent.
    """
    config, log = folder / "greenlane.toml", folder / "server.log"
    config.write_text(_config(repository, tenants, granules), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["uvicorn", "server.app:app"] if plain else ["server", "--config", str(config)]
    command = [sys.executable, "-m", *words, "--port", str(port)]
    environment = {**os.environ, "GREENLANE_CONFIG": str(config)}
    with log.open("w") as said, subprocess.Popen(command, stderr=said, stdout=said, env=environment) as process:
        try:
            _wait_until_ready(process, port, log)
            with closing(Client(port)) as client:
                yield client
            process.terminate()
            assert process.wait(PATIENCE) == (-signal.SIGTERM if plain else 0), log.read_text()
        finally:
            process.kill()


def _config(repository: Path, tenants: tuple[str, ...], granules: int) -> str:
    lines = ["[server]", f'default_tenant = "{tenants[0]}"', "[device]", 'backend = "cuda"']
    lines += ["[models]", f'repository = "{repository}"']
    for tenant in tenants:
        lines += [f"[tenants.{tenant}]", f"granules = {granules}", 'models = ["*"]']
    return "\n".join(lines)


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    ends = time.monotonic() + PATIENCE
    while not _is_ready(port):
        assert time.monotonic() < ends, f"it is not ready:\n{log.read_text()}"
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"it ended:\n{log.read_text()}")


def _is_ready(port: int) -> bool:
    try:
        with closing(Client(port)) as client:
            return client.ask("GET", "/v2/health/ready")[0] == 200
    except (OSError, http.client.HTTPException):
        return False
