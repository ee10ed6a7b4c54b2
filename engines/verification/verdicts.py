"""Verdicts on sets of shapes, kept in a file beside an engine's kernels: a start does not pay for them twice."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from ..model_files.cache_folder import replace_file
from ..model_files.profiles import shape_text
from ..signature import Shape

log = logging.getLogger("greenlane.engines")

Shapes = tuple[Shape, ...]


class Verdict(NamedTuple):
    """What was found of one set of shapes: `word` is right, wrong or unverified, `why` a text for the operator."""

    word: str
    error: float = 0.0
    tolerance: float = 0.0
    why: str = ""


class Verdicts:
    """The verdicts of one engine. Any thread may call. `file` is where they are kept, None for nowhere.

    The file's name has to say what they depend on: the plan, the library, the kind of GPU and the strategy of kernels. Those
    that are no verdicts are not kept, as the reason may be gone the next time.
    """

    def __init__(self, file: Path | None) -> None:
        """Blocks to read the file. A damaged one counts as empty."""
        self._file = file
        self._lock = Lock()
        self._found: dict[Shapes, Verdict] = _read(file) if file else {}

    def get(self, shapes: Shapes) -> Verdict | None:
        """The verdict on these shapes, None if there is none."""
        return self._found.get(shapes)

    def put(self, shapes: Shapes, verdict: Verdict) -> None:
        """Remember a verdict, and keep it in the file. Blocks. Never raises: what cannot be kept is found again."""
        with self._lock:
            self._found[shapes] = verdict
            if self._file and verdict.word != "unverified":
                self._found = {**_read(self._file), **self._found}  # Another process may have found more meanwhile.
                kept = [[shapes, *each] for shapes, each in self._found.items() if each.word != "unverified"]
                with suppress(OSError):
                    self._file.parent.mkdir(parents=True, exist_ok=True)
                    replace_file(self._file, json.dumps(kept).encode())

    def all(self) -> Mapping[Shapes, Verdict]:
        """Every verdict, by shapes."""
        return dict(self._found)


def shapes_text(shapes: Shapes) -> str:
    """A set of shapes as text: `2x53x512`, or several with commas between."""
    return ", ".join(map(shape_text, shapes))


def _read(file: Path) -> dict[Shapes, Verdict]:
    try:
        rows = json.loads(file.read_bytes())
        return {tuple(map(tuple, row[0])): Verdict(str(row[1]), float(row[2]), float(row[3]), str(row[4])) for row in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, IndexError) as error:
        log.warning("%s: verdicts on shapes cannot be read, so they are found again: %s", file, error)
        return {}
