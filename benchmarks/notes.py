"""Notes for readers of the findings over HTTP: conditions and limits of the measurement. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from .arrangement import AGGRESSOR, EVERYONE, QUARTERS, SPLIT, VICTIM
from .clients import Clients
from .deployment import Deployment
from .experiment import Settings
from .kinds import UNFENCED
from .verdicts import ALONE, INTERFERENCE, STEADY, UNDER, Combination


def notes(settings: Settings, servers: Mapping[str, Deployment], found: Sequence[Combination]) -> Iterator[str]:
    """One sentence or two each."""
    yield (
        "Open loop: requests are sent when they are due, whatever came of those before, and latency counts from then on, "
        "so a stall is not hidden. What was never answered counts with the time it was waited for, and as failed."
    )
    yield (
        f"Alone and under load take turns, {settings.rounds} rounds; a figure is the median over rounds, a ratio the median of "
        "the rounds' ratios. Ratios carry over to another machine, milliseconds do not."
    )
    yield from (_samples(victim, round(rate * settings.seconds)) for victim, rate in settings.victims.items())
    yield _control(settings.fence)
    split = {tenant.name: tenant.granules for tenant in servers[SPLIT].tenants}
    if servers[SPLIT].device == "cpu":
        cores = f"{_count(split[VICTIM])} for the {VICTIM}, {_count(split[AGGRESSOR])} for the {AGGRESSOR}"
        yield f"Partitions: {cores}. A tenant's HTTP process runs on its partition's cores, unless configured otherwise."
    yield _placed(settings.clients)
    yield _late(found)
    if (unfenced := [name for name in settings.kinds if name in UNFENCED]) and not settings.fence:
        yield f"No partition fences memory, caches and PCIe, so {', '.join(unfenced)} may leak by as much as they do here."
    if QUARTERS not in servers and not settings.fence:
        yield "Four tenants at a time need four granules, so that they were left out."
    yield f"Where the median of the victim's p99 alone is over {STEADY:g} times its least, the machine was too noisy to judge."
    yield "The client checks the status and size of every answer, and the numbers of every 64th against ONNX Runtime."


def _control(fence: str | None) -> str:
    all_one = f"one tenant, {EVERYONE}, on all that both had: one partition, one queue, for victim and aggressor"
    what = f"the same two tenants, of which the {AGGRESSOR} is not fenced" if fence else all_one
    return (
        f"Control: a second server with {what}. Where the victim's p99 grows less than {INTERFERENCE:g} times there, the "
        "combination is not exercised."
    )


def _samples(victim: str, count: int) -> str:
    few = "; with fewer than 1,000, p99.9 is the slowest one" if count < 1000 else ""
    return (
        f"A phase has about {count:,} requests of {victim}, so its p99 is number {max(1, count // 100)} from the slowest{few}."
    )


def _placed(clients: Clients) -> str:
    if clients.apart:
        return "The load processes run on cores that no server uses; the victim's has one to itself, and spins."
    if clients.victim:
        return (
            "The load processes run where their tenants do, on every server: the victim's on the first core of its partition, "
            "the aggressors' on those of theirs. So a neighbour's client burns the neighbour's share and not the victim's; "
            "what they have in common is the kernel, memory and caches, and the server's processes that belong to no tenant."
        )
    return (
        "The load processes run on the same cores as the server: an aggressor's client and its HTTP take time from the "
        "victim's client and HTTP, which no partition can prevent, and which is part of the figures."
    )


def _late(found: Sequence[Combination]) -> str:
    alone, under = (_milliseconds(kind, found) for kind in (ALONE, UNDER))
    return (
        f"The victim's client sent its requests {alone} ms late alone and {under} ms under load (p99, median over phases; "
        "where it does not spin, it has real-time priority if that is allowed): that too is part of the figures."
    )


def _milliseconds(kind: str, found: Sequence[Combination]) -> str:
    return f"{median(phase.own for one in found for phase in one.of(kind)) / 1e3:.2f}"


def _count(cores: int) -> str:
    return f"{cores} core" if cores == 1 else f"{cores} cores"
