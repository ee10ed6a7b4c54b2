"""A server with three tenants, and load processes that watch it: a quiet phase, something that changes, and what was felt.

Each client is a process of its own, which notes when its answers came; what changes is done by this process meanwhile, and
both read one clock. So an answer belongs to the change if any of its time does.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import TypeVar

import numpy as np

from greenlane.load.jobs import Ask, OpenLoop, Seen
from greenlane.load.processes import begun, poisson
from greenlane.load.server_process import family_of
from greenlane.load.wire import Caller

from . import nets, stalling
from .asks import TOLERANCE, inference, wrong
from .clients import apart
from .deployment import Deployment, Server, Tenant, ask, granules, launched
from .goals import Felt, felt
from .nets import NETS, Array
from .virtualcores import GRANULES

T = TypeVar("T")
WATCHER, MOVERS = "tiny", ("mob", "enc")
"""Tenants, each called as the model that its load is for."""
FRESH = tuple(f"fresh{number}" for number in range(4))
"""Models of one tenant that are written, and built, while another is timed."""
STREAMED = "streamed"
"""A model of the first mover that is written for its phase."""
EXTRA = {"mob": ("mean", "tiny"), "enc": ("mob", "tiny")}
"""Further models of the tenants that move; loaded at the start, so that they are compiled, and then unloaded."""
RATES = {"cuda": {"tiny": 500.0, "mob": 100.0, "enc": 100.0}, "cpu": {"tiny": 100.0, "mob": 20.0, "enc": 20.0}}
"""Requests a second by device and tenant, modest for each."""
KEEP = {"tiny": 3, "mob": 15, "enc": 63}
"""Every so manyth answer is compared; odd, as two requests take turns."""
INPUTS = 2
SETTLE, TAIL = 0.5, 0.3
"""Seconds before a quiet phase, and after a change, in which nothing is expected to be felt any more."""
LONGEST = 200.0
"""Seconds that a change may take."""
START = 180.0
"""Seconds in which the server has to be ready: on a GPU everything is built and compiled meanwhile."""
PATIENCE = 120.0
"""Seconds for which an answer is waited for."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of the watcher's client, of the other clients, and of the server; none are any."""

    watcher: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    server: tuple[int, ...] = ()


def share_out(every: Sequence[int]) -> Cores:
    """The last quarter of enough cores is for clients, and the watcher's has one of them to itself."""
    own = apart(every, None)
    return Cores(own[:1], own[1:], tuple(core for core in every if core not in own)) if own else Cores()


