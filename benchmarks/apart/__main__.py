"""`python -m benchmarks.apart`: many tenants on one GPU, in one device process ("off") and in one each under MPS ("on").

Each tenant has one granule and the models `tiny` and `mob` (benchmarks.nets). For each form a server: what it takes at rest;
the answers a second of tenants one by one and all at once; a victim at 250 requests a second, alone, beside all others, beside
one that loads a model again and again, and beside PUTs of partitions; kills of a tenant's process. PUTs give a granule of the
last tenant but one to the last and back, who are asked as often; so they need one granule more than tenants (an H100 has 15,
fourteen of 8 SMs and one of 20), and are left out without. Clients are processes of their own, in C, on the
last cores, the victim's on the very last one alone. "parts" says what the victim's works took on average, by the server's
counts. Prints a line for each, and JSON at the end. With `--device cpu` cores have
device processes, and a fake daemon is needed on PATH: that shows that it works, and nothing of a GPU.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, sleep
from typing import Any

from greenlane.load.wire import ask, post
from greenlane.options import count, positive
from tests.end_to_end import devices_server

from .. import nets
from ..deployment import granules
from ..depth import request_of
from ..watched_server import ServerProcess, server_process

MODELS = "tiny", "mob"
RATE = 250
"""Requests a second of the victim."""
CONNECTIONS = 4
SOME = 5
"""Tenants of whom the rate is taken one by one."""
PATIENCE = 180.0
"""Seconds until all models have to be served: kernels may have to be compiled."""
PROGRAMS = {"cuda": "server", "cpu": "tests.end_to_end.devices_server"}
PARTS = {
    "request": "nv_inference_request_duration_us",
    "queue": "nv_inference_queue_duration_us",
    "run": "nv_inference_compute_infer_duration_us",
    "on its units": "greenlane_used_unit_seconds_total",
}
"""What is said of the victim's works, in microseconds, and whence; the last times its units, by the device's clock if any."""
DEVICES = {"cuda": 'backend = "cuda"', "cpu": 'backend = "cpu"\ncores = "0-1"'}


def main() -> int:
    """Run a command line; the exit status, which is 1 if a PUT was refused."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.apart", description="One device process, or one for each tenant."
    )
    parser.add_argument("--device", choices=tuple(PROGRAMS), default="cuda")
    parser.add_argument("--tenants", type=count, default=15, help="default: 15")
    parser.add_argument("--forms", nargs="+", choices=("off", "on"), default=["off", "on"], help="values of `mps`")
    parser.add_argument("--seconds", type=positive, default=2.5, help="of each figure; default: 2.5")
    parser.add_argument("--clients", type=count, default=4, help="cores for clients, of which the victim's has one; default: 4")
    parser.add_argument("--kills", type=count, default=5, help="of a tenant's process; default: 5")
    parser.add_argument("--puts", type=count, default=20, help="PUTs of partitions, at least; default: 20")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    found = {}
    with TemporaryDirectory(prefix="greenlane-apart-") as folder:
        bench = Bench(Path(folder), options)
        for form in options.forms:
            found[form] = bench.run(form)
    text = json.dumps(found)
    print(text)
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    return int(bench.refused)


