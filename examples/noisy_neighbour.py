"""Shows, in half a minute and on CPU cores, what a partition does to a tenant's latency beside a noisy neighbour.

    .venv/bin/python examples/noisy_neighbour.py [--seconds 5]

Two servers are started, one after the other. In the first, `victim` and `neighbour` are tenants, each with half of this
machine's cores. In the second, one tenant has all cores and serves both clients. The victim's client sends 50 small
requests a second. It is measured alone, and beside a neighbour that keeps two connections busy with images. Each
client runs on the cores of its own half, so that the neighbour's client is not what is measured.

Latency counts from when a request was due: where the shared server cannot keep up, a queue builds up, and p99 is seconds.
It needs two cores. With two, clients and servers share them, so run it twice before you believe a number. Other
programs disturb a victim as a neighbour does: the last column says what they used of these cores meanwhile.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from time import perf_counter, sleep

from greenlane.load.machine import Others
from server.demo import build

RATE = 50
"""Requests of the victim's client a second."""
DISTURBED = 0.1
"""The part of the cores' time from which on other programs make the figures worth little."""
IMAGE = [1, 1, 256, 256]
"""The shape of the neighbour's input: a quarter of a MiB."""
PARTITIONS = """
[tenants.victim]
cores = {first}
models = ["identity"]
[tenants.neighbour]
cores = {second}
models = ["stripes"]
"""
SHARED = """
[tenants.everybody]
cores = {both}
models = ["identity", "stripes"]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="p99 of a tenant, alone and beside a noisy neighbour")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each of the four measurements takes")
    seconds = parser.parse_args().seconds
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("this needs two cores, one for each tenant")
    half = len(cores) // 2
    ours, theirs = cores[:half], cores[half : 2 * half]
    counts = {"first": half, "second": half, "both": 2 * half}
    disturbed = False
    print(f"{'':18} {'alone':>18} {'beside a neighbour':>21}   p99 beside / p99 alone   used by other programs")
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder, "models"))
        for name, tenants in (("own partition", PARTITIONS), ("shared", SHARED)):
            victim, neighbour = re.findall(r"tenants\.(\w+)", tenants)[0], re.findall(r"tenants\.(\w+)", tenants)[-1]
            with serving(Path(folder), tenants.format(**counts)) as port:
                os.sched_setaffinity(0, ours)
                others = Others(cores, whole=True)
                measure(port, victim, 1.0)  # The first requests of a connection are slower; they are not counted.
                alone = measure(port, victim, seconds)
                with busy(port, neighbour, theirs):
                    beside = measure(port, victim, seconds)
                used = others.share()
                os.sched_setaffinity(0, cores)
            ratio = p99(beside) / p99(alone)
            print(f"{name:18} {shown(alone):>18} {shown(beside):>21}   {ratio:22.1f}   {used:22.0%}")
            disturbed = disturbed or used >= DISTURBED
    if disturbed:
        print("Other programs were busy on these cores, which delays the victim too: run it again on a machine at rest.")


@contextmanager
def serving(folder: Path, tenants: str) -> Iterator[int]:
    """Run a server with these tenants until the block ends; gives its port."""
    config = folder / "greenlane.toml"
    config.write_text(f'[device]\nbackend = "cpu"\n[server]\ndrain_grace = "0s"\n[models]\nrepository = "models"\n{tenants}')
    command = [sys.executable, "-m", "server", "--config", str(config), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        log, port = "", 0
        for line in process.stderr:
            log += line
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                port = int(found[1])
            if port and "ready: " in log:
                break
        else:
            sys.exit(f"the server did not start:\n{log}")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # So that the log's pipe never fills.
        try:
            yield port
        finally:
            process.terminate()
            process.wait()


def measure(port: int, tenant: str, seconds: float) -> list[float]:
    """Send requests at a fixed rate; the milliseconds from when each was due to its answer."""
    post = poster(port, tenant, "identity", {"name": "x", "datatype": "FP32", "shape": [1, 4]}, bytes(16))
    milliseconds, began = [], perf_counter()
    for number in range(int(seconds * RATE)):
        due = began + number / RATE
        sleep(max(0.0, due - perf_counter()))
        post()
        milliseconds.append((perf_counter() - due) * 1000)
    return milliseconds


@contextmanager
def busy(port: int, tenant: str, cores: Sequence[int]) -> Iterator[None]:
    """Keep two connections of this tenant busy until the block ends, from a process on these cores."""
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=make_noise, args=(port, tenant, list(cores), started), daemon=True)
    process.start()
    started.wait()
    try:
        yield
    finally:
        process.kill()
        process.join()


def make_noise(port: int, tenant: str, cores: list[int], started: "threading.Event") -> None:
    """Send images on two connections, each of which waits for its answer. Runs until the process is killed."""
    os.sched_setaffinity(0, cores)
    image = {"name": "image", "datatype": "FP32", "shape": IMAGE}
    nbytes = 4
    for size in IMAGE:
        nbytes *= size

    def send() -> None:
        post = poster(port, tenant, "stripes", image, bytes(nbytes))
        while True:
            post()
            started.set()

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def poster(port: int, tenant: str, model: str, tensor: Mapping[str, object], data: bytes) -> Callable[[], None]:
    """A function that sends the same request again and again on one connection; it exits unless the answer is 200."""
    described = {**tensor, "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    headers = {"X-Tenant": tenant, "Inference-Header-Content-Length": str(len(head))}
    connection, body = http.client.HTTPConnection("127.0.0.1", port), head + data

    def post() -> None:
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            sys.exit(f"{model} of {tenant}: {answer.status} {text[:200]!r}")

    return post


def p99(milliseconds: Sequence[float]) -> float:
    return quantiles(milliseconds, n=100)[98]


def shown(milliseconds: Sequence[float]) -> str:
    return f"p99 {p99(milliseconds):.1f} ms"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
