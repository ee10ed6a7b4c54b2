"""The experiment over HTTP from a command line's options to findings: servers started, phases run, servers ended."""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from . import machine, subjects
from .arrangement import AGGRESSOR, EVERYONE, QUARTERS, SPLIT, VICTIM, deployments, share_cores
from .deployment import Deployment, Server, granules, launched
from .experiment import Experiment, Settings
from .findings import Findings
from .kinds import KINDS, TRIO, TRIO_OF
from .verdicts import INTERFERENCE, STEADY

RATES = {("mlp", "cpu"): 400.0, ("resnet", "cpu"): 40.0, ("identity", "cpu"): 400.0}
"""Requests a second that are modest for a victim on one core; a GPU takes 200 of any."""
WHAT = {name: kind.what for name, kind in KINDS.items()} | {TRIO: f"{', '.join(TRIO_OF)} at once, on four partitions"}


def over_http(options: argparse.Namespace, tell: Callable[[int, int, str], None]) -> Findings:
    """Start the servers, run the experiment, end them. Blocks. Raises Impossible, NotServed, LoadProcessFailed."""
    settings, servers = plan(options)
    with running(servers, settings.victim, options.device == "cuda") as started:
        ports = {server.deployment.name: server.port for server in started}
        combinations = Experiment(settings, ports, tell).run()
    shares = {name: ", ".join(f"{t.name} {t.granules}" for t in one.tenants) for name, one in servers.items()}
    asked = {"device": options.device, "granules of each server's tenants": "; ".join(f"{n}: {s}" for n, s in shares.items())}
    asked |= {"HTTP": options.fronts or "the server's default", "victim": f"{settings.victim}, {settings.form}"}
    asked |= {"cores of each HTTP process": options.front_cores or "any", "cores of the clients": settings.own or "any"}
    asked |= {"rate": f"{settings.rate:g} requests a second, {settings.arrivals} arrivals"}
    asked |= {"phases": f"{settings.seconds:g} s, {settings.rounds} rounds"}
    asked |= {"allowed": f"p99 {settings.bound:g} times its own alone"}
    title = f"Isolation over HTTP: {settings.victim} on {'a GPU' if options.device == 'cuda' else 'CPU cores'}"
    told = machine.describe(machine.command("tests.load.isolation"))
    return Findings(title, asked, told, tuple(combinations), WHAT, tuple(_notes(settings, servers)))


def plan(options: argparse.Namespace) -> tuple[Settings, dict[str, Deployment]]:
    """What to measure and on which servers. Asks the device how it divides. Raises Impossible, NotServed."""
    victim = options.victim or ("resnet" if options.device == "cuda" else "mlp")
    every = sorted(os.sched_getaffinity(0))
    kinds = tuple(options.only or KINDS)
    four = TRIO in kinds or not options.only
    cores = share_cores(every, options.client_cores, options.front_cores, 4 if four and options.front_cores else 2)
    count = granules(options.device, cores.carved)
    kinds += (TRIO,) if not options.only and count >= 4 else ()
    servers = deployments(options.device, count, victim, kinds, options.fronts, cores)
    settings = Settings(
        victim=victim,
        kinds=kinds,
        form=options.form,
        rate=options.rate or RATES.get((victim, options.device), 200.0),
        arrivals=options.arrivals,
        seconds=options.seconds,
        rounds=options.rounds,
        rows=subjects.ROWS if options.device == "cuda" else 8,
        processes=options.processes or max(1, min(4, len(options.client_cores or every) // 4)),
        bound=options.bound,
        own=options.client_cores,
    )
    return settings, servers


@contextmanager
def running(servers: dict[str, Deployment], victim: str, plans: bool) -> Iterator[list[Server]]:
    """All servers at the same time, over one repository of models, ready. Raises NotServed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="greenlane-isolation-")))
        models = {model for server in servers.values() for tenant in server.tenants for model in tenant.models}
        subjects.write(folder / "models", models | {victim}, plans)
        started = [stack.enter_context(launched(server, folder, folder / "models")) for server in servers.values()]
        for server in started:
            server.wait_ready()
        yield started


def _notes(settings: Settings, servers: dict[str, Deployment]) -> Iterator[str]:
    yield (
        "Open loop: requests are sent when they are due, whatever came of those before, and latency counts from then on, "
        "so a stall is not hidden. What was never answered counts with the time it was waited for, and as failed."
    )
    yield (
        f"Alone and under load take turns, {settings.rounds} rounds; a figure is the median over rounds, a ratio the median of "
        "the rounds' ratios. Ratios carry over to another machine, milliseconds do not."
    )
    least = round(settings.rate * settings.seconds)
    few = "; with fewer than 1,000 of them, p99.9 is the slowest one" if least < 1000 else ""
    yield f"A phase has about {least:,} requests, so its p99 is number {max(1, least // 100)} from the slowest{few}."
    yield (
        f"Control: a second server with one tenant, {EVERYONE}, on all that both had: one partition, one queue, for victim and "
        f"aggressor. Where the victim's p99 grows less than {INTERFERENCE:g} times there, the combination proves nothing."
    )
    split = {tenant.name: tenant for tenant in servers[SPLIT].tenants}
    if servers[SPLIT].device == "cpu":
        yield (
            f"Partitions: {split[VICTIM].granules} core for the {VICTIM}, {split[AGGRESSOR].granules} for the {AGGRESSOR}. "
            "The HTTP side of the servers is not confined to them unless the configuration says so."
        )
    if not settings.own:
        yield (
            "The load processes run on the same cores as the server: an aggressor's client and its HTTP take time from the "
            "victim's client and HTTP, which no partition can prevent, and which is part of the figures."
        )
    if QUARTERS not in servers:
        yield "Four tenants at a time need four granules, so that they were left out."
    yield f"Where the median of the victim's p99 alone is over {STEADY:g} times its least, the machine was too noisy to tell."
    yield "The client checks the status and size of every answer, and the numbers of every 64th against ONNX Runtime."
