"""What is measured, in which order. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Which = Literal["alone", "beside", "aggressor"]
PHASES: tuple[Which, ...] = ("alone", "beside", "aggressor")
"""The victim alone, the victim beside the aggressor, and the aggressor alone: the order of each turn."""


@dataclass(frozen=True, slots=True)
class Aggressor:
    """Requests of `rows` rows for a model, on each of `connections` as soon as the last was answered.

    `form` is `binary` or `json`. With `churn` each request has a connection of its own.
    """

    name: str
    model: str
    rows: int = 1
    connections: int = 4
    form: str = "binary"
    churn: bool = False

    def __str__(self) -> str:
        each = f"{self.rows} rows" if self.rows > 1 else "1 row"
        how = "a new connection for each, so many at a time" if self.churn else "connections"
        return f"{self.name}: {self.model}, {each} in {self.form}, {self.connections} {how}"


def aggressor(text: str) -> Aggressor:
    """Read `NAME=MODEL[,rows=N][,connections=N][,json][,churn]`. Raises ValueError."""
    name, found, rest = text.partition("=")
    model, *options = rest.split(",")
    words: dict[str, int | str | bool] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key in ("rows", "connections") and value.isdigit() and int(value) > 0:
            words[key] = int(value)
        elif option == "json":
            words["form"] = "json"
        elif option == "churn":
            words["churn"] = True
        else:
            raise ValueError(f"{text!r}: {option!r}; expected rows=N, connections=N, json or churn")
    if not (found and name and model):
        raise ValueError(f"{text!r}; expected NAME=MODEL[,rows=N][,connections=N][,json][,churn], as batches=conv,rows=8")
    return Aggressor(name, model, **words)  # type: ignore[arg-type]


DEFAULT = ("batches=conv,rows=8,connections=4", "small=identity,connections=32", "json=numbers,json,connections=4")
"""The aggressors of the published figures."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Three phases one after another: of this server, with this aggressor, in this round."""

    round: int
    server: str
    aggressor: str

    def __str__(self) -> str:
        return f"round {self.round + 1}, {self.server}, {self.aggressor}"


def turns(servers: Sequence[str], aggressors: Sequence[str], rounds: int) -> Iterator[Turn]:
    """All of them. In each round another server and another aggressor come first."""
    for number in range(rounds):
        for kind in _from(aggressors, number):
            for server in _from(servers, number):
                yield Turn(number, server, kind)


def _from(names: Sequence[str], number: int) -> Sequence[str]:
    at = number % len(names)
    return [*names[at:], *names[:at]]
