"""A flood of log lines, or a log that is not read, does not affect the server."""

import fcntl
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.forked import Forked

from .golden import OK, infer
from .harness import PATIENCE
from .processes import configure, tenant
from .test_golden import hear
from .wire import Connection, until

FORMS = {"server": ["server", "--config"], "uvicorn": ["uvicorn", "server.app:app", "--port", "0", "--no-access-log"]}
GARBAGE = b"hello\r\n\r\n"
FLOOD = 300


class Started:
    """A server whose log is read until it is ready, and then only when asked."""

    def __init__(self, words: list[str], config: Path) -> None:
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        command = [sys.executable, "-m", *words, *([str(config)] if words[0] == "server" else [])]
        self.popen = Forked(command, stderr=writer, env={**os.environ, "GREENLANE_CONFIG": str(config)})
        os.close(writer)
        self.log: IO[str] = os.fdopen(reader)
        self.port = 0

    def start(self) -> None:
        ready = False
        while not (ready and self.port):
            line = self.log.readline()
            assert line, "it ended"
            ready = ready or "ready: " in line
            if found := re.search(r"(?:listening|running) on http://\S+?:(\d+)", line):
                self.port = int(found[1])

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.log.close()


@pytest.fixture(params=FORMS)
def server(request: pytest.FixtureRequest, standard: Path, tmp_path: Path) -> Iterator[Started]:
    settings = {"default_tenant": '"acme"', "log_format": '"json"'}
    started = Started(FORMS[request.param], configure(tmp_path / "c.toml", standard, tenant(), **settings))
    try:
        started.start()
        yield started
    finally:
        started.close()


def flood(server: Started) -> None:
    for _ in range(FLOOD):
        with Connection(server) as connection:
            connection.send(GARBAGE)
            assert connection.answer().status == 400


def test_a_log_that_is_not_read_blocks_neither_requests_nor_shutdown(server: Started) -> None:
    flood(server)
    with Connection(server) as connection:
        connection.send(infer())
        hear(connection, OK)
    server.popen.terminate()
    assert server.popen.wait(PATIENCE) in (0, -15)


def test_a_flood_is_logged_within_limits_with_the_number_of_lines_left_out(server: Started) -> None:
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(server.log))
    reader.start()
    flood(server)
    warning = "Invalid HTTP request received."

    sent = FLOOD

    def counted() -> int:
        nonlocal sent
        sent += 1
        with Connection(server) as connection:
            connection.send(GARBAGE)
            connection.answer()
        return sum(json.loads(line).get("left_out", 0) for line in list(lines) if warning in line)

    until(lambda: counted() > 0)
    server.popen.terminate()
    server.popen.wait(PATIENCE)
    reader.join()
    written = [line for line in lines if warning in line]
    assert len(written) + sum(json.loads(line).get("left_out", 0) for line in written) <= sent
    assert len(written) < sent
