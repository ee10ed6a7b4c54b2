"""Batches that are too long to borrow are cut, in both forms of the server, on cores; the answers stay right."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest

from benchmarks import subjects
from benchmarks.asks import tensor as values

from .harness import cores
from .processes import Running, client, configure, running, running_device
from .wire import Connection, answered, binary, parts, request, tensor, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

ROWS = 8
CLIENTS = 2 * ROWS
"""While a batch runs, as many requests as make the next one wait."""
TENANTS = """
[tenants.acme]
granules = 1
burst = 2
models = ["conv", "identity"]
[tenants.globex]
granules = 1
lend = "{lend:.3f}ms"
models = ["identity"]
[models.conv]
max_batch = {rows}
"""
X = values("conv")


def took(network: subjects.Network) -> float:
    """Milliseconds of a whole batch on one core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(network.onnx, options, providers=["CPUExecutionProvider"])
    found = []
    for _ in range(5):
        began = time.perf_counter()
        session.run(None, {"x": values("conv", ROWS)})
        found.append(1e3 * (time.perf_counter() - began))
    return min(found)


@pytest.fixture(scope="module", params=["tenants' processes", "device process"])
def server(standard: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Running]:
    """Batches of all rows take longer than globex lends even if both cores help, and those of two do not on one."""
    folder = tmp_path_factory.mktemp("cutting")
    subjects.write(folder, {"conv"}, plans=False)
    (folder / "identity").symlink_to(standard / "identity")
    lend = 0.35 * took(subjects.conv())
    start = running_device if request.param == "device process" else running
    with start(configure(folder / "greenlane.toml", folder, TENANTS.format(lend=lend, rows=ROWS))) as server:
        yield server


@contextmanager
def asking(server: Running) -> Iterator[list[object]]:
    """Ask for single rows on many connections; yields what came instead of right answers."""
    right = subjects.expected(subjects.conv(), X)
    document = request(tensor("x", "FP32", list(X.shape), binary_data_size=X.nbytes), parameters={"binary_data_output": True})
    body = binary(document, X.tobytes())
    wrong: list[object] = []
    stop = Event()

    def ask() -> None:
        with client(server, **{"X-Tenant": "acme"}) as http:
            while not stop.is_set():
                answer = http.post("/v2/models/conv/infer", **body)
                if answer.status_code != 200:
                    wrong.append((answer.status_code, answer.text))
                    continue
                _, (data,) = parts(answer)
                if not np.allclose(np.frombuffer(data, np.float32), right.ravel(), rtol=1e-3, atol=1e-6):
                    wrong.append(data)

    with ThreadPoolExecutor(CLIENTS) as threads:
        for _ in range(CLIENTS):
            threads.submit(ask)
        try:
            yield wrong
        finally:
            stop.set()


def counted(http: httpx.Client) -> tuple[float, int]:
    """Batches of acme's that were cut, and works that went wide."""
    lines = http.get("/metrics").text.splitlines()
    (cut,) = [float(line.split()[-1]) for line in lines if line.startswith('greenlane_cut_batches_total{tenant="acme"}')]
    wide: dict[str, Any] = http.get("/admin/partitions").json()["partitions"]["acme"]["wide"]
    return cut, wide["launches"]


def launched(http: httpx.Client) -> int:
    """Works of acme's."""
    wide: dict[str, Any] = http.get("/admin/partitions").json()["partitions"]["acme"]["wide"]
    return int(wide["launches"]) + sum(wide["home_launches"].values())


def any_is_cut(http: httpx.Client) -> bool:
    """Whether any of the next 30 works of acme's is a batch that was cut."""
    before, cut = launched(http), counted(http)[0]
    until(lambda: launched(http) > before + 30)
    return counted(http)[0] > cut


def test_batches_are_cut_and_run_on_the_lenders_core_once_it_rests(server: Running) -> None:
    with client(server, **{"X-Tenant": "acme"}) as http:
        until(lambda: answered(http) == 200)
        until(lambda: "wide" in http.get("/admin/partitions").json()["partitions"]["acme"])
        with Connection(server) as lender:
            head = ["POST /v2/models/identity/infer HTTP/1.1", "Host: localhost", "X-Tenant: globex", "Content-Length: 100"]
            lender.send("\r\n".join([*head, "", ""]).encode())
            with asking(server) as wrong:
                until(lambda: not any_is_cut(http))  # At first a size may be tried, as the lender rested before.
                cut, wide = counted(http)
                lender.close()
                until(lambda: counted(http)[0] > cut and counted(http)[1] > wide)
        assert wrong == []
        assert wide == 0, "nothing runs on the lender's core while it has a request open"
        assert json.loads(http.get("/admin/partitions").text)["partitions"]["acme"]["wide"]["problems"] == []
