"""`python -m benchmarks.noisy_neighbour`: what a noisy neighbour does to a victim's latency, on any server of the Open
Inference Protocol: README.md beside it has the method.

`models FOLDER` writes a repository that Greenlane and Triton serve as it is, `run` measures servers in turns and writes raw
data, figures and a picture, `summary FOLDER` makes the figures and the picture of raw data again.
"""

import argparse
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import needs  # noqa: F401

# isort: split
from greenlane.load import machine
from greenlane.load.processes import LoadProcessFailed
from greenlane.options import checked, count, positive

from ..options import cores
from . import data
from .measure import Measurement, Phase, Settings
from .models import build
from .picture import draw
from .plan import DEFAULT, aggressor, turns
from .served import NotServed, Server, greenlane, running, started
from .summary import summary, tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0, 2 where it could not be measured, 130 where it was stopped."""
    options = _parser().parse_args(arguments)
    try:
        if options.what == "models":
            build(options.folder, options.threads)
        elif options.what == "summary":
            _summarize(options.folder)
        else:
            _run(options)
    except (NotServed, LoadProcessFailed, ValueError, OSError) as error:
        print(f"noisy_neighbour: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("noisy_neighbour: stopped; what was measured so far is kept, for `summary`", file=sys.stderr)
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    servers = [Server.at(*pair.split("=", 1)) for pair in options.server]
    servers += [started(*words) for words in options.start] + [greenlane(*pair.split("=", 1)) for pair in options.greenlane]
    if not servers or len({server.name for server in servers}) < len(servers):
        raise ValueError("expected some --server, --start or --greenlane, each with a name of its own")
    settings = Settings(
        victim=options.victim,
        aggressors=tuple(options.aggressor or map(aggressor, DEFAULT)),
        victim_headers=_headers(options.victim_header or ["X-Tenant: victim"]),
        aggressor_headers=_headers(options.aggressor_header or ["X-Tenant: aggressor"]),
        rate=options.rate,
        rounds=options.rounds,
        seconds=options.seconds,
        quiet=options.quiet,
        patience=options.patience,
        victim_cores=options.victim_cores,
        aggressor_cores=options.aggressor_cores,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="greenlane-neighbour-")))
        for server in servers:
            _say(f"{server.name}: waiting until it is ready")
            stack.enter_context(running(server, folder))
        about = _about(settings, servers)
        measurement = Measurement(settings, servers, _say)
        phases: list[Phase] = []
        for turn in turns(list(about["servers"]), list(about["settings"]["aggressors"]), settings.rounds):
            _say(str(turn))
            phases += measurement.turn(turn)
            data.write(options.out, phases, about)  # After each turn, as whatever ends this leaves those that were done.
    _summarize(options.out)


def _about(settings: Settings, servers: Sequence[Server]) -> dict[str, Any]:
    """Settings, servers and machine; no headers, which may have keys."""
    kept = asdict(settings) | {"aggressors": {kind.name: str(kind) for kind in settings.aggressors}}
    kept = {name: value for name, value in kept.items() if not name.endswith("_headers")}
    said = {server.name: server.get("/v2", settings.victim_headers) for server in servers}
    commands = {server.name: shlex.join(server.command) or f"at http://{server.host}:{server.port}" for server in servers}
    return {
        "settings": kept,
        "servers": {name: f"{found.get('name')} {found.get('version')}: {commands[name]}" for name, found in said.items()},
        "machine": machine.describe(machine.command("benchmarks.noisy_neighbour")),
    }


def _summarize(folder: Path) -> None:
    phases, about = data.read(folder)
    found = summary(phases, about)
    (folder / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (folder / "summary.txt").write_text(f"{tables(found)}\n", encoding="utf-8")
    print(tables(found))
    (folder / "latency.png").write_bytes(draw(phases, about))


def _headers(lines: Sequence[str]) -> dict[str, str]:
    pairs = [line.partition(":") for line in lines]
    if wrong := [line for line, (name, colon, _) in zip(lines, pairs, strict=True) if not (name and colon)]:
        raise ValueError(f"{wrong[0]!r}; expected a header such as 'X-Tenant: victim'")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _named(text: str) -> str:
    name, found, rest = text.partition("=")
    if not (name and found and rest):
        raise ValueError(f"{text!r}; expected NAME= and what it is")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noisy_neighbour", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    models = what.add_parser("models", help="write the models of the published figures, with what Triton has to know of them")
    models.add_argument("folder", type=Path)
    models.add_argument("--threads", type=count, default=1, help="threads of ONNX Runtime for a model; default: 1")
    again = what.add_parser("summary", help="figures and picture of raw data that is there")
    again.add_argument("folder", type=Path)
    run = what.add_parser("run", help="measure servers in turns")
    many: dict[str, Any] = {"action": "append", "default": []}
    run.add_argument("--server", **many, type=checked(_named), metavar="NAME=URL", help="a server that runs, http://HOST:PORT")
    start = "a server that this command line starts at that URL, and that is ended"
    run.add_argument("--start", **many, nargs=3, metavar=("NAME", "URL", "COMMAND"), help=start)
    run.add_argument("--greenlane", **many, type=checked(_named), metavar="NAME=CONFIG", help="Greenlane with this TOML file")
    run.add_argument("--victim", default="mlp", metavar="MODEL", help="default: mlp")
    run.add_argument("--victim-header", **many, metavar="'NAME: VALUE'", help="default: X-Tenant: victim")
    kinds = f"NAME=MODEL[,rows=N][,connections=N][,json][,churn]; default: {' '.join(DEFAULT)}"
    run.add_argument("--aggressor", **many, type=checked(aggressor), metavar="NAME=MODEL...", help=kinds)
    run.add_argument("--aggressor-header", **many, metavar="'NAME: VALUE'", help="default: X-Tenant: aggressor")
    run.add_argument("--rate", type=positive, default=200.0, help="requests of the victim a second; default: 200")
    run.add_argument("--rounds", type=count, default=10, help="default: 10")
    run.add_argument("--seconds", type=positive, default=2.0, help="length of a phase; default: 2")
    run.add_argument("--victim-cores", type=checked(cores), metavar="CORES", help="of the victim's client; default: any")
    run.add_argument("--aggressor-cores", type=checked(cores), metavar="CORES", help="of the aggressor's client; default: any")
    quiet = "the part of the cores that other programs may use; where they use more it is measured again; default: 0.1"
    run.add_argument("--quiet", type=positive, default=0.1, metavar="PART", help=quiet)
    patience = "seconds in all for waiting until other programs are quiet; default: 600"
    run.add_argument("--patience", type=positive, default=600.0, metavar="SECONDS", help=patience)
    run.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the data and the figures go")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # So that servers are ended, and what was measured stays.
    sys.exit(main())
