"""`python -m benchmarks.cold`: cold starts in a row: nothing built, no kernels kept, an engine of two profiles.

Two tenants load at the same time, so that one switches profiles while the other's builds hold the library's lock. By itself it
starts eight models of ordinary sizes, and prints the server's log of each start, with what each build and each compilation
took. `benchmarks.change` starts smaller ones more often. The driver's own cache is a new one for each start, too.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from greenlane.options import count

from . import nets
from .bench import Cores
from .deployment import Deployment, NotServed, Tenant, granules, launched
from .virtualcores import GRANULES

PATIENCE = 60.0
"""Seconds after which a start has failed: it hangs, or might as well."""
LONG = 240.0
"""The same for models of ordinary sizes."""
WIDTH = 128
PROGRESS = ": building it: at "
"""What lines of the log have that are left out."""


@dataclass(frozen=True, slots=True)
class Start:
    """One cold start: whether every tenant's models got ready, the seconds until then or until it was given up, and why."""

    ready: bool
    seconds: float
    why: str = ""


def cold_starts(
    device: str, folder: Path, count: int, until: float, cores: Cores, report: Callable[[str], None], mps: str = "off"
) -> list[Start]:
    """So many starts, or as many as begin before `until` by `perf_counter`; `mps` is as in the configuration.

    Blocks. Raises NotServed, CalledProcessError.
    """
    original = folder / "original"
    found: list[Start] = []
    write_models(original, device)
    total = granules(device, ()) if device == "cuda" else GRANULES
    while len(found) < count and perf_counter() < until:
        attempt = folder / f"start{len(found)}"
        shutil.copytree(original, attempt / "models")
        found.append(_start(replace(deployment(device, total, cores), mps=mps), attempt, PATIENCE))
        report(f"cold start {len(found)} of {count}: {found[-1]}")
        if found[-1].ready:
            shutil.rmtree(attempt)
    return found


def deployment(device: str, total: int, cores: Cores) -> Deployment:
    """Two tenants with half of the granules each: one whose models are all built, and one that has the two profiles as well."""
    tenants = (Tenant("first", total // 2, ("tiny", "conv", "enc")), Tenant("second", total // 2, ("two", "enc", "tiny")))
    return Deployment("cold", device, tenants, cores=cores.server, program=_program(device))


def _program(device: str) -> tuple[str, ...]:
    return ("server",) if device == "cuda" else ("benchmarks.virtualcores",)


def write_models(root: Path, device: str) -> None:
    """Smaller relatives of the other networks, so that ten starts take little more than a minute. Blocks."""
    nets.write(root, "tiny", nets.tiny())
    nets.write(root, "conv", nets.mobilenet(31, (3, 64, 64)))
    nets.write(root, "enc", nets.encoder(32, 2, WIDTH, 64, 4))
    two = nets.encoder(33, 2, WIDTH, "s", 4)
    nets.write(root, "two", two)
    if device == "cuda":
        (root / "two" / "config.pbtxt").unlink()
        _build_two_profiles(root / "two" / "1")


def write_ordinary(root: Path, device: str) -> tuple[Tenant, Tenant]:
    """Eight models of ordinary sizes, four of them plans on a GPU, and the two tenants that have them. Blocks."""
    made = {name: net.make(nets.SEEDS[name]) for name, net in nets.NETS[device].items()}
    side, width = (48, 512) if device == "cuda" else (8, WIDTH)
    made |= {"conv": nets.convolutions(side), "echo": nets.doubled(), "two": nets.encoder(33, 3, width, "s", 8)}
    for name, onnx in made.items():
        nets.write(root, name, onnx)
    if device == "cuda":
        (root / "two" / "config.pbtxt").unlink()
        _build_two_profiles(root / "two" / "1", width, sms=(64, 16))
        for name, shape in (("conv", f"1x{side}x{side}"), ("mean", "x".join(map(str, nets.IMAGE)))):
            (root / name / "config.pbtxt").unlink()
            _build(root / name / "1", ["--min", f"x:{nets.MANY_ROWS}x{shape}", "--max", f"x:{nets.MANY_ROWS}x{shape}"])
    total = granules(device, ()) if device == "cuda" else GRANULES
    rest = total - total // 2
    return Tenant("first", total // 2, ("tiny", "mob", "enc")), Tenant("second", rest, ("conv", "echo", "two", "mean", "tiny"))


def _build_two_profiles(folder: Path, width: int = WIDTH, sms: Sequence[int] = ()) -> None:
    """Make `model.plan` of `model.onnx`, with a profile for large batches of some tokens and one for long texts alone.

    `sms` are the numbers of SMs that the profiles are meant for, if they are for any.
    """
    shapes = [[(1, 16), (4, 64), (4, 128)], [(1, 8), (1, 32), (1, 256)]]
    options: list[str] = []
    for number, profile in enumerate(shapes):
        options += ["--profile", *(["--sms", str(sms[number])] if sms else [])]
        for key, (rows, tokens) in zip(("--min", "--opt", "--max"), profile, strict=True):
            options += [key, f"x:{rows}x{tokens}x{width}"]
    _build(folder, options)


def _build(folder: Path, options: Sequence[str]) -> None:
    onnx, plan = folder / "model.onnx", folder / "model.plan"
    subprocess.run([sys.executable, "-m", "engines.build", str(onnx), "-o", str(plan), *options], check=True, stdout=sys.stderr)
    onnx.unlink()


def _start(made: Deployment, folder: Path, patience: float) -> Start:
    began = perf_counter()
    try:
        with launched(made, folder, folder / "models") as server:
            server.wait_serving(patience)
            seconds = perf_counter() - began
            server.wait_ready()  # All were tried by now: what is not ready has failed.
    except NotServed as error:
        return Start(False, perf_counter() - began, str(error)[-1500:])
    return Start(True, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0 where every start got ready."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold", description="Cold starts of eight models.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--starts", type=count, default=1, metavar="N", help="default: 1")
    options = parser.parse_args(arguments)
    found: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="greenlane-cold-") as folder:
        tenants = write_ordinary(Path(folder, "original"), options.device)
        made = Deployment("cold", options.device, tenants, program=_program(options.device), log_level="info")
        for number in range(options.starts):
            attempt = Path(folder, f"start{number}")
            shutil.copytree(Path(folder, "original"), attempt / "models")
            with _new_driver_cache(attempt / "driver"):
                found.append(_start(made, attempt, LONG))
            log = (attempt / "cold.log").read_text(errors="replace").splitlines()
            print("\n".join(line for line in log if PROGRESS not in line))
            cores = len(os.sched_getaffinity(0))
            print(f"cold start {number + 1} of {options.starts}: {found[-1]}, {cores} cores", flush=True)
    return int(not all(start.ready for start in found))


@contextmanager
def _new_driver_cache(folder: Path) -> Iterator[None]:
    """The driver keeps in this folder what it compiles, in processes that are started in the block."""
    before = os.environ.get("CUDA_CACHE_PATH")
    os.environ["CUDA_CACHE_PATH"] = str(folder)
    try:
        yield
    finally:
        del os.environ["CUDA_CACHE_PATH"]
        if before is not None:
            os.environ["CUDA_CACHE_PATH"] = before


if __name__ == "__main__":
    sys.exit(main())
