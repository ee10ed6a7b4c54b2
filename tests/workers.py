"""How tests are given to the processes that run them (pytest-xdist)."""

from collections.abc import Callable
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SLOWEST = (
    "tests/simulation/test_mps_server.py",
    "tests/server/accounts/test_harm.py",
    "tests/end_to_end/test_reload_tenants.py",
    "tests/end_to_end/test_functions.py",
    "tests/greenlane/prove/test_command.py",
    "tests/end_to_end/test_hung.py",
    "tests/end_to_end/test_fences.py",
    "tests/simulation/test_two_devices.py",
    "tests/end_to_end/test_ensembles.py",
    "tests/end_to_end/test_grpc.py",
    "tests/end_to_end/test_http_processes.py",
    "tests/end_to_end/test_reload.py",
    "tests/end_to_end/test_shutdown.py",
    "tests/end_to_end/test_watchdog.py",
    "tests/end_to_end/test_leaving.py",
    "tests/end_to_end/test_generate.py",
    "tests/greenlane/test_wheel.py",
    "tests/end_to_end/test_device_process.py",
    "tests/engines/tensorrt/test_verifying.py",
    "tests/end_to_end/test_given_up.py",
    "tests/end_to_end/test_tenant_process.py",
    "tests/end_to_end/test_lending.py",
    "tests/browser/test_status_page.py",
    "tests/greenlane/load/test_rules.py",
    "tests/test_docs_shell.py",
    "tests/benchmarks/test_attacks.py",
    "tests/engines/tensorrt/test_load.py",
    "tests/end_to_end/test_several_http_processes.py",
    "tests/partitions/test_mps.py",
    "tests/end_to_end/test_text.py",
    "tests/engines/tensorrt/building/test_builds.py",
    "tests/simulation/test_lost.py",
    "tests/server/control/test_green_contexts.py",
    "tests/end_to_end/test_log.py",
    "tests/end_to_end/test_remote_repository.py",
    "tests/end_to_end/test_usage.py",
    "tests/end_to_end/test_starting.py",
    "tests/end_to_end/test_connections.py",
    "tests/fuzz/test_fuzz.py",
    "tests/end_to_end/test_repository.py",
    "tests/test_examples.py",
    "tests/end_to_end/test_several_devices.py",
    "tests/end_to_end/test_paging.py",
    "tests/fuzz/test_parsers.py",
)
"""Files that took twenty seconds or more in all on a busy machine of two cores, the slowest first; not those of many tests."""


class Scheduling(LoadFileScheduling):
    """The tests of a file to one process, the slowest files first: one that begins last leaves the other processes idle.

    The others follow in the order of pytest-xdist, those with many tests first. A process that ends early leaves to the others
    only the files that it has not done.

    pytest-xdist 3.8 gives them those that it has done as well: a process that gets nothing but such a file, of which no test
    is left, reports nothing, is given nothing more, and all wait for ever.
    """

    def _assign_work_unit(self, node: Any) -> None:
        slow = next((path for path in SLOWEST if path in self.workqueue), None)
        if slow is not None:
            self.workqueue.move_to_end(slow, last=False)
        self._say(next(iter(self.workqueue)))
        super()._assign_work_unit(node)

    def _say(self, file: str) -> None:
        """Print which file begins: the dots of several processes have no names."""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write(f"\n{file}\n")

    def _reschedule(self, node: Any) -> None:
        """A process runs a test only when it has another or is asked to end; pytest-xdist 3.8 may give a new one just one.

        Where two are replaced at a time it would also give tests to one that has collected none yet, and end by a KeyError.
        """
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        if self._pending_of(self.assigned_work[node]) == 1:
            super()._reschedule(node)

    def remove_node(self, node: Any) -> Any:
        done = [scope for scope, tests in self.assigned_work[node].items() if all(tests.values())]
        for scope in done:
            del self.assigned_work[node][scope]
        return super().remove_node(node)


class Failures:
    """Prints the name of each test that fails when it fails: the summary is lost if the run is ended before it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write(f"\nFAILED {report.nodeid} ({report.when})\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> Scheduling | None:
    """For `--dist=loadfile`."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.pluginmanager.register(Failures(config))
    return Scheduling(config, log)
