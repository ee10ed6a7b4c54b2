"""`python -m benchmarks.holding [--seconds S] [NAME ...]`: what a tenant feels of another's large requests, on a CPU.

One tenant asks 100 times a second for next to nothing, alone and beside another that does, again and again, what could keep
the interpreter that the workers of both share. Needs two cores.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx.parser
from onnx import numpy_helper

from greenlane.load import jobs
from greenlane.load.wire import Broken, Caller, post

from .servers import Server, launch

RATE = 100
"""Requests a second of the tenant that is looked at."""
PATIENCE = 60.0
"""Seconds for which an answer is waited for."""
_HEAD = '<ir_version: 8, opset_import: ["": 17]>'
_GRAPHS = {
    "little": "little (float[n] x) => (float[n] y) { y = Neg(x) }",
    "open": "open (float[n] x) => (float[m] y) { y = Identity(x) }",
    "expand": "expand (float[1] x, int64[1] n) => (float[m] y) { y = Expand(x, n) }",
    "texts": "texts (string[n] x) => (string[n] y) { y = Identity(x) }",
    "repeat": "repeat (string[1] x, int64[1] n) => (string[m] y) { y = Expand(x, n) }",
    "heavy": "heavy (float[n, 1024] x) => (float[n, 1024] y) { a = MatMul(x, w0) y = MatMul(a, w1) }",
}
_CONFIG = """
[models]
repository = "{root}"
[device]
backend = "cpu"
[tenants.victim]
granules = 1
models = ["little"]
[tenants.other]
granules = 1
memory = "2GiB"
models = ["open", "expand", "texts", "repeat", "heavy"]
"""


class Ask(NamedTuple):
    """A request of the other tenant's."""

    path: str
    body: bytes
    headers: dict[str, str]


def asks() -> dict[str, Ask]:
    """The requests of the other tenant, by name."""
    mib = 1 << 18  # Floats.
    return {
        "64 MB, output of another name": infer("open", b"\0" * 62_000_000, _input("x", "FP32", 15_500_000, 62_000_000)),
        "100 bytes for 95 MiB": _expand("expand", "FP32", 95 * mib),
        "100 bytes for 549 MiB": _expand("expand", "FP32", 549 * mib),
        "100,000 texts": _texts(100_000),
        "250,000 texts": _texts(250_000),
        "1,000,000 texts": _texts(1_000_000),
        "100 bytes for 1,000,000 texts": _expand("repeat", "BYTES", 1_000_000),
        "load of 60 MB again": Ask("/v2/repository/models/heavy/load", b"{}", {}),
    }


def _texts(count: int) -> Ask:
    return infer("texts", b"\4\0\0\0text" * count, _input("x", "BYTES", count, 8 * count))


def _expand(model: str, datatype: str, count: int) -> Ask:
    data = ["x"] if datatype == "BYTES" else [1.0]
    one = {"name": "x", "datatype": datatype, "shape": [1], "data": data}
    return infer(model, b"", one, {"name": "n", "datatype": "INT64", "shape": [1], "data": [count]})


def _input(name: str, datatype: str, count: int, nbytes: int) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": [count], "parameters": {"binary_data_size": nbytes}}


def infer(model: str, binary: bytes, *inputs: Mapping[str, object]) -> Ask:
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return Ask(f"/v2/models/{model}/infer", head + binary, {"Inference-Header-Content-Length": str(len(head))})


def build(root: Path) -> None:
    """Write every model below `root`."""
    for name, graph in _GRAPHS.items():
        model = onnx.parser.parse_model(_HEAD + graph)
        if name == "heavy":
            for index, shape in enumerate([(1024, 7680), (7680, 1024)]):
                model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), f"w{index}"))
        path = root / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(model.SerializeToString())


def watch(port: int, seconds: float) -> list[float]:
    """The latencies of the victim's requests in milliseconds, from when each was due."""
    ask = infer("little", b"", {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]})
    asked = _of(ask, "victim")
    with closing(Caller(port, PATIENCE)) as caller:
        caller.ask(asked)
        took, begun = [], time.perf_counter()
        for index in range(int(seconds * RATE)):
            due = begun + index / RATE
            time.sleep(max(0.0, due - time.perf_counter()))
            assert caller.ask(asked).status == 200
            took.append((time.perf_counter() - due) * 1e3)
    return took


def attack(port: int, ask: Ask, statuses: "multiprocessing.SimpleQueue[int]") -> None:
    """Send this again and again, and put each status into the queue."""
    caller, asked = Caller(port, PATIENCE), _of(ask, "other")
    while True:
        with suppress(Broken):
            statuses.put(caller.ask(asked, keep=False).status)


def _of(ask: Ask, tenant: str) -> jobs.Ask:
    return jobs.Ask(post(ask.path, {"X-Tenant": tenant, **ask.headers}, ask.body))


@contextmanager
def beside(port: int, ask: Ask) -> Iterator[Callable[[], str]]:
    """Another tenant at it, from its first answer on; what is given says how often, with which statuses."""
    context = multiprocessing.get_context("spawn")
    received = context.SimpleQueue()
    process = context.Process(target=attack, args=(port, ask, received), daemon=True)
    process.start()
    statuses = [received.get()]

    def count() -> str:
        while not received.empty():
            statuses.append(received.get())
        return ", ".join(f"{statuses.count(status)} of {status}" for status in sorted(set(statuses)))

    try:
        yield count
    finally:
        process.terminate()
        process.join()
        with closing(Caller(port, PATIENCE)) as caller:
            caller.ask(_of(_expand("expand", "FP32", 1), "other"))  # Which is answered after whatever is left.


def row(name: str, took: Sequence[float], note: str) -> str:
    p50, p99 = np.percentile(took, [50, 99])
    return f"{name:32} p50 {p50:6.2f}  p99 {p99:7.2f}  longest {max(took):7.2f} ms  {note}"


def resident(server: Server) -> int:
    """MiB that the device's process has."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) >> 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.holding", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round")
    parser.add_argument("names", nargs="*", metavar="NAME", help="what the other tenant does; without any, all there is")
    options = parser.parse_args(arguments)
    chosen = {name: ask for name, ask in asks().items() if not options.names or name in options.names}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        build(root)
        with launch(Path(folder), _CONFIG.format(root=root)) as server:
            for name, ask in chosen.items():
                print(row("alone", watch(server.port, options.seconds), f"{resident(server)} MiB"), flush=True)
                with beside(server.port, ask) as count:
                    took = watch(server.port, options.seconds)
                    print(row(name, took, f"{resident(server)} MiB, {count()}"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
