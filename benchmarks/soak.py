"""`python -m benchmarks.soak`: random load on three tenants for minutes, with everything that may happen to a server. Linux.

Right requests (every answer is checked), wrong ones, slow readers, and clients that leave; beside that repartitions with a
ladder and without, lending, loads of models, reloads of the configuration, and kills of two tenants' processes. The device is
16 granules on whatever cores there are (`benchmarks.virtualcores`), or with `--device cuda` a GPU; with `--mps` each tenant has
a device process there, and these are killed too. The load comes from threads of this one process, at a bounded rate: latencies
say how long clients waited here, not what the server can do.

Exit status 0 if it held: no wrong answer, none missing but on connections that a kill ended, memory and descriptors flat, the
account's sums right, and every tenant answered at the end. With `--fence RATE` acme has hogs of memory and PCIe as well, and is
held to such a part of both; then some of their works have to have run narrow, and but on a GPU some to have waited.
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from greenlane.load import machine

from .arrangement import literal
from .hogs import outgoing, reading
from .soak_clients import HOGS, MODELS, ROWS, Client, onnx_of
from .soak_events import Events, Late, Sample, ask, oversleep, watch
from .soak_report import Account, Report
from .watched_server import ServerProcess, server_process

TENANTS = """[tenants.acme]
granules = 6
ladder = [4, 6]
models = ["*"]
{acme}
[tenants.beta]
granules = 4
burst = 8
models = ["*"]
{beta}
[tenants.gamma]
granules = 4
lend = true
models = ["*"]
"""
LIMITS = (
    {"acme": "", "beta": ""},
    {"acme": "requests_per_second = 100000", "beta": ""},
    {"acme": "", "beta": "max_connections = 500"},
)
"""What reloads change; none of it refuses anything here."""
PLANS = [{"acme": a, "beta": b, "gamma": c} for a, b, c in ((6, 4, 4), (4, 4, 4), (6, 5, 4), (4, 4, 3), (6, 4, 3))]
KILLED = "beta", "gamma"
"""acme's process lives throughout, so that its memory can be looked at."""
FENCED = "memory_bandwidth = {0}\npcie = {0}\n"
HOG_PACE = 0.002
KINDS = {"kept": (2, 0.03), "new": (1, 0.06), "wrong": (1, 0.08), "leave": (1, 0.15), "slow": (1, 2.0)}
"""Clients a tenant, and seconds between two requests of each on average, by what they do."""


