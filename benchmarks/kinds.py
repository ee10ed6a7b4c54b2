"""The ways of being a nuisance, each as hard as a client can: what is sent, on how many connections, to which model."""

from collections.abc import Callable
from dataclasses import dataclass

from greenlane.load.jobs import Ask, Behaviour, ClosedLoop

from .asks import as_json, binary, invalid, unauthenticated
from .subjects import ROWS, SUBJECTS


@dataclass(frozen=True, slots=True)
class Kind:
    """One way. `asks` makes its requests for a tenant, given the rows of a large batch.

    `fenced` is whether a partition is there to hold it off: none does so with memory, caches and PCIe. `mib` is what a request
    moves of these, on cores and on a GPU. One that is `tried` moves few bytes: the server has to find that it slows others. One
    that is `mild` is bounded by other means, so that a fence is measured beside it in one round.
    """

    name: str
    what: str
    model: str
    connections: int
    asks: Callable[[str, int], tuple[Ask, ...]]
    behaviour: Behaviour = "flood"
    fenced: bool = True
    tried: bool = False
    mild: bool = False
    mib: tuple[float, float] = (0, 0)

    def jobs(
        self, port: int, tenant: str, seconds: float, rows: int, processes: int, cores: tuple[int, ...] | None = None
    ) -> list[ClosedLoop]:
        """The same for each of some processes, which share its connections."""
        count = max(1, min(processes, self.connections // 4))
        asks, each = self.asks(tenant, rows), self.connections // count
        job = ClosedLoop(
            name=self.name,
            port=port,
            asks=asks,
            connections=each,
            behaviour=self.behaviour,
            seconds=seconds,
            cores=cores,
        )
        return [job] * count


def _moving(name: str, what: str, model: str, tried: bool = False, mild: bool = False) -> Kind:
    """A model that moves bytes, on four connections: one of their requests is always there when another has ended."""

    def asks(tenant: str, _: int) -> tuple[Ask, ...]:
        return (binary(model, tenant, outputs=("y",)),)

    return Kind(name, what, model, 4, asks, fenced=False, tried=tried, mild=mild, mib=SUBJECTS[model].mib)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("compute", "batches of convolutions", "conv", 4, lambda t, rows: (binary("conv", t, rows),)),
        Kind("transfer", "38 MB bodies", "image", 2, lambda t, _: (binary("image", t, ROWS),)),
        Kind("bandwidth", "a model that reads 64 MB", "elementwise", 4, lambda t, _: (binary("elementwise", t),)),
        Kind("small", "small requests, 32 connections", "identity", 32, lambda t, _: (binary("identity", t),)),
        Kind("json", "a megabyte of JSON both ways", "numbers", 8, lambda t, _: (as_json("numbers", t),)),
        Kind("slow", "8 MB answers, read by a few bytes", "wide", 16, lambda t, _: (binary("wide", t),), "slow"),
        Kind("churn", "a new connection for each request", "identity", 16, lambda t, _: (binary("identity", t),), "churn"),
        Kind("invalid", "nothing but wrong requests of its own", "identity", 16, lambda t, _: invalid(t)),
        Kind("unauthenticated", "requests of no tenant, some not even HTTP", "identity", 16, lambda _, __: unauthenticated()),
        _moving("memory-read", "a model that reads memory, 2 GB on a GPU", "reading"),
        _moving("memory-write", "a model that writes memory, 2 GB on a GPU", "writing"),
        _moving("memory-copy", "a model that reads and writes memory, 1 GB each on a GPU", "copying"),
        _moving("random-sectors", "a model that reads 32 bytes here and there in memory", "random", tried=True),
        _moving("l2-16", "a model that reads 16 MB of a cache again and again", "cached16"),
        _moving("l2-40", "a model that reads 40 MB of a cache again and again", "cached40"),
        _moving("pcie-out", "small requests of a model with an output of 4 MB that they do not ask for", "outgoing", mild=True),
        _moving("pcie-stream", "a model of which a GPU keeps 64 of 512 MiB, and reads the rest from the host", "streamed"),
        Kind(
            "pcie-in",
            "38 MB bodies, 8 connections",
            "image",
            8,
            lambda t, _: (binary("image", t, ROWS),),
            fenced=False,
            mild=True,
            mib=(36.75, 36.75),
        ),
    )
}
FENCED, UNFENCED = (tuple(name for name, kind in KINDS.items() if kind.fenced == fenced) for fenced in (True, False))
TRIO = "trio"
"""Three aggressors at a time, on four partitions: these."""
TRIO_OF = ("compute", "transfer", "small")
