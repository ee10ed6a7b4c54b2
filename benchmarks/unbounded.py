"""`python -m benchmarks.unbounded`: the server, where lending has no bound, to show what the bound is for.

`python -m benchmarks.unbounded prove --lending --config FILE` is `greenlane prove` with such servers, whose verdict
must be worse.
A borrower runs everything on its wide partition, whatever the lender does, and its threads on lent cores have the usual
priority. Every process imports this module, so it changes all of them. Not for serving.
"""

import os
import sys
from typing import Any

from greenlane.prove import child, server
from greenlane.prove.command import main as prove
from server import __main__ as command
from server.host.leaving import leave
from server.workers import wide
from server.workers.stretching import IN_FLIGHT, WIDE


def _always(*arguments: Any) -> int:
    """In place of `decide`: unless something is in flight."""
    in_flight: bool = arguments[5]
    return IN_FLIGHT if in_flight else WIDE


def _refuse(*_: Any) -> None:
    raise PermissionError("not tried, for the comparison")


def _remove_the_bound(module: Any) -> None:
    module.decide = _always
    module.rested_since = lambda _: 0
    os.sched_setscheduler = _refuse


_remove_the_bound(wide)

if __name__ == "__main__":
    if sys.argv[1:2] == ["prove"]:
        server.CHILD = ("benchmarks.unbounded", "child")
        sys.exit(prove(sys.argv[2:], "benchmarks.unbounded prove"))
    if sys.argv[1:] == ["child"]:
        child.main()
    leave(command.main())
