"""The simulated streams themselves: what a real device would do with streams that wait for each other."""

from threading import Barrier, Thread

from .streams import Event, Operation, Stream

PATIENCE = 20


def test_two_threads_run_streams_that_wait_for_each_other() -> None:
    first, second = Stream(None, 1), Stream(None, 2)
    ran: list[str] = []
    both = Barrier(2)

    def begin(name: str) -> None:
        both.wait(PATIENCE)
        ran.append(name)

    for stream, name in ((first, "first"), (second, "second")):
        stream.put(Operation(lambda name=name: begin(name)))  # type: ignore[misc]
    marks = Event(), Event()
    for mark, stream in zip(marks, (first, second), strict=True):
        mark.record(stream)
    marks[0].hold(second)
    marks[1].hold(first)
    for stream in (first, second):
        stream.put(Operation(lambda: ran.append("last")))
    threads = [Thread(target=stream.wait, daemon=True) for stream in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "each waits for the turn of the other"
    assert sorted(ran[:2]) == ["first", "second"]
    assert ran[2:] == ["last", "last"]


def test_a_stream_goes_on_when_what_it_awaits_can_never_be_reached() -> None:
    """As after a loss of the device, which drops what is pending."""
    first, second = Stream(None, 1), Stream(None, 2)
    first.put(Operation(lambda: None))
    mark = Event()
    mark.record(first)
    mark.hold(second)
    first.pending.clear()
    ran: list[int] = []
    second.put(Operation(lambda: ran.append(1)))
    second.wait()
    assert ran == [1]
