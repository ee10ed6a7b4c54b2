"""Reading the configuration again, where that takes long, does not end, or gives very much."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.config.file import load
from server.config.schema import Config
from server.control.reload import Reloader
from server.errors import Conflict
from tests.fakes import PATIENCE

FILE = """
[server]
port = 8000
[models]
repository = "."
[tenants.acme]
granules = 1
models = ["*"]
"""


class Controller:
    """Uses what it is given."""

    state = "serving"

    def __init__(self, config: Config) -> None:
        self.config = config

    def holding(self, lock: asyncio.Lock) -> asyncio.Lock:
        return lock

    async def reconfigure(self, config: Config) -> None:
        self.config = config


def reloader(path: Path, read: Callable[[], Config], patience: float = PATIENCE) -> Reloader:
    controller: Any = Controller(load(path))
    return Reloader(controller, read, controller.reconfigure, patience)


def write(path: Path, more: str = "") -> None:
    path.write_text(FILE + more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "greenlane.toml")
    return tmp_path / "greenlane.toml"


async def test_a_file_that_is_never_read_to_its_end_stops_no_later_reload(path: Path) -> None:
    gate, slow = threading.Event(), [True]

    def read() -> Config:
        if slow:
            gate.wait(PATIENCE)
        return load(path)

    reloading = reloader(path, read, 1.0)
    try:
        with pytest.raises(Conflict, match="nothing has changed, as the file could not be read within 1 s"):
            await reloading.reload()
        slow.clear()
        write(path, "requests_per_second = 3\n")
        assert [change.key for change in await reloading.reload()] == ["tenants.acme.requests_per_second"]
    finally:
        gate.set()


async def test_the_event_loop_runs_while_a_file_of_thousands_of_tenants_is_read_and_compared(path: Path) -> None:
    old = load(path)
    write(path, "".join(f"[tenants.t{number}]\ngranules = 1\nmodels = ['m']\n" for number in range(3000)))
    controller: Any = Controller(old)
    turns, reading = 0, True

    async def watch() -> None:
        nonlocal turns
        while reading:
            await asyncio.sleep(0)
            turns += 1

    watching = asyncio.create_task(watch())
    changes = await Reloader(controller, lambda: load(path), controller.reconfigure).reload()
    reading = False
    await watching
    assert len(changes) == 3000 + 1, "all tenants, and a lone one is the default, which none of them is"
    assert turns > 20


async def test_whatever_keeps_a_signal_s_reload_from_being_used_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Config:
        raise OverflowError("too large for a message")

    signalled = reloader(path, fail)
    signalled.on_signal()
    while not caplog.records:
        await asyncio.sleep(0)
    assert "SIGHUP: the configuration could not be used" in caplog.text
    assert "too large for a message" in caplog.text
