"""How a server's processes end after an orderly shutdown: no library's objects are freed by an interpreter that ends."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from greenlane.load.server_process import family_of, free_port

from .harness import PATIENCE
from .processes import configure, tenant
from .wire import until

PLANTED = """
import builtins, os, sys

class Freed:
    def __del__(self, open_=os.open, write=os.write, line=repr(sys.orig_argv).encode() + b"\\n"):
        write(open_({path!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), line)

builtins.freed = Freed()  # The garbage collector, which servers keep from what is loaded, is not needed to free this.
"""
"""Imported by each interpreter at its start; records which of them freed the globals of its modules."""
STANDARD_LIBRARY_ONLY = ("server.host.watch", "multiprocessing.resource_tracker")
"""Processes that load no other library, and may end as any interpreter does."""
SERVER = [sys.executable, "-m", "server", "--config", "greenlane.toml"]
MODULE = [sys.executable, "-m", "greenlane", "serve", "--config", "greenlane.toml"]
SCRIPT = [str(Path(sys.executable).with_name("greenlane")), "--config", "greenlane.toml"]
PROVE, RAY = [sys.executable, "-m", "greenlane.prove.child"], [sys.executable, "-m", "greenlane.ray.child"]


@pytest.fixture
def config(tmp_path: Path, standard: Path) -> Path:
    return configure(tmp_path / "greenlane.toml", standard, tenant("acme", "identity"))


def environment(folder: Path) -> dict[str, str]:
    """With this each interpreter records in `freed` that it frees what it imported."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(PLANTED.format(path=str(folder / "freed")))
    path = os.pathsep.join([str(site), str(Path(__file__).parents[2])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def freed(folder: Path) -> str:
    """The command lines of processes with other libraries that freed what they had imported."""
    lines = (folder / "freed").read_text().splitlines() if (folder / "freed").exists() else []
    return "\n".join(line for line in lines if not any(each in line for each in STANDARD_LIBRARY_ONLY))


def ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def serve_and_end(words: Sequence[str], folder: Path, port: int, given: Any = None) -> int:
    """The exit status of this command after SIGTERM, once every process of it has ended. `given` is for its stdin."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        TemporaryDirectory() as temporary,
        subprocess.Popen(words, cwd=folder, env=environment(folder) | {"TMPDIR": temporary}, text=True, **pipes) as popen,  # type: ignore[call-overload]
    ):
        try:
            popen.stdin.write(json.dumps(given) if given else "")
            popen.stdin.close()
            popen.stdin = None
            until(lambda: popen.poll() is not None or ready(port))
            maps = [Path(f"/proc/{one.pid}/maps").read_text() for one in family_of(popen.pid)]
            assert not any("/dev/shm/" in each for each in maps)  # Nothing there has a name that could be left behind.
            popen.terminate()
            said, _ = popen.communicate(timeout=PATIENCE)
        finally:
            popen.kill()
        assert not list(Path(temporary).iterdir())
    assert "Traceback" not in said
    return popen.returncode


@pytest.mark.parametrize("words", [SERVER, MODULE, SCRIPT])
def test_after_a_drain_no_process_frees_what_it_imported(words: list[str], config: Path, tmp_path: Path) -> None:
    port = free_port()
    assert (serve_and_end([*words, "--port", str(port)], tmp_path, port), freed(tmp_path)) == (0, "")


def test_nor_does_a_server_of_prove(config: Path, tmp_path: Path) -> None:
    given = {"config": str(config), "port": free_port(), "admin": "a", "lends": False, "keys": str(tmp_path / "keys")}
    assert (serve_and_end(PROVE, tmp_path, given["port"], given), freed(tmp_path)) == (0, "")


def test_nor_does_a_server_of_ray(config: Path, tmp_path: Path) -> None:
    given = {"parent": os.getpid(), "config": str(config), "host": "127.0.0.1", "port": free_port(), "key": "k"}
    given |= {"cores": [], "shares": {}}
    assert (serve_and_end(RAY, tmp_path, given["port"], given), freed(tmp_path)) == (0, "")


@pytest.mark.parametrize("program", [[sys.executable, "-m", "server"], SCRIPT[:1]])
def test_nor_does_a_check_whose_output_arrives_in_a_pipe_with_its_status(
    program: list[str], config: Path, tmp_path: Path
) -> None:
    given = environment(tmp_path)

    def check() -> "subprocess.CompletedProcess[str]":
        words = [*program, "check", "greenlane.toml"]
        return subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=PATIENCE, check=False)

    found = check()
    assert (found.returncode, freed(tmp_path)) == (0, "")
    assert "identity" in found.stdout
    config.write_text(config.read_text().replace("identity", "absent"))
    found = check()
    assert (found.returncode, freed(tmp_path)) == (1, "")
    assert "absent" in found.stdout + found.stderr
