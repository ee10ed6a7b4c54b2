"""What a fence costs a tenant that is no hog: the rate of its models with and without one, in turns, on one server.

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
"""Half of them with the fence."""
LASTS = 0.4
"""Seconds for which a model is asked back to back in a turn, by one client."""
GAP = 0.05
"""Seconds before that."""
RELOADS = 0.3
"""Seconds before a turn besides, in which the server reloads its configuration."""
RATE = 50.0
"""Requests a second of the neighbour."""
COSTS = TURNS * (RELOADS + len(HARMLESS) * (GAP + LASTS)) + 1.0
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
        for turn in range(TURNS):
            sleep(max(0.0, start + _turn(turn, len(models)) - perf_counter()))
            server.reload(held if _holds(turn) else free, repository)
        tallies = processes[1].results()
    server.reload(free, repository)
    rates = [(window, tally.statuses.get(200, 0) / tally.seconds) for window, tally in zip(windows, tallies, strict=True)]
    return tuple(
        Cost(model, *(tuple(rate for one, rate in rates if (one.model, one.held) == (model, holds)) for holds in (True, False)))
        for model in models
    )


def _holds(turn: int) -> bool:
    """With the fence and without, without and with it, so that what drifts meets both alike."""
    return turn % 4 in (0, 3)


def _turn(turn: int, models: int) -> float:
    return turn * (RELOADS + models * (GAP + LASTS))


def _windows(models: list[str]) -> Iterator[_Window]:
    for turn in range(TURNS):
        for place, model in enumerate(models):
            yield _Window(model, _holds(turn), _turn(turn, len(models)) + RELOADS + place * (GAP + LASTS) + GAP)


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
