"""`python -m benchmarks.revisions NAME=CHECKOUT NAME=CHECKOUT ...`: what a request costs the servers of several checkouts.

Each serves the demo as `python -m server` of its own .venv (made by `scripts/install cpu`, or with `--compiled`), all on the
first core, and the client is on the last. They take turns, so that a machine's moods meet all of them. Printed are answers
a second and the CPU time of all processes of the server by answer, as medians, and both over those of the first checkout.
"""

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from .cases import Request
from .client import drive
from .server_process import free_port

PATH = "/v2/models/identity/infer"
TICK = 1e6 / os.sysconf("SC_CLK_TCK")
"""Microseconds of what /proc counts CPU time in."""


class Server(NamedTuple):
    """A server that runs: its port, and the session that all of its processes belong to."""

    port: int
    session: int

    def cpu(self) -> float:
        """Microseconds that its processes have run, those that ended aside."""
        fields = [_fields(path) for path in Path("/proc").glob("[0-9]*")]
        return sum(TICK * (int(each[11]) + int(each[12])) for each in fields if each and int(each[3]) == self.session)


class Round(NamedTuple):
    """Answers a second, and microseconds of CPU for one."""

    rate: float
    cost: float


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=__doc__)
    parser.add_argument("checkouts", nargs="+", metavar="NAME=CHECKOUT")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as running:
        checkouts = dict(word.split("=", 1) for word in options.checkouts)
        servers = {name: running.enter_context(_running(Path(path), cores[0])) for name, path in checkouts.items()}
        os.sched_setaffinity(0, {cores[-1]})
        for kind, request in _requests().items():
            for connections in (1, 32):
                rounds = _measure(servers, request, connections, options.rounds, options.seconds)
                _print(f"{kind}, {connections} connections", rounds)
    return 0


def _requests() -> dict[str, Request]:
    x = np.arange(4, dtype=np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
    binary = {**tensor, "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [binary], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    document = json.dumps({"inputs": [{**tensor, "data": x.tolist()}]}).encode()
    return {
        "binary": Request(PATH, {"Inference-Header-Content-Length": str(len(head))}, head + x.tobytes()),
        "json": Request(PATH, {}, document),
    }


@contextmanager
def _running(checkout: Path, core: int) -> Iterator[Server]:
    port = free_port()
    # -P: an installed wheel is run where there is one, not the sources beside it.
    words = [".venv/bin/python", "-P", "-m", "server", "--port", str(port)]
    command = ["taskset", "-c", str(core), *words]
    with subprocess.Popen(command, cwd=checkout, stderr=subprocess.PIPE, text=True, start_new_session=True) as popen:
        try:
            assert popen.stderr
            if not any("listening on" in line for line in popen.stderr):
                raise SystemExit(f"{checkout}: the server did not start; try {' '.join(words)} there")
            yield Server(port, popen.pid)
        finally:
            os.killpg(popen.pid, signal.SIGTERM)


def _measure(
    servers: dict[str, Server], request: Request, connections: int, rounds: int, seconds: float
) -> dict[str, list[Round]]:
    names, measured = list(servers), {name: list[Round]() for name in servers}
    for server in servers.values():
        drive(server.port, request, connections, seconds / 2)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began = servers[name].cpu()
            load = drive(servers[name].port, request, connections, seconds)
            measured[name].append(Round(load.rate, (servers[name].cpu() - began) / load.requests))
            time.sleep(0.05)
    return measured


def _print(title: str, measured: dict[str, list[Round]]) -> None:
    base = next(iter(measured.values()))
    print(title)
    for name, rounds in measured.items():
        rates = median(each.rate / other.rate for each, other in zip(rounds, base, strict=True))
        costs = median(each.cost / other.cost for each, other in zip(rounds, base, strict=True))
        rate, cost = median(each.rate for each in rounds), median(each.cost for each in rounds)
        print(f"  {name:12} {rate:8.0f}/s ({rates:.2f})  {cost:6.1f} us of CPU ({costs:.2f})", flush=True)


def _fields(process: Path) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty for a process that has ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    raise SystemExit(main())
