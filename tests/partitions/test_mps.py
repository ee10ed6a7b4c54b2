"""The MPS daemon of a GPU. What is in TestMps runs against a fake of NVIDIA's command with simulated GPUs as clients, and in
tests/gpu/test_mps.py against the real ones.
"""

import asyncio
import ctypes
import json
import logging
import math
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

import pytest

from partitions import probe
from partitions.cuda.driver_memory import Taken
from partitions.deposit import Deposit, open_deposit
from partitions.errors import MpsError, PartitionError
from partitions.mps import COMMAND, MpsDaemon, default_parent, find_command, find_other, is_mps_client, stay_outside
from tests.gpu.mps_client import TAKES
from tests.simulation import Gpu, installed
from tests.simulation.mps import FakeMps

pytestmark = pytest.mark.usefixtures("forked_programs")
PATIENCE = 20.0
PROCESS = r"\d+ \S+ S( in \S+)?"
PROCESSES = f"its processes: {PROCESS}, {PROCESS}"
"""Keeper and daemon, which wait."""
_PTRACE_ATTACH, _ALL_THREADS = 16, 0x40000000


class Subject(NamedTuple):
    """What is tested: the GPU of this UUID, and the module whose processes are to use it."""

    uuid: str
    module: str
    felt: float = math.inf
    """How many times as long small kernels may take beside processes that write to the host as fast as they may."""


class Client:
    """A process of the module."""

    def __init__(self, module: str, environment: dict[str, str], *arguments: int) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self._process = started(command, inherited | environment, arguments[1:])
        self.pid = self._process.pid
        self._threads: list[int] = []

    async def next(self) -> dict[str, Any]:
        """What it says next; nothing if it has ended."""
        assert self._process.stdout
        line = await asyncio.to_thread(self._process.stdout.readline)
        return json.loads(line) if line else {}

    def ask(self, what: str) -> None:
        assert self._process.stdin
        print(what, file=self._process.stdin, flush=True)

    async def do(self, what: str) -> dict[str, Any]:
        self.ask(what)
        return await self.next()

    async def do_until_lost(self, error: str) -> None:
        """Work until that fails with this error, as it does soon."""
        async with asyncio.timeout(PATIENCE):
            while "error" not in (said := await self.do("work")):
                pass
        assert error in said["error"]

    def hold(self) -> None:
        """As a debugger does: SIGCONT does not let it go on."""
        self._threads = [int(each) for each in os.listdir(f"/proc/{self.pid}/task")]
        for each in self._threads:
            if ctypes.CDLL(None).ptrace(_PTRACE_ATTACH, each, 0, 0):
                pytest.skip("processes may not be debugged here")
            os.waitpid(each, _ALL_THREADS)

    def kill(self) -> None:
        self._process.kill()
        for each in reversed(self._threads):
            with suppress(ChildProcessError):
                os.waitpid(each, _ALL_THREADS)
        self._threads = []
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            assert end
            with suppress(BrokenPipeError):
                end.close()


def started(command: list[str], env: dict[str, str] | None = None, descriptors: Sequence[int] = ()) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True, pass_fds=descriptors)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0)


async def has_clients(daemon: MpsDaemon, *clients: Client) -> bool:
    return await daemon.clients() == [each.pid for each in clients]


async def ended(*processes: int) -> None:
    """Wait for the end of processes that need not be ours."""
    for each in processes:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(each)
            try:
                found, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], PATIENCE)
                assert found, f"process {each} goes on"
            finally:
                os.close(descriptor)


def daemon_of(folder: Path) -> int:
    return int((folder / "pipe" / f"{COMMAND}.pid").read_text())


