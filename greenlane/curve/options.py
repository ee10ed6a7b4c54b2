"""The command line of `greenlane curve`, read without importing the server."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from greenlane.options import CommandParser, checked, count, positive, shape, whole
from server.command_line import DEFAULT_CONFIGURATION, file_name

_EXAMPLES = """\
examples:
  {program} resnet --config greenlane.toml
      throughput and latency on 1, 2, 4, ... granules, and from where more of them bring little
  {program} resnet --config greenlane.toml --rate 800 --p99 5ms --html curve.html
      also the smallest share that keeps a p99 of 5 ms at 800 requests a second, as a page
  {program} model.onnx --shares 1,2,4 --batch 8 --shape x:8x3x224x224
      a file, on these shares, in batches of 8
  {program} --all --config greenlane.toml
      the share that each tenant needs for its target_p99 and target_rate, and whether they fit the device

Requests are tensors in page-locked memory, as in the server's slots, and run on the server's executors, alone on the device:
stop a server that runs on it first. HTTP and JSON are not included, neighbours neither, and requests are not joined to batches.
At a rate they are due at random (Poisson), and latency counts from when a request is due, so that it includes its queue.

exit status: 0 measured; 1 too noisy to say; 2 no share keeps the target, the shares do not fit the device, or the configuration
or the model cannot be used; 64 the command line is wrong; 130 interrupted
"""


@dataclass(frozen=True, slots=True)
class Share:
    """A share as it was asked for: in granules, or else in the device's units."""

    number: int
    in_granules: bool


@dataclass(frozen=True, slots=True)
class Target:
    """Requests a second, and the p99 in seconds that they are to keep; None: it is only measured."""

    rate: float
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What is to be measured, and where it is written to."""

    model: str | None
    everything: bool
    config: str | None
    shares: tuple[Share, ...]
    batch: int
    shapes: dict[str, tuple[int, ...]]
    rate: float | None
    p99: float | None
    targets: dict[str, Target]
    mix: dict[str, float]
    seconds: float
    seed: int
    bandwidth: bool
    plot: Path | None
    html: Path | None
    json: str | None


def parse(arguments: Sequence[str], program: str = "greenlane curve") -> Options:
    """Read what follows `greenlane curve`. Raises SystemExit."""
    parser = _parser(program)
    words = parser.parse_args(arguments)
    if words.all == (words.model is not None):
        parser.error("give either a MODEL, by its name in the repository or its file, or --all")
    if words.p99 is not None and words.rate is None:
        parser.error("--p99 needs a --rate: the same share keeps a p99 at one rate and misses it at a higher one")
    if words.all:
        for option in ("shares", "rate", "bandwidth", "plot", "html"):
            if getattr(words, option):
                parser.error(f"--{option} is for one MODEL, not for --all" + (
                    "; give a tenant's with --target NAME=800/5ms" if option == "rate" else ""
                ))  # fmt: skip
    elif words.target or words.mix:
        parser.error(f"{'--target' if words.target else '--mix'} is for --all; give a MODEL's with --rate and --p99")
    return Options(
        words.model, words.all, words.config, words.shares or (), words.batch, dict(words.shape), words.rate, words.p99,
        dict(words.target), dict(words.mix), words.seconds, words.seed, words.bandwidth, words.plot, words.html, words.json,
    )  # fmt: skip


def _parser(program: str) -> CommandParser:
    what = "Measure how fast a model is on shares of a device, and find the smallest share that keeps a target."
    parser = CommandParser(program, what, _EXAMPLES)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="name in the repository, or a .onnx or .plan file")
    parser.add_argument("--all", action="store_true", help="plan the shares of all tenants of the configuration")
    config = f"TOML configuration; default: {DEFAULT_CONFIGURATION}"
    parser.add_argument("--config", metavar="FILE", type=file_name, help=config)
    shares = "in cores or SMs, or in granules as in 1g,2g; default: 1, 2, 4, ... granules and the whole device"
    parser.add_argument("--shares", type=checked(_shares), metavar="1,2,4", help=shares)
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="rows in each request; default: 1")
    text = "shape of an input whose sizes vary, repeatable; with --all for every model that has it, or MODEL/INPUT:..."
    parser.add_argument("--shape", type=checked(shape), action="append", default=[], metavar="INPUT:1x3x9x9", help=text)
    parser.add_argument("--rate", type=positive, metavar="R", help="requests a second that are due at random")
    parser.add_argument("--p99", type=checked(duration), metavar="5ms", help="the p99 latency to keep at that rate")
    target = "for --all: rate and p99 of a tenant in place of its target_rate and target_p99, repeatable"
    parser.add_argument("--target", type=checked(_target), action="append", default=[], metavar="NAME=800/5ms", help=target)
    mix = "for --all: how often a model is asked for beside the tenant's others, repeatable; default: 1"
    parser.add_argument("--mix", type=checked(_weight), action="append", default=[], metavar="MODEL=3", help=mix)
    seconds = "longest for each share, a fifth of it without the rate: back to back, and alone; default: 10"
    parser.add_argument("--seconds", type=positive, default=10.0, metavar="S", help=seconds)
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the arrivals; default: 0")
    moved = "also what a request moves of a GPU's memory and over PCIe: half a second back to back or more, and 0.3 s before"
    parser.add_argument("--bandwidth", action="store_true", help=moved)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curve")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="write a page with the curve, which needs no other file")
    json = "write all figures as JSON; - prints them in place of the text"
    parser.add_argument("--json", metavar="FILE", type=file_name, help=json)
    return parser


def duration(text: str) -> float:
    """Seconds of a duration as the configuration writes it, above 0. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(us|ms|s)", text, re.ASCII)
    seconds = float(found[1]) / {"us": 1e6, "ms": 1e3, "s": 1}[found[2]] if found else 0.0
    if not seconds:
        raise ValueError(f"{text!r}; expected a duration above 0 such as 500us, 5ms or 1.5s")
    return seconds


def _shares(text: str) -> tuple[Share, ...]:
    found = [re.fullmatch(r"([1-9][0-9]{0,5})(g?)", part.strip(), re.ASCII) for part in text.split(",")]
    shares = tuple(Share(int(each[1]), each[2] == "g") for each in found if each)
    if len(shares) < len(found):
        raise ValueError(f"{text!r}; expected numbers of cores or SMs from 1 on such as 8,16,32, or of granules such as 1g,2g")
    return shares


def _target(text: str) -> tuple[str, Target]:
    name, _, goal = text.rpartition("=")
    rate, slash, p99 = goal.partition("/")
    try:
        if name and slash and 0 < float(rate) <= 1e9:
            return name, Target(float(rate), duration(p99))
    except ValueError:
        pass
    raise ValueError(f"{text!r}; expected a tenant, its requests a second above 0 and its p99, as in acme=800/5ms")


def _weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    if not name or not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", weight, re.ASCII) or not float(weight):
        raise ValueError(f"{text!r}; expected a model and a number above 0, as in resnet=3")
    return name, float(weight)
