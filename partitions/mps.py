"""A CUDA MPS control daemon of our own for one GPU: its clients, each a process, run there side by side.

Needs no CUDA: everything goes by NVIDIA's command `nvidia-cuda-mps-control`. What it answers was seen on an H100 with driver
580.159 (2026-11-26). The daemon has an MPS server, which has the GPU, and:
- it answers errors with exit status 0 and a text; so texts are read
- `terminate_client` for a client that is stopped never answers, and all other clients stand still until that one is killed
- after a fault (a kernel that fails) it takes no client until every old one has ended, those that noticed nothing included;
  9 ms later it is ACTIVE again
- without the daemon new clients run outside MPS, without an error, while its server goes on with the old ones; so both end
  together here (`mps_keeper`), also if this process is killed
"""

import asyncio
import fcntl
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from .errors import MpsError

log = logging.getLogger("greenlane.partitions")

MOST_CLIENTS = 48
"""Processes that a daemon takes; the next is refused with error 808 (H100, driver 580.159, 2026-11-26)."""
COMMAND = "nvidia-cuda-mps-control"
PREFIX = "CUDA_MPS_"
"""What the names of MPS's variables begin with. Of those in our environment a daemon and its clients get none."""
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
"""Where a daemon is looked for if CUDA_MPS_PIPE_DIRECTORY does not say otherwise."""
START_LIMIT, ANSWER_LIMIT, TERMINATE_LIMIT, RECOVERY_LIMIT = 20.0, 5.0, 2.0, 5.0
"""Seconds for: a daemon and its server to start; a command; a client to end before it is killed; a server to be ACTIVE after a
fault.
"""

_PID_FILE = f"{COMMAND}.pid"
_KEEPER = Path(__file__).with_name("mps_keeper.py")
_FOLDER = "greenlane-mps-"
_NOWHERE = "/nonexistent"
_LONGEST_SOCKET = "control_privileged"
_MOST = 107
"""Bytes of a UNIX socket's path."""
_NAME = COMMAND[:15]
"""What the kernel keeps of the name of a daemon's process, and of a server's."""
_PAUSE = 0.01
"""Seconds between two questions."""
_NEWS = 1.0
"""Seconds after a command failed in which a daemon that has ended, for which it did, is seen to have."""
_KEPT_LINES = 5
_READ = 1 << 16
_NO_CLIENT = "201"
_FAULTED = "FAULT"
_FAULT = "Server is handling a fatal GPU error"
_CULPRIT = re.compile(r"Client \{PID: (\d+),.* encountered a fatal GPU error")
_SERVER_ENDED = re.compile(r"Server \d+ exited with status")
_LINE = re.compile(r"\[\S+ \S+ +(\w+ +\d+)\] (.*)")
_ASKED = re.compile(r"Accepting connection|NEW UI|UI closed|Cmd:|\d+$|[A-Z]+$")
"""What each of our commands makes it print, with the answer."""
_NOTABLE = re.compile(r"fatal|exited with status|Failed to accept|Refusing|unable|cannot|denied", re.IGNORECASE)


class Trouble(NamedTuple):
    """Why no new client can come, and the old ones have ended or have to."""

    fault: bool
    """A kernel failed, so the daemon recovers once every client has ended. If not, it has to be started again."""
    text: str
    process: int = 0
    """The client whose kernel it was; 0 if the daemon did not say."""