def keeper_of(folder: Path) -> int:
    return int(Path(f"/proc/{daemon_of(folder)}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    """NVIDIA's command, on PATH."""
    fake = FakeMps(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(fake.folder), prepend=os.pathsep)
    return fake


@pytest.fixture
def parent() -> Iterator[Path]:
    """A folder with a short path, as sockets need it."""
    with TemporaryDirectory(prefix="mps-", dir="/tmp") as folder:
        yield Path(folder)


def environment_of(process: int) -> dict[str, str]:
    """What it has of CUDA's variables."""
    lines = Path(f"/proc/{process}/environ").read_text().split("\0")
    return dict(each.split("=", 1) for each in lines if each.startswith("CUDA_"))


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open none more than it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def no_trouble(daemon: MpsDaemon) -> bool:
    """Whether `trouble` would wait."""
    with suppress(StopIteration):
        waiting = daemon.trouble()
        waiting.send(None)
        waiting.close()
        return True
    return False


class TestMps:
    @pytest.fixture
    def subject(self, fake: FakeMps) -> Subject:
        return Subject("GPU-5ea1", "tests.simulation.mps_client")

    @pytest.fixture
    async def daemon(self, subject: Subject) -> AsyncIterator[MpsDaemon]:
        daemon = MpsDaemon(subject.uuid)
        await daemon.start()
        yield daemon
        await daemon.close()

    @pytest.fixture
    async def clients(self, subject: Subject) -> AsyncIterator[Callable[..., Awaitable[list[Client]]]]:
        """Starts processes side by side, and waits until each says whether it is a client, or why it cannot be one."""
        async with AsyncExitStack() as made:

            async def start(
                environment: dict[str, str], count: int = 1, first: str = "client", deposit: Deposit | None = None
            ) -> list[Client]:
                """Those with a deposit have a granule each."""
                found = [
                    Client(subject.module, environment, *((granule, *deposit.descriptors) if deposit else ()))
                    for granule in range(count)
                ]
                for client in found:
                    made.callback(client.kill)
                for client in found:
                    said = await client.next()
                    assert first in str(said), said
                return found

            yield start

    async def test_a_process_with_its_environment_is_a_client_and_one_without_is_none(
        self, daemon: MpsDaemon, clients: Any
    ) -> None:
        (client,) = await clients(daemon.environment, first="'client': True")
        await clients({}, first="'client': False")
        assert await daemon.status() == "ACTIVE"
        assert await daemon.clients() == [client.pid]
        client.kill()
        await until(partial(has_clients, daemon))

    async def test_processes_that_take_memory_at_the_same_time_each_measure_their_own(
        self, daemon: MpsDaemon, clients: Any
    ) -> None:
        """Clients, and others on the same GPU."""
        found = [*await clients(daemon.environment, 2), *await clients({}, 2)]

        async def do_all(what: str) -> list[dict[str, Any]]:
            return list(await asyncio.gather(*(client.do(what) for client in found)))

        for what in ("take", "measure", "take", "take"):
            assert await do_all(what) == [{"done": what}] * 4
        assert await found[0].do("give") == {"done": "give"}
        assert await do_all("measured") == [{"taken": each * TAKES, "unmeasured": 0} for each in (1, 2, 2, 2)]

    async def test_processes_take_turns_with_each_other_and_not_with_others(self, daemon: MpsDaemon, clients: Any) -> None:
        with closing(open_deposit()) as deposit, closing(open_deposit()) as another:
            ours = await clients(daemon.environment, 3, deposit=deposit)
            (apart,) = await clients(daemon.environment, deposit=another)
            for number, client in enumerate((*ours, *ours), 1):
                assert await client.do("copy") == {"tickets": number}
            assert await apart.do("copy") == {"tickets": 1}
            assert len(await asyncio.gather(*(client.do("copy") for client in ours))) == 3

    async def test_a_process_that_is_killed_in_its_turn_holds_up_no_other(self, daemon: MpsDaemon, clients: Any) -> None:
        """Nor one that has its turn for ever. It is the one that has made the memory, which the others keep."""
        with closing(open_deposit()) as deposit:
            first, second, third = await clients(daemon.environment, 3, deposit=deposit)
            assert await first.do("copy") == {"tickets": 1}
            assert await first.do("keep") == {"done": "keep"}
            assert await second.do("copy") == {"tickets": 3}
            assert await daemon.terminate(first.pid)
            first.kill()
            for number, client in enumerate((second, third, second), 4):
                assert await client.do("copy") == {"tickets": number}
            (later,) = await clients(daemon.environment, deposit=deposit)
            assert await later.do("copy") == {"tickets": 7}

    async def test_small_kernels_beside_processes_that_write_to_the_host_as_fast_as_they_may(
        self, daemon: MpsDaemon, clients: Any, subject: Subject
    ) -> None:
        with closing(open_deposit()) as deposit:
            one, other, small = await clients(daemon.environment, 3, deposit=deposit)
            took: list[float] = []
            for what in ("copy", "flood"):
                await asyncio.gather(*(client.do(what) for client in (one, other)))
                took.append((await small.do("small"))["microseconds"])
            print("median of a small kernel in us, alone and beside two that write:", took)
            assert took[1] <= subject.felt * took[0], took
            assert await daemon.terminate(one.pid)
            one.kill()
            assert "tickets" in await other.do("copy")

    async def test_clients_are_terminated_without_harm_to_others(self, daemon: MpsDaemon, clients: Any) -> None:
        idle, busy, stopped = await clients(daemon.environment, 3)
        assert "done" in await busy.do("busy")
        os.kill(stopped.pid, signal.SIGSTOP)
        assert await asyncio.gather(*(daemon.terminate(each.pid) for each in (busy, stopped))) == [True, True]
        for each in (busy, stopped):
            assert "MPS_CLIENT_TERMINATED" in (await each.do("work"))["error"]
            each.kill()
            assert not await daemon.terminate(each.pid)
        assert await idle.do("work") == {"done": "work"}
        await until(partial(has_clients, daemon, idle))
        assert await daemon.status() == "ACTIVE"
        with started([sys.executable, "-c", "input()"]) as other:
            assert not await daemon.terminate(other.pid)
            assert other.poll() is None

    async def test_a_client_that_does_not_answer_is_killed_and_the_others_go_on(self, daemon: MpsDaemon, clients: Any) -> None:
        idle, held = await clients(daemon.environment, 2)
        held.hold()
        terminating = asyncio.create_task(daemon.terminate(held.pid, limit=0.5))
        assert await idle.do("work") == {"done": "work"}
        assert not await terminating
        held.kill()
        await until(partial(has_clients, daemon, idle))
        assert await idle.do("work") == {"done": "work"}

    async def test_a_fault_is_over_once_every_client_has_ended(self, daemon: MpsDaemon, clients: Any) -> None:
        idle, busy, culprit = old = await clients(daemon.environment, 3)
        assert "done" in await busy.do("busy")
        trouble = asyncio.create_task(daemon.trouble())
        assert "ILLEGAL_ADDRESS" in (await culprit.do("fault"))["error"]
        assert "ILLEGAL_ADDRESS" in (await busy.do("wait"))["error"]
        async with asyncio.timeout(PATIENCE):
            assert (await trouble).fault
        assert (await daemon.trouble()).process == culprit.pid
        for each in (busy, culprit):
            each.kill()
        assert await daemon.status() == "FAULT"
        await clients(daemon.environment, first="CUDA_MPS_PIPE_DIRECTORY names takes no clients now")
        with pytest.raises(MpsError, match=rf"takes no clients after 1 s; processes that have not ended: {idle.pid}$"):
            await daemon.wait_until_active(limit=1.0)
        assert (await daemon.trouble()).fault
        for each in old:
            each.kill()
        await daemon.wait_until_active()
        (client,) = await clients(daemon.environment, first="'client': True")
        assert await client.do("work") == {"done": "work"}
        assert no_trouble(daemon)

    async def test_the_end_of_the_server_is_noticed_and_another_daemon_serves(self, daemon: MpsDaemon, clients: Any) -> None:
        (client,) = await clients(daemon.environment)
        before = daemon.folder
        os.kill(daemon.server, signal.SIGKILL)
        fault, text, _ = await daemon.trouble()
        assert not fault
        assert f"server of {daemon.uuid}, process {daemon.server}, ended" in text
        await client.do_until_lost("MPS_RPC_FAILURE")
        await daemon.close()
        await daemon.start()
        assert daemon.folder != before
        await clients(daemon.environment, first="'client': True")

    async def test_the_server_ends_with_its_daemon(self, daemon: MpsDaemon, clients: Any) -> None:
        """Or processes that come would run outside MPS, beside its clients."""
        (client,) = await clients(daemon.environment)
        assert daemon.folder
        environment, folder, server = daemon.environment, daemon.folder, daemon.server
        os.kill(daemon_of(folder), signal.SIGKILL)
        fault, text, _ = await daemon.trouble()
        assert not fault
        await ended(server)
        await client.do_until_lost("MPS_RPC_FAILURE")
        await daemon.close()
        assert "ended" in text
        assert not folder.exists()
        await clients(environment, first="'client': False")

    async def test_closing_ends_all_that_is_left(self, daemon: MpsDaemon, clients: Any) -> None:
        (client,) = await clients(daemon.environment)
        assert daemon.folder
        folder, processes = daemon.folder, (daemon_of(daemon.folder), keeper_of(daemon.folder), daemon.server)
        await daemon.close()
        await ended(*processes)
        assert not folder.exists()
        await client.do_until_lost("MPS_RPC_FAILURE")
        assert no_trouble(daemon)

    @pytest.mark.parametrize("keeper", [False, True], ids=["", "and the keeper"])
    async def test_nothing_is_left_when_the_process_that_started_it_is_killed(
        self, subject: Subject, keeper: bool, parent: Path
    ) -> None:
        """Without the keeper the next start ends the rest, in folders of ours that no process uses any more; in no others."""
        async with supervisor(subject.uuid, parent) as (killed, folder, server):
            processes = [daemon_of(folder), server]
            if not keeper:
                await start_and_close(MpsDaemon(subject.uuid, parent))
                os.kill(server, 0)
            if keeper:
                os.kill(keeper_of(folder), signal.SIGKILL)
                await ended(processes[0])
            killed.kill()
            if keeper:
                await start_and_close(MpsDaemon(subject.uuid, parent))
            await ended(*processes)

            async def is_gone() -> bool:
                return not folder.exists()

            await until(is_gone)


async def start_and_close(daemon: MpsDaemon) -> None:
    await daemon.start()
    await daemon.close()


@asynccontextmanager
async def supervisor(uuid: str, parent: Path) -> AsyncIterator[tuple[subprocess.Popen[str], Path, int]]:
    """A process with a daemon, the daemon's folder and server."""
    script = (
        "import asyncio, pathlib, sys; from partitions.mps import MpsDaemon\n"
        "async def main():\n"
        "    daemon = MpsDaemon(sys.argv[1], pathlib.Path(sys.argv[2]))\n"
        "    await daemon.start(); print(daemon.folder, daemon.server, flush=True)\n"
        "    await asyncio.to_thread(input); await daemon.close()\n"
        "asyncio.run(main())"
    )
    process = started([sys.executable, "-c", script, uuid, str(parent)])
    assert process.stdin
    assert process.stdout
    try:
        folder, server = (await asyncio.to_thread(process.stdout.readline)).split()
        yield process, Path(folder), int(server)
    finally:
        with suppress(BrokenPipeError):
            process.communicate("\n")


async def test_what_it_lets_its_clients_have_of_our_environment(fake: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's limits would be the daemon's too, and its folder another daemon's."""
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/other")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    daemon = MpsDaemon("5ea1")
    await daemon.start()
    try:
        assert daemon.folder
        assert environment_of(daemon_of(daemon.folder)) == daemon.environment
        assert daemon.environment == {
            "CUDA_VISIBLE_DEVICES": "GPU-5ea1",
            "CUDA_MPS_PIPE_DIRECTORY": f"{daemon.folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{daemon.folder}/log",
        }
        assert oct(daemon.folder.stat().st_mode)[-3:] == "700"
        assert repr(daemon) == f"<MpsDaemon of GPU-5ea1, server {daemon.server}>"
        with pytest.raises(MpsError, match="is started already"):
            await daemon.start()
    finally:
        await daemon.close()
    await daemon.close()
    for use in (daemon.status, daemon.clients, lambda: daemon.terminate(1)):
        with pytest.raises(MpsError, match="is not started"):
            await use()


@pytest.mark.parametrize(
    ("behaviour", "limit", "said"),
    [
        ({"start": "silent"}, 0.5, f"was not ready after 0.5 s: it does not answer; it printed nothing; {PROCESSES}$"),
        ({"start": "Failed to start: as scripted"}, 10, "ended with status 1; it printed: Failed to start: as scripted$"),
        (
            {"server": "ends"},
            10,
            r"server of GPU-5ea1 ended during its start; it printed: .* the GPU cannot be used \(as scripted\)",
        ),
        ({"server": "dies"}, 10, r"server of GPU-5ea1 ended during its start; it printed: .* the GPU is lost \(as scripted\)"),
        ({"start": "dies"}, 10, r"daemon of GPU-5ea1 ended with signal 9; it printed: .* / Assertion failed \(as scripted\)$"),
        (
            {"server": "initializes"},
            2,
            rf"not ready after 2 s: its server \d+ is not ACTIVE, but INITIALIZING; it printed: .*; {PROCESSES}, {PROCESS}$",
        ),
        ({"hang": ["get_server_list"]}, 1, f"was not ready after 1 s: it does not answer; it printed: .*; {PROCESSES}$"),
        ({"hang": ["start_server"]}, 2, f"not ready after 2 s: it has not started its server; it printed: .*; {PROCESSES}$"),
        (
            {"hang": ["get_server_status"]},
            2,
            rf"not ready after 2 s: it does not say how its server \d+ is; it printed: .*; {PROCESSES}, {PROCESS}$",
        ),
        ({"says": {"get_server_list": "WARNING"}}, 10, f"^{COMMAND} answers 'WARNING', where process ids were expected$"),
    ],
    ids=[
        "silent",
        "refuses",
        "no server",
        "server dies",
        "dies",
        "never active",
        "hangs",
        "not started",
        "no status",
        "nonsense",
    ],
)
async def test_a_daemon_that_does_not_start_is_reported_with_what_it_printed(
    fake: FakeMps, behaviour: dict[str, Any], limit: float, said: str, parent: Path
) -> None:
    fake.behave(**behaviour)
    daemon = MpsDaemon("GPU-5ea1", parent)
    with pytest.raises(MpsError, match=said):
        await daemon.start(limit)
    assert os.listdir(parent) == []


async def test_a_start_that_is_given_up_leaves_nothing(fake: FakeMps, parent: Path) -> None:
    fake.behave(start="silent")
    daemon = MpsDaemon("GPU-5ea1", parent)
    starting = asyncio.create_task(daemon.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert daemon.folder is None
    assert os.listdir(parent) == []


async def test_a_command_that_cannot_be_run_is_reported(fake: FakeMps, parent: Path) -> None:
    (fake.folder / COMMAND).write_text("#!/nowhere\n")
    with pytest.raises(
        MpsError, match=rf"ended with status 1; it printed: {fake.folder / COMMAND} cannot be run: No such file"
    ):
        await MpsDaemon("GPU-5ea1", parent).start()


async def test_a_daemon_that_answers_no_more_is_ended(fake: FakeMps, parent: Path) -> None:
    fake.behave(start="silent")
    daemon = MpsDaemon("GPU-5ea1", parent)
    with pytest.raises(MpsError):
        await daemon.start(limit=0.1)
    fake.behave()
    await daemon.start()
    assert daemon.folder
    processes = daemon_of(daemon.folder), daemon.server
    fake.behave(hang=["quit"])
    await daemon.close(limit=0.2)
    await ended(*processes)
    assert os.listdir(parent) == []


@pytest.mark.parametrize("stopped", ["keeper", "daemon", "server"])
async def test_a_daemon_of_which_a_process_is_stopped_is_ended_and_leaves_nothing(
    fake: FakeMps, parent: Path, stopped: str, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = MpsDaemon("GPU-5ea1", parent)
    await daemon.start()
    assert daemon.folder
    processes = {"keeper": keeper_of(daemon.folder), "daemon": daemon_of(daemon.folder), "server": daemon.server}
    os.kill(processes[stopped], signal.SIGSTOP)
    await daemon.close(limit=1.0)
    await ended(*processes.values())
    assert os.listdir(parent) == []
    assert "did not end within" not in caplog.text, "the keeper goes on"


async def test_a_daemon_refuses_clients_beyond_the_most_and_takes_another_once_one_has_ended(
    fake: FakeMps, caplog: pytest.LogCaptureFixture
) -> None:
    fake.behave(most=1)
    daemon = MpsDaemon("GPU-5ea1")
    await daemon.start()
    with ExitStack() as stack:
        stack.callback((first := Client("tests.simulation.mps_client", daemon.environment)).kill)
        assert (await first.next())["client"]
        stack.callback((second := Client("tests.simulation.mps_client", daemon.environment)).kill)
        assert "CUDA_MPS_PIPE_DIRECTORY names takes no clients now: it has too many" in (await second.next())["error"]
        await until_logged(caplog, f"Failed to accept client {{PID: {second.pid}, Context ID: 0}} with status 808")
        assert await daemon.clients() == [first.pid]
        assert no_trouble(daemon)
        first.kill()
        await until(partial(has_clients, daemon))
        stack.callback((third := Client("tests.simulation.mps_client", daemon.environment)).kill)
        assert (await third.next())["client"]
    await daemon.close()


async def test_a_status_that_is_not_answered_is_an_error_in_time(fake: FakeMps) -> None:
    daemon = MpsDaemon("GPU-5ea1")
    await daemon.start()
    fake.behave(hang=["get_server_status"])
    with pytest.raises(MpsError, match=r"^the MPS daemon of GPU-5ea1 does not say within 0.2 s how its server is$"):
        await daemon.wait_until_active(limit=0.2)
    fake.behave()
    await daemon.wait_until_active()
    await daemon.close()


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ({"get_server_status": "FAULT", "get_client_list": "1 2"}, "processes that have not ended: 1, 2$"),
        ({"get_server_status": "FAULT", "get_client_list": "WARNING"}, "answers 'WARNING', where process ids were expected$"),
    ],
)
async def test_a_fault_that_does_not_end_is_an_error_whatever_the_daemon_says_of_its_clients(
    fake: FakeMps, says: dict[str, str], said: str
) -> None:
    daemon = MpsDaemon("GPU-5ea1")
    await daemon.start()
    fake.behave(says=says)
    with pytest.raises(MpsError, match=said):
        await daemon.wait_until_active(limit=1.5)
    await daemon.close()


@pytest.mark.parametrize(
    ("behaviour", "fault", "said"),
    [
        ({}, None, ""),
        (
            {"hang": ["get_server_status"]},
            False,
            "takes no more clients: .* did not answer 'get_server_status [0-9]+' within 0.5 s$",
        ),
        ({"says": {"get_server_status": "FAULT"}}, True, "^a kernel failed: "),
    ],
)
async def test_a_daemon_that_takes_no_more_clients_is_found_by_a_check(
    fake: FakeMps, behaviour: dict[str, Any], fault: bool | None, said: str
) -> None:
    """Though it has printed nothing, and goes on."""
    daemon = MpsDaemon("GPU-5ea1")
    await daemon.start()
    fake.behave(**behaviour)
    await daemon.check(limit=0.5)
    if fault is None:
        assert no_trouble(daemon)
    else:
        found = await daemon.trouble()
        assert found.fault == fault
        assert re.search(said, found.text), found.text
    await daemon.close()


async def test_a_daemon_that_was_found_to_have_ended_is_not_asked_to_terminate_clients(
    fake: FakeMps, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would wait for its answer, one after another, and the end of the daemon for all of them."""
    caplog.set_level(logging.DEBUG, "greenlane.partitions")
    daemon = MpsDaemon("GPU-5ea1")
    await daemon.start()
    fake.behave(hang=["get_server_status"])
    await daemon.check(limit=0.2)
    with started([sys.executable, "-c", "input()"]) as client:
        assert not await daemon.terminate(client.pid)
        client.kill()
    await daemon.close()
    assert "Cmd:get_server_status" in caplog.text
    assert "Cmd:terminate_client" not in caplog.text


async def test_a_daemon_whose_folder_was_removed_takes_no_more_clients(fake: FakeMps) -> None:
    """They would run outside MPS."""
    daemon = MpsDaemon("GPU-5ea1")
    await daemon.start()
    assert daemon.folder
    shutil.rmtree(daemon.folder)
    await daemon.check()
    assert "takes no more clients: " in daemon.ended
    assert not (await daemon.trouble()).fault
    await daemon.close()


async def test_a_daemon_that_cannot_be_asked_now_has_not_ended_and_is_closed_all_the_same(
    fake: FakeMps, parent: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = MpsDaemon("GPU-5ea1", parent)
    await daemon.start()
    assert daemon.folder
    processes = daemon_of(daemon.folder), keeper_of(daemon.folder), daemon.server
    with no_descriptors():
        await daemon.check()
        assert "cannot be run: Too many open files" in caplog.text
        assert no_trouble(daemon)
        await daemon.close()
    await ended(*processes)
    assert os.listdir(parent) == []


async def test_its_lines_are_logged_and_only_notable_ones_shown(fake: FakeMps, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "greenlane.partitions")
    daemon = MpsDaemon("GPU-5ea1")
    await daemon.start()
    os.kill(daemon.server, signal.SIGKILL)
    await daemon.trouble()
    await until_logged(caplog, "exited with status")
    await daemon.close()
    shown = [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG]
    assert len(shown) == 2, shown
    assert "runs in" in shown[0]
    assert "exited with status 0" in shown[1]
    assert any("NEW SERVER" in record.getMessage() for record in caplog.records)


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async def is_logged() -> bool:
        return any(text in record.getMessage() for record in caplog.records)

    await until(is_logged)


def test_where_there_can_be_no_daemon_the_reason_is_said(
    fake: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_command("GPU-5ea1", tmp_path) == str(fake.folder / COMMAND)
    with pytest.raises(MpsError, match=r"^MIG-5ea1 is an instance of MIG"):
        find_command("MIG-5ea1", tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    with pytest.raises(MpsError, match="under WSL"):
        find_command("GPU-5ea1", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsError, match=rf"^{COMMAND} is not on PATH; it comes with NVIDIA's driver"):
        find_command("GPU-5ea1", tmp_path / "bin")


@pytest.mark.parametrize("variable", ["RUNTIME_DIRECTORY", "TMPDIR"])
@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("x" * 100, r"would have paths of 1\d\d bytes; 107 are the most; set {} to a folder with a shorter path$"),
        ("gone", "No such file or directory; set {} to a folder in which user {} may make one, and which has room$"),
        ("file", "Not a directory; set {} to a folder in which user {} may make one, and which has room$"),
    ],
)
async def test_a_folder_that_cannot_be_used_is_named_with_its_variable_and_what_to_do(
    variable: str, folder: str, said: str, fake: FakeMps, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parent / "file").touch()
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    if variable == "TMPDIR":
        monkeypatch.setattr("tempfile.tempdir", str(parent / folder))  # As if TMPDIR had become so since it was first read.
    else:
        monkeypatch.setenv(variable, f"{parent / folder}:/run/other")
    where = rf"in {parent / folder} \({variable}\)"
    with pytest.raises(MpsError, match=f"{where}.*{said.format(variable, os.geteuid())}"):
        await MpsDaemon("GPU-5ea1").start()
    assert os.listdir(parent) == ["file"]


def test_folders_are_made_in_the_service_s_runtime_directory(tmp_path: Path) -> None:
    assert default_parent({"RUNTIME_DIRECTORY": "/run/greenlane:/run/other"}) == Path("/run/greenlane")
    assert default_parent({}) == Path(gettempdir())


async def test_an_operator_s_daemon_is_found_by_the_variable_or_where_it_is_by_default(
    fake: FakeMps, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = MpsDaemon("GPU-5ea1", parent)
    await daemon.start()
    assert daemon.folder
    assert await find_other(daemon.environment) == Path(daemon.environment["CUDA_MPS_PIPE_DIRECTORY"])
    monkeypatch.setattr("partitions.mps.DEFAULT_PIPES", Path(daemon.environment["CUDA_MPS_PIPE_DIRECTORY"]))
    assert await find_other({}) == Path(daemon.environment["CUDA_MPS_PIPE_DIRECTORY"])
    assert await find_other({"CUDA_MPS_PIPE_DIRECTORY": str(parent)}) is None
    fake.behave(hang=["get_server_list"])
    assert await find_other(daemon.environment, limit=0.2) == Path(daemon.environment["CUDA_MPS_PIPE_DIRECTORY"])
    fake.behave()
    os.kill(keeper_of(daemon.folder), signal.SIGKILL)
    assert (await daemon.trouble()).text.endswith("ended with signal 9")
    assert await find_other(daemon.environment) is None
    await daemon.close()
    assert await find_other({}) is None


@pytest.mark.parametrize("where", ["variable", "default"])
def test_a_process_stays_outside_an_operator_s_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    (tmp_path / "control").touch()
    monkeypatch.setattr("partitions.mps.DEFAULT_PIPES", tmp_path if where == "default" else tmp_path / "none")
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)} if where == "variable" else {}
    variables = {"HOME": "/", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50", **pipes}
    stay_outside(variables)
    assert variables.pop("HOME") == "/"
    assert list(variables) == ([] if where == "variable" else ["CUDA_MPS_PIPE_DIRECTORY"])
    assert not any(Path(each, "control").exists() for each in variables.values())


def test_a_process_without_an_mps_server_is_no_client() -> None:
    gpu = Gpu()
    with installed(gpu):
        assert not is_mps_client(gpu.index)
        gpu.fail("cuDeviceGetAttribute", error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(PartitionError, match=rf"^asking whether device {gpu.index} is used by MPS: CUDA_ERROR_UNKNOWN"):
            is_mps_client(gpu.index)


async def test_a_client_s_partitions_have_no_numbers_of_their_sms_but_no_more_of_them_than_granted(
    fake: FakeMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, gpu = MpsDaemon("5ea1"), Gpu(index=0)
    await daemon.start()
    for name, value in daemon.environment.items():
        monkeypatch.setenv(name, value)
    with installed(gpu) as cuda:
        with closing(cuda.open_cuda(0)) as device, closing(device.carve([0])) as a, closing(device.carve([1])) as b:
            assert device.shared
            assert "under MPS" in device.describe()
            probe.check(partitions := {"acme": a, "globex": b}, probe.locate(partitions))
            assert a.locate() == b.locate() == frozenset()
            assert gpu.limits == {0: 256}
            held = a.hold(0.01)
            assert (held.units, held.until - held.since) == (8, 10_000_000)
            with device.current(), Taken(device.driver_memory, "graphs").measuring("one that takes long"):
                calls = len(gpu.log)
                assert a.hold(0.01).units == 8
            assert "cuGreenCtxStreamCreate" not in gpu.log[calls:], "which would wait for the end of the measurement"
            gpu.confines = False
            with pytest.raises(cuda.Misplaced, match=r"<CudaPartition granules \[0\], 8 SMs> ran on 32 SMs"):
                a.locate()
        await daemon.close()
        async with asyncio.timeout(PATIENCE):
            while not gpu.lost:
                await asyncio.sleep(0)
