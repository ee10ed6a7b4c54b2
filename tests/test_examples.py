"""The examples that need no GPU run; the one that needs a GPU is compiled here, and type-checked with everything else."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server import demo
from tests.end_to_end.processes import configure, running

EXAMPLES = Path(__file__).parents[1] / "examples"
TENANTS = """
[tenants.acme]
granules = 1
models = ["*"]
[tenants.globex]
granules = 1
models = ["identity"]
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the demo's models."""
    folder = tmp_path_factory.mktemp("demo")
    demo.build(folder / "models")
    with running(configure(folder / "greenlane.toml", folder / "models", TENANTS, default_tenant='"acme"')) as server:
        yield server.address


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_sh(address: str) -> None:
    said = run(str(EXAMPLES / "curl.sh"), f"http://{address}")
    assert '"data":[1.0,2.5]' in said
    assert "expected a number for FP32" in said
    assert "nv_inference_request_success{" in said


def test_tritonclient_stripes(address: str) -> None:
    assert "vertical" in run(sys.executable, str(EXAMPLES / "tritonclient_stripes.py"), address)


def test_picture(address: str) -> None:
    assert "vertical" in run(sys.executable, str(EXAMPLES / "picture.py"), address)


def test_noisy_neighbour_prints_both_tails_and_what_other_programs_used() -> None:
    """Which of them is longer is for benchmarks: this machine may be busy."""
    lines = run(sys.executable, str(EXAMPLES / "noisy_neighbour.py"), "--seconds", "0.5").splitlines()
    assert re.match(r"own partition +p99 [\d.]+ ms +p99 [\d.]+ ms +[\d.]+ +\d+%$", lines[1])
    assert re.match(r"shared +p99 [\d.]+ ms +p99 [\d.]+ ms +[\d.]+ +\d+%$", lines[2])


def test_noisy_neighbour_ends_by_ctrl_c_without_a_traceback() -> None:
    command = [sys.executable, "-u", str(EXAMPLES / "noisy_neighbour.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout
        assert "alone" in process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does: the servers that it starts get it, too.
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")


def test_partition_stream_compiles() -> None:
    """It needs a GPU and PyTorch; mypy checks its calls."""
    path = EXAMPLES / "partition_stream.py"
    compile(path.read_text(), str(path), "exec")
