"""Records which functions of the project each process of a server calls, while the page GREENLANE_CALLS/now has a number not 0.

`scripts/measure --calls` puts this folder into the PYTHONPATH of a server, so Python imports this in each of its processes. A
process appends what it called to the file GREENLANE_CALLS/NUMBER-PID, a function a line, at its first call after the number has
changed.
"""

import mmap
import os
import sys
import threading
from pathlib import Path

FOLDER = Path(os.environ["GREENLANE_CALLS"])
ROOT = f"{Path(__file__).resolve().parents[2]}/"
PRODUCT = tuple(ROOT + name for name in ("server/", "engines/", "partitions/", "greenlane/"))


class Recorder:
    """What this process calls, in memory until the number changes. Any thread."""

    def __init__(self, page: mmap.mmap) -> None:
        self.page = page
        self.number = 0
        self.calls: list[str] = []

    def __call__(self, frame, event, _) -> None:
        number = self.page[0]
        if number != self.number:
            calls, before, self.calls, self.number = self.calls, self.number, [], number
            if calls:
                with open(FOLDER / f"{before}-{os.getpid()}", "a") as file:
                    file.writelines(calls)
        if number and event == "call" and (code := frame.f_code).co_filename.startswith(PRODUCT):
            self.calls.append(f"{code.co_filename.removeprefix(ROOT)} {code.co_firstlineno} {code.co_qualname}\n")


with open(FOLDER / "now", "rb") as opened:
    recorder = Recorder(mmap.mmap(opened.fileno(), 1, prot=mmap.PROT_READ))
threading.setprofile(recorder)
sys.setprofile(recorder)
