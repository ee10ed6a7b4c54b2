"""The limits of a queue whose works run on several devices."""

from engines import DATATYPES, Signature, TensorSpec
from server.link.messages import Ticket
from server.scheduling.batching import batchable
from server.scheduling.queue_policy import Batching
from server.scheduling.scheduler import Scheduler

FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (), max_batch=8)


def tickets(count: int) -> list[Ticket]:
    return [Ticket(slot, slot + 1, "m", ((1, 3),), 1e9, 0) for slot in range(count)]


def test_each_device_has_places_of_its_own() -> None:
    scheduler = Scheduler(8, 2)
    scheduler.set_devices(2)
    for each in tickets(6):
        scheduler.add(each)
    assert [each.slot for each in scheduler.take()] == [0, 1, 2, 3]
    scheduler.set_devices(1)
    scheduler.finish(0)
    scheduler.finish(1)
    assert scheduler.take() == [], "two are in flight, which is the limit of one device"
    scheduler.finish(2)
    assert [each.slot for each in scheduler.take()] == [4]
    scheduler.set_devices(0)
    scheduler.finish(3)
    assert [each.slot for each in scheduler.take()] == [5], "what no device can take is answered when it is put"


def test_a_single_request_does_not_wait_for_a_batch_while_a_device_is_idle() -> None:
    scheduler = Scheduler(8, 2)
    scheduler.set_devices(2)
    batching = Batching(SIGNATURE, most=8, delay=1.0)
    for each in tickets(3):
        scheduler.add(each, 0, batchable(batching, each, 0.0))
        choice = scheduler.choose(0.5)
        if choice.members:
            scheduler.launch(choice.members, each.slot)
    assert scheduler.statistics().in_flight == 2
    assert scheduler.choose(0.5).due == 1.0
