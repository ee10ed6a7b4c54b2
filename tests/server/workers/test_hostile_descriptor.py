"""The process at the other end of a link fills its eventfds: no call that an event loop makes of a worker waits."""

import os
from collections.abc import Iterator

import pytest

from tests.contract import in_a_thread
from tests.launchable import needs_a_compiler
from tests.server.link.test_listener import empty, fill
from tests.server.workers.test_worker import PATIENCE, SLOTS, Bench, benched


@pytest.fixture(params=["python", pytest.param("loop", marks=needs_a_compiler)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A bench whose worker listens by itself, and one whose worker is in the launch loop."""
    with benched(launchable=request.param == "loop") as bench:
        bench.worker.serve(bench.endpoint)
        if request.param == "loop":
            bench.teach()
        bench.rush()
        yield bench


@pytest.mark.parametrize("call", ["stop", "abandon"])
def test_no_call_waits_for_a_descriptor_that_is_filled_just_before_it_writes(
    bench: Bench, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has ended, so that it reads nothing any more, and the other process fills what is then written to."""
    event, write = bench.link.tickets.event, os.eventfd_write
    write(event, SLOTS + 1)
    bench.wait_for_error()

    def filled(descriptor: int, count: int) -> None:
        monkeypatch.setattr(os, "eventfd_write", write)
        fill(event)
        write(descriptor, count)

    monkeypatch.setattr(os, "eventfd_write", filled)
    _, returned = in_a_thread(getattr(bench.worker, call))
    try:
        returned.result(PATIENCE)
    finally:
        empty(event)
        bench.worker.halt()


def test_a_worker_that_waits_for_a_full_descriptor_of_completions_goes_on_when_its_process_was_replaced(bench: Bench) -> None:
    """That one belongs to both as well, so the other process decides whether writing to it waits."""
    event, completions = bench.link.completions.event, bench.link.completions
    fill(event)
    before = bench.enqueued()
    bench.put(bench.ticket(0, 7))
    bench.wait_for_enqueued(before + 1)
    stopped = bench.worker.stop()
    assert not stopped.done()
    completions.free_writer()
    stopped.result(PATIENCE)
    os.set_blocking(event, False)
    assert bench.answer(bench.next()) == [7]


def test_completions_that_were_not_taken_stay_when_a_link_is_replaced(bench: Bench) -> None:
    before = bench.enqueued()
    bench.put(bench.ticket(0, 7))
    bench.wait_for_enqueued(before + 1)
    bench.worker.stop().result(PATIENCE)
    bench.link.completions.free_writer()
    assert bench.answer(bench.next()) == [7]