class Bench:
    """The servers, one after another, and their clients."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._options = options
        self._tenants = [chr(ord("a") + number) for number in range(options.tenants)]
        cores = sorted(os.sched_getaffinity(0))
        self._clients, self._client = frozenset(cores[-options.clients : -1] or cores), frozenset(cores[-1:])
        self._cores = frozenset(cores[: -options.clients] or cores)
        self._spare = (granules("cuda", ()) if options.device == "cuda" else devices_server.GRANULES) - options.tenants
        nets.write_all(folder / "models", options.device)
        self._loader = folder / "loader"
        source = Path(__file__).with_name("loader.c")
        subprocess.run(["cc", "-O2", "-o", str(self._loader), str(source), "-lm"], check=True)
        self.refused = False
        self._form = ""
        self._port = 0

    def run(self, form: str) -> dict[str, Any]:
        """The figures of one form: milliseconds, answers a second, cores, MiB."""
        self._form = form
        began = perf_counter()
        with self._served(form) as server:
            found: dict[str, Any] = {"seconds until all is served": round(perf_counter() - began, 1)}
            found |= self._at_rest(server)
            for model in MODELS:
                found |= self._together(server, model)
            for model in MODELS:
                found |= self._victim(model)
            found |= self._killed(server)
        return found

    @contextmanager
    def _served(self, form: str) -> Iterator[ServerProcess]:
        config = self._folder / f"{form}.toml"
        lines = ["[server]", 'drain_grace = "0s"', "port = 0", "[device]", DEVICES[self._options.device], f'mps = "{form}"']
        lines += ["[models]", f'repository = "{self._folder / "models"}"']
        for name in self._tenants:
            more = self._spare > 0 and name == self._tenants[-2]
            lines += [f"[tenants.{name}]", f"granules = {1 + more}", f"models = {json.dumps(MODELS)}", 'memory = "32MiB"']
        config.write_text("\n".join(lines), encoding="utf-8")
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)  # Inherited by the server.
        try:
            command = [sys.executable, "-m", PROGRAMS[self._options.device], "--config", str(config)]
            with server_process(command, signs=(" on http://",)) as server:
                os.sched_setaffinity(0, before)
                self._port = server.port
                for name in self._tenants:
                    self._until_served(name)
                yield server
        finally:
            os.sched_setaffinity(0, before)

    def _until_served(self, tenant: str) -> None:
        ends = monotonic() + PATIENCE
        for model in MODELS:
            while self._ask("GET", f"/v2/models/{model}/ready", tenant) != 200:
                if monotonic() > ends:
                    raise TimeoutError(f"{model} of {tenant} is not served after {PATIENCE:g} s")
                sleep(0.02)

    def _ask(self, method: str, path: str, tenant: str) -> int:
        body = b"{}" if method == "POST" else b""
        return ask(self._port, method, path, {"X-Tenant": tenant}, body, PATIENCE).status

    def _load(self, tenant: str, model: str, seconds: float, rate: int = 0) -> "subprocess.Popen[str]":
        path = self._folder / f"{tenant}.{model}"
        if not path.exists():
            asked = request_of(model, nets.NETS[self._options.device][model].draw(1, 0))
            path.write_bytes(post(asked.path, {"X-Tenant": tenant, **asked.headers}, asked.body))
        words = [str(self._loader), str(self._port), str(path), str(CONNECTIONS), str(seconds), str(rate)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(process.pid, self._client if rate and tenant == self._tenants[0] else self._clients)
        return process

    def _say(self, what: str, figures: object) -> None:
        print(f"mps = {self._form}: {what}: {figures}", flush=True)

    def _at_rest(self, server: ServerProcess) -> dict[str, Any]:
        before, seconds = _cpu(server), self._options.seconds
        sleep(seconds)
        found = {"cores at rest": round((_cpu(server) - before) / seconds, 2), "processes": len(server.family())}
        if self._options.device == "cuda":
            query = ["nvidia-smi", "--query-gpu=memory.used,temperature.gpu,clocks.sm", "--format=csv,noheader,nounits"]
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
            figures = subprocess.run([*query, "-i", visible], capture_output=True, text=True, check=True).stdout.split(",")
            found |= dict(zip(("MiB of the GPU", "degrees", "MHz"), map(int, figures), strict=True))
        self._say("at rest", found)
        return found

    def _together(self, server: ServerProcess, model: str) -> dict[str, Any]:
        some = self._tenants[:: max(1, len(self._tenants) // SOME)][:SOME]
        alone = [_figures(self._load(name, model, self._options.seconds / 2))["rate"] for name in some]
        before = _cpu(server)
        loads = [self._load(name, model, self._options.seconds) for name in self._tenants]
        rates = [_figures(each)["rate"] for each in loads]
        found = {
            "one": round(sum(alone) / len(alone)),
            "all": round(sum(rates)),
            "all over one by one": round(sum(rates) / len(rates) * len(alone) / sum(alone), 2),
            "cores": round((_cpu(server) - before) / self._options.seconds, 1),
        }
        self._say(f"{model}, answers a second", found)
        return {f"{model}, answers a second": found}

    def _victim(self, model: str) -> dict[str, Any]:
        victim, other, *_ = self._tenants
        _figures(self._load(victim, model, 0.5, RATE))
        found = {"alone": self._asked(model)}
        for busy in MODELS:
            loads = [self._load(name, busy, self._options.seconds + 0.8) for name in self._tenants[1:]]
            sleep(0.4)
            found[f"beside all others with {busy}"] = self._asked(model)
            for each in loads:
                _figures(each)
        asked, reloads = self._load(victim, model, self._options.seconds, RATE), 0
        while asked.poll() is None:
            for what in ("unload", "load"):
                self._ask("POST", f"/v2/repository/models/mob/{what}", other)
            reloads += 1
        found["beside loads"] = _figures(asked) | {"loads": reloads}
        if self._spare > 0:
            found["beside PUTs"] = self._beside_puts(model)
        for where, figures in found.items():
            over = {part: round(figures[part] / found["alone"][part], 2) for part in ("p50", "p99")}
            over["worst, ms more"] = round(figures["worst"] - found["alone"]["worst"], 2)
            self._say(f"victim {model} {where}", figures | {"over alone": over})
        return {f"victim {model}": found}

    def _asked(self, model: str) -> dict[str, Any]:
        """The victim's figures, and the parts of what a work of it took on average, in microseconds."""
        before = self._counts(model)
        found = _figures(self._load(self._tenants[0], model, self._options.seconds, RATE))
        now = self._counts(model)
        works = max(1.0, now["works"] - before["works"])
        return found | {"parts": {part: round((now[part] - before[part]) / works, 1) for part in PARTS}}

    def _counts(self, model: str) -> dict[str, float]:
        text = ask(self._port, "GET", "/metrics", {}, b"", PATIENCE).body.decode()

        def total(name: str, **labels: str) -> float:
            lines = re.findall(rf"^{name}{{(.*)}} (\S+)", text, re.MULTILINE)
            wanted = {f'{label}="{value}"' for label, value in labels.items()}
            return sum(float(value) for found, value in lines if wanted <= set(found.split(",")))

        victim = self._tenants[0]
        found = {part: total(name, tenant=victim, model=model) for part, name in PARTS.items()}
        found["on its units"] *= 1e6
        return found | {"works": total("nv_inference_exec_count", tenant=victim, model=model)}

    def _beside_puts(self, model: str) -> dict[str, Any]:
        """The victim while a granule goes to and fro; milliseconds of each PUT after the first two, which meet new shares."""
        victim, *_, giver, taker = self._tenants
        plans = ({giver: 1, taker: 2}, {giver: 2, taker: 1})
        first = [self._put(plan) for plan in plans]
        asked, *others = [self._load(name, model, self._options.seconds, RATE) for name in (victim, giver, taker)]
        done: list[tuple[int, float]] = []
        while asked.poll() is None or len(done) < self._options.puts:
            done += [self._put(plan) for plan in plans]
        for each in others:
            _figures(each)
        took = [each for _, each in done]
        puts = {"PUTs": dict(Counter(status for status, _ in first + done)), "median, ms": median(took), "most, ms": max(took)}
        return _figures(asked) | puts | {"first two, ms": [each for _, each in first], "each, ms": took}

    def _put(self, plan: dict[str, int]) -> tuple[int, float]:
        began, headers = perf_counter(), {"Content-Type": "application/json"}
        status = ask(self._port, "PUT", "/admin/partitions", headers, json.dumps(plan).encode(), PATIENCE).status
        self.refused |= status != 200
        return status, round((perf_counter() - began) * 1e3, 1)

    def _killed(self, server: ServerProcess) -> dict[str, Any]:
        """Seconds from a kill of the second tenant's device process, or that of all, until the tenant is served again."""
        victim, killed, *_ = self._tenants
        name = f"greenlane dev {killed if self._form == 'on' else 0}"
        seconds, asked = [], self._load(victim, "tiny", 600, RATE)
        for _ in range(self._options.kills):
            began = monotonic()
            os.kill(next(one.pid for one in server.family() if one.name == name), signal.SIGKILL)
            while self._ask("GET", "/v2/models/tiny/ready", killed) == 200 and monotonic() < began + 1:
                sleep(0.002)
            self._until_served(killed)
            seconds.append(round(monotonic() - began, 2))
            sleep(5.2)  # Processes that end sooner are started again later and later.
        asked.kill()
        asked.communicate()
        self._say("killed: seconds until served", seconds)
        return {"killed: seconds until served": seconds}


def _figures(load: "subprocess.Popen[str]") -> dict[str, Any]:
    output, _ = load.communicate()
    found: dict[str, Any] = json.loads(output)
    return found


def _cpu(server: ServerProcess) -> float:
    """CPU seconds of all its processes."""
    return sum(one.cpu_seconds for one in server.family())


if __name__ == "__main__":
    sys.exit(main())
