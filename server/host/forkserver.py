"""The forkserver, from which a server forks its processes: started before this process imports the server itself.

Both import the same modules, which takes each a second or more, and do so at the same time then.

multiprocessing gives the forkserver's socket a name in the folder for temporary files. A process that is killed leaves that
there, and a folder whose own name is long has no room for it, as the kernel takes up to 107 bytes. So the socket is bound by
way of a descriptor of its folder, removed at once, and reached by a descriptor of its own.
"""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, process, resource_tracker
from multiprocessing.context import ForkServerContext
from threading import Lock, current_thread, main_thread
from typing import Any, cast

from . import orphans
from .signals import blocked_in_children

_DESCRIPTORS = "/proc/self/fd/"
_starting = Lock()
"""Held while it is started: there is one for the whole process, as in multiprocessing."""
forking = Lock()
"""Held while a process is forked of which this one does not know the number yet."""


def context() -> ForkServerContext:
    """What starts processes from the forkserver."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["server.__main__", "server.processes.forkserver_preload"])
    return found


def start() -> None:
    """Start the forkserver, if there is none. Blocks, but does not wait until it has loaded its modules. Raises OSError."""
    context()
    resource_tracker.ensure_running()  # Its start unblocks both signals, and the forkserver would start it otherwise.
    with _starting, blocked_in_children():
        if not _is_running():
            _start_without_name()


def start_early() -> None:
    """The same before it is known what is served.

    SIGHUP is ignored meanwhile, and so in all processes that are forked: they end with this one, not with the terminal.
    Raises SystemExit with a sentence where it cannot be started.
    """
    if current_thread() is not main_thread():
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        start()
    except OSError as error:
        where = "a socket is made at the start in the folder for temporary files, which TMPDIR names"
        raise SystemExit(f"greenlane: no process can be started: {error}; {where}") from error
    finally:
        signal.signal(signal.SIGHUP, before)


def pid() -> int | None:
    """The forkserver's process id, for which multiprocessing has no public name; None if there is no forkserver."""
    found: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return found


def kept_alive_by() -> list[int]:
    """The descriptors of this process that keep the forkserver running, of which each process that it forks has one."""
    found: int | None = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    return [] if found is None else [found]


def kill() -> None:
    """Kill it, if there is one. Any thread."""
    if (number := pid()) is not None:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def kill_all() -> None:
    """Kill it and all processes below it, if there is one. Any thread."""
    if (number := pid()) is not None:
        for each in (number, *orphans.below(number)):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def end_orphans() -> None:
    """End what is below it, but was not forked from it by this process: what processes left that have ended. Blocks."""
    if (number := pid()) is not None:
        with forking:
            started = [each.pid for each in process._children]  # type: ignore[attr-defined]  # `active_children` asks each for its status.
            orphans.end_below(number, [each for each in started if each])


def _is_running() -> bool:
    """Whether it was started and has not ended. Its exit status is left to multiprocessing."""
    if (number := pid()) is None:
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def _start_without_name() -> None:
    """Start it with a socket that only this process can reach, and that has no name any more when this returns."""
    started: Any = forkserver._forkserver
    before: str | None = started._forkserver_address
    folder = _make_folder()
    try:
        inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _socket_at(f"{_DESCRIPTORS}{inside}/forkserver") as path:
                forkserver.ensure_running()
                started._forkserver_address = ""  # It is that of a folder which is removed.
            started._forkserver_address = _reach(path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink("forkserver", dir_fd=inside)
            os.close(inside)
    finally:
        os.rmdir(folder)
        if before and before.startswith(_DESCRIPTORS) and before != started._forkserver_address:
            os.close(int(before.removeprefix(_DESCRIPTORS)))


def _make_folder() -> str:
    """A new folder among the temporary files. Raises OSError."""
    try:
        return tempfile.mkdtemp(prefix="greenlane-")
    except OSError:  # Where temporary files were has been removed, or is full: another place is looked for.
        tempfile.tempdir = None
        return tempfile.mkdtemp(prefix="greenlane-")


@contextmanager
def _socket_at(path: str) -> Iterator[str]:
    """Have multiprocessing bind the next socket here."""
    module = cast(Any, connection)
    choose, module.arbitrary_address = module.arbitrary_address, lambda _: path
    try:
        yield path
    finally:
        module.arbitrary_address = choose


def _reach(path: str) -> str:
    """A path to the forkserver's socket that stays when its name is removed, as long as this process runs.

    Without it nothing could be forked, so if there is no descriptor left for it the forkserver is ended. Raises OSError.
    """
    try:
        return f"{_DESCRIPTORS}{os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)}"
    except OSError:
        kill()
        raise