class MpsDaemon:
    """The daemon of one GPU. Once closed it can be started again, in another folder. Belongs to the event loop; nothing blocks.

    `uuid` is the GPU's; `parent` is where its folder is made, by default `default_parent()`. All but `start`, `close`,
    `ended` and `trouble` need a daemon that was started, and raise MpsError without one.
    """

    def __init__(self, uuid: str, parent: Path | None = None) -> None:
        self.uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self.server = 0
        """The process id of its server; 0 without one."""
        self.folder: Path | None = None
        """Where its sockets are, while it is started."""
        self._parent = parent
        self._command = ""
        self._keeper: subprocess.Popen[bytes] | None = None
        self._watched: set[int] = set()
        self._output = -1
        self._rest = b""
        self._printed: deque[str] = deque(maxlen=_KEPT_LINES)
        self._notable: deque[str] = deque(maxlen=_KEPT_LINES)
        self._missing = ""
        """What a start waits for."""
        self._ended = ""
        self._fault = ""
        self._culprit = 0
        self._closing = False
        self._trouble = asyncio.Event()
        self._gone = asyncio.Event()
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<MpsDaemon of {self.uuid}{f', server {self.server}' if self.server else ''}>"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process a client, if they are set before it uses CUDA; it must have no others of PREFIX.

        The process sees this GPU alone, as device 0.
        """
        folder = self._started()
        return {
            "CUDA_VISIBLE_DEVICES": self.uuid,
            f"{PREFIX}PIPE_DIRECTORY": str(folder / "pipe"),
            f"{PREFIX}LOG_DIRECTORY": str(folder / "log"),
        }

    @property
    def ended(self) -> str:
        """Why it, or its server, has ended since it was started, other than by `close`; "" if neither has."""
        return self._ended

    async def start(self, limit: float = START_LIMIT) -> None:
        """Start the daemon and its server, within `limit` seconds, and end what earlier runs that were killed have left.

        Raises MpsError with what is missing and what to do, or with what the daemon printed; at once if one of them ends.
        """
        if self.folder:
            raise MpsError(f"the MPS daemon of {self.uuid} is started already")
        self._command = find_command(self.uuid)
        self._printed.clear()
        self._notable.clear()
        self._rest, self._ended, self._fault, self._closing = b"", "", "", False
        self._missing = "it does not answer"
        self._culprit = 0
        self._trouble.clear()
        self._gone.clear()
        opening = asyncio.ensure_future(self._open())
        try:
            async with asyncio.timeout(limit):
                await asyncio.shield(opening)
                await self._become_ready()
        except BaseException as error:
            await asyncio.wait({opening})
            late = await self._late(limit) if isinstance(error, TimeoutError) else ""
            await self.close()
            if late:
                raise MpsError(late) from error
            raise
        log.info("the MPS daemon of %s runs in %s, with server %d", self.uuid, self.folder, self.server)

    async def close(self, limit: float = ANSWER_LIMIT) -> None:
        """End the daemon, its server and with it all clients that are left, and remove its folder. Does nothing without one.

        Each of its steps (an order, its end, a signal) gets `limit` seconds.
        """
        async with self._turn:
            if not (folder := self.folder):
                return
            self._closing = True
            if self._keeper:
                await self._end_keeper(self._keeper, limit)
            for descriptor in tuple(self._watched):
                self._drop(descriptor)
            self._keeper, self.folder, self.server = None, None, 0
            self._trouble.clear()
            await asyncio.to_thread(_remove, folder)

    async def status(self) -> str:
        """The server's: ACTIVE, or FAULT while clients of before a fault are left. Raises MpsError."""
        return await self._ask_server("get_server_status")

    async def clients(self) -> list[int]:
        """The process ids of the server's clients. Raises MpsError."""
        return _numbers(await self._ask_server("get_client_list"))

    async def check(self, limit: float = START_LIMIT) -> None:
        """Ask how its server is. What keeps it from taking clients is `trouble` from then on, though it was not printed: a
        daemon that does not answer in time, or whose folder was removed, has ended. Nothing is known if it cannot be asked now.
        """
        try:
            status = await self._ask(f"get_server_status {self.server}", limit)
        except _CannotAsk as error:
            log.warning("%s", error)
        except MpsError as error:
            self._end(f"the MPS daemon of {self.uuid} takes no more clients: {error}")
        else:
            if status == _FAULTED:
                self._on_fault()

    async def terminate(self, client: int, limit: float = TERMINATE_LIMIT) -> bool:
        """End what this process, a child of the caller's, has on the GPU, so that it can be killed. One at a time; others wait.

        Returns whether that went in order: from then on its calls of CUDA fail, and the other clients felt nothing. A process
        that is stopped is continued first, as long as it does not answer all clients stand still; after `limit` seconds it is
        killed. False, too, for a process that is no client. Raises MpsError where no daemon was started.
        """
        self._started()
        return await asyncio.shield(asyncio.ensure_future(self._terminate(client, limit)))

    async def wait_until_active(self, limit: float = RECOVERY_LIMIT) -> None:
        """Wait until the server takes clients, after a fault until every client of before has ended. Then that is forgotten.

        Raises MpsError if that takes longer than `limit` seconds, with the clients that are left, if there is no answer, and if
        the server has ended.
        """
        answer = ""
        try:
            async with asyncio.timeout(limit):
                while (answer := await self.status()) != "ACTIVE":
                    await asyncio.sleep(_PAUSE)
        except TimeoutError as error:
            if not answer:
                raise MpsError(f"the MPS daemon of {self.uuid} does not say within {limit:g} s how its server is") from error
            left = ", ".join(map(str, await self.clients())) or "none"
            raise MpsError(
                f"the MPS server of {self.uuid} takes no clients after {limit:g} s; processes that have not ended: {left}"
            ) from error
        self._fault, self._culprit = "", 0
        if not self._ended:
            self._trouble.clear()

    async def trouble(self) -> Trouble:
        """Wait for a fault, or the end of the daemon or of its server; at once if there was one since the start or recovery.

        A fault is noticed by what the daemon prints. That it was closed is none; this waits then for that of the next one.
        """
        await self._trouble.wait()
        return Trouble(not self._ended, self._ended or self._fault, self._culprit)

    def _started(self) -> Path:
        if not self.folder:
            raise MpsError(f"the MPS daemon of {self.uuid} is not started")
        return self.folder

    async def _open(self) -> None:
        await asyncio.to_thread(self._spawn)
        self._watch()

    def _spawn(self) -> None:
        """In a thread: make the folder, and start the keeper, which starts the daemon and has the lock on the folder.

        They have a session of their own: signals of a terminal are not for them.
        """
        self.folder, lock = _make_folder(self._parent or default_parent())
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", str(_KEEPER), str(self.folder), self._command, "-f"],
                env=_without_ours() | self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise MpsError(f"the MPS daemon of {self.uuid} cannot be started: {error}") from error
        finally:
            os.close(lock)

    def _watch(self) -> None:
        """Read what the daemon and its server print, and notice the end of the keeper, which is the daemon's."""
        assert self._keeper
        assert self._keeper.stdout
        self._output = os.dup(self._keeper.stdout.fileno())
        self._keeper.stdout.close()
        os.set_blocking(self._output, False)
        self._add(self._output, self._read)
        self._on_exit(self._keeper.pid, self._on_keeper_end)

    def _on_exit(self, process: int, call: Callable[[], None]) -> None:
        """Call a function once this process has ended."""
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            call()
            return
        except OSError as error:
            raise MpsError(f"MPS needs pidfd_open, which Linux has from 5.3 on: {error.strerror}") from error

        def on_end() -> None:
            self._drop(descriptor)
            call()

        self._add(descriptor, on_end)

    def _add(self, descriptor: int, call: Callable[[], None]) -> None:
        self._watched.add(descriptor)
        asyncio.get_running_loop().add_reader(descriptor, call)

    def _drop(self, descriptor: int) -> None:
        self._watched.remove(descriptor)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def _read(self) -> None:
        try:
            data = os.read(self._output, _READ)
        except BlockingIOError:
            return
        if not data:
            self._drop(self._output)
            self._output = -1
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_READ:]
        for line in filter(None, (each.decode(errors="replace").strip() for each in lines)):
            self._on_line(line)

    def _on_line(self, line: str) -> None:
        found = _LINE.match(line)
        source, text = found.groups() if found else ("it", line)
        notable = not found or bool(_NOTABLE.search(text))
        level = logging.WARNING if notable and not self._closing else logging.DEBUG
        log.log(level, "MPS daemon of %s: %s: %s", self.uuid, source, text)
        if notable:
            self._notable.append(text)
        if not _ASKED.match(text):
            self._printed.append(text)
        if _SERVER_ENDED.match(text):
            self._on_server_end()
        if culprit := _CULPRIT.match(text):
            self._culprit = int(culprit[1])
        if text.startswith(_FAULT):
            self._on_fault()

    def _on_keeper_end(self) -> None:
        assert self._keeper
        if self._output >= 0:
            self._read()
        status = self._keeper.wait()
        self._gone.set()
        how = f"signal {-status}" if status < 0 else f"signal {status - 128}" if status > 128 else f"status {status}"
        self._end(f"the MPS daemon of {self.uuid} ended with {how}{self._said()}")

    def _on_server_end(self) -> None:
        if self.server:
            which = f"the MPS server of {self.uuid}, process {self.server},"
            self._end(f"{which} ended, and with it what its clients had on the GPU")
        else:
            self._end(f"the MPS server of {self.uuid} ended during its start{self._said()}")

    def _on_fault(self) -> None:
        self._fault = f"a kernel failed: every client of the MPS server of {self.uuid} has to end"
        self._trouble.set()

    def _end(self, text: str) -> None:
        if not self._closing:
            self._ended = self._ended or text
            self._trouble.set()

    def _said(self) -> str:
        lines = self._notable if self.server else self._printed
        return f"; it printed: {' / '.join(lines)}" if lines else ""

    async def _late(self, limit: float) -> str:
        """Why it is not ready after so many seconds, with what is there of it."""
        there = await asyncio.to_thread(_family, self._keeper.pid) if self._keeper else []
        processes = ", ".join(there) or "none"
        why = f"the MPS daemon of {self.uuid} was not ready after {limit:g} s: {self._missing}"
        return f"{why}{self._said() or '; it printed nothing'}; its processes: {processes}"

    async def _become_ready(self) -> None:
        """Raises MpsError as soon as the daemon or its server has ended."""
        starting, ended = asyncio.ensure_future(self._start_server()), asyncio.ensure_future(self._trouble.wait())
        try:
            await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and starting.exception():
                await asyncio.wait({ended}, timeout=_NEWS)
            if self._ended:
                raise MpsError(self._ended)
            self.server = await starting
        finally:
            for each in (starting, ended):
                each.cancel()
            await asyncio.gather(starting, ended, return_exceptions=True)

    async def _start_server(self) -> int:
        """Its process id, once it takes clients."""
        while not await self._is_ready():
            await asyncio.sleep(_PAUSE)
        self._missing = "it has not started its server"
        await self._ask(f"start_server -uid {os.geteuid()}", START_LIMIT)
        while not (servers := _numbers(await self._ask("get_server_list", START_LIMIT))):
            await asyncio.sleep(_PAUSE)
        server = servers[0]
        self._on_exit(server, self._on_server_end)
        self._missing = f"it does not say how its server {server} is"
        while (status := await self._ask(f"get_server_status {server}", START_LIMIT)) != "ACTIVE":
            self._missing = f"its server {server} is not ACTIVE, but {status or 'says nothing'}"
            await asyncio.sleep(_PAUSE)
        return server

    async def _is_ready(self) -> bool:
        """Whether the daemon that the keeper started answers."""
        assert self._keeper
        if _parent_of_daemon(self._started() / "pipe") != self._keeper.pid:
            return False
        with suppress(MpsError):
            await self._ask("get_server_list")
            return True
        return False

    async def _ask_server(self, command: str) -> str:
        answer = await self._ask(f"{command} {self.server}")
        if "not found" in answer:
            raise MpsError(f"the MPS server of {self.uuid}, process {self.server}, is not there any more{self._said()}")
        return answer

    async def _ask(self, command: str, limit: float = ANSWER_LIMIT) -> str:
        return await asyncio.to_thread(_ask, self._command, command, self._started() / "pipe", limit)

    async def _terminate(self, client: int, limit: float) -> bool:
        async with self._turn:
            if not self.server or self._ended or not _send(client, signal.SIGCONT):
                return False
            asked = asyncio.ensure_future(self._ask(f"terminate_client {self.server} {client}", limit + ANSWER_LIMIT))
            done, _ = await asyncio.wait({asked}, timeout=limit)
            if not done:
                log.warning("process %d did not leave the MPS server of %s within %g s; killing it", client, self.uuid, limit)
                _send(client, signal.SIGKILL)
            try:
                answer = await asked
            except MpsError as error:
                answer = str(error)
            if done and answer not in ("0", _NO_CLIENT):
                log.warning("process %d did not leave the MPS server of %s: %s", client, self.uuid, answer)
            return bool(done) and answer == "0"

    async def _end_keeper(self, keeper: "subprocess.Popen[bytes]", limit: float) -> None:
        """End it and all that is below it: in order once it was ready, else by the end of its standard input, or a signal."""
        assert keeper.stdin
        keeper.send_signal(signal.SIGCONT)  # A keeper that is stopped would never end, nor remove its folder.
        if self.server and not self._gone.is_set():
            with suppress(MpsError):
                await self._ask("quit -t 1", limit)
                await self._wait_gone(limit)
        keeper.stdin.close()
        if not await self._wait_gone(limit):
            log.warning("the MPS daemon of %s did not end within %g s", self.uuid, limit)
            keeper.kill()
            await asyncio.to_thread(keeper.wait)

    async def _wait_gone(self, limit: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), limit)
        return self._gone.is_set()


