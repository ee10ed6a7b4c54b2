"""Commands that use a GPU themselves are no clients of an MPS daemon that an operator runs, in whose environment they start."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from greenlane.__main__ import main
from partitions.mps import MpsDaemon
from server.app import configuration, open_alone
from server.check import check
from tests.engines.simulated import AFFINE, ROWS
from tests.engines.small import model
from tests.greenlane.curve.test_on_gpu import CONFIG
from tests.simulation import Gpu, installed
from tests.simulation.mps import FakeMps
from tests.simulation.plans import make_plan
from tests.simulation.tensorrt import library

PIPES = "CUDA_MPS_PIPE_DIRECTORY"


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The connections to an operator's daemon, which refuses each."""
    came: list[str] = []
    with TemporaryDirectory(prefix="theirs-", dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as control:
        control.bind(f"{folder}/control")
        control.listen()

        def refuse() -> None:
            with suppress(OSError):  # It is shut down below.
                while True:
                    control.accept()[0].close()
                    came.append("a client")

        refusing = threading.Thread(target=refuse)
        refusing.start()
        monkeypatch.setenv(PIPES, folder)
        monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
        yield came
        control.shutdown(socket.SHUT_RDWR)
        refusing.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "c.toml").write_text(CONFIG)
    (tmp_path / "affine.onnx").write_bytes(model(AFFINE))
    (tmp_path / "affine.plan").write_bytes(make_plan(model(AFFINE), ROWS))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("check c.toml", 0),
        ("curve affine.plan --config c.toml --shares 8 --seconds 0.2 --batch 2", 0),
        ("verify affine.plan --config c.toml --shape x:1x3", 0),
        ("build missing.onnx", 1),  # The simulated library builds none, and its plans begin in another way.
        ("inspect affine.plan", 1),
    ],
)
def test_a_command_that_opens_a_gpu_is_no_client_of_an_operator_s_daemon(
    words: str, status: int, clients: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    gpu = Gpu()
    with installed(gpu, library(gpu)):
        assert main(words.split()) == status
    assert clients == []
    assert [name for name in os.environ if name.startswith("CUDA_MPS_")] == [], "what it starts is no client either"


async def test_check_finds_an_operator_s_daemon_all_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(FakeMps(tmp_path / "fake").folder), prepend=os.pathsep)
    (folder / "c.toml").write_text(CONFIG.replace("index = 1", 'index = 1\nmps = "on"'))
    gpu = Gpu()
    with TemporaryDirectory(prefix="theirs-", dir="/tmp") as parent:
        theirs = MpsDaemon("GPU-5ea1", Path(parent))
        await theirs.start()
        monkeypatch.setenv(PIPES, theirs.environment[PIPES])
        with installed(gpu, library(gpu)):
            assert await asyncio.to_thread(check, str(folder / "c.toml"), open_alone, configuration) == 2
        await theirs.close()
    assert 'device.mps: "on", but an MPS daemon of yours runs in ' in capsys.readouterr().err
    assert gpu.mps is None
