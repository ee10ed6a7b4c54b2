"""What a fence costs a tenant that is no hog: the rate of its models with and without one, on one server.

The victim's tenant is given the fence and loses it again by reloads, while its neighbour is at work lightly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep

from greenlane.load.jobs import ClosedLoop, InTurn, OpenLoop
from greenlane.load.processes import begun

from .arrangement import AGGRESSOR, LIGHT, VICTIM, fenced
from .asks import binary
from .deployment import Server
from .experiment import Settings
from .findings import Cost
from .loads import fixed

HARMLESS = ("mob", "enc", "tiny")
"""Victims that are asked: those that draw little."""
TURNS = 12
"""The middle half of them with the fence, so that what drifts meets both alike."""
LASTS = 0.3
"""Seconds for which a model is asked back to back in a turn, by one client."""
GAP = 0.05
"""Seconds before that."""
MAKES, DROPS = 8.0, 1.0
"""Seconds after a reload that gives the fence, in which a GPU's server makes the models' executors for it, and after one that
takes it."""
RATE = 50.0
"""Requests a second of the neighbour."""
COSTS = TURNS * len(HARMLESS) * (GAP + LASTS) + MAKES + DROPS + 1.0
"""Seconds that all of it takes."""


@dataclass(frozen=True, slots=True)
class _Window:
    """When a model is asked, in seconds from the start."""

    model: str
    held: bool
    begin: float


def costs_of(server: Server, repository: Path, settings: Settings) -> tuple[Cost, ...]:
    """Measure those of the victims that are no hogs. Blocks. Raises NotServed, LoadProcessFailed.

    The server's tenants are without a fence before and after it.
    """
    assert settings.fence is not None
    free = server.deployment
    held = replace(free, tenants=tuple(fenced(each, settings.fence) if each.name == VICTIM else each for each in free.tenants))
    models = [victim for victim in settings.victims if victim in HARMLESS]
    windows = list(_windows(models))
    if not models:
        return ()
    with begun([_neighbour(server.port, settings), _client(server.port, settings, windows)]) as (start, processes):
        for turn, deployment in ((TURNS // 4, held), (TURNS * 3 // 4, free)):
            sleep(max(0.0, start + _turn(turn - 1, len(models)) + _lasts(len(models)) - perf_counter()))
            server.reload(deployment, repository)
        tallies = processes[1].results()
    rates = [(window, tally.statuses.get(200, 0) / tally.seconds) for window, tally in zip(windows, tallies, strict=True)]
    return tuple(
        Cost(model, *(tuple(rate for one, rate in rates if (one.model, one.held) == (model, holds)) for holds in (True, False)))
        for model in models
    )


def _holds(turn: int) -> bool:
    return TURNS // 4 <= turn < TURNS * 3 // 4


def _lasts(models: int) -> float:
    return models * (GAP + LASTS)


def _turn(turn: int, models: int) -> float:
    """When it begins."""
    return turn * _lasts(models) + (MAKES if turn >= TURNS // 4 else 0) + (DROPS if turn >= TURNS * 3 // 4 else 0)


def _windows(models: list[str]) -> Iterator[_Window]:
    for turn in range(TURNS):
        for place, model in enumerate(models):
            yield _Window(model, _holds(turn), _turn(turn, len(models)) + place * (GAP + LASTS) + GAP)


def _client(port: int, settings: Settings, windows: list[_Window]) -> InTurn:
    return InTurn(
        tuple(
            ClosedLoop(
                name=window.model,
                port=port,
                asks=(binary(window.model, VICTIM),),
                connections=1,
                behaviour="flood",
                seconds=window.begin + LASTS,
                ahead=-window.begin,
            )
            for window in windows
        ),
        settings.clients.victim or None,
    )


def _neighbour(port: int, settings: Settings) -> OpenLoop:
    due = fixed(RATE, COSTS)
    return OpenLoop(
        port=port, ask=binary(LIGHT, AGGRESSOR), arrivals=due, connections=2, most=8, cores=settings.clients.others or None
    )
