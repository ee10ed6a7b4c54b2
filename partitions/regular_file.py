"""Opens files of which others chose the names or the contents, without waiting: a pipe, a device or a socket is refused.

And says early what could not be written later.
"""

import errno
import os
import stat
import tempfile
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

_KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"), (stat.S_ISSOCK, "a socket"))


def open_regular(path: str | Path, most: int | None = None) -> BufferedReader:
    """Open a file to read its bytes. Raises OSError, whose `strerror` says what is no file, or what is larger than `most`.

    Nothing but a file is opened, as to open a pipe waits for a writer, and a device may never end.
    """
    _check(os.stat(path), path, most)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    try:
        _check(os.fstat(file.fileno()), path, most)  # It may be another one by now.
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: str | Path, most: int) -> bytes:
    """The bytes of a file. Raises OSError as `open_regular` does, also for a file that has grown meanwhile."""
    with open_regular(path, most) as file:
        content: bytes | None = file.read(most + 1)
    if content is None:  # Of the kernel's own files some have nothing to read for now, as /proc/kmsg.
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
    if len(content) > most:
        raise _too_large(len(content), most, path)
    return content


def nearest_there(path: Path) -> Path:
    """The path, or the nearest of the folders above it, that exists."""
    return next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))


def check_writable(path: Path) -> None:
    """Raise OSError, with what is in the way, unless a file or folder of this name can be made, or written if it is there.

    Blocks. Leaves nothing.
    """
    there = path
    try:
        with suppress(FileNotFoundError):
            os.lstat(path)  # Raises where the name is too long, also if no such file is there.
        there = nearest_there(path)
        with there.open("ab") if there == path and there.is_file() else tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(there)) from error


def _check(found: os.stat_result, path: str | Path, most: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(found.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"is {kind}; expected a file", str(path))
    if most is not None and found.st_size > most:
        raise _too_large(found.st_size, most, path)


def _too_large(size: int, most: int, path: str | Path) -> OSError:
    return OSError(errno.EFBIG, f"has {size} bytes; at most {most} are read", str(path))
