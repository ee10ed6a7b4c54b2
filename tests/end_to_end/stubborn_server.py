"""`python -m server` with a device process, except that HTTP processes do not end when the supervisor closes their channel.

A process that has been taken over would not either: the supervisor has to kill it.
"""

import asyncio

from server import __main__ as command
from server.host.leaving import leave
from server.processes.children.process_setup import ProcessArguments
from server.processes.http_side import http_process
from server.processes.supervision import restarts

_main = http_process.main


async def stay(_: http_process.HttpProcess) -> None:
    """In place of an exit."""
    await asyncio.Event().wait()


def main(arguments: ProcessArguments) -> None:
    """The HTTP process."""
    http_process.HttpProcess._exit_with_supervisor = stay  # type: ignore[method-assign]
    _main(arguments)


if __name__ == "__main__":
    from tests.end_to_end import stubborn_server

    command.on_host_cores = lambda _: False
    restarts.EXIT_TIMEOUT = 100  # type: ignore[attr-defined]  # Nothing else ends such a process within the test's patience.
    http_process.main = stubborn_server.main  # By a name that the processes can import.
    leave(command.main())
