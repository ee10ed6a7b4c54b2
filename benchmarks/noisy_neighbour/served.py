"""The servers: where they listen, what they say of themselves, and how those that this benchmark starts are started."""

import json
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from greenlane.load.jobs import Ask
from greenlane.load.server_process import becomes_ready, free_port, logging_process
from greenlane.load.wire import ask
from greenlane.prove.inputs import Form, Model, binary, described, padded

PATIENCE = 120.0
"""Seconds in which a server that was started has to be ready."""


class NotServed(Exception):
    """A server that does not answer, or not what is needed."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server by its name in the tables, and where it listens. This benchmark starts it if there is a `command`."""

    name: str
    host: str
    port: int
    command: tuple[str, ...] = ()

    @classmethod
    def at(cls, name: str, url: str, command: Sequence[str] = ()) -> "Server":
        """Read the URL. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"{url!r}; expected http://HOST:PORT")
        return cls(name, parts.hostname, parts.port or 80, tuple(command))

    @property
    def address(self) -> str:
        """The host as an address, for clients that have no time to look it up."""
        return socket.gethostbyname(self.host)

    def get(self, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
        """A document. Raises NotServed."""
        try:
            answer = ask(self.port, "GET", path, headers, timeout=30, host=self.host)
        except (OSError, HTTPException) as error:
            raise NotServed(f"{self.name}: GET {path}: {error}") from error
        if answer.status != 200:
            raise NotServed(f"{self.name}: GET {path} is answered with {answer.status}: {answer.body[:300]!r}")
        found: dict[str, Any] = json.loads(answer.body) if answer.body else {}
        return found

    def ready(self) -> bool:
        """Whether it says so."""
        with suppress(NotServed):
            self.get("/v2/health/ready", {})
            return True
        return False

    def model(self, name: str, headers: Mapping[str, str]) -> Model:
        """A model by its metadata. A first dimension that varies is taken for the batch's. Raises NotServed."""
        metadata = self.get(f"/v2/models/{quote(name, safe='')}", headers)
        varies = all(each["shape"] and int(each["shape"][0]) == -1 for each in metadata["inputs"])
        shapes = [{**each, "shape": [int(size) for size in each["shape"]]} for each in metadata["inputs"]]  # Triton: texts.
        return described(name, {"inputs": shapes}, {"max_batch_size": int(varies)})

    def ask(self, model: str, headers: Mapping[str, str], rows: int = 1, form: str = "binary") -> Ask:
        """A request for this model. Raises NotServed."""
        found, fields = self.model(model, headers), {"Host": f"{self.host}:{self.port}", **headers}
        return padded(found, Form(rows), fields, 0) if form == "json" else binary(found, Form(rows), fields)


def greenlane(name: str, config: str) -> Server:
    """Greenlane with this configuration, on a port that is free."""
    port = free_port()
    command = [sys.executable, "-m", "server", "--config", config, "--port", str(port)]
    return Server(name, "127.0.0.1", port, tuple(command))


def started(name: str, url: str, command: str) -> Server:
    """A server that this command line starts. Raises ValueError."""
    return Server.at(name, url, shlex.split(command))


@contextmanager
def running(server: Server, folder: Path) -> Iterator[None]:
    """Start it, if that is ours to do, and wait until it is ready; what it logs is a file in `folder`. Raises NotServed."""
    if not server.command:
        server.get("/v2/health/ready", {})
        yield
        return
    log = folder / f"{server.name}.log"
    with logging_process(server.command, log) as process:
        if not becomes_ready(process, server.ready, PATIENCE):
            text = log.read_text(errors="replace")[-2000:]
            raise NotServed(f"{server.name} is not ready ({shlex.join(server.command)}):\n{text}")
        yield
