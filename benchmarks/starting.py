"""`python -m benchmarks.starting`: from the start of `python -m server` until it listens, and until it is ready.

Ten ONNX models of a few MB that each of three tenants is served, on a CPU core each (fewer tenants where there are fewer
cores) or on two granules of a GPU each; all files in the kernel's cache, Python's modules compiled, plans built and kernels on
disk by a start that is not counted. Printed are medians of the seconds, and of the CPU seconds
that the server's processes took until it was ready, by process. "Imports" is what importing the server takes by itself; the
main process and the forkserver both do that. With `--checkout FOLDER` the server of another revision takes turns with this one.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from subprocess import run
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from greenlane.load.server_process import ProcessStatus
from greenlane.options import count

from .servers import PYTHON
from .watched_server import server_process

HIDDEN = 700
"""Of each model's two layers: 4 MB of weights."""
_MODEL = f"""<ir_version: 8, opset_import: ["": 17], producer_name: "greenlane">
mlp (float[rows, {HIDDEN}] x) => (float[rows, {HIDDEN}] y) {{ a = MatMul(x, w0)  b = Relu(a)  y = MatMul(b, w1) }}"""
SHARES = {"cpu": "cores = 1", "cuda": "granules = 2"}
PROCESSES = ("main process", "forkserver", "tenants' processes", "others")


class Start(NamedTuple):
    """One start: seconds until it listened and until it was ready, and CPU seconds by process until then."""

    listening: float
    ready: float
    cpu: Mapping[str, float]


def main() -> int:
    """Run a command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.starting", description="From a start to ready.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--starts", type=count, default=9, metavar="N", help="of each revision; default: 9")
    parser.add_argument("--models", type=count, default=10, metavar="N", help="default: 10")
    tenants = min(3, len(os.sched_getaffinity(0)))
    parser.add_argument("--tenants", type=count, default=tenants, metavar="N", help=f"default: {tenants} here")
    parser.add_argument("--checkout", type=Path, metavar="FOLDER", help="another revision, installed there by scripts/install")
    options = parser.parse_args()
    pythons = {"here": [sys.executable]}
    if options.checkout:
        pythons[options.checkout.name] = [str(options.checkout / PYTHON), "-P"]
    with TemporaryDirectory(prefix="greenlane-starting-") as folder:
        config = write(Path(folder), options.models, options.tenants, options.device)
        os.environ |= {"PYTHONPYCACHEPREFIX": str(Path(folder, "compiled")), "PYTHONDONTWRITEBYTECODE": ""}
        for python in pythons.values():
            start(python, config)  # Modules are compiled, plans built, and files in the kernel's cache from now on.
        starts: dict[str, list[Start]] = {name: [] for name in pythons}
        imports: dict[str, list[tuple[float, float]]] = {name: [] for name in pythons}
        for _ in range(options.starts):
            for name, python in pythons.items():
                imports[name].append(timed([*python, "-c", "import server.__main__"]))
                starts[name].append(start(python, config))
    cores = len(os.sched_getaffinity(0))
    print(f"{options.device}: {options.models} models, {options.tenants} tenants, {options.starts} starts, {cores} cores")
    for name, found in starts.items():
        print("\n".join(report(name, found, imports[name])))
    return 0


def write(folder: Path, models: int, tenants: int, device: str) -> Path:
    """Write the repository and the configuration, and return that."""
    for number in range(models):
        path = folder / "models" / f"mlp{number}" / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(model(number))
    lines = ["[models]", f'repository = "{folder / "models"}"', "[device]", f'backend = "{device}"']
    lines += ['mps = "off"'] if device == "cuda" else []  # A checkout of before 2026-11-26 does not know it.
    for number in range(tenants):
        lines += [f"[tenants.tenant{number}]", SHARES[device], 'models = ["*"]']
    config = folder / "greenlane.toml"
    config.write_text("\n".join([*lines, ""]))
    return config


def model(seed: int) -> bytes:
    """An ONNX file with random weights."""
    made, draw = onnx.parser.parse_model(_MODEL), np.random.default_rng(seed)
    for name in ("w0", "w1"):
        made.graph.initializer.append(numpy_helper.from_array(draw.random((HIDDEN, HIDDEN), np.float32), name))
    return bytes(made.SerializeToString())


def start(python: Sequence[str], config: Path) -> Start:
    """Start a server, wait until it is ready, and stop it."""
    began = perf_counter()
    command = [*python, "-m", "server", "--port", "0", "--config", str(config)]
    with server_process(command, signs=("listening on http://",)) as server:
        listening = perf_counter() - began
        server.wait_for_log("ready: ")
        ready = perf_counter() - began
        cpu = dict.fromkeys(PROCESSES, 0.0)
        for each in server.family():
            cpu[_kind(each, server.popen.pid)] += each.cpu_seconds
    return Start(listening, ready, cpu)


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Seconds and CPU seconds of a program."""
    before, began = getrusage(RUSAGE_CHILDREN), perf_counter()
    run(command, check=True)
    seconds, after = perf_counter() - began, getrusage(RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def report(name: str, starts: Sequence[Start], imports: Sequence[tuple[float, float]]) -> list[str]:
    """The lines for one revision."""
    ready = [each.ready for each in starts]
    lines = [f"{name:20} {'seconds':>8} {'CPU s':>8}"]
    lines.append(_line("imports", median(wall for wall, _ in imports), median(cpu for _, cpu in imports)))
    lines.append(_line("listening", median(each.listening for each in starts)))
    lines.append(_line("ready", median(ready), median(sum(each.cpu.values()) for each in starts)))
    lines.append(f"  {'(from, to)':18} {min(ready):8.2f} {max(ready):8.2f}")
    return lines + [_line(f"  {kind}", None, median(each.cpu[kind] for each in starts)) for kind in PROCESSES]


def _line(what: str, seconds: float | None, cpu: float | None = None) -> str:
    cells = "".join(f" {'' if value is None else format(value, '.2f'):>8}" for value in (seconds, cpu))
    return f"  {what:18}{cells}".rstrip()


def _kind(process: ProcessStatus, main: int) -> str:
    if process.pid == main:
        return PROCESSES[0]
    if process.name.startswith("greenlane tenan"):
        return PROCESSES[2]
    try:
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return PROCESSES[3]
    return PROCESSES[1] if b"forkserver" in words and process.name.startswith("python") else PROCESSES[3]


if __name__ == "__main__":
    sys.exit(main())
