"""Time of an event loop, which a test lets pass."""

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
