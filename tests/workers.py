"""How tests are given to the processes that run them (pytest-xdist)."""

from collections.abc import Callable
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class Scheduling(LoadFileScheduling):
    """The tests of a file to one process. A process that ends early leaves to the others only the files that it has not done.

    pytest-xdist 3.8 gives them those that it has done as well: a process that gets nothing but such a file, of which no test
    is left, reports nothing, is given nothing more, and all wait for ever.
    """

    def remove_node(self, node: Any) -> Any:
        done = [scope for scope, tests in self.assigned_work[node].items() if all(tests.values())]
        for scope in done:
            del self.assigned_work[node][scope]
        return super().remove_node(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> Scheduling | None:
    """For `--dist=loadfile`."""
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
