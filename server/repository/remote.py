"""Copies a model repository from a URL that fsspec can read (s3://, gs://, hf://) into a directory, one model at a time.

It runs as a process of its own, `python remote.py URL DIRECTORY LIMIT`, so that processes which serve do not load the libraries
for this. It imports nothing of ours. For each line on its standard input it copies once and prints an `Outcome` as JSON. The
line is a JSON array of the models that are not to be copied this time.

In the directory each model is a symbolic link to a complete copy in `.copies`. A model that has changed gets a new copy, in
which unchanged files are hard links to the old ones; then its link is replaced in one step. So a reader finds the old model or
the new one, never a part of a download.
"""

import fcntl
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

LIMIT = 300.0
"""Seconds that a listing may take, and that a download may go without a byte, before they are broken off."""
COPIES, STATE, LOCK = ".copies", ".state.json", ".lock"
_IDENTITIES = ("ETag", "etag", "md5Hash", "generation", "blob_id", "LastModified", "mtime", "updated", "created")
"""Fields that identify a file's content or version, the most reliable first. The first that a file has is compared."""
_EXTRA = "install greenlane[remote] (in a checkout: scripts/install remote)"
_HINTS = {
    "s3": "credentials as for AWS's command line (AWS_PROFILE, AWS_ACCESS_KEY_ID), and AWS_ENDPOINT_URL for another service",
    "gs": "credentials as for Google's libraries (GOOGLE_APPLICATION_CREDENTIALS)",
    "hf": "HF_TOKEN for a repository that is not public",
}


T = TypeVar("T")


@dataclass(slots=True)
class Outcome:
    """What a copy did. `error` is why it could not begin, and `kind` which kind of failure that is.

    Two failures of the same kind may have different texts, for example with different numbers in them.
    """

    error: str = ""
    kind: str = ""
    problems: list[str] = field(default_factory=list)
    """Paths that are not copied, and why."""
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The models that could not be fetched and stay as they were: for each the kind of failure and the text."""
    hangs: bool = False
    """Whether a call was given up that still waits in a thread, so that this process has to be replaced."""
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    files: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model: its path in the remote file system, its size if known, and what changes when it does.

    Or a directory, such as the version of an ensemble, which may be empty; its path below the model ends with a slash.
    """

    path: str
    size: int | None
    tag: str


class Hangs(TimeoutError):
    """A call of the file system's library has not returned in time, and still waits."""


class CannotWrite(Exception):
    """The directory of the copy cannot be written; the text says why."""


Models = Mapping[str, Mapping[str, RemoteFile]]
"""The files of each model, by their paths below its directory."""


def copy(url: str, root: Path, left_alone: Collection[str] = (), limit: float = LIMIT) -> Outcome:
    """Make a directory the same as a remote repository, except for models that are to be left alone. Blocks, but a listing for
    `limit` seconds at most. Whatever goes wrong is in the outcome, never raised."""
    outcome, files = Outcome(), None
    try:
        from fsspec.core import url_to_fs  # Slow, and need not be installed.

        files, path = _within(limit, "opening it", lambda: url_to_fs(url))
        with _locked(root):
            models = _within(limit, "listing it", lambda: _listed(files, path.rstrip("/"), outcome))
            _Copy(root, url, outcome, limit).follow(files, models, left_alone)
    except CannotWrite as error:
        outcome.error, outcome.kind = f"{url} cannot be copied to {root}: {error}", "CannotWrite"
    except Exception as error:  # The libraries of all these file systems raise what they like.
        outcome.error, outcome.kind = _explained(url, error), _kind(error)
        outcome.hangs = isinstance(error, Hangs)
        if files:  # The next time begins with new connections and credentials.
            type(files).clear_instance_cache()
    return outcome


