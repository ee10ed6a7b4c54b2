import asyncio
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

from server.mailbox import Mailbox

PRODUCERS, ITEMS = 8, 500


async def test_what_is_said_is_heard_in_order_and_later() -> None:
    heard: list[int] = []
    done = asyncio.Event()
    mailbox = Mailbox[int](asyncio.get_running_loop(), lambda item: done.set() if item == 99 else heard.append(item))
    for item in range(100):
        mailbox.put(item)
    assert heard == []
    assert repr(mailbox) == "<Mailbox 100 unheard>"
    await done.wait()
    assert heard == list(range(99))
    assert repr(mailbox) == "<Mailbox 0 unheard>"


async def test_everything_that_many_threads_say_is_heard_on_the_loop_in_the_order_of_each() -> None:
    heard: dict[int, list[int]] = {producer: [] for producer in range(PRODUCERS)}
    loop, together, done = asyncio.get_running_loop(), Barrier(PRODUCERS), asyncio.Event()

    def hear(item: tuple[int, int]) -> None:
        assert asyncio.get_running_loop() is loop
        heard[item[0]].append(item[1])
        if sum(map(len, heard.values())) == PRODUCERS * ITEMS:
            done.set()

    mailbox = Mailbox(loop, hear)

    def produce(producer: int) -> None:
        together.wait()
        for number in range(ITEMS):
            mailbox.put((producer, number))

    threads = [Thread(target=produce, args=(producer,)) for producer in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(30):
        await done.wait()
    for thread in threads:
        thread.join()
    assert heard == {producer: list(range(ITEMS)) for producer in range(PRODUCERS)}


async def test_what_is_said_while_hearing_is_heard_too() -> None:
    heard: list[int] = []
    done = asyncio.Event()

    def hear(item: int) -> None:
        heard.append(item)
        if item < 3:
            mailbox.put(item + 1)
        else:
            done.set()

    mailbox = Mailbox(asyncio.get_running_loop(), hear)
    mailbox.put(0)
    await done.wait()
    assert heard == [0, 1, 2, 3]


class CountingLoop:
    """As much of a loop as a mailbox needs; its calls wait until the test runs them."""

    def __init__(self, closed: bool = False) -> None:
        self.calls: list[Callable[[], None]] = []
        self.closed = closed

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(call)


def made(loop: Any, hear: Callable[[int], None]) -> Mailbox[int]:
    return Mailbox(loop, hear)


def test_the_loop_is_woken_once_for_all_that_is_said_meanwhile() -> None:
    loop, heard = CountingLoop(), list[int]()
    mailbox = made(loop, heard.append)
    for item in range(3):
        mailbox.put(item)
    assert len(loop.calls) == 1
    loop.calls.pop()()
    mailbox.put(3)
    loop.calls.pop()()
    assert heard == [0, 1, 2, 3]
    assert loop.calls == []


def test_what_is_said_to_a_closed_loop_is_lost_without_a_word() -> None:
    loop, heard = CountingLoop(closed=True), list[int]()
    mailbox = made(loop, heard.append)
    mailbox.put(1)
    mailbox.put(2)
    assert loop.calls == []
    assert heard == []


def test_a_real_loop_that_was_closed_harms_nobody() -> None:
    loop = asyncio.new_event_loop()
    mailbox = made(loop, list[int]().append)
    loop.close()
    mailbox.put(1)
