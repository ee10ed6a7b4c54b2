"""Time that a test lets pass: of an event loop, and a clock for code that is given one."""

import asyncio


async def pass_time(seconds: float) -> None:
    """Have the running event loop's clock go on by so much, and let what is due then run; until the next call it stands still.

    So nothing that the test begins afterwards may wait for time, not even `asyncio.timeout`.
    """
    loop = asyncio.get_running_loop()
    now = loop.time() + seconds
    loop.time = lambda: now  # type: ignore[method-assign]
    for _ in range(3):  # What was due before, the timers, and what these call soon.
        await asyncio.sleep(0)


class Clock:
    """A clock in seconds, which stands still unless it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
