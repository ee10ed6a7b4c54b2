"""Where work ran, from the server's probe and from what the kernel says of threads."""

import math
import os
import socket
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from greenlane.load import machine
from greenlane.load.rules import Word
from greenlane.prove.confinement import LEAST_TICKS, Located, Seen, Watch, judged, parsed, probe, processes_of

ACME = Located("acme", "core", (2, 3), "isolated", "")
GLOBEX = {0: "of globex"}
HTTP, WORKER = (7, 7), (7, 8)


def seen(cores: set[int], allowed: set[int], ticks: int = 50) -> Seen:
    return Seen(ticks, ticks, cores, frozenset(allowed))


@pytest.mark.parametrize(
    ("threads", "word", "said"),
    [
        ({WORKER: seen({2, 3}, {2, 3})}, "isolated", "1 thread of its models worked"),
        ({WORKER: seen({0, 2}, {0, 2})}, "leaks", "ran on core 0 (of globex)"),
        ({WORKER: seen({2}, {2, 9})}, "leaks", "may run on core 9 (of no tenant)"),
        ({WORKER: seen({2}, {2}), HTTP: seen({0}, {0})}, "isolated", "1 thread"),
        ({HTTP: seen({0}, {0})}, "leaks", "ran on core 0"),
        ({WORKER: seen({2}, {2}), (7, 9): Seen(50)}, "isolated", "1 thread"),
        ({WORKER: seen({0}, {0}, ticks=1)}, "not exercised", "no thread"),
        ({}, "not exercised", "no thread"),
    ],
)
def test_a_models_threads_belong_on_its_tenants_cores(threads: dict[tuple[int, int], Seen], word: Word, said: str) -> None:
    found = judged(ACME, threads, GLOBEX)
    assert found.own_word == word
    assert said in found.own_why
    assert (found.word, found.units) == (ACME.word, ACME.units)


def test_an_engines_sms_are_not_seen_from_outside() -> None:
    found = judged(Located("acme", "SM", (1, 2), "isolated", ""), {WORKER: seen({0}, {0})}, {})
    assert found.own_word == "not exercised"


def test_the_kernels_words_about_a_thread_are_read_whatever_its_name() -> None:
    fields = ["S", *map(str, range(4, 53))]  # Fields 3 to 52 of proc(5), most of them their own number.
    assert parsed(f"12 (a ) (b) {' '.join(fields)}") == (39, 14 + 15)


def test_this_process_is_found_by_its_connection_and_watched_while_it_works() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with closing(socket.create_connection(("127.0.0.1", port))) as client, closing(listener.accept()[0]):
            assert processes_of(port, client.getsockname()[1]) == {os.getpid()}
            assert processes_of(port, 1) == frozenset()
    watch, me = Watch({"acme": frozenset({os.getpid()})}), threading.get_native_id()
    watch.start()
    before = os.times()
    while (now := os.times()).user + now.system - before.user - before.system < 0.3:
        pass
    thread = watch.stop()["acme"][(os.getpid(), me)]
    assert thread.worked >= LEAST_TICKS
    assert thread.cores <= os.sched_getaffinity(0)
    assert thread.allowed == os.sched_getaffinity(0)


def test_what_other_programs_used_is_what_is_left_of_busy_cores() -> None:
    stat = "cpu  9 9 9 9\ncpu0 100 20 30 400 5 6 7 50 0 0\ncpu1 7 0 0 0 0 0 0 0 0 0\ncpu2 1 1 1\nintr 5\n"
    ticks = os.sysconf("SC_CLK_TCK")
    assert machine.busy(stat, frozenset({0, 2})) == [200 / ticks, 3 / ticks]
    assert math.isnan(machine.Others([0], whole=False).share())
    assert 0 <= machine.Others(sorted(os.sched_getaffinity(0)), whole=True).share() <= 1


@pytest.mark.parametrize(("units", "said"), [([0], "1 of its 1 core,"), ([0, 3], "2 of its 2 cores,")])
def test_units_that_were_seen_are_counted(units: list[int], said: str) -> None:
    partition = {"device": "0", "size": len(units), "located": units}
    answer = {"devices": [{"name": "0", "unit": "core"}], "overlaps": [], "partitions": {"acme": partition}}
    access: Any = SimpleNamespace(administer=lambda *asked: answer)
    (found,) = probe(access)
    assert found.why == f"it ran on {said} and on none of another tenant's"


@pytest.mark.parametrize(
    ("overlaps", "word", "said"),
    [
        ([], "isolated", "took all of its 8 SMs at the same time as each other tenant's took theirs"),
        (
            [{"tenants": ["acme", "globex"], "units": []}],
            "leaks",
            "it did not have all of its units at the same time as globex",
        ),
    ],
)
def test_a_partition_without_numbers_is_apart_if_it_was_held_with_all_others(
    overlaps: list[dict[str, Any]], word: Word, said: str
) -> None:
    answer = {
        "devices": [{"name": "0", "unit": "SM"}],
        "overlaps": overlaps,
        "partitions": {"acme": {"device": "0", "size": 8, "located": None}},
    }
    access: Any = SimpleNamespace(administer=lambda *asked: answer)
    (found,) = probe(access)
    assert (found.tenant, found.units, found.word) == ("acme", (), word)
    assert said in found.why