def is_mps_client(index: int) -> bool:
    """Whether this process uses the GPU with this ordinal by an MPS server; ask once it has a context there.

    A client whose daemon is not there runs outside MPS without an error. Raises PartitionError, DeviceLost.
    """
    from cuda.bindings import driver  # Where there is no GPU it need not be installed.

    from .cuda.driver import handle_return, translated

    enabled = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    with translated(f"asking whether device {index} is used by MPS"):
        return bool(handle_return(driver.cuDeviceGetAttribute(enabled, index)))


def find_command(uuid: str, root: Path = Path("/")) -> str:
    """The path of NVIDIA's command. Raises MpsError, with what is missing and what to do, where no daemon can run."""
    if uuid.startswith("MIG-"):
        raise MpsError(f"{uuid} is an instance of MIG, and a daemon is started for whole GPUs only; name the GPU, without MIG")
    if (root / "dev/dxg").exists():
        raise MpsError("under WSL there is no MPS; run on Linux itself")
    if not (found := shutil.which(COMMAND)):
        raise MpsError(
            f"{COMMAND} is not on PATH; it comes with NVIDIA's driver, on Ubuntu in nvidia-compute-utils, and into containers "
            "if NVIDIA_DRIVER_CAPABILITIES has compute"
        )
    return found


