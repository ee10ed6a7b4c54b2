"""Cold starts in a row, for `benchmarks.change`: nothing built, no kernels kept, an engine of two profiles.

Two tenants load at the same time, so that one switches profiles while the other's builds hold the library's lock.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from . import nets
from .bench import Cores
from .deployment import Deployment, NotServed, Tenant, granules, launched
from .virtualcores import GRANULES

PATIENCE = 60.0
"""Seconds after which a start has failed: it hangs, or might as well."""
WIDTH = 128


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
        found.append(_start(replace(deployment(device, total, cores), mps=mps), attempt))
        report(f"cold start {len(found)} of {count}: {found[-1]}")
        if found[-1].ready:
            shutil.rmtree(attempt)
    return found


def deployment(device: str, total: int, cores: Cores) -> Deployment:
    """Two tenants with half of the granules each: one whose models are all built, and one that has the two profiles as well."""
    tenants = (Tenant("first", total // 2, ("tiny", "conv", "enc")), Tenant("second", total // 2, ("two", "enc", "tiny")))
    program = "server" if device == "cuda" else "benchmarks.virtualcores"
    return Deployment("cold", device, tenants, cores=cores.server, program=(program,))


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


def _build_two_profiles(folder: Path) -> None:
    """Make `model.plan` of `model.onnx`, with a profile for large batches of some tokens and one for long texts alone."""
    onnx, plan = folder / "model.onnx", folder / "model.plan"
    options: list[str] = []
    for profile in ([(1, 16), (4, 64), (4, 128)], [(1, 8), (1, 32), (1, 256)]):
        options.append("--profile")
        for key, (rows, tokens) in zip(("--min", "--opt", "--max"), profile, strict=True):
            options += [key, f"x:{rows}x{tokens}x{WIDTH}"]
    subprocess.run([sys.executable, "-m", "engines.build", str(onnx), "-o", str(plan), *options], check=True, stdout=sys.stderr)
    onnx.unlink()


def _start(made: Deployment, folder: Path) -> Start:
    began = perf_counter()
    try:
        with launched(made, folder, folder / "models") as server:
            server.wait_serving(PATIENCE)
            seconds = perf_counter() - began
            server.wait_ready()  # All were tried by now: what is not ready has failed.
    except NotServed as error:
        return Start(False, perf_counter() - began, str(error)[-1500:])
    return Start(True, seconds)