def _within(limit: float, doing: str, work: Callable[[], T], progress: Callable[[], object] = lambda: None) -> T:
    """What this returns. Raises what it raises, and Hangs where what `progress` says stays the same for so many seconds.

    It runs on a thread, which is left alone then: the libraries have calls that nothing breaks off.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=doing, daemon=True)
    thread.start()
    while True:
        before = progress()
        thread.join(limit)
        if not thread.is_alive():
            break
        if progress() == before:
            raise Hangs(f"{doing} was broken off after {limit:g} s without an answer")
    if errors:
        raise errors[0]
    return results[0]


class _Copy:
    """One run over a directory, which is locked. `state` has each model's copy, and the tags of its files."""

    def __init__(self, root: Path, url: str, outcome: Outcome, limit: float) -> None:
        self._limit = limit
        self._root = root
        self._url = url
        self._outcome = outcome
        self._state = _state(root / STATE)

    def follow(self, files: Any, models: Models, left_alone: Collection[str]) -> None:
        """Copy what differs, and take away what is not there any more. It ends where a download hangs."""
        self._clear()
        for name, wanted in models.items():
            if name in left_alone:
                continue
            tags = {path: each.tag for path, each in wanted.items()}
            if self._tags(name) != tags or not self._is_whole(name, wanted):
                try:
                    self._replace(name, wanted, files)
                except CannotWrite:
                    raise
                except Exception as error:
                    text = f"{name} of {self._url} stays as it was: {_why(error)}{_advice(self._url, 'its files')}"
                    self._outcome.failed[name] = _kind(error), text
                    if isinstance(error, Hangs):
                        self._outcome.hangs = True
                        return
        for name in sorted({*self._state, *self._links()}.difference(models)):
            (self._root / name).unlink(missing_ok=True)
            self._state.pop(name, None)
            self._outcome.removed.append(name)
            self._save()
        self._clear()

    def _tags(self, name: str) -> Any:
        """The tags of a model's copy; None for another one, as a process may have been killed before it wrote that down."""
        known = self._state.get(name, {})
        return known.get("files") if self._link(name) == str(Path(COPIES, known.get("copy", ""))) else None

    def _link(self, name: str) -> str:
        """The copy that a model's link leads to, below the root; "" if there is no such link."""
        try:
            found = os.readlink(self._root / name)
        except OSError:
            return ""
        return found if Path(found).parent == Path(COPIES) else ""

    def _links(self) -> dict[str, str]:
        """The copies that are used, by model."""
        return {name: found for name in os.listdir(self._root) if (found := self._link(name))}

    def _is_whole(self, name: str, wanted: Mapping[str, RemoteFile]) -> bool:
        """Whether the model's copy is still there, with all of its files."""
        return all(_is_there(self._root / name, path, each) for path, each in wanted.items())

    def _replace(self, name: str, wanted: Mapping[str, RemoteFile], files: Any) -> None:
        """Make a copy beside the one that is used, and use it once it is complete."""
        before, tags = self._root / name, self._tags(name) or {}
        made = self._root / COPIES / f"{name}-{uuid4().hex[:12]}"
        for path, each in wanted.items():
            target = made / path
            if path.endswith("/"):
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if tags.get(path) == each.tag and _has(before / path, each.size):
                os.link((before / path).resolve(), target)
                continue
            self._fetch(files, each.path, target)
            if not _has(target, each.size):
                came = target.stat().st_size if target.is_file() else "no"
                raise OSError(f"{each.path}: {came} bytes came; expected {each.size}")
            self._outcome.files += 1
            self._outcome.nbytes += target.stat().st_size
        link = self._root / COPIES / f"{made.name}.link"
        link.symlink_to(Path(COPIES, made.name))
        link.replace(before)
        self._state[name] = {"copy": made.name, "files": {path: each.tag for path, each in wanted.items()}}
        self._outcome.changed.append(name)
        self._save()

    def _fetch(self, files: Any, path: str, target: Path) -> None:
        """Download a file. Raises Hangs if its size does not grow for `limit` seconds."""

        def arrived() -> tuple[int, int]:
            found = target.stat() if target.exists() else None
            return (found.st_size, found.st_mtime_ns) if found else (0, 0)

        _within(self._limit, f"downloading {path}", lambda: files.get_file(path, str(target)), arrived)

    def _save(self) -> None:
        """Raises CannotWrite; what was copied last is copied again then."""
        new = self._root / f"{STATE}.new"
        try:
            new.write_text(json.dumps({"url": self._url, "models": self._state}))
            new.replace(self._root / STATE)
        except OSError as error:
            raise CannotWrite(error.strerror or str(error)) from error

    def _clear(self) -> None:
        """Remove copies that no link names: old ones, and those that were broken off."""
        (self._root / COPIES).mkdir(exist_ok=True)
        used = set(self._links().values())
        for name in os.listdir(self._root / COPIES):
            if str(Path(COPIES, name)) not in used:
                path = self._root / COPIES / name
                path.unlink() if path.is_symlink() else shutil.rmtree(path)


