"""The shell blocks of README, the quickstart and the operations guide are run, page by page, as a reader pastes them.

The reader's checkout is a folder in which scripts/serve and .venv/bin/greenlane run these sources on a free port. What serves
runs until the page starts the next server; a loop runs for some turns.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenlane.load import wire
from greenlane.load.server_process import free_port, terminate
from tests.end_to_end.wire import until

ROOT = Path(__file__).parents[1]
SERVES = re.compile(r"(scripts/serve|\.venv/bin/greenlane( --config \S+)?) *(#.*)?$")
LEFT_OUT = {
    r"^scripts/install cpu,rtx": "needs a GPU",
    r"greenlane build model\.onnx": "needs a model of the reader's",
    r"greenlane prove ": "takes a minute; tests/greenlane/prove runs it",
    r"greenlane curve conv ": "needs a model that the demo does not have",
    r"greenlane curve identity ": "takes 17 seconds; tests/greenlane/curve runs it",
    r"greenlane top": "needs a terminal; tests/greenlane/top has one",
    r"pip install": "is installed for the tests",
    r"^prometheus --config": "tests/deploy runs it",
}
"""Lines that are not run, by regular expression, and the reason."""
SERVE = '#!/bin/sh\nexec "{python}" -P -m greenlane {port} "$@"\n'
COMMAND = """#!/bin/sh
case ${{1-}} in "" | -*) set -- "$@" {port} ;; esac
exec "{python}" -P -m greenlane "$@"
"""
PYTHON = '#!/bin/sh\nexec "{python}" "$@"\n'


class Reader:
    """A reader at a terminal in a checkout."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        given = {"python": sys.executable, "port": f"--port {self.port}"}
        for name, text in (("scripts/serve", SERVE), (".venv/bin/greenlane", COMMAND), (".venv/bin/python", PYTHON)):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(**given))
            path.chmod(0o755)
        (folder / ".curlrc").write_text("silent\n")  # At a terminal curl shows no progress either where it prints the answer.
        for name in ("examples", "deploy"):
            (folder / name).symlink_to(ROOT / name)

    def paste(self, block: str) -> str:
        """Run a block, its server in the background. What its commands print."""
        block = block.replace("localhost:8000", f"localhost:{self.port}")
        block = re.sub(r"(tritonclient_stripes\.py)$", rf"\1 localhost:{self.port}", block, flags=re.MULTILINE)
        block = re.sub(r"^while sleep 0\.05; do (.*) done$", r"for turn in 1 2 3; do \1 done", block, flags=re.MULTILINE)
        lines = [line for line in block.splitlines() if not any(re.search(each, line) for each in LEFT_OUT)]
        serves = [line for line in lines if SERVES.match(line)]
        said = self._run("\n".join(line for line in lines if line not in serves))
        for line in serves:
            self._serve(line)
        return said

    def leave(self) -> None:
        """Stop the server, as Ctrl-C does."""
        if self._server:
            terminate(self._server, 10)
            self._server = None

    def _run(self, script: str) -> str:
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=self._folder, env=self._environment(), capture_output=True, text=True, timeout=100)
        unexpected = [line for line in done.stderr.splitlines() if "the device is the CPU, though TensorRT is" not in line]
        assert (done.returncode, unexpected) == (0, []), f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, line: str) -> None:
        self.leave()
        words = line.partition("#")[0].split()
        self._server = subprocess.Popen(words, cwd=self._folder, env=self._environment(), stderr=subprocess.DEVNULL)
        until(self._is_ready)

    def _is_ready(self) -> bool:
        assert self._server
        assert self._server.poll() is None, "the server has ended"
        try:
            return wire.ask(self.port, "GET", "/v2/health/ready", {}, timeout=5).status == 200
        except OSError:
            return False

    def _environment(self) -> dict[str, str]:
        given = {key: value for key, value in os.environ.items() if key != "GREENLANE_CONFIG"}
        return {**given, "PYTHONPATH": str(ROOT), "CURL_HOME": str(self._folder)}


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.leave()


def blocks(page: str) -> list[str]:
    return re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_readme(reader: Reader) -> None:
    said = []
    for block in blocks("README.md"):
        if "greenlane check" in block:
            reader.leave()
            reader.paste(".venv/bin/greenlane init\n")  # In the sentence above it.
        said.append(reader.paste(block))
    assert '"data":[1.0,2.5]' in said[1]
    assert "tenant globex: " in said[2]


def test_quickstart(reader: Reader) -> None:
    said = [reader.paste(block) for block in blocks("docs/quickstart.md")]
    assert '"data":["vertical"]' in said[1]
    assert "404 Not Found" in said[3]
    assert any('"data":[1.0,2.5]' in each for each in said[5:])
    assert '"moved":["acme"]' in said[-1]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_operations_from_nothing_to_a_dashboard(reader: Reader) -> None:
    said = [reader.paste(block) for block in blocks("docs/operations.md")]
    assert said[1].count('"data":[1.0,2.5]') >= 9, "acme's, and the first of globex'"
    assert '"tenants.globex.requests_per_second"' in said[-1]
