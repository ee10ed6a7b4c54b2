"""Builds the package; with GREENLANE_COMPILE=1, the modules that every inference goes through as machine code (mypyc).

Everything else about the package is in pyproject.toml. What is compiled stays Python that runs as it is.
"""

import os
from typing import Any

from setuptools import setup

COMPILED = [
    "server/http/body.py",
    "server/http/connection.py",
    "server/http/disconnects.py",
    "server/http/head.py",
    "server/http/infer.py",
    "server/http/inference.py",
    "server/http/paths.py",
    "server/link/blocks.py",
    "server/link/ring.py",
    "server/link/slots.py",
    "server/protocol/request.py",
    "server/protocol/request_cache.py",
    "server/protocol/response.py",
    "server/scheduling/deadlines.py",
    "server/scheduling/lane.py",
    "server/scheduling/pending.py",
    "server/scheduling/scheduler.py",
    "server/scheduling/slot_pool.py",
    "server/tenants/statistics.py",
    "server/tenants/uploads.py",
    "server/workers/deferred.py",
    "server/workers/gil_priority.py",
    "server/workers/roles.py",
    "server/workers/worker.py",
]
"""Together, for a call from one of them to another takes no detour; each of both processes' time by inference is spent here."""

MYPY = ["--config-file=pyproject.toml", "--ignore-missing-imports"]
"""scripts/check has everything installed, and is strict."""


def extensions() -> list[Any]:
    """One library in the package `server`, and a module of the old name for each source, which Python prefers to the source."""
    if os.environ.get("GREENLANE_COMPILE") != "1":
        return []
    from mypyc.build import mypycify  # Only here: whoever does not compile need not have it.

    return mypycify([*MYPY, *COMPILED], opt_level="3", debug_level="0", group_name="server.host.compiled")


if __name__ == "__main__":
    setup(ext_modules=extensions())
