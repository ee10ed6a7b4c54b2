"""What it costs to relay requests through a tenant's lead: `python -m benchmarks.relaying [seconds]`.

A process with a lane asks a worker with a model that takes no time, without HTTP: once over the worker's own link, and once as
a helper, over a relay in a lead process of its own. Printed for each number of requests at a time: requests a second, the
median time of one, and the processor time of the lead and of the asking process for one.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import uvloop

from engines import DATATYPES, Signature, TensorSpec
from server.link import occupancy as occupancies
from server.link import ring as links
from server.link.occupancy import LEAD, Occupancy, SharedBlocks
from server.link.ring import Descriptors
from server.scheduling.helper_scheduler import HelperScheduler
from server.scheduling.lane import Lane
from server.scheduling.scheduler import Scheduler
from server.tenants import relay
from server.tenants.catalog import Catalog
from server.tenants.relay import Relay
from server.tenants.service import HORIZON
from tests.lanes import submit

SLOTS, MEMORY, SHAPES = 320, 64 << 20, ((8,),)
FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))


class NoControl:
    def cancel(self, slot: int, serial: int) -> None: ...


@contextmanager
def started(module: str, *arguments: object, fds: Sequence[int]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def worker(link: Descriptors) -> AbstractContextManager[object]:
    """A worker with a model that takes no time."""
    return started("tests.server.far_side", *link, fds=link[:4])


def processor_time(pid: int) -> float:
    """Seconds of processor time that a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def measure(lane: Lane, together: int, seconds: float) -> list[float]:
    """The seconds that each request took."""
    took: list[float] = []
    end = time.monotonic() + seconds

    async def one_after_another() -> None:
        while (begin := time.monotonic()) < end:
            slot = lane.take_slot()
            slot.lay_out(SIGNATURE, [32], 32)
            await submit(lane, slot, "m/1#1", SHAPES)
            lane.release(slot)
            took.append(time.monotonic() - begin)

    await asyncio.gather(*(one_after_another() for _ in range(together)))
    return took


async def ask(lane: Lane, lead: int | None, seconds: float) -> None:
    lane.open(asyncio.get_running_loop())
    await measure(lane, 1, 0.5)
    for together in (1, 8, 32):
        before, own = processor_time(lead or os.getpid()), time.process_time()
        took = await measure(lane, together, seconds)
        of_lead = f"{(processor_time(lead) - before) / len(took) * 1e6:4.0f} us of the lead, " if lead else ""
        each = f"{of_lead}{(time.process_time() - own) / len(took) * 1e6:4.0f} us of the asking process"
        where = "relayed" if lead else "direct "
        print(
            f"{where} {together:2} at a time: {len(took) / seconds:7.0f}/s, p50 {statistics.median(took) * 1e6:5.0f} us, {each}"
        )
    lane.close(asyncio.get_running_loop())


def scheduler() -> Scheduler:
    return Scheduler(64, 2, HORIZON)


async def lead(to_worker: Descriptors, to_helper: Descriptors, cancellations: int, page: int) -> None:
    """The lead, in a process of its own, until the helper ends."""
    link, occupancy = links.attach(to_worker), Occupancy(page, LEAD)
    lane = Lane("acme", scheduler(), link, NoControl(), SharedBlocks(MEMORY, "memory", occupancy))
    lane.open(asyncio.get_running_loop())
    end = socket.socket(fileno=cancellations)
    found = Relay(2, lane, Catalog(), links.attach(to_helper, link.arena.memory), end, occupancy)
    found.open(asyncio.get_running_loop())
    await found.ended.wait()


def main(seconds: float) -> None:
    link = links.create(SLOTS, MEMORY)
    with worker(link):
        uvloop.run(ask(Lane("acme", scheduler(), links.attach(link), NoControl()), None, seconds))
    to_worker = links.create(SLOTS, MEMORY)
    to_helper = links.renew(to_worker)
    ours, theirs = relay.sockets()
    page = occupancies.create(MEMORY)
    shared = (*to_worker[:4], *to_helper[:4], theirs.fileno(), page)
    arguments = "lead", *to_worker, *to_helper, theirs.fileno(), page
    with worker(to_worker), started("benchmarks.relaying", *arguments, fds=shared) as process:
        theirs.close()
        occupancy = Occupancy(page, 2)
        blocks = SharedBlocks(MEMORY, "memory", occupancy)
        helping = HelperScheduler(SLOTS, 64, "queue", occupancy)
        lane = Lane("acme", helping, links.attach(to_helper), relay.Cancellations(ours), blocks, True)
        uvloop.run(ask(lane, process.pid, seconds))
        ours.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["lead"]:
        numbers = [int(each) for each in sys.argv[2:]]
        uvloop.run(lead(Descriptors(*numbers[:6]), Descriptors(*numbers[6:12]), *numbers[12:]))
    else:
        main(float(sys.argv[1]) if sys.argv[1:] else 3)
