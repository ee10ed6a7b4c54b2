"""A tenant's memory over real sockets: large and small bodies side by side, and refusals of what does not fit."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice
from typing import Any

import httpx
import numpy as np
import pytest

from partitions.cpu import CpuDevice
from server.config.tenant import TenantConfig
from server.device import runtime
from server.link.slots import SMALLEST
from server.scheduling.lane_statistics import SlotStatistics
from server.tenants.auth import digest
from server.tenants.local_frontend import LocalFrontend
from tests.memory import Peak

from . import repository
from .harness import Served, configuration, cores, serving
from .wire import PATH, Connection, binary, busy, infer, parts, post, post_binary, request, tensor, until

MIB = 1 << 20
MEMORY = 16 * MIB
KEY = {"Authorization": "Bearer globex-key"}


class Counting(CpuDevice):
    """Counts what is pinned and unpinned."""

    def __init__(self) -> None:
        super().__init__(cores())
        self.counted: Counter[str] = Counter()
        self.pinned: list[tuple[int, int]] = []

    def pin(self, address: int, nbytes: int) -> "Counting":
        self.counted["pin"] += 1
        self.pinned.append((address, nbytes))
        return self


@pytest.fixture(scope="module")
def device() -> Counting:
    return Counting()


@pytest.fixture(scope="module", params=[False, True], ids=["asgi", "direct"])
def served(tmp_path_factory: pytest.TempPathFactory, device: Counting, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Two tenants of 16 MiB each, of which one request may take 14; answers are as long as bodies, so 7 MiB of those."""
    root = repository.standard(tmp_path_factory.mktemp("models"))
    repository.write(root, "tile", repository.TILE)
    acme = TenantConfig(name="acme", granules=1, models=("*",), memory=MEMORY, in_flight=1)
    globex = TenantConfig(name="globex", granules=1, models=("identity",), memory=MEMORY, keys_sha256=(digest("globex-key"),))
    with serving(configuration(root, acme, globex, max_body=50 * MIB), device, direct=request.param) as served:
        yield served


