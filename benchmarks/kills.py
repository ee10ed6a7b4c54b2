"""`python -m benchmarks.kills`: who notices what when each of a server's processes is killed under load. Linux, two cores.

Two tenants on a core each are asked throughout, each by a client that keeps its connection and by one that makes a new
connection for each request. A process is killed with SIGKILL, and what each client got instead of right answers is printed, and
for how long it got none. With `--device-process` the cores have a device process, as a GPU has.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from greenlane.load import machine
from greenlane.load.jobs import Ask
from greenlane.load.wire import Broken, Caller, post
from server.demo import build

from .watched_server import ServerProcess, alive, server_process

TENANTS = ("acme", "globex")
BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}]}'
RIGHT = b'"data":[1.0,2.5]'
PACE = {"kept": 0.005, "new": 0.02}
"""Seconds between two requests of a client, by what it does with its connection."""
VICTIMS = {
    "nothing": "nothing",
    "acme": "process of acme",
    "(shared)": "shared HTTP process",
    "(unauthenticated)": "unauthenticated HTTP process",
    "(dispatcher)": "dispatcher",
    "forkserver": "forkserver",
    "watch": "watchdog of the supervisor",
}
"""Names of processes, and what the table calls them. The supervisor comes last, as it ends the server."""
DEVICE = {"dev 0": "device process"}


Noticed = tuple[Counter[str], float, float]
"""What came instead of right answers, the longest time without any, and when they came again, in seconds."""


@dataclass(slots=True)
class Client:
    """One client: when each right answer came, and what came instead of others, with the time, by `time.monotonic`."""

    port: int
    tenant: str
    connection: str
    answered: list[float] = field(default_factory=list)
    wrong: list[tuple[float, str]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Ask until stopped."""
        ask = Ask(post("/v2/models/identity/infer", {"X-Tenant": self.tenant}, BODY))
        with closing(Caller(self.port)) as caller:
            while not self.stopped.wait(PACE[self.connection]):
                try:
                    answer = caller.ask(ask)
                except Broken as broken:
                    refused = isinstance(broken.__cause__, ConnectionRefusedError)
                    self.wrong.append((time.monotonic(), "refused" if refused else "lost"))
                    continue
                if answer.status == 200 and RIGHT in answer.parts[0]:
                    self.answered.append(time.monotonic())
                else:
                    self.wrong.append((time.monotonic(), f"{answer.status}" if answer.status != 200 else "wrong"))
                if self.connection == "new":
                    caller.close()

    def noticed(self, begin: float, end: float) -> Noticed:
        """What it noticed between these times."""
        wrong = [(at, what) for at, what in self.wrong if begin <= at < end]
        right = [begin, *(at for at in self.answered if begin <= at < end), end]
        longest = max(after - before for before, after in pairwise(right))
        last = max((at for at, _ in wrong), default=begin)
        again = min((at for at in right[1:] if at > last), default=end) - begin if wrong else 0.0
        return Counter(what for _, what in wrong), longest, again


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line. Exit status 1 if a client was not served again."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kills", description="Who notices what when a process is killed."
    )
    parser.add_argument("--device-process", action="store_true", help="the cores have a device process, as a GPU has")
    parser.add_argument("--times", type=int, default=5, help="how often each is killed; default: 5")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="how long the clients are looked at after a kill; default: 6"
    )
    options = parser.parse_args(arguments)
    print(*(f"{name}: {text}" for name, text in machine.describe(machine.command("benchmarks.kills")).items()), sep="\n")
    victims = VICTIMS | DEVICE if options.device_process else VICTIMS
    print("\n| killed | client | instead of right answers | right again after | longest time without |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="greenlane-kills-") as folder:
        build(Path(folder, "models"))
        missed = 0
        for name, label in victims.items():
            # A forkserver is replaced when a process is to be started, and what it had forked is no child of the server's then.
            times = 1 if name == "forkserver" else options.times
            for client, rounds in _kill(name, times, options.seconds, Path(folder), options.device_process).items():
                _print(label, client, rounds)
                missed += sum(again >= options.seconds for _, _, again in rounds)
        took = _end(Path(folder), options.device_process)
        print(f"| supervisor | all | connections end | never: every process ended within {took * 1e3:.0f} ms | |")
    return int(bool(missed))


def _kill(victim: str, times: int, seconds: float, folder: Path, device: bool) -> dict[str, list[Noticed]]:
    """Kill one process so often under load; what each client noticed, by its name in the table."""
    seen: dict[str, list[Noticed]] = {}
    with _serving(folder, device) as server, _asking(server.port) as clients:
        time.sleep(1.0)
        for _ in range(times):
            begin = time.monotonic()
            if victim != "nothing":
                os.kill(_find(server, victim), signal.SIGKILL)
            time.sleep(seconds)
            for client in clients:
                name = f"{client.tenant}, {client.connection} connection"
                seen.setdefault(name, []).append(client.noticed(begin, time.monotonic()))
    return seen


def _end(folder: Path, device: bool) -> float:
    """Kill the supervisor under load, and return after how many seconds every other process had ended too."""
    with _serving(folder, device) as server, _asking(server.port):
        time.sleep(1.0)
        family, begin = server.family(), time.monotonic()
        os.kill(server.popen.pid, signal.SIGKILL)
        while alive(family):
            time.sleep(0.002)
        took = time.monotonic() - begin
        server.close()
    return took


def _print(label: str, client: str, rounds: Sequence[Noticed]) -> None:
    kinds = sorted({kind for counts, _, _ in rounds for kind in counts})
    texts = [f"{kind}: {_spread([counts.get(kind, 0) for counts, _, _ in rounds])}" for kind in kinds]
    again = [after for _, _, after in rounds]
    after = _spread([round(each * 1e3) for each in again]) + " ms" if any(again) else ""
    longest = _spread([round(longest * 1e3) for _, longest, _ in rounds])
    print(f"| {label} | {client} | {', '.join(texts) or 'nothing'} | {after} | {longest} ms |", flush=True)


def _spread(values: Sequence[int]) -> str:
    """The median, and the most if that is more."""
    middle, most = round(median(values)), max(values)
    return f"{middle:,}" if middle == most else f"{middle:,} (most {most:,})"


@contextmanager
def _serving(folder: Path, device: bool) -> Iterator[ServerProcess]:
    config = folder / "greenlane.toml"
    tenants = "".join(f'[tenants.{name}]\ncores = 1\nmodels = ["*"]\n' for name in TENANTS)
    config.write_text(f'[server]\nport = 0\ndrain_grace = "0s"\n[models]\nrepository = "{folder}/models"\n{tenants}')
    module = "tests.end_to_end.device_server" if device else "server"
    with server_process([sys.executable, "-m", module, "--config", str(config)]) as server:
        yield server


@contextmanager
def _asking(port: int) -> Iterator[list[Client]]:
    clients = [Client(port, tenant, connection) for tenant in TENANTS for connection in PACE]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        for client in clients:
            client.stopped.set()
        for thread in threads:
            thread.join()


def _find(server: ServerProcess, victim: str) -> int:
    """The process of this name; the server is being asked, so one that is being replaced comes soon."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for one in server.family():
            if one.state != "Z" and _is(one.pid, one.name, victim):
                return one.pid
        time.sleep(0.01)
    raise RuntimeError(f"there is no process {victim}; there are {', '.join(one.name for one in server.family())}")


def _is(pid: int, name: str, victim: str) -> bool:
    words = {"forkserver": b"multiprocessing.forkserver", "watch": b"server.host.watch"}.get(victim)
    if words is None:
        return name == f"greenlane {victim}"[:15]
    with suppress(OSError):
        return words in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


if __name__ == "__main__":
    sys.exit(main())
