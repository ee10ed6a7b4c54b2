"""A fenced worker over a simulated GPU: the real engines, whose executors at home and on the narrow placement share memory."""

import asyncio
import random
from pathlib import Path

from server.workers.narrow import NarrowPlacement, NarrowStatistics
from server.workers.worker import Worker
from tests.server.device.test_paging_on_gpu import OnGpu, on_gpu
from tests.server.workers.test_narrow import Neighbour


def fence(site: OnGpu, worker: Worker, neighbour: Neighbour) -> NarrowPlacement:
    """Hold all models of this tenant to its first granule while the neighbour is at work."""
    made = NarrowPlacement(site.runtime.device.carve(worker.partition.granules[:1]), [neighbour.page], 1, NarrowStatistics())
    for key, executor in worker.executors.items():
        made.executors[key] = executor.alternate(made.partition)
    made.set_moved(dict.fromkeys(made.executors, 10**12))
    worker.narrow = made
    worker.revoke()
    worker.resume(made)
    return made


async def test_answers_are_right_while_a_neighbour_comes_and_goes_and_after_the_tenant_has_moved(tmp_path: Path) -> None:
    async with on_gpu(tmp_path, 1 << 30, paging=False, count=3, copies="sm") as site:
        choose, neighbour, worker = random.Random(5), Neighbour(), site.runtime.workers["acme"]
        placement = await asyncio.to_thread(fence, site, worker, neighbour)
        done = 0

        async def client() -> None:
            nonlocal done
            for _ in range(40):
                await site.infer(choose.randint(1, 3))
                done += 1
                if choose.random() < 0.3:
                    if neighbour.activity.open:
                        neighbour.rest()
                    else:
                        neighbour.activity.begin()

        await asyncio.gather(*[client() for _ in range(4)])
        assert 0 < placement.statistics.launches < done
        found = placement.measured()
        assert all(each.home and each.narrow for each in found.values()), found
        await site.controller.repartition({"acme": 3, "globex": 1})
        assert site.runtime.workers["acme"].narrow is placement, "it is a part of the new home"
        before, done = placement.statistics.launches, 0
        await asyncio.gather(*[client() for _ in range(4)])
        assert before < placement.statistics.launches < before + done
        await site.controller.repartition({"acme": 1})
        assert site.runtime.workers["acme"].narrow is None, "it closed with the worker"
        await site.infer(1)
