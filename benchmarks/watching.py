"""`python -m benchmarks.watching`: what an open status page and a scrape of the metrics cost, each once a second.

A server of two tenants on CPU cores, each with two small models and a request now and then, is asked for nothing, GET
/admin/status, GET /metrics, and both, in turns. What counts is the time that all threads of a process were on a core, by
/proc/PID/task/TID/schedstat, in percent of one core. With `--victim RATE` one tenant gets so many requests a second, of which
p50 and p99 are printed, and the processes' time says little.
"""

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from greenlane.load.figures import percentile
from greenlane.load.jobs import Ask, OpenLoop, Seen, Tally
from greenlane.load.processes import begun
from greenlane.load.schedule import poisson
from greenlane.load.server_process import ServerProcess, server_process
from greenlane.load.wire import post
from server.demo import build

ASKED: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "page": ("/admin/status",),
    "scrape": ("/metrics",),
    "both": ("/admin/status", "/metrics"),
}
TENANTS = "acme", "globex"
LATENCIES = "victim p50", "victim p99"
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}).encode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.watching", description=__doc__)
    parser.add_argument("--seconds", type=int, default=30, help="for each kind in each round (default: 30)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3; the table has medians of them")
    parser.add_argument("--victim", type=float, metavar="RATE", help="requests a second of a tenant whose latency is printed")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "server", "--config", str(configuration(Path(folder)))]
        with server_process(words) as server:
            found: dict[str, list[dict[str, float]]] = {kind: [] for kind in ASKED}
            for number in range(options.rounds):
                for kind, paths in ASKED.items():
                    jobs = [victim(server, options.victim, options.seconds, number)] if options.victim else []
                    with begun(jobs) as (_, processes):
                        row = measure(server, paths, options.seconds)
                        found[kind].append(row | latency([process.result() for process in processes]))
    names = list(found["nothing"][0])
    print(f"{'asked for':10}", *(f"{name:>20}" for name in names))
    for kind, rounds in found.items():
        cells = ((median(each[name] for each in rounds), "ms" if name in LATENCIES else " %") for name in names)
        print(f"{kind:10}", *(f"{value:17.2f} {unit}" for value, unit in cells))


def configuration(folder: Path) -> Path:
    """Write the demo's models and the configuration of a server of two tenants, and return where the latter is."""
    build(folder / "models")
    tenants = "".join(f'[tenants.{name}]\ncores = 1\nmodels = ["*"]\n' for name in TENANTS)
    path = folder / "greenlane.toml"
    path.write_text(f'[server]\nport = 0\n[device]\nbackend = "cpu"\n[models]\nrepository = "models"\n{tenants}')
    return path


def measure(server: ServerProcess, paths: Sequence[str], seconds: int) -> dict[str, float]:
    """Percent of a core that each process took, while these were asked for once a second."""
    before, began = on_core(server), time.monotonic()
    for second in range(1, seconds + 1):
        for path in paths:
            get(server.url + path)
        for name in TENANTS:
            get(f"{server.url}/v2/models/identity/infer", BODY, **{"X-Tenant": name})
        time.sleep(max(0.0, began + second - time.monotonic()))
    after, elapsed = on_core(server), time.monotonic() - began
    return {name: (after[name] - before[name]) / 1e7 / elapsed for name in before}


def victim(server: ServerProcess, rate: float, seconds: int, seed: int) -> OpenLoop:
    """Requests of the first tenant at this rate for a little less than the time."""
    ask = Ask(post("/v2/models/identity/infer", {"X-Tenant": TENANTS[0]}, BODY))
    return OpenLoop(port=server.port, ask=ask, arrivals=poisson(rate, seconds - 1, seed), connections=4, most=32)


def latency(seen: Sequence[Seen | Tally]) -> dict[str, float]:
    """The victim's, in milliseconds, if there was one. Raises RuntimeError if a request failed."""
    found = [each.samples for each in seen if isinstance(each, Seen)]
    if any(status != 200 for samples in found for status in samples.status):
        raise RuntimeError("requests of the victim failed")
    parts = zip(LATENCIES, (0.5, 0.99), strict=True)
    return {name: percentile(sorted(samples.latency), part) / 1e3 for samples in found for name, part in parts}


def get(url: str, body: bytes | None = None, **headers: str) -> None:
    """Ask once."""
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        answer.read()


def on_core(server: ServerProcess) -> dict[str, int]:
    """Nanoseconds that all threads of the supervisor, the shared process and the tenants' were on a core, by the kernel."""
    names = {f"greenlane {name}"[:15]: name for name in (*TENANTS, "(shared)")}
    pids = {server.popen.pid: "supervisor"} | {each.pid: names[each.name] for each in server.family() if each.name in names}
    return {
        name: sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
        for pid, name in pids.items()
    }


if __name__ == "__main__":
    main()
