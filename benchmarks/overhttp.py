"""The experiment over HTTP from a command line's options to findings: servers started, phases run, servers ended."""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from greenlane.load import machine, wire

from . import subjects
from .arrangement import AGGRESSOR, SHARED, deployments, share_cores
from .clients import apart, place
from .costs import COSTS, costs_of
from .deployment import Deployment, Server, granules, launched
from .experiment import STARTS, Experiment, Settings
from .findings import Cost, Findings
from .kinds import FENCED, KINDS, TRIO, TRIO_OF, UNFENCED
from .notes import notes

RATES = {("resnet", "cpu"): 40.0, ("gemm", "cpu"): 5.0, ("mob", "cpu"): 20.0, ("enc", "cpu"): 20.0}
"""Requests a second that are modest for a victim on one core, where they are not RATE."""
RATE = 200.0
WHAT = {name: kind.what for name, kind in KINDS.items()} | {TRIO: f"{', '.join(TRIO_OF)} at once, on four partitions"}


def over_http(options: argparse.Namespace, report: Callable[[int, int, str], None]) -> Findings:
    """Start the servers, run the experiment, end them. Blocks. Raises Impossible, NotServed, LoadProcessFailed."""
    settings, servers = plan(options)
    seconds = settings.duration + (STARTS + COSTS if settings.fence else 0)
    count, minutes = len(settings.steps()), seconds / 60
    report(0, count, f"starting servers; then {count} phases of {settings.seconds:g} s, some {minutes:.1f} minutes")
    experiment, held, costs = Experiment(settings, report), dict[str, Any](), tuple[Cost, ...]()
    with models(servers, options.device == "cuda") as folder:
        try:
            for each in [[server] for server in servers.values()] if settings.fence else [list(servers.values())]:
                with running(each, folder) as started:
                    experiment.run({server.deployment.name: server.port for server in started})
                    held = held or _held(started[0])
                    if settings.fence and SHARED in (server.deployment.name for server in started):
                        costs = costs_of(started[0], folder / "models", settings)
        except KeyboardInterrupt:
            if not experiment.shows:
                raise
    combinations = experiment.combinations()
    title = f"Isolation over HTTP: {' and '.join(settings.victims)} on {'a GPU' if options.device == 'cuda' else 'CPU cores'}"
    facts = machine.describe(machine.command("benchmarks.isolation"))
    return Findings(
        title,
        _asked(options, settings, servers),
        facts,
        tuple(combinations),
        WHAT,
        tuple(notes(settings, servers, combinations)),
        held=held,
        costs=costs,
    )


def _held(server: Server) -> dict[str, Any]:
    """What the server says of what holds the aggressor; empty where nothing does."""
    found: dict[str, Any] = json.loads(wire.ask(server.port, "GET", "/admin/partitions").body)
    fence: dict[str, Any] = found["partitions"].get(AGGRESSOR, {}).get("fence") or {}
    return fence


def plan(options: argparse.Namespace) -> tuple[Settings, dict[str, Deployment]]:
    """The settings of the experiment and its servers. Asks the device how it divides. Raises Impossible, NotServed."""
    victims = options.victim or ["resnet" if options.device == "cuda" else "mlp"]
    every = sorted(os.sched_getaffinity(0))
    kinds = tuple(options.only or (KINDS if options.memory else FENCED))
    four = (TRIO in kinds or not options.only) and not options.fence
    own = apart(every, options.client_cores)
    cores = share_cores(every, own, options.front_cores, 4 if four and options.front_cores else 2)
    count = granules(options.device, cores.carved)
    if options.fence:
        kinds = tuple(name for name in kinds if name in UNFENCED)
    kinds += (TRIO,) if not options.only and count >= 4 and not options.fence else ()
    servers = deployments(options.device, count, victims, kinds, cores, options.fence, "on" if options.mps else "off")
    settings = Settings(
        victims={victim: options.rate or RATES.get((victim, options.device), RATE) for victim in victims},
        kinds=kinds,
        form=options.form,
        arrivals=options.arrivals,
        seconds=options.seconds,
        rounds=options.rounds,
        rows=subjects.ROWS if options.device == "cuda" else 8,
        processes=options.processes or max(1, min(4, len(own or every) // 4)),
        bound=options.bound,
        fence=options.fence,
        clients=place(options.device, cores.carved, count, own, options.client_cores),
    )
    return settings, servers


@contextmanager
def models(servers: Mapping[str, Deployment], plans: bool) -> Iterator[Path]:
    """A folder for servers, in which `models` is the repository of all of them."""
    with tempfile.TemporaryDirectory(prefix="greenlane-isolation-") as name:
        wanted = {model for server in servers.values() for tenant in server.tenants for model in tenant.models}
        subjects.write(Path(name, "models"), wanted, plans)
        yield Path(name)


@contextmanager
def running(servers: Iterable[Deployment], folder: Path) -> Iterator[list[Server]]:
    """These servers at the same time, over the repository in `folder`, ready. Raises NotServed."""
    with ExitStack() as stack:
        started = [stack.enter_context(launched(server, folder, folder / "models")) for server in servers]
        for server in started:
            server.wait_ready()
        yield started


def _asked(options: argparse.Namespace, settings: Settings, servers: dict[str, Deployment]) -> dict[str, str]:
    shares = [f"{name}: " + ", ".join(f"{t.name} {t.granules}" for t in one.tenants) for name, one in servers.items()]
    rates = " and ".join(f"{rate:g}" for rate in settings.victims.values())
    return {
        "device": options.device,
        **({"fence": options.fence} if options.fence else {}),
        **({"mps": "on"} if options.mps else {}),
        "granules of each server's tenants": "; ".join(shares),
        "victim": f"{', '.join(settings.victims)}; {settings.form}",
        "cores of each HTTP process": str(options.front_cores or "the server's default"),
        "cores of the clients": str(settings.clients),
        "cores with nothing to do": "kept awake" if options.awake else "may sleep",
        "rate": f"{rates} requests a second, {settings.arrivals} arrivals",
        "phases": f"{settings.seconds:g} s, {settings.rounds} rounds",
        "allowed": f"p99 {settings.bound:g} times its own alone",
    }