def identity(nbytes: int, seed: int = 0) -> tuple[dict[str, Any], bytes]:
    """A request whose answer is as long, in binary, and its data."""
    data = np.random.default_rng(seed).bytes(nbytes)
    document = request(tensor("x", "FP32", [nbytes // 4, 1], binary_data_size=nbytes))
    return binary(document | {"parameters": {"binary_data_output": True}}, data), data


def slots(served: Served, tenant: str = "acme") -> SlotStatistics:
    return served.service.tenants[tenant].lane.slots.statistics()


def test_concurrent_bodies_of_all_sizes_are_answered_and_pin_no_memory(
    served: Served, http: httpx.Client, device: Counting
) -> None:
    before = device.counted.copy()
    bodies = [identity(nbytes, seed) for seed, nbytes in enumerate(islice(cycle([3 * MIB, 600_000, 1000]), 15))]

    def ask(body: tuple[dict[str, Any], bytes]) -> bool:
        answer = http.post(PATH, **body[0])
        return answer.status_code == 200 and parts(answer)[1] == [body[1]]

    with ThreadPoolExecutor(3) as clients:
        assert all(clients.map(ask, bodies))
    assert device.counted == before
    memory = [served.service.tenants[name].lane.slots.blocks.nbytes for name in ("acme", "globex")]
    assert [nbytes for _, nbytes in device.pinned[-2:]] == memory, "all of it, when the tenants began"


def test_a_small_request_gets_a_small_block_after_a_large_one(served: Served, http: httpx.Client) -> None:
    assert http.post(PATH, **identity(5 * MIB)[0]).status_code == 200
    with busy(served, http):
        assert slots(served) == (1, slots(served).slots, SMALLEST)
    until(lambda: slots(served).nbytes == 0)  # A slot is given back just after its answer was written.


@pytest.mark.parametrize("nbytes", [8 * MIB, 30 * MIB])
def test_a_request_that_never_fits_is_413_with_the_numbers(served: Served, http: httpx.Client, nbytes: int) -> None:
    answer = http.post(PATH, **identity(nbytes)[0])
    assert answer.status_code == 413
    most = MEMORY * 7 // 8
    assert f"bytes of memory; the most for one is {most} (tenants.acme.memory: {MEMORY}" in answer.json()["error"]
    assert slots(served) == (0, slots(served).slots, 0)


def test_a_request_that_never_fits_is_413_before_its_body_is_sent(served: Served) -> None:
    with Connection(served) as connection:
        connection.send(post(PATH, b"", length=40 * MIB))
        answer = connection.answer()
    assert answer.status == 413
    assert f"the most for one is {MEMORY * 7 // 8} (tenants.acme.memory" in answer.json["error"]


def test_a_request_that_does_not_fit_now_is_429_and_small_ones_still_fit(served: Served, http: httpx.Client) -> None:
    rejected = lane_rejected(served)
    with ThreadPoolExecutor(1) as clients, busy(served, http):
        waiting = clients.submit(http.post, PATH, **identity(5 * MIB)[0])
        until(lambda: slots(served).nbytes >= 10 * MIB)
        refused = http.post(PATH, **identity(5 * MIB)[0])
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        held = slots(served).nbytes
        assert f"bytes of memory in one piece, but requests hold {held} and the largest piece left" in refused.json()["error"]
        assert lane_rejected(served) == rejected + 1
        small = clients_of(served, 4)
    assert waiting.result().status_code == 200
    assert small == [None] * 4
    until(lambda: slots(served).nbytes == 0)


def clients_of(served: Served, count: int) -> list[None]:
    """So many small requests that are accepted while something runs; each is withdrawn again."""
    before = slots(served).used
    with ExitStack() as stack:
        for number in range(count):
            connection = stack.enter_context(Connection(served))
            connection.send(post_binary(PATH, identity(MIB // 8)[0]))
            until(lambda number=number: slots(served).used == before + number + 1)  # type: ignore[misc]
    until(lambda: slots(served).used == before)
    return [None] * count


def lane_rejected(served: Served) -> int:
    return served.service.tenants["acme"].lane.statistics().rejected


def test_many_large_bodies_stay_within_their_tenants_memory(served: Served, http: httpx.Client) -> None:
    bodies = [identity(nbytes, seed) for seed, nbytes in enumerate(islice(cycle([MIB, 2 * MIB]), 16))]
    small, data = identity(1000)
    assert post_as_globex(http, small) == data
    theirs, most = taken(served, "globex"), 0
    with ThreadPoolExecutor(len(bodies)) as clients:
        with busy(served, http):
            asked = [clients.submit(http.post, PATH, **body) for body, _ in bodies]
            until(lambda: slots(served).used + sum(each.done() for each in asked) == len(bodies) + 1)
            most = slots(served).nbytes
            assert post_as_globex(http, small) == data
        answers = [each.result() for each in asked]
    assert most <= MEMORY
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer, (_, sent) in zip(answers, bodies, strict=True):
        if answer.status_code == 200:
            assert parts(answer)[1] == [sent]
    until(lambda: slots(served).nbytes == 0)  # A slot is given back just after its answer was written.
    assert taken(served, "globex") == theirs, "only its own requests write to it, and use the same memory again"


def post_as_globex(http: httpx.Client, body: dict[str, Any]) -> bytes:
    (data,) = parts(http.post(PATH, content=body["content"], headers=body["headers"] | KEY))[1]
    return data


def taken(served: Served, tenant: str) -> int:
    """Bytes that the system has given for a tenant's memory."""
    frontend = served.runtime.frontends[tenant]
    assert isinstance(frontend, LocalFrontend)
    return os.fstat(frontend.descriptors.memory).st_blocks * 512


def arriving(served: Served) -> int:
    """Bytes that have arrived of acme's bodies that are not complete."""
    return sum(upload.received() for upload in list(served.service.tenants["acme"].uploads._waiting))  # Its loop changes it.


def test_a_slow_upload_holds_no_memory_that_another_request_needs(served: Served, http: httpx.Client) -> None:
    body, data = identity(2 * MIB)
    whole = post_binary(PATH, body)
    with Connection(served) as slow:
        slow.send(whole[:-1])
        until(lambda: arriving(served) == len(body["content"]) - 1)
        # 13 MiB with its answer: of 16 MiB there are not enough beside the 4 of a slot that the slow body may be received into.
        assert http.post(PATH, **identity(13 * MIB // 2)[0]).status_code == 200
        until(lambda: slots(served).nbytes == 0)  # A slot is given back just after its answer was written.
        slow.send(whole[-1:])
        assert slow.answer().body.endswith(data)


def test_outputs_of_unexpected_size_are_whole_and_later_ones_have_room_at_once(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = served.service.tenants["acme"].catalog.find("tile").key
    executor: Any = served.runtime.workers["acme"].executors[key]
    enqueue, runs = executor.enqueue, []
    monkeypatch.setattr(executor, "enqueue", lambda inputs, room: [runs.append(1), enqueue(inputs, room)][1])

    def ask(times: int) -> int:
        """How often the model ran for it: twice if its outputs outgrew the room of the first run."""
        runs.clear()
        answer = ask_for(http, times)
        assert np.frombuffer(parts(answer)[1][0], np.float32).tolist() == [1.5] * 1000 * times
        return len(runs)

    assert ask(2) == 1
    assert ask(100) == 2
    assert ask(100) == 1
    assert ask(3000) == 2
    until(lambda: slots(served).nbytes == 0)  # A slot is given back just after its answer was written.


def ask_for(http: httpx.Client, times: int) -> httpx.Response:
    """Ask for 4,000 bytes so many times."""
    inputs = tensor("x", "FP32", [1000], [1.5] * 1000), tensor("times", "INT64", [1], [times])
    return infer(http, "tile", request(*inputs, parameters={"binary_data_output": True}))


@pytest.mark.parametrize("times", [32_000, 1_000_000])
def test_outputs_that_never_fit_take_no_memory(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """128 MB and 4 GB, of a tenant that has 16 MiB."""
    monkeypatch.setattr(runtime, "KEPT", math.inf)
    peak = Peak()
    answer = ask_for(http, times)
    assert answer.status_code == 413, answer.text
    assert peak.nbytes < 32 * MIB
    assert f"{times * 4000} bytes of memory; the most for one is {MEMORY * 7 // 8} (tenants" in answer.json()["error"]


def test_outputs_that_never_fit_are_413_with_the_numbers(served: Served, http: httpx.Client) -> None:
    answer = ask_for(http, 5_000)
    assert answer.status_code == 413
    assert f"the most for one is {MEMORY * 7 // 8} (tenants.acme.memory: {MEMORY}" in answer.json()["error"]
    until(lambda: slots(served).nbytes == 0)  # A slot is given back just after its answer was written.
