"""The functions of a version that is served: their module, and the thread that they run on in this process."""

import logging
from collections.abc import Callable

from ..errors import DeadlineExceeded
from ..functions.arrays import copied
from ..functions.definition import Functions, FunctionsFailed
from ..functions.module import FunctionModule
from ..functions.thread import Call, FunctionThread, OnEnd

log = logging.getLogger("greenlane.functions")

LOAD_SECONDS = 60.0
"""How long `model.py` may take to run when its model is loaded."""


class RunningFunctions:
    """Belongs to the event loop of the tenant's HTTP process; `open_functions` makes one. `name` is the model's."""

    copied = staticmethod(copied)
    """As `functions.arrays.copied`, for `ThroughFunctions`, which imports none of this."""

    def __init__(self, functions: Functions, name: str, thread: FunctionThread) -> None:
        self.functions = functions
        self.module = FunctionModule(functions, f"model {name!r}")
        self.thread = thread
        self._name = name

    def what(self, function: str) -> str:
        """A function's name in errors."""
        return f"model {self._name!r}: {function}"

    def call(self, function: str, work: Callable[[], object], on_end: OnEnd) -> Call:
        """As `FunctionThread.call`."""
        return self.thread.call(self.what(function), work, on_end)

    def close(self) -> None:
        """Its model is not served any more, and no request for it is left."""
        self.thread.close()
        self.module.close()


async def open_functions(
    functions: Functions, name: str, most: int, setting: str, limit: tuple[float, str]
) -> RunningFunctions:
    """Run `model.py` on a thread of its own. `most` requests may wait for it. Raises FunctionsFailed."""
    running = RunningFunctions(functions, name, FunctionThread(name, most, setting, *limit))
    try:
        await running.thread.result_of(running.what("model.py"), running.module.load, LOAD_SECONDS)
    except BaseException as error:
        running.close()
        if not isinstance(error, Exception):
            raise
        too_long = f"{functions.where} ran for {LOAD_SECONDS:g} s without an end"
        raise FunctionsFailed(too_long if isinstance(error, DeadlineExceeded) else str(error)) from error
    return running