class Bench:
    """A server that is ready. `watch` is for one phase after the other; every phase leaves shares and models as they were."""

    def __init__(self, server: Server, device: str, repository: Path, seconds: float, cores: Cores) -> None:
        self.device = device
        self.repository = repository
        self.seconds = seconds
        self.shares = {tenant.name: tenant.granules for tenant in server.deployment.tenants}
        self.nets = NETS[device]
        self.quiet_worst: dict[str, float] = {}
        self._server = server
        self._cores = cores
        self._asks = {name: [self.request(name, 1, seed) for seed in range(INPUTS)] for name in (WATCHER, *MOVERS)}
        self._first: dict[str, list[Array]] = {}

    @property
    def port(self) -> int:
        return self._server.port

    def open(self) -> None:
        """Unload what is not a tenant's own, and keep the first answer of each request. Blocks. Raises RuntimeError."""
        for tenant in MOVERS:
            for model in EXTRA[tenant]:
                self.order("unload", model, tenant)
        for name, requests in self._asks.items():
            with closing(Caller(self.port, PATIENCE)) as caller:
                answers = [caller.ask(request) for request in requests]
            if bad := [each for each in answers if each.status != 200]:
                raise RuntimeError(f"{name} answers {bad[0].status}: {bad[0].body!r:.300}")
            self._first[name] = firsts = [np.frombuffer(each.parts[1], np.float32) for each in answers]
            if np.abs(firsts[0] - firsts[1]).max() <= 2 * TOLERANCE * np.abs(firsts[0]).max():
                raise RuntimeError(f"{name} answers different requests alike, so that a wrong answer would not be seen")

    def check(self) -> None:
        """Raise RuntimeError if the server has ended."""
        if (status := self._server.process.poll()) is not None:
            raise RuntimeError(f"the server ended with {status}: {self.log()}")

    def log(self) -> str:
        """The end of the server's log."""
        return self._server.log.read_text(errors="replace")[-3000:]

    def request(self, model: str, rows: int, seed: int = 0, tenant: str | None = None) -> Ask:
        """An inference of a model, by its own tenant or another."""
        return inference(model, tenant or model, self.nets[model].draw(rows, seed))

    def order(self, what: str, model: str, tenant: str) -> int:
        """Load or unload a model through the repository API; the status. Blocks."""
        return ask(self.port, "POST", f"/v2/repository/models/{model}/{what}", {"X-Tenant": tenant}, b"{}")[0]

    def repartition(self, counts: Mapping[str, int]) -> tuple[int, float]:
        """PUT these granules; the status and how many seconds it took. Blocks."""
        body, began = repr(dict(counts)).replace("'", '"').encode(), perf_counter()
        status, _ = ask(self.port, "PUT", "/admin/partitions", {"Content-Type": "application/json"}, body)
        return status, perf_counter() - began

    def stall(self) -> None:
        """Have each process with a device keep its interpreter for `stalling.STALL` seconds; returns at once."""
        for one in family_of(self._server.process.pid):
            stalling.request(one.pid)

    def longest_work(self, tenant: str, count: int = 30) -> float:
        """Milliseconds that the slowest of some inferences of a tenant spends in its worker, when nothing else happens."""
        requests = self._asks[tenant]
        with closing(Caller(self.port, PATIENCE)) as caller:
            return max(caller.ask(requests[number % INPUTS]).times[1] for number in range(count))

    def watch(self, tenants: Sequence[str], change: Callable[[], T], quiet: float | None = None) -> tuple[T, list[Felt]]:
        """Have these tenants ask all the time, do nothing for so long (`seconds` by default), then do this; what came of it.

        Blocks. Raises LoadProcessFailed, and what the change raises.
        """
        with begun([self._job(tenant) for tenant in tenants]) as (start, workers):
            sleep(max(0.0, start + SETTLE - perf_counter()))
            calm = SETTLE
            sleep(self.seconds if quiet is None else quiet)
            changed = perf_counter() - start
            outcome = change()
            ended = perf_counter() - start
            sleep(TAIL)
            for worker in workers:
                worker.stop()
            seen = [result for worker in workers if isinstance(result := worker.result(), Seen)]
        self.check()
        return outcome, [self._felt(*pair, (calm, changed), (changed, ended)) for pair in zip(tenants, seen, strict=True)]

    def _job(self, tenant: str) -> OpenLoop:
        due = poisson(RATES[self.device][tenant], LONGEST, seed=len(tenant))
        asks = self._asks[tenant]
        mine = self._cores.watcher if tenant == WATCHER else self._cores.others
        return OpenLoop(
            port=self.port,
            ask=asks[0],
            others=tuple(asks[1:]),
            arrivals=due,
            connections=4,
            most=64,
            spin=tenant == WATCHER and bool(mine),
            grace=30.0,
            keep=KEEP[tenant],
            cores=mine or None,
        )

    def _felt(self, tenant: str, seen: Seen, quiet: tuple[float, float], change: tuple[float, float]) -> Felt:
        pairs = zip(seen.asked, seen.bodies, strict=True)
        differ = sum(wrong([body], "binary", self._first[tenant][which]) for which, body in pairs)
        found = felt(tenant, seen.samples, quiet, change, differ + seen.wrong, seen.failures, seen.slowest)
        if found.quiet_count:
            self.quiet_worst[tenant] = max(found.quiet_worst, self.quiet_worst.get(tenant, 0.0))
        return found


@contextmanager
def opened(
    device: str, folder: Path, repository: Path, seconds: float, stalls: bool = False, mps: str = "off"
) -> Iterator[Bench]:
    """Write the models, start the server, and wait until all is ready. Blocks. Raises NotServed, RuntimeError.

    `stalls` is whether `Bench.stall` is to work; `mps` is as in the configuration.
    """
    nets.write_all(repository, device)
    cores = share_out(sorted(os.sched_getaffinity(0)))
    total = granules(device, ()) if device == "cuda" else GRANULES
    with launched(replace(deployment(device, total, cores, stalls), mps=mps), folder, repository) as server:
        server.wait_serving(START)
        bench = Bench(server, device, repository, seconds, cores)
        bench.open()
        yield bench


def deployment(device: str, total: int, cores: Cores, stalls: bool = False) -> Deployment:
    """Of 16 granules, each mover has 5 and the watcher 4. Raises ValueError for fewer than 10."""
    mover, watcher = total * 5 // 16, total * 4 // 16
    if mover < 3:
        raise ValueError(f"{total} granules; moving two tenants and leaving a third in peace needs 10 or more")
    tenants = (
        Tenant("mob", mover, ("mob", *EXTRA["mob"], STREAMED)),
        Tenant("enc", mover, ("enc", *EXTRA["enc"], *FRESH)),
        Tenant(WATCHER, watcher, (WATCHER,)),
    )
    made = Deployment("change", device, tenants, cores=cores.server)
    if stalls:
        return replace(made, program=("benchmarks.stalling", *["--virtual"] * (device == "cpu")))
    return made if device == "cuda" else replace(made, program=("benchmarks.virtualcores",))
