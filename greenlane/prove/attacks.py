"""What an aggressor does to its neighbours, each as hard as a client can: which requests, on how many connections.

Ordered by how much of the server each one meets: the model's own share, then HTTP and the queue, then memory and parsing.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from greenlane.load.jobs import Ask, Behaviour, ClosedLoop
from greenlane.load.wire import post
from partitions.strain import STRAINS, Strain

from .access import Access
from .inputs import Model, binary, padded, wrong
from .survey import Drivable, Surveyed

BATCHES, SMALL, BODIES, INVALID, CHURN = "batches", "small", "bodies", "invalid", "churn"
KINDS = (BATCHES, SMALL, BODIES, INVALID, CHURN)
MARGIN = 0.02
"""Seconds by which a strain is shorter than the phase that it is for, as its request is on its way for some of them."""
WHAT = {
    BATCHES: "its largest requests, 4 connections",
    SMALL: "small requests, 32 connections",
    BODIES: "JSON bodies of a megabyte, 4 connections",
    INVALID: "invalid requests, 16 connections",
    CHURN: "a new connection for each request, 16 at a time",
    "memory copy": "the server's own work on the aggressor's share copies memory",
    "memory read": "the same reads memory",
    "memory write": "the same writes memory",
    "random sectors": "the same reads 32 bytes here and there",
    "L2": "the same reads what the last cache before memory holds, again and again",
    "PCIe out": "the same writes to the host",
    "PCIe in": "the same reads from the host",
}
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Attack:
    """One kind of aggressor: its requests, and `seconds`, which one of them takes alone (0: not measured).

    `expected` is the status that shows that it did what it is about; `model` is which one it asks, for people. A strain is
    asked for by the one request that `lasting` makes for so many seconds, and moves `rate` gigabytes a second alone.
    """

    kind: str
    asks: tuple[Ask, ...]
    connections: int
    expected: frozenset[int]
    model: str
    behaviour: Behaviour = "flood"
    seconds: float = 0.0
    lasting: Callable[[float], Ask] | None = None
    rate: float = 0.0

    def jobs(self, port: int, begin: float, end: float, processes: int, cores: tuple[int, ...] | None) -> list[ClosedLoop]:
        """The jobs of some load processes from `begin` to `end`, in seconds after the start that all are given."""
        count = max(1, min(processes, self.connections))
        job = ClosedLoop(
            name=self.kind,
            port=port,
            asks=(self.lasting(end - begin - MARGIN),) if self.lasting else self.asks,
            connections=self.connections // count,
            behaviour=self.behaviour,
            seconds=end,
            ahead=-begin,
            cores=cores,
        )
        return [job] * count


def possible(tenant: Surveyed) -> tuple[str, ...]:
    """The kinds that this tenant can be: one without models can only send invalid requests."""
    return KINDS if tenant.drivable else (INVALID,)


def attack(kind: str, tenant: Surveyed, access: Access, like: Attack | None = None) -> Attack:
    """This kind as this tenant. `like`: as that one does it, with the same model where the tenant may call it."""
    headers = access.headers(tenant.name)
    if kind == INVALID:
        model = _chosen(tenant, tenant.drivable[:1], like)
        asks = wrong(model.model if model else Model("unknown", ()), headers)
        return Attack(kind, asks, 16, frozenset({400, 404}), model.model.name if model else "none")
    model = _chosen(tenant, [tenant.heaviest if kind == BATCHES else tenant.quickest], like)
    assert model
    name = model.model.name
    if kind == BATCHES:
        return Attack(kind, (binary(model.model, model.large.form, headers),), 4, frozenset({200}), name)
    if kind == BODIES:
        return Attack(kind, (padded(model.model, model.small.form, headers, MIB),), 4, frozenset({200}), name)
    small = (binary(model.model, model.small.form, headers),)
    if kind == SMALL:
        return Attack(kind, small, 32, frozenset({200}), name)
    return Attack(kind, small, 16, frozenset({200}), name, "churn")


def strains(unit: str, wanted: Sequence[Strain] = STRAINS) -> tuple[Strain, ...]:
    """Those of these kinds of strain that a device with such units has."""
    return tuple(kind for kind in wanted if unit != "core" or not kind.startswith("PCIe"))


def lacking(wanted: Sequence[Strain]) -> str:
    """Which of these kinds of strain cores do not have, in words; "" for none of them, or where all kinds are wanted."""
    lacks = [kind for kind in wanted if kind not in strains("core")]
    return f"cores cannot strain {' and '.join(lacks)}" if lacks and tuple(wanted) != STRAINS else ""


def strain_of(tenant: str) -> str:
    """The path that a strain of this tenant's share is asked for at."""
    return f"/admin/tenants/{quote(tenant, safe='')}/strain"


def strain_body(kind: Strain, seconds: float) -> bytes:
    """What it is asked for with."""
    return json.dumps({"kind": kind, "seconds": round(seconds, 3)}).encode()


def strain(kind: Strain, tenant: str, access: Access) -> Attack:
    """This kind of strain, by work on this tenant's share."""

    def lasting(seconds: float) -> Ask:
        return Ask(post(strain_of(tenant), access.administrator, strain_body(kind, seconds)))

    return Attack(kind, (), 1, frozenset({200}), "no model", "once", lasting=lasting)


def fenced(tenant: str, fence: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Lines that say which strains by a tenant on cores something holds, and what; `fence` is what the server says of that."""
    how, notes = (fence.get("cores", ""), fence["notes"]) if fence else ("", ["it has no memory_bandwidth"])
    found = {what: bool(re.search(line, how)) for what, line in (("memory", "MB:"), ("the last cache (L2)", r"L3\w*:"))}
    lines = []
    for word, held in (("fenced", True), ("not fenced", False)):
        if parts := [what for what, each in found.items() if each == held]:
            lines.append(f"{word}: what {tenant} does to {' and '.join(parts)}{f': {how}' * held}")
    return (*lines, *(f"{tenant}: {note}" for note in notes))


def held(tenant: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> tuple[str, ...]:
    """A line if a victim was held to its own shares of bandwidth meanwhile; arguments are as `fence` of `fenced`."""
    counts = {key: (after or {}).get(key, 0) - (before or {}).get(key, 0) for key in ("launches", "waits")}
    words = {"launches": "that ran on fewer granules", "waits": "that waited for PCIe"}
    parts = [f"{count} inference{'s' * (count != 1)} {words[key]}" for key, count in counts.items() if count > 0]
    why = f"{tenant} is slower also as its own memory_bandwidth and pcie held it while others worked"
    return (f"{why}: {' and '.join(parts)}",) if parts else ()


def _chosen(tenant: Surveyed, own: Sequence[Drivable], like: Attack | None) -> Drivable | None:
    """The model of `like` if the tenant has it, or else its own."""
    same = tenant.model(like.model) if like else None
    return same or next(iter(own), None)