def _listed(files: Any, root: str, outcome: Outcome) -> Models:
    """The models below a path. Raises what the file system's library raises, and FileNotFoundError if there is nothing."""
    files.invalidate_cache()
    models: dict[str, dict[str, RemoteFile]] = {}
    for path, info in sorted(files.find(root, withdirs=True, detail=True).items()):
        if not path.startswith(f"{root}/"):
            continue
        *folders, name = path.removeprefix(f"{root}/").split("/")
        if info.get("type") == "directory" and name:
            folders, name = [*folders, name], ""
        if any(part in ("", "..") or not part.isprintable() for part in (*folders, name or "a directory")):
            outcome.problems.append(f"{path!r} is not copied: it is no path below a model's directory")
            continue
        if not folders or any(part.startswith(".") for part in folders):
            continue
        model = models.setdefault(folders[0], {})
        for depth in range(2, len(folders) + 1):
            model["/".join(folders[1:depth]) + "/"] = RemoteFile("", None, "directory")
        if name and not name.startswith("."):
            model["/".join([*folders[1:], name])] = RemoteFile(path, info.get("size"), _tag(info))
    if not models:
        raise FileNotFoundError("there is no model; expected MODEL/1/model.onnx and so on below it")
    return models


def _tag(info: Mapping[str, Any]) -> str:
    """What changes when the file does."""
    found = next((f"{key} {info[key]}" for key in _IDENTITIES if info.get(key) is not None), "")
    return f"{info.get('size')} {found}"


def _has(path: Path, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


def _is_there(model: Path, path: str, each: RemoteFile) -> bool:
    return (model / path).is_dir() if path.endswith("/") else _has(model / path, each.size)


def _state(path: Path) -> dict[str, Any]:
    """What was copied; nothing if that is not known, so all is copied again."""
    try:
        found = json.loads(path.read_text())["models"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Make the directory, and wait for another process that copies to the same one. Raises CannotWrite."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / LOCK).open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise CannotWrite(error.strerror or str(error)) from error
    with file:
        yield


def _why(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _explained(url: str, error: Exception) -> str:
    """What is wrong, and what to do."""
    if isinstance(error, ModuleNotFoundError) and error.name == "fsspec":
        return f"{url} cannot be read without fsspec; {_EXTRA}"
    if isinstance(error, ImportError | ValueError):  # The library for this scheme is missing, or there is none.
        return f"{url} cannot be read: {_why(error)}; for s3://, gs:// and hf:// {_EXTRA}"
    return f"{url} cannot be read: {_why(error)}{_advice(url, 'the address')}"


def _advice(url: str, what: str) -> str:
    """What to look at, as the end of a text."""
    hint = _HINTS.get(url.partition("://")[0])
    return f"; check {what}, and {hint}" if hint else f"; check {what}"


def _kind(error: Exception) -> str:
    """The same for what fails in the same way: the class, and the number of the error or of the answer if there is one."""
    numbers = (getattr(error, "errno", None), getattr(getattr(error, "response", None), "status_code", None))
    number = next((str(each) for each in numbers if isinstance(each, int)), "")
    return f"{type(error).__name__} {number}".strip()


def main(url: str, directory: str, limit: str) -> int:
    """The process, until its input ends, as it does when the process that started it has ended."""
    os.nice(10)
    out, sys.stdout = sys.stdout, sys.stderr  # Libraries may print something.
    for line in sys.stdin:
        outcome = copy(url, Path(directory), json.loads(line), float(limit))
        print(json.dumps(asdict(outcome)), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
