"""Records which plan belongs to a model's files, so that these need not be read and hashed again at every start.

A plan is found by a digest of the model and its weights. To read and parse gigabytes is work for another process, and to start
that takes half a second. So it leaves a record beside the plan: the plan's name, and the state of every file that it read. A
file whose inode, size and times are the same has not changed, as in ccache's `inode_cache`
(https://ccache.dev/manual/4.10.html#config_inode_cache).
"""

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .cache_folder import replace_file

SETTLED = 2.0
"""No record is made of a file that changed less than so many seconds before it was read: a later change might leave the same
times, whose resolution is that of the file system (https://git-scm.com/docs/racy-git).
"""


class FileState(NamedTuple):
    """Differs once a file has changed. Times are in nanoseconds since the epoch, `changed` is that of the inode."""

    inode: int
    size: int
    modified: int
    changed: int

    def had_settled(self) -> bool:
        """Whether it had not changed for `SETTLED` seconds by now."""
        return time.time() - max(self.modified, self.changed) / 1e9 >= SETTLED


States = Mapping[Path, FileState | None]
"""The states of files by their paths; None for one that is not there."""


def states_of(paths: Iterable[Path]) -> States:
    """Take these before the files are read. Blocks; raises nothing."""
    return {path: _state(path) for path in paths}


def record(where: Path, plan: Path, read: States) -> None:
    """Write at `where`, beside the plan, that it was made from these files, unless one of them had only just changed.

    Blocks. What cannot be written is not recorded.
    """
    plan_state = _state(plan)
    if plan_state is None or not all(state is None or state.had_settled() for state in read.values()):
        return
    files = [[str(path.absolute()), state] for path, state in read.items()]
    with suppress(OSError):
        replace_file(where, json.dumps({"plan": plan.name, "state": plan_state, "files": files}).encode())


def known_plan(where: Path) -> Path | None:
    """The plan that is recorded at `where`, if neither it nor a file that it was made from has changed. Blocks; raises nothing.

    A record that cannot be read counts as none.
    """
    try:
        found = json.loads(where.read_bytes())
        plan = where.with_name(found["plan"])
        recorded = [(plan, found["state"]), *((Path(path), state) for path, state in found["files"])]
        states = [(path, None if state is None else FileState(*state)) for path, state in recorded]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return plan if all(_state(path) == state for path, state in states) else None


def _state(path: Path) -> FileState | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return FileState(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
