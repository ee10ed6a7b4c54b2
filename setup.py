"""Builds the package; with GREENLANE_COMPILE=1, the modules that every inference goes through as machine code (mypyc).

Everything else about the package is in pyproject.toml. What is compiled stays Python that runs as it is.
"""

import os
from typing import Any

from setuptools import setup

COMPILED = [
    "server/aside.py",
    "server/blocks.py",
    "server/body.py",
    "server/deadlines.py",
    "server/departures.py",
    "server/front.py",
    "server/head.py",
    "server/infer.py",
    "server/inference.py",
    "server/lane.py",
    "server/link.py",
    "server/pending.py",
    "server/pool.py",
    "server/precedence.py",
    "server/protocol/plans.py",
    "server/protocol/request.py",
    "server/protocol/response.py",
    "server/roles.py",
    "server/scheduler.py",
    "server/slots.py",
    "server/statistics.py",
    "server/worker.py",
]
"""Together, for a call from one of them to another takes no detour; each of both processes' time by inference is spent here."""

MYPY = ["--config-file=pyproject.toml", "--ignore-missing-imports"]
"""scripts/check has everything installed, and is strict."""


def extensions() -> list[Any]:
    """One library in the package `server`, and a module of the old name for each source, which Python prefers to the source."""
    if os.environ.get("GREENLANE_COMPILE") != "1":
        return []
    from mypyc.build import mypycify  # Only here: whoever does not compile need not have it.

    return mypycify([*MYPY, *COMPILED], opt_level="3", debug_level="0", group_name="server.compiled")


if __name__ == "__main__":
    setup(ext_modules=extensions())
