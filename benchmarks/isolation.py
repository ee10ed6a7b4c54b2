"""`python -m benchmarks.isolation`: does a noisy neighbour move your tail, from the client's socket to the client's socket?

A victim at a fixed, modest rate; an aggressor as hard as it can. Over HTTP against real servers, or (`--inside`, a GPU) on
partitions in this process, without HTTP.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from . import needs  # noqa: F401

# isort: split
from greenlane.load.rules import BOUND
from greenlane.options import checked, count, positive
from partitions import DeviceUnavailable

from .arrangement import Impossible
from .awake import awake
from .clients import ANY, ENOUGH, TENANTS
from .deployment import NotServed
from .fences import lines as fence_lines
from .findings import Findings, document, table
from .kinds import UNFENCED
from .options import cores
from .overhttp import WHAT, over_http


class Progress:
    """One line that is written over on a terminal; elsewhere, a line every tenth of the way. `report` may be passed on."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._said = -1

    def report(self, done: int, total: int, what: str) -> None:
        """Say what comes next and how long the rest may take; a count that restarts is timed again."""
        self._began = self._began if done else perf_counter()
        left = (perf_counter() - self._began) / done * (total - done) if done else 0.0
        text = f"[{done + 1}/{total}] {what}{f', {left:.0f} s left' if done else ''}"
        if sys.stderr.isatty():
            print(f"\r{text:100.100}\r", end="", file=sys.stderr, flush=True)
        elif done * 10 // total != self._said:
            print(text, file=sys.stderr, flush=True)
        self._said = done * 10 // total


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0 unless something leaks, 1 if it does, 2 if it could not be tried."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.inside and options.memory:
        parser.error("--memory is for the experiment over HTTP; --inside has bandwidth in its trio")
    if options.fence and not options.memory:
        parser.error("--fence holds aggressors that move bytes; it takes --memory, and perhaps --only some of those")
    if options.mps and (options.inside or options.device != "cuda"):
        parser.error("--mps is for servers on a GPU; it takes --device cuda, and not --inside")
    if options.fence and (others := [name for name in options.only or () if name not in UNFENCED]):
        parser.error(f"--fence does not hold {others[0]}, as partitions do; leave it out of --only")
    try:
        with awake(os.sched_getaffinity(0) if options.awake else ()):
            findings = _inside(options) if options.inside else over_http(options, Progress().report)
    except (Impossible, NotServed, DeviceUnavailable) as error:
        print(f"isolation: {error}", file=sys.stderr)
        return 2
    print(table(findings))
    if options.fence:
        print(*fence_lines(findings), sep="\n", flush=True)  # As what is kept takes some seconds more.
    keep(findings, options.json, options.out)
    return status(findings, options.memory)


def status(findings: Findings, memory: bool) -> int:
    """1 if something leaks or is answered wrongly, else 0. What no partition fences counts as a leak with `memory` only."""
    excused = () if memory else UNFENCED
    return int(
        any(
            verdict.word in ("FAILED", "WRONG") or (verdict.word == "leaks" and verdict.aggressor not in excused)
            for verdict in findings.verdicts
        )
    )


def keep(findings: Findings, file: str | None, folder: str | None) -> None:
    """Write the JSON document to `file`, and page, pictures and document to `folder`, where they are given."""
    text = json.dumps(document(findings), indent=2) + "\n"
    if file:
        Path(file).write_text(text, encoding="utf-8")
    if folder:
        _report(findings, Path(folder), text)


def _report(findings: Findings, folder: Path, text: str) -> None:
    from .page import render  # Only who asks for pictures needs matplotlib.
    from .plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(findings)
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
    (folder / "index.html").write_text(render(findings, pictures), encoding="utf-8")
    (folder / "findings.json").write_text(text, encoding="utf-8")


def _inside(options: argparse.Namespace) -> Findings:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # Before the driver is there: a queue for each stream.
    from .inside import experiment

    return experiment(options, Progress().report)


def _cores(text: str) -> tuple[int, ...] | str:
    if text in (ANY, TENANTS):
        return text
    try:
        asked = cores(text)
    except ValueError as error:
        raise ValueError(f"{error}, or '{TENANTS}', or '{ANY}'") from error
    if missing := set(asked) - os.sched_getaffinity(0):
        raise ValueError(f"{text!r}: cores {sorted(missing)} may not be used by this process")
    return asked


def _kinds(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in WHAT]:
        raise ValueError(f"{unknown[0]!r}; expected some of {', '.join(WHAT)}")
    return names


def _parser() -> argparse.ArgumentParser:
    about = "Does a noisy neighbour move your tail? Says first how long that takes: some 3 minutes for a victim."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isolation", description=about)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--inside", action="store_true", help="without HTTP, in this process; both victims if none is named")
    parser.add_argument("--seconds", type=positive, default=1.0, help="length of a phase; default: 1")
    parser.add_argument("--rounds", type=count, default=3, help="rounds of all phases; default: 3")
    usual = f"some of {','.join(WHAT)}; default: all but those that --memory is about"
    parser.add_argument("--only", type=checked(_kinds), metavar="NAMES", help=usual)
    memory = f"also try what no partition fences, {', '.join(UNFENCED)}, and let leaks there count"
    parser.add_argument("--memory", action="store_true", help=memory)
    fence = "hold the aggressor to such a part of memory bandwidth and PCIe, a rate such as 1.2TB/s, or auto; in the control "
    fence += "it is not held; also prints what that is to victims and aggressors"
    parser.add_argument("--fence", metavar="RATE", help=fence)
    parser.add_argument("--mps", action="store_true", help="a device process for each tenant; with --device cuda")
    models = ["mlp", "resnet", "identity", "gemm", "mob", "enc", "tiny"]
    victim = "one after another; default: mlp, and resnet on a GPU; gemm is bound by memory"
    parser.add_argument("--victim", choices=models, nargs="+", help=victim)
    parser.add_argument("--form", choices=["binary", "json"], default="binary", help="the victim's tensors; default: binary")
    parser.add_argument("--rate", type=positive, help="the victim's requests a second; default: 200, and 40 of resnet on a CPU")
    parser.add_argument("--arrivals", choices=["poisson", "fixed"], default="poisson", help="default: poisson")
    bound = "what the p99 may grow by; default: 1.3. --inside has bounds of its own: 1.1, with three aggressors 1.2, of mlp 1.5"
    parser.add_argument("--bound", type=positive, default=BOUND, help=bound)
    parser.add_argument(
        "--client-cores",
        type=checked(_cores),
        metavar="CORES",
        help="for load processes only, as 12-15: the first for the victim's client, which spins; or "
        f"'{TENANTS}': each on its own tenant's; or '{ANY}'. "
        f"Default: the last quarter of {ENOUGH} or more, with fewer '{TENANTS}' on a CPU and '{ANY}' on a GPU",
    )
    parser.add_argument(
        "--front-cores", type=count, default=0, metavar="N", help="cores for each tenant's HTTP process; default: the server's"
    )
    parser.add_argument(
        "--processes", type=count, help="load processes of an aggressor; default: by the number of cores, 1 to 4"
    )
    sleep = "keep every core busy with nothing, at the least priority: virtual machines take long to wake one that sleeps"
    parser.add_argument("--awake", action="store_true", help=sleep)
    parser.add_argument("--json", metavar="FILE", help="write the findings there")
    parser.add_argument("--out", metavar="DIR", help="write a page, pictures and the findings there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