async def find_other(environ: Mapping[str, str] = os.environ, limit: float = ANSWER_LIMIT) -> Path | None:
    """The folder of a daemon that an operator runs, if there is one: that of CUDA_MPS_PIPE_DIRECTORY, or the default one.

    Processes without an environment of ours are its clients. One that does not answer for `limit` seconds counts, as they hang.
    """
    pipes = Path(environ.get(f"{PREFIX}PIPE_DIRECTORY") or DEFAULT_PIPES)
    if not (command := shutil.which(COMMAND)) or not (pipes / "control").exists():
        return None
    try:
        await asyncio.to_thread(_ask, command, "get_server_list", pipes, limit)
    except _Silent:
        return pipes
    except MpsError:
        return None
    return pipes


def stay_outside(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have this process, which has not used CUDA yet, be a client of no daemon, as it would be of an operator's by itself.

    There SMs are numbered again in each partition, so that those of several tenants in one process cannot be seen to be apart.
    """
    for name in [each for each in environ if each.startswith(PREFIX)]:
        del environ[name]
    if (DEFAULT_PIPES / "control").exists():
        environ[f"{PREFIX}PIPE_DIRECTORY"] = _NOWHERE


def default_parent(environ: Mapping[str, str] = os.environ) -> Path:
    """Where daemons have their folders: systemd's RuntimeDirectory of this service, or the folder for temporary files."""
    return _runtime_directory(environ) or Path(tempfile.gettempdir())


def _runtime_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    found = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(found) if found else None


class _Silent(MpsError):
    """A daemon does not answer in time."""


class _CannotAsk(MpsError):
    """NVIDIA's command cannot be run now; the daemon may be well."""


def _ask(command: str, text: str, pipes: Path, limit: float) -> str:
    """In a thread: what the daemon answers."""
    try:
        done = subprocess.run(
            [command],
            input=f"{text}\n",
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=_without_ours() | {f"{PREFIX}PIPE_DIRECTORY": str(pipes)},
            timeout=limit,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise _Silent(f"the MPS daemon in {pipes} did not answer {text!r} within {limit:g} s") from error
    except OSError as error:
        raise _CannotAsk(f"{command} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise MpsError(f"{command}: {text!r} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def _numbers(answer: str) -> list[int]:
    """The process ids that a daemon answers. Raises MpsError if it answers anything else."""
    try:
        return [int(each) for each in answer.split()]
    except ValueError as error:
        raise MpsError(f"{COMMAND} answers {answer!r}, where process ids were expected") from error


def _without_ours() -> dict[str, str]:
    """This process's environment without MPS's variables, such as an operator's limits."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def _send(process: int, number: signal.Signals) -> bool:
    """Whether the process is there, or has ended and was not waited for."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return False
    return True


def _parent_of_daemon(pipes: Path) -> int:
    """The parent of the process that says it is the daemon of this folder; 0 if there is none."""
    try:
        found = int((pipes / _PID_FILE).read_text())
        return int(Path(f"/proc/{found}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def _family(keeper: int) -> list[str]:
    """This process and all below it: id, name, state as in proc(5), and where in the kernel each sleeps. Blocks."""
    parents, texts = dict[int, int](), dict[int, str]()
    for number in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):  # It has ended.
            own = Path("/proc", str(number))
            state, parent = (own / "stat").read_text().rpartition(")")[2].split()[:2]
            where = (own / "wchan").read_text()
            texts[number] = f"{number} {(own / 'comm').read_text().strip()} {state}{f' in {where}' if where != '0' else ''}"
            parents[number] = int(parent)
    found = [keeper] if keeper in texts else []
    for above in found:
        found += [number for number, parent in parents.items() if parent == above]
    return [texts[number] for number in found]


def _make_folder(parent: Path) -> tuple[Path, int]:
    """A folder for a daemon, and a descriptor with a lock on it. Blocks. Raises MpsError."""
    variable = "RUNTIME_DIRECTORY" if parent == _runtime_directory() else "TMPDIR"
    longest = parent / f"{_FOLDER}xxxxxxxx" / "pipe" / _LONGEST_SOCKET
    if (size := len(os.fsencode(longest))) > _MOST:
        raise MpsError(
            f"the sockets of an MPS daemon in {parent} ({variable}) would have paths of {size} bytes; {_MOST} are the most; "
            f"set {variable} to a folder with a shorter path"
        )
    try:
        _remove_left(parent)
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
        with ExitStack() as failed:
            failed.callback(shutil.rmtree, folder, ignore_errors=True)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            failed.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in ("log", "pipe"):
                (folder / name).mkdir(mode=0o700)
            failed.pop_all()
    except OSError as error:
        raise MpsError(
            f"no folder for an MPS daemon can be made in {parent} ({variable}): {error.strerror}; "
            f"set {variable} to a folder in which user {os.geteuid()} may make one, and which has room"
        ) from error
    return folder, lock


def _remove_left(parent: Path) -> None:
    """Remove our folders whose keepers have ended, with the processes that use them. Blocks."""
    for folder in parent.glob(f"{_FOLDER}*/pipe"):  # One without it is being made.
        with suppress(OSError):
            own = folder.parent
            lock = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    log.info("removing what an MPS daemon that was killed has left in %s", own)
                    _remove(own)
            finally:
                os.close(lock)


def _remove(folder: Path) -> None:
    """Kill the daemon and the servers in this folder of ours, if any are left, wait for their end, and remove it. Blocks."""
    with suppress(OSError):  # No descriptor is left, so what the keeper leaves stays until the next start.
        _end_in(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _end_in(folder: Path) -> None:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), ExitStack() as opened:  # It has ended, or is another user's.
            process = os.pidfd_open(int(name))
            opened.callback(os.close, process)
            if _is_in(Path("/proc", name), folder):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                ended = select.poll()  # Descriptors may have any number, which `select` does not take.
                ended.register(process, select.POLLIN)
                ended.poll(ANSWER_LIMIT * 1000)


def _is_in(process: Path, folder: Path) -> bool:
    """Whether this process is one of MPS whose sockets are in this folder: by its name and its environment. Raises OSError."""
    variable = os.fsencode(f"{PREFIX}PIPE_DIRECTORY={folder / 'pipe'}")
    return (process / "comm").read_text().strip() == _NAME and variable in (process / "environ").read_bytes().split(b"\0")
