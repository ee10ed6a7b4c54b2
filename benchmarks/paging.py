"""How long models that were paged out take to come back on CPU cores, and what their first requests wait for that.

    python -m benchmarks.paging --rounds 20 --megabytes 50

For each model a server has two copies of it and a budget with room for one. Requests alternate between the two, so each
pages one copy out and brings the other one back; a second request to the same copy finds it there.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from greenlane.load.server_process import server_process
from server import demo

CONFIG = """
[server]
port = 0
drain_grace = "0s"
[device]
backend = "cpu"
[models]
repository = "models"
[tenants.acme]
granules = 1
models = ["*"]
"""
SIDE = 1024
REQUESTS: dict[str, dict[str, Any]] = {
    "identity": {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0.5] * 4},
    "stripes": {"name": "image", "datatype": "FP32", "shape": [1, 1, 16, 16], "data": [0.5] * 256},
    "matrices": {"name": "x", "datatype": "FP32", "shape": [1, SIDE], "data": [1.0] * SIDE},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how often each copy is brought back")
    parser.add_argument("--megabytes", type=int, default=50, help="size of the weights of the third model")
    words = parser.parse_args()
    print("| model, its file | takes | first request: p50, worst | paging in and out, mean | resident: p50 |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        demo.build(models)
        add_matrices(models / "matrices", words.megabytes)
        for name in REQUESTS:
            print(measured(Path(folder, name), models / name, words.rounds), flush=True)
    return 0


def add_matrices(model: Path, megabytes: int) -> None:
    """A model that multiplies by square matrices, one after another, of so many megabytes together."""
    count = max(1, megabytes * 10**6 // (SIDE * SIDE * 4))
    draw = np.random.default_rng(count)
    weights = [numpy_helper.from_array(draw.random((SIDE, SIDE), np.float32) / SIDE, f"w{index}") for index in range(count)]
    names = ["x", *(f"t{index}" for index in range(1, count)), "y"]
    nodes = [helper.make_node("MatMul", [names[index], f"w{index}"], [names[index + 1]]) for index in range(count)]
    x, y = (helper.make_tensor_value_info(each, TensorProto.FLOAT, ["n", SIDE]) for each in "xy")
    path = model / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    graph = helper.make_graph(nodes, "matrices", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def measured(folder: Path, model: Path, rounds: int) -> str:
    """A row of the table, from a server with two copies of this model."""
    copies = [f"{model.name}_{number}" for number in (1, 2)]
    for copy in copies:
        shutil.copytree(model, folder / "models" / copy)
        settings = folder / "models" / copy / "config.pbtxt"
        if settings.exists():
            settings.write_text(settings.read_text().replace(f'name: "{model.name}"', f'name: "{copy}"'))
    (folder / "greenlane.toml").write_text(CONFIG)
    with serving(folder) as http:
        takes = memory(http)["used"] // 2
    (folder / "greenlane.toml").write_text(f"{CONFIG}device_memory = {takes * 3 // 2}\npaging = true\n")
    first: list[float] = []
    resident: list[float] = []
    with serving(folder) as http:
        before = memory(http)
        for _ in range(rounds):
            for copy in copies:
                paged = copy in [each["name"] for each in memory(http)["models"] if each["paged"]]
                (first if paged else resident).append(timed(http, copy, REQUESTS[model.name]))
                resident.append(timed(http, copy, REQUESTS[model.name]))
        after = memory(http)
    assert first, "nothing was paged out"
    ways = [("page_ins", "page_in_seconds"), ("page_outs", "page_out_seconds")]
    means = [1e3 * (after[seconds] - before[seconds]) / max(1, after[count] - before[count]) for count, seconds in ways]
    size = (model / "1" / "model.onnx").stat().st_size
    begins = f"| `{model.name}`, {size / 1e6:.3g} MB | {takes / 2**20:.3g} MiB"
    found = f"{1e3 * statistics.median(first):.1f}, {1e3 * max(first):.1f} ms ({len(first)})"
    return f"{begins} | {found} | {means[0]:.1f}, {means[1]:.1f} ms | {1e3 * statistics.median(resident):.2f} ms |"


def timed(http: httpx.Client, model: str, inputs: dict[str, Any]) -> float:
    """Seconds of one request."""
    began = time.perf_counter()
    answer = http.post(f"/v2/models/{model}/infer", json={"inputs": [inputs]})
    took = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    return took


def memory(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/admin/memory").json()["tenants"][0]
    return found


@contextmanager
def serving(folder: Path) -> Iterator[httpx.Client]:
    """A client of a server of its own."""
    words = [sys.executable, "-m", "server", "--config", str(folder / "greenlane.toml"), "--log-level", "info"]
    with server_process(words) as server, httpx.Client(base_url=server.url, headers={"X-Tenant": "acme"}, timeout=60) as http:
        yield http


if __name__ == "__main__":
    sys.exit(main())
