"""The device side of a link as a process of its own: a worker over fakes, until its input ends. See test_link."""

import sys

from engines import DATATYPES, Signature, TensorSpec
from server.link import ring as links
from server.link.ring import Descriptors
from server.workers.gil_priority import GilPriorities
from server.workers.placement import Placement
from server.workers.session import Endpoint
from server.workers.worker import Worker
from tests.fakes import FakeDevice, FakeEngine

FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))
KEY = "m/1#1"


def serve(descriptors: Descriptors) -> None:
    device = FakeDevice()
    partition = device.carve([0])
    executors = {KEY: FakeEngine(SIGNATURE, compute=lambda given: [given[0][::-1]]).bind(partition)}
    worker = Worker(Placement(partition, executors), on_lost=print, priorities=GilPriorities())
    link = links.attach(descriptors)
    worker.serve(Endpoint(link, device.pin(link.arena.memory.address, link.arena.memory.nbytes)))
    sys.stdin.read()
    worker.close()


if __name__ == "__main__":
    serve(Descriptors(*map(int, sys.argv[1:])))
