"""A server as a process of its own, whose log a thread reads, for programs that look for what it says."""

import os
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Condition, Thread

from greenlane.load.server_process import ProcessStatus, family_of, processes, terminate

READY = (" on http://", "ready: ")
"""Texts in the log of a server that is ready: where it listens, and that every model was tried."""
PATIENCE = 120.0
"""Seconds for which a line of the log is waited for: a GPU's engines are built and compiled meanwhile."""


class NotInLog(Exception):
    """The server ended, or took too long, before its log said what was waited for; the text has the log."""


class ServerProcess:
    """A server that was started with its stderr in a pipe: its port, its log so far, and its processes."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self.popen = popen
        self.port = 0
        self.log: list[str] = []
        self._grown = Condition()
        self._ended = False
        self._reader = Thread(target=self._read)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def start(self, signs: Sequence[str] = READY) -> None:
        """Read the log, and wait until it has all of these signs. Take the port from it, if it is there. Raises NotInLog."""
        self._reader.start()
        for sign in signs:
            self.wait_for_log(sign)
        if found := re.search(r"(?:listening|running) on http://\S+?:(\d+)", "".join(self.log)):
            self.port = int(found[1])

    def wait_for_log(self, text: str, times: int = 1) -> None:
        """Wait until so many lines of the log contain this text. Raises NotInLog."""

        def count() -> int:
            return sum(text in line for line in self.log)

        with self._grown:
            self._grown.wait_for(lambda: self._ended or count() >= times, PATIENCE)
            if count() < times:
                raise NotInLog(f"{text!r} is not in the log:\n{''.join(self.log)}")

    def family(self) -> list[ProcessStatus]:
        """Every process that this server started, and itself."""
        return family_of(self.popen.pid)

    def stop(self) -> None:
        """Have it drain and end, and wait for that; it is killed if it takes too long."""
        terminate(self.popen, PATIENCE)
        self.close()

    def close(self) -> None:
        """Kill it, and wait until its children have ended too, which hold the log's pipe open."""
        self.popen.kill()
        self.popen.wait()
        if self._reader.ident:
            self._reader.join(PATIENCE)

    def _read(self) -> None:
        assert self.popen.stderr
        for line in self.popen.stderr:
            with self._grown:
                self.log.append(line)
                self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()


@contextmanager
def server_process(
    command: Sequence[str], environment: Mapping[str, str] | None = None, signs: Sequence[str] = READY
) -> Iterator[ServerProcess]:
    """Start a server, by default wait until it serves, and stop it after the block; on an error it is killed.

    `environment` is added to this process's. Raises NotInLog.
    """
    variables = os.environ | (environment or {})
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as popen:
        server = ServerProcess(popen)
        try:
            server.start(signs)
            yield server
            server.stop()
        finally:
            server.close()


@contextmanager
def restricted(cores: Collection[int]) -> Iterator[None]:
    """This process, and those that it starts in this block, may use these cores only; any if there are none."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def alive(family: Sequence[ProcessStatus]) -> list[ProcessStatus]:
    """Which of these are still there; zombies count only while they have other threads, which hold their sockets."""
    now = {one.pid: one for one in processes()}
    return [one for one in family if one.pid in now and (now[one.pid].state != "Z" or _other_threads(one.pid))]


def _other_threads(pid: int) -> int:
    """How many threads it has besides the first."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task")) - 1
    return 0
