"""Threads that compile run at a lower priority than threads that serve."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

from engines.thread_priority import NICE, lower_priority


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_lower_priority_is_for_the_thread_and_those_it_starts() -> None:
    found = []
    before = niceness()

    def inner() -> None:
        thread = Thread(target=lambda: found.append(niceness()))
        thread.start()
        thread.join()

    with ThreadPoolExecutor(1, initializer=lower_priority) as threads:
        threads.submit(inner).result()
        assert threads.submit(niceness).result() == max(before, NICE)
    assert found == [max(before, NICE)]
    assert niceness() == before
