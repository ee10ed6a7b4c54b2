"""What the soak makes of what it saw: which requests a kill excuses, what grows, and which answers are wrong."""

import json
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.soak_clients import Client, Outcome, judge
from benchmarks.soak_events import Event, Late, Sample, oversleep
from benchmarks.soak_report import Account, Report
from greenlane.load.wire import Answer

KILL = Event("kill", "beta", 100.0, 100.01, 200)
FLAT = [Sample(float(at), 50_000, 30) for at in range(300)]


def report(*outcomes: Outcome, samples: list[Sample] = FLAT, answered: int = 20, share: float = 1.0) -> Report:
    client = Client(0, "beta", "kept", 1.0, random.Random(0), threading.Event(), list(outcomes))
    processes = {("greenlane acme", 1): samples}
    return Report(120.0, [client], [KILL], processes, Account(share, 0.0, 0.0), {"beta": answered}, [])


def lost(opened: float, ended: float) -> Outcome:
    return Outcome("lost", "kept", opened, opened, ended)


@pytest.mark.parametrize(
    ("opened", "ended", "what"),
    [
        (90.0, 100.02, "lost by a kill"),
        (90.0, 110.0, "lost by a kill"),  # It was idle when its process was killed.
        (90.0, 99.9, "unanswered"),
        (100.1, 100.2, "lost with a process that ended"),
        (100.5, 100.6, "unanswered"),
    ],
)
def test_a_kill_excuses_connections_that_were_there(opened: float, ended: float, what: str) -> None:
    found = report(lost(opened, ended))
    assert found.counts() == {what: 1}
    assert found.failures() == (["1 unanswered"] if what == "unanswered" else [])


def test_what_grows_or_is_missing_is_a_failure() -> None:
    growing = [each._replace(anonymous=50_000 + 50 * at) for at, each in enumerate(FLAT)]
    leaking = [each._replace(descriptors=30 + at) for at, each in enumerate(FLAT)]
    grows = ["greenlane acme: memory or descriptors grow"]
    assert report().failures() == []
    assert report(samples=growing).failures() == report(samples=leaking).failures() == grows
    assert report(samples=growing).processes()[0]["MiB a minute"] == pytest.approx(50 * 60 / 1024, abs=0.01)
    assert report(samples=growing).steps() == [], "it grows all the time"
    rising = [
        each._replace(anonymous=50_000 + 8_000 * (at > 99) + 8_000 * (at > 220), threads=5) for at, each in enumerate(FLAT)
    ]
    assert report(samples=rising).steps() == [
        {"name": "greenlane acme", "at": 100, "KiB": 8_000, "threads": (5, 5), "during": ["kill"]},
        {"name": "greenlane acme", "at": 221, "KiB": 8_000, "threads": (5, 5), "during": []},
    ]
    young = [each._replace(anonymous=50_000 + 50 * at) for at, each in enumerate(FLAT[:299])]
    assert report(samples=young).failures() == [], "its heap still grows with what it does for the first time"
    assert report(samples=leaking[:299]).failures() == grows
    assert report(answered=19, share=0.9).failures() == [
        "beta answers 19 of 20 at the end",
        "the account's sum is 0.900 of what there was",
    ]
    assert report(Outcome("wrong", "kept", 1.0, 1.0, 2.0)).failures() == ["1 wrong"]


def test_latencies_stand_beside_what_was_going_on() -> None:
    quiet, killed = Outcome("right", "kept", 1.0, 50.0, 50.5), Outcome("right", "kept", 1.0, 101.0, 101.25)
    assert report(quiet, killed).latencies() == {
        ("beta", "all"): [0.25, 0.5],
        ("beta", "its kill"): [0.25],
        ("beta", "nothing else"): [0.5],
    }


def test_the_slowest_answers_stand_beside_what_was_done_last() -> None:
    quiet, killed = Outcome("right", "kept", 1.0, 50.0, 50.5), Outcome("right", "kept", 1.0, 101.0, 101.25)
    found = replace(report(killed, quiet, killed._replace(ended=101.24)), late=[Late(50.52, 0.2), Late(60.0, 0.3)])
    assert found.slowest() == [
        {"tenant": "beta", "kind": "kept", "at": 0.5, "seconds": 0.5, "after": "", "since": None, "own": 0.2},
        {"tenant": "beta", "kind": "kept", "at": 51.2, "seconds": 0.25, "after": "kill beta", "since": 1.25, "own": 0.0},
    ], "one of each tenth of a second"
    assert "| beta | kept | 51.2 s | 250.0 ms | kill beta | 1,250 ms | 0 ms |" in list(found.lines())


def test_a_process_that_stops_is_seen_to_be_late() -> None:
    class Naps(threading.Event):
        """Each takes a tenth of a second, for two of them."""

        def wait(self, timeout: float | None = None) -> bool:
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                pass
            ended, self.naps = self.naps == 2, self.naps + 1
            return ended

        naps = 0

    late, began = list[Late](), time.monotonic()
    oversleep(Naps(), late)
    first, second = (each.seconds for each in late)
    assert min(first, second) > 0.094, "but for the nap itself"
    assert first + second < time.monotonic() - began


def test_a_device_process_takes_longer_to_be_back_and_hogs_stand_apart() -> None:
    right = Outcome("right", "kept", 1.0, 104.0, 104.25)
    clients = [
        Client(0, tenant, kind, 1.0, random.Random(0), threading.Event(), [right])
        for tenant, kind in (("acme", "kept"), ("acme", "reading"), ("beta", "kept"))
    ]
    killed = KILL._replace(name="kill of dev")
    found = Report(120.0, clients, [killed], {}, Account(1.0, 0.0, 0.0), {}, [], {"launches": 7, "waits": 0}, "cuda")
    beside = {("acme", "another's kill of dev"), ("acme, reading", "another's kill of dev"), ("beta", "its kill of dev")}
    assert {key for key in found.latencies() if key[1] != "all"} == beside
    assert found.failures() == []
    assert replace(found, device="cpu").failures() == ["the fence held nothing: 0 waits"]


@pytest.mark.parametrize(("data", "what"), [([1, 2], "right"), ([1, 3], "wrong"), ([1], "wrong"), (["a", 2], "wrong")])
def test_an_answer_is_compared_value_by_value(data: list[object], what: str) -> None:
    body = json.dumps({"outputs": [{"name": "y", "shape": [1, 2], "datatype": "FP32", "data": data}]}).encode()
    assert judge(_answer(200, body), np.array([[1, 2]], np.float32))[0] == what


def test_an_error_is_identified_by_its_status_and_text() -> None:
    body = b'{"error": "the queue is full"}'
    assert judge(_answer(503, body), np.zeros((1, 1), np.float32)) == ("503", "the queue is full")


def _answer(status: int, body: bytes) -> Answer:
    return Answer(status, len(body), body, last=False)


def test_the_file_says_when_what_is_missing_was_asked() -> None:
    (found,) = report(lost(100.5, 100.6), Outcome("right", "kept", 1.0, 1.0, 2.0)).document()["missing"]
    assert (found["tenant"], found["how"], found["began"], found["ended"]) == ("beta", "unanswered", 100.5, 100.6)
