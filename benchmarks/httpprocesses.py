"""`python -m benchmarks.httpprocesses`: what several HTTP processes bring a tenant that has the whole device.

For each number of processes a server of its own; they are asked in turns, over several numbers of connections, by one client,
and requests are joined into batches. Compared is the engine with batches, one after another. With `--device cpu` the cores
have a device process, as a GPU has: that shows that it works, and nothing of a GPU. It prints a line of JSON for each row.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from engines import RuntimeSettings, load_engine
from greenlane.options import count, positive
from partitions import open_device

from . import nets
from .client import Load, drive
from .depth import ROUNDS, bare_rate, request_of
from .nets import MOST_ROWS, NETS
from .seat import open_seat
from .servers import launch
from .sidebyside import WARM_UP

CONNECTIONS = (1, 8, 32)
MODELS = ("mob", "enc")
PROGRAMS = {"cuda": "server", "cpu": "tests.end_to_end.device_server"}


def main() -> int:
    """Run a command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.httpprocesses", description="One HTTP process against several.")
    parser.add_argument("--device", choices=tuple(PROGRAMS), default="cuda")
    parser.add_argument("--seconds", type=positive, default=2.0, help="length of a round; default: 2")
    parser.add_argument("--processes", type=count, nargs="+", default=[1, 2, 4], help="default: 1 2 4")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--repository", type=Path, required=True, help="models, as benchmarks.change writes them")
    options = parser.parse_args()
    nets.write_all(options.repository, options.device)
    granules, rates = engine_rates(options.device, options.repository, options.models, options.seconds)
    compare(options, granules, rates)
    return 0


def engine_rates(kind: str, repository: Path, models: Sequence[str], seconds: float) -> tuple[int, dict[str, float]]:
    """How many granules the device has, and of each engine on all of them the rows a second in its largest batches."""
    rates = {}
    with ExitStack() as stack:
        device = stack.enter_context(closing(open_device(kind)))
        partition = stack.enter_context(closing(device.carve(range(len(device.granules)))))
        for name in models:
            path, x = repository / name / "1" / "model.onnx", NETS[kind][name].draw(MOST_ROWS, 0)
            settings = RuntimeSettings(copies="auto", warm_up="usual")
            engine = stack.enter_context(closing(load_engine(path, device, settings, MOST_ROWS)))
            with closing(open_seat(device, engine, partition, x)) as seat:
                rates[name] = MOST_ROWS * median(bare_rate(seat, seconds) for _ in range(ROUNDS))
        return len(device.granules), rates


def compare(options: argparse.Namespace, granules: int, rates: dict[str, float]) -> None:
    """Ask a server of each number of processes. Blocks. Raises LoadFailed."""
    with ExitStack() as stack:
        servers = {}
        for processes in options.processes:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="greenlane-processes-")))
            text = configuration(options, granules, processes)
            servers[processes] = stack.enter_context(launch(folder, text, program=PROGRAMS[options.device]))
        for name in options.models:
            ask = request_of(name, NETS[options.device][name].draw(1, 0))
            for connections in CONNECTIONS:
                rounds: dict[int, list[Load]] = {processes: [] for processes in servers}
                for server in servers.values():
                    drive(server.port, ask, connections, WARM_UP)
                for _ in range(ROUNDS):
                    for processes, server in servers.items():
                        rounds[processes].append(drive(server.port, ask, connections, options.seconds))
                for processes, loads in rounds.items():
                    rate, p50 = median(load.rate for load in loads), median(load.p50 for load in loads)
                    row = {"model": name, "connections": connections, "HTTP processes": processes, "1/s": rate, "p50 us": p50}
                    print(json.dumps({**row, f"of the engine at batch {MOST_ROWS}": rate / rates[name]}), flush=True)


def configuration(options: argparse.Namespace, granules: int, processes: int) -> str:
    lines = ["[server]", 'default_tenant = "one"', "[models]", f'repository = "{options.repository.absolute()}"']
    for name in options.models:
        lines += [f"[models.{name}]", 'batch_delay = "0us"']
    lines += ["[device]", f'backend = "{options.device}"', 'mps = "off"', "[tenants.one]", f"granules = {granules}"]
    lines += [f"models = {json.dumps(list(options.models))}", f"http_processes = {processes}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
