"""`python -m benchmarks.accounts`: whether the account of a server on CPU cores adds up, and is what the kernel saw.

A server of two tenants with a core each is loaded by a closed loop a tenant, of works of one length after another. The account
is GET /admin/usage; the kernel's view is the time that the worker's thread was on a core (/proc/PID/task/TID/schedstat). The
thread also takes tickets and reports their ends, which is not the model's time.
"""

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx.parser

from greenlane.load.server_process import ServerProcess, server_process

SPIN = """<ir_version: 8, opset_import: ["": 17]>
spin (int64 turns, float[n, n] x) => (float[n, n] y) <bool go = {1}> {
  y = Loop (turns, go, x) <body = turn (int64 i, bool on, float[n, n] last) => (bool again, float[n, n] next) {
    again = Identity(on)  product = MatMul(last, last)  next = Tanh(product)
  }>
}"""
TURNS = 1000, 3000, 10000
TENANTS = "acme", "beta"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.accounts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each length (default: 10)")
    options = parser.parse_args(arguments)
    print("turns  works  us a work  used over the kernel's  sum over granted")
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "server", "--config", str(configuration(Path(folder)))]
        with server_process(words) as server:
            for turns in TURNS:
                works, each, kernel, total = measure(server, turns, options.seconds)
                print(f"{turns:5} {works:6} {each:10.0f} {kernel:23.3f} {total:17.4f}", flush=True)


def configuration(folder: Path) -> Path:
    """Write the model and the configuration of a server of two tenants, and return where the latter is."""
    (folder / "models" / "spin" / "1").mkdir(parents=True)
    model = onnx.parser.parse_model(SPIN).SerializeToString()
    (folder / "models" / "spin" / "1" / "model.onnx").write_bytes(model)
    tenants = "".join(f'[tenants.{name}]\ncores = 1\nmodels = ["spin"]\n' for name in TENANTS)
    path = folder / "greenlane.toml"
    path.write_text(f'[server]\nport = 0\n[device]\nbackend = "cpu"\n[models]\nrepository = "models"\n{tenants}')
    return path


def measure(server: ServerProcess, turns: int, seconds: float) -> tuple[int, float, float, float]:
    """Works, microseconds that each took, what was used over what the kernel saw, and what was accounted over what passed."""
    body = json.dumps(request(turns)).encode()
    for name in TENANTS:
        post(server.url, name, body)
    threads, before, began = on_core(server), usage(server.url), time.monotonic()
    with ThreadPoolExecutor(len(TENANTS)) as clients:
        list(clients.map(lambda name: load(server.url, name, body, seconds), TENANTS))
    after, now, elapsed = usage(server.url), on_core(server), time.monotonic() - began
    (old,), (new,) = before["devices"], after["devices"]
    grown = sum(max(now[name][thread] - ran for thread, ran in threads[name].items()) for name in TENANTS)  # The workers'.
    used = new["used"] - old["used"]
    works = sum(model["works"] for each in after["tenants"] for model in each["models"])
    works -= sum(model["works"] for each in before["tenants"] for model in each["models"])
    accounted = sum(new[key] - old[key] for key in ("used", "idle", "lent", "free"))
    return works, used / works * 1e6, used / (grown / 1e9), accounted / (new["units"] * elapsed)


def request(turns: int) -> dict[str, Any]:
    """One inference."""
    x = {"name": "x", "datatype": "FP32", "shape": [64, 64], "data": [0.1] * 4096}
    return {"inputs": [{"name": "turns", "datatype": "INT64", "shape": [], "data": [turns]}, x]}


def load(url: str, tenant: str, body: bytes, seconds: float) -> None:
    """Ask again and again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        post(url, tenant, body)


def post(url: str, tenant: str, body: bytes) -> None:
    """Ask once."""
    headers = {"X-Tenant": tenant, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v2/models/spin/infer", body, headers)) as answer:
        answer.read()


def usage(url: str) -> dict[str, Any]:
    """The account now."""
    with urllib.request.urlopen(f"{url}/admin/usage") as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def on_core(server: ServerProcess) -> dict[str, dict[str, int]]:
    """Nanoseconds that each thread of each tenant's process was on a core, by the kernel."""
    found = {}
    for process in server.family():
        name = process.name.removeprefix("greenlane ")
        if name in TENANTS:
            tasks = Path(f"/proc/{process.pid}/task").iterdir()
            found[name] = {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}
    return found


if __name__ == "__main__":
    main()