@dataclass(slots=True)
class Soak:
    """One run: its clients, events and samples."""

    server: ServerProcess
    events: Events
    clients: list[Client]
    stopped: threading.Event
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)
    late: list[Late] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Do all of it for so long. Python collects no garbage meanwhile: beside half a million outcomes that stops clients."""
        runs = [
            self.events.run,
            lambda: watch(self.server, self.stopped, self.samples),
            lambda: oversleep(self.stopped, self.late),
            *(each.run for each in self.clients),
        ]
        threads = [threading.Thread(target=run) for run in runs]
        gc.disable()
        for thread in threads:
            thread.start()
        try:
            time.sleep(seconds)
        finally:
            self.stopped.set()
            for thread in threads:
                thread.join()
            gc.enable()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Random load and faults for minutes.")
    parser.add_argument("--minutes", type=float, default=10.0, help="default: 10")
    parser.add_argument("--seed", type=int, default=0, help="of what happens when; default: 0")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mps", action="store_true", help="a device process for each tenant; with --device cuda")
    parser.add_argument("--every", type=float, default=1.5, help="seconds between two changes, on average; default: 1.5")
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds between two kills; default: 20")
    parser.add_argument("--fence", metavar="RATE", help="give acme hogs, and hold it to this part of memory bandwidth and PCIe")
    parser.add_argument("--json", type=Path, help="where the report is written to as JSON")
    options = parser.parse_args(arguments)
    facts = machine.describe(machine.command("benchmarks.soak")) | machine.load()
    with tempfile.TemporaryDirectory(prefix="greenlane-soak-") as folder:
        report = soak(Path(folder), options)
    print(*(f"{name}: {text}" for name, text in facts.items()), "", *report.lines(), sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, **report.document()}, indent=1))
    return int(bool(report.failures()))


def soak(folder: Path, options: argparse.Namespace) -> Report:
    """Serve, and do all of it; the report."""
    texts = [configuration(folder, options.device, options.mps, limits) for limits in changes(options.fence)]
    config = folder / "greenlane.toml"
    for name, width in MODELS.items():
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "1" / "model.onnx").write_bytes(onnx_of(name))
        (folder / "models" / name / "config.pbtxt").write_text(_pbtxt(name, width))
    if options.fence:
        write_hogs(folder / "models", options.device)
    config.write_text(texts[0])
    chance, stopped = random.Random(options.seed), threading.Event()
    program = (
        ["server"] if options.device == "cuda" else ["benchmarks.virtualcores", *(["--bandwidth"] if options.fence else [])]
    )
    with server_process([sys.executable, "-m", *program, "--config", str(config)]) as server:
        clients = [
            Client(server.port, tenant, kind, pace, random.Random(chance.getrandbits(64)), stopped)
            for tenant in ("acme", *KILLED)
            for kind, (count, pace) in KINDS.items()
            for _ in range(count)
        ]
        if options.fence:
            hogs = ("reading", "reading", "outgoing")
            clients += [
                Client(server.port, "acme", kind, HOG_PACE, random.Random(chance.getrandbits(64)), stopped) for kind in hogs
            ]
        events = Events(
            server,
            config,
            texts,
            PLANS,
            [name for tenant in KILLED for name in ([tenant, f"dev {tenant}"] if options.mps else [tenant])],
            options.every,
            options.kill_every,
            random.Random(chance.getrandbits(64)),
            stopped,
        )
        run = Soak(server, events, clients, stopped)
        run.run(options.minutes * 60)
        answered = _answered(server.port, chance)
        account = Account.of(ask(server.port, "GET", "/admin/usage")[1])
        fence = (
            ask(server.port, "GET", "/admin/partitions")[1]["partitions"]["acme"].get("fence", {}) if options.fence else None
        )
        log = [line for line in server.log if "Traceback" in line or "ERROR" in line]
    seconds, device = options.minutes * 60, options.device
    return Report(seconds, clients, events.done, run.samples, account, answered, log, fence, device, run.late)


def changes(fence: str | None) -> list[dict[str, str]]:
    """What reloads change; with a fence acme has it in all of them, and another one in the last."""
    if not fence:
        return list(LIMITS)
    rates = [literal(fence)] * (len(LIMITS) - 1) + ['"auto"']
    return [each | {"acme": FENCED.format(rate) + each["acme"]} for rate, each in zip(rates, LIMITS, strict=True)]


def write_hogs(models: Path, device: str) -> None:
    """Those that a GPU feels, or two cores."""
    made = {"reading": reading(256, 4) if device == "cuda" else reading(16), "outgoing": outgoing()}
    for name in HOGS:
        (models / name / "1").mkdir(parents=True)
        (models / name / "1" / "model.onnx").write_bytes(made[name].onnx)


def configuration(folder: Path, device: str, mps: bool, limits: dict[str, str]) -> str:
    """The text of a configuration file."""
    device = f'backend = "{device}"\nmps = "{"on" if mps else "off"}"'
    head = '[server]\nport = 0\ndrain_grace = "0s"\n[device]\n{}\n[models]\nrepository = "{}/models"\n'
    return head.format(device, folder) + TENANTS.format(**limits)


def _pbtxt(name: str, width: int) -> str:
    tensors = "".join(
        f'{where} [ {{ name: "{tensor}" data_type: TYPE_FP32 dims: [ {width} ] }} ]\n'
        for where, tensor in (("input", "x"), ("output", "y"))
    )
    return f'name: "{name}"\nmax_batch_size: {ROWS}\n{tensors}dynamic_batching {{ }}\n'


def _answered(port: int, chance: random.Random) -> dict[str, int]:
    """How many of 20 right requests each tenant answers after all of it."""
    found = {}
    for tenant in ("acme", *KILLED):
        asked = Client(port, tenant, "kept", 0.001, chance, threading.Event())
        thread = threading.Thread(target=asked.run)
        thread.start()
        until = time.monotonic() + 30
        while len(asked.outcomes) < 20 and time.monotonic() < until:
            time.sleep(0.01)
        asked.stopped.set()
        thread.join()
        found[tenant] = sum(outcome.what == "right" for outcome in asked.outcomes[:20])
    return found


if __name__ == "__main__":
    sys.exit(main())
