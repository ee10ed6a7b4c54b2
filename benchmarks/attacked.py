"""A server that is attacked: what another tenant feels of it, how long SIGTERM takes meanwhile, when what hangs is replaced.

One tenant is timed, by an open loop on connections that are kept and, where those who accept connections are attacked, by
another that makes a new one for each request; a second one attacks. Where there are few cores, each has its client on its own.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from time import perf_counter, sleep

import onnx.parser

from greenlane.load.jobs import Ask, OpenLoop, Seen, Tally
from greenlane.load.machine import Others
from greenlane.load.processes import LoadProcess, begun, poisson
from greenlane.load.server_process import family_of
from greenlane.load.wire import Broken, Caller, post
from server.tenants.auth import digest
from tests.end_to_end.repository import HEADER, SPIN
from tests.models import FUSSY

from .bench import SETTLE, TAIL
from .clients import apart
from .deployment import Deployment, Server, Tenant, launched
from .goals import Felt, felt
from .hostile import ADMIN_KEY, ATTACKER, ATTACKER_KEY, MODELS, Crowd, Inquiry, infer, write_models
from .watched_server import alive

VICTIM, VICTIM_KEY, KEPT, NEW = "victim", "key of the victim", "kept", "new"
"""The tenant that is timed, and what its connections are: kept, or new for each request."""
DISPATCHER, SHARED = "(dispatcher)", "(shared)"
"""Processes that are no tenant's: one accepts connections, one answers health, metrics and administration."""
LIMIT = 10.0
"""Seconds from `drain_grace`, which is none here, to the end."""
PATIENCE = 30.0
"""Seconds until whatever takes longer than it may is given up."""
START = 60.0
RATE = 100
"""Requests a second of the victim."""
KEEPS = 16
"""Connections of the victim's that are kept: enough, as one that is made later passes through the process that accepts them."""
_KEEP = 15
_LOOK = 0.02
_ONCE = 0.5
_MEMORY = 'memory = "2GiB"'


class Attacked:
    """A server that is ready. One phase after the other."""

    def __init__(self, server: Server, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._victims, self._attackers = _cores()
        self._ask = _as(VICTIM_KEY, infer("little", b"", _one()))
        self._right = b""

    @property
    def port(self) -> int:
        return self._server.port

    def open(self) -> None:
        """Keep the victim's right answer. Raises RuntimeError."""
        with closing(Caller(self.port)) as caller:
            answer = caller.ask(self._ask)
        if answer.status != 200:
            raise RuntimeError(f"the victim is answered {answer.status}: {answer.body!r:.300}")
        self._right = answer.body or b""

    def beside(self, name: str, crowds: Sequence[Crowd], new: bool) -> tuple[list[Felt], list[Tally], float]:
        """Time the victim in a quiet phase and then beside this attack; `new` is whether on new connections, too. Blocks.

        Also returns which part of the cores' time other programs, or the host, used meanwhile.
        """
        begin = SETTLE + self._seconds
        end = begin + max(self._seconds, *(crowd.least for crowd in crowds))
        jobs = [crowd.job(name, self.port, -begin, end, self._attackers) for crowd in crowds]
        watching = [self._watch(way) for way in (KEPT, NEW)[: 1 + new]]
        others = Others(sorted(os.sched_getaffinity(0)), True)
        with begun([*watching, *jobs]) as (start, workers):
            tallies = [worker.result() for worker in workers[len(watching) :]]
            sleep(max(0.0, start + end + TAIL - perf_counter()))
            found = self._felt(workers[: len(watching)], (begin, end))
        self._settle()
        return found, [tally for tally in tallies if isinstance(tally, Tally)], others.share()

    def stopped(self, name: str) -> tuple[list[Felt], float]:
        """Time the victim while the process of this name is stopped, until another answers; the seconds that took. Blocks."""
        request = self._served_by(name)
        with begun([self._watch(KEPT)]) as (start, workers):
            sleep(max(0.0, start + SETTLE + self._seconds - perf_counter()))
            began = self._stop(name)
            took = self._answered(request) - began
            found = self._felt(workers, (began - start, perf_counter() - start))
        return found, took

    def ended(self, crowds: Sequence[Crowd], stopped: str = "") -> tuple[float, list[str]]:
        """Seconds from SIGTERM to the end, with this attack on or a process of this name stopped; and what was wrong."""
        jobs = [crowd.job("end", self.port, 0.0, 2 * PATIENCE, self._attackers) for crowd in crowds]
        with begun(jobs):
            sleep(SETTLE)
            family = family_of(self._server.process.pid)
            if stopped:
                self._stop(stopped)
            began = perf_counter()
            self._server.process.terminate()
            try:
                status = self._server.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                return perf_counter() - began, [f"SIGTERM did not end the server in {PATIENCE:g} s"]
            took = perf_counter() - began
        flaws = [f"it ended with {status}"] if status else []
        left = [one.name for one in alive(family) if perf_counter() - began > LIMIT or not _gone(one.pid, began + LIMIT)]
        return took, flaws + [f"{', '.join(left)} did not end"] * bool(left)

    def _watch(self, way: str) -> OpenLoop:
        return OpenLoop(
            port=self.port,
            ask=self._ask,
            arrivals=poisson(RATE, 4 * self._seconds + PATIENCE, seed=len(way)),
            connections=KEEPS if way == KEPT else 1,
            most=KEEPS if way == KEPT else 64,
            keep=_KEEP,
            cores=self._victims or None,
            fresh=way == NEW,
        )

    def _felt(self, workers: Sequence[LoadProcess], change: tuple[float, float]) -> list[Felt]:
        """End these watchers; what each felt, of which the quiet phase ended when the change began."""
        for worker in workers:
            worker.stop()
        every = [seen for worker in workers if isinstance(seen := worker.result(), Seen)]
        if (status := self._server.process.poll()) is not None:
            raise RuntimeError(f"the server ended with {status}: {self._server.log.read_text(errors='replace')[-3000:]}")
        quiet = (SETTLE, change[0])
        return [
            felt(way, seen.samples, quiet, change, sum(body != self._right for body in seen.bodies), seen.failures)
            for way, seen in zip((KEPT, NEW), every, strict=False)
        ]

    def _settle(self) -> None:
        """Wait until what the attack left behind is done: the attacker is answered again. Raises RuntimeError."""
        if self._answered(_as(ATTACKER_KEY, infer("open", b"", _one()))) == float("inf"):
            raise RuntimeError(f"the attacker itself was not answered for {PATIENCE:g} s after its attack")

    def _served_by(self, name: str) -> Ask:
        """A request that the process of this name has a part in."""
        if name == SHARED:
            return Ask(b"GET /v2/health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        return self._ask if name == DISPATCHER else _as(ATTACKER_KEY, infer("open", b"", _one()))

    def _stop(self, name: str) -> float:
        """Send SIGSTOP to the process of this name; when that was. Raises StopIteration if there is none."""
        called = f"greenlane {name}"[:15]
        pid = next(one.pid for one in family_of(self._server.process.pid) if one.name == called and one.state != "Z")
        os.kill(pid, signal.SIGSTOP)
        return perf_counter()

    def _answered(self, ask: Ask) -> float:
        """When this was answered with 200 on a connection of its own, tried again and again; infinite if it never was."""
        end = perf_counter() + PATIENCE
        while perf_counter() < end:
            with closing(Caller(self.port, _ONCE)) as caller, suppress(Broken):
                if caller.ask(ask).status == 200:
                    return perf_counter()
            sleep(_LOOK)
        return float("inf")


@contextmanager
def opened(folder: Path, repository: Path, seconds: float, moving: bool = False) -> Iterator[Attacked]:
    """Start a server, and wait until all is ready; `moving` is whether it has granules to move. Blocks.

    `seconds` are those of a phase. Raises NotServed, RuntimeError.
    """
    with launched(deployment(moving), folder, repository) as server:
        server.wait_serving(START)
        attacked = Attacked(server, seconds)
        attacked.open()
        yield attacked


def deployment(moving: bool) -> Deployment:
    """Two tenants of a core each; or, of 16 granules on two cores, three, of which the third shares the attacker's core."""
    keys = {name: (f'keys_sha256 = ["{digest(key)}"]',) for name, key in ((ATTACKER, ATTACKER_KEY), (VICTIM, VICTIM_KEY))}
    share = {ATTACKER: 6, VICTIM: 8} if moving else {ATTACKER: 1, VICTIM: 1}
    attacker = Tenant(ATTACKER, share[ATTACKER], MODELS, settings=(*keys[ATTACKER], _MEMORY))
    others = (Tenant("bystander", 2, ("little",)),) if moving else ()
    victim = Tenant(VICTIM, share[VICTIM], ("little",), settings=keys[VICTIM])
    admin = (f'admin_key_sha256 = "{digest(ADMIN_KEY)}"', 'max_pause = "1s"')
    program = ("benchmarks.virtualcores", "--in-order") if moving else ("server",)
    every = sorted(os.sched_getaffinity(0))
    carved = () if moving else tuple(every[:2])
    server = tuple(core for core in every if core not in apart(every, None))
    tenants = (attacker, *others, victim)
    return Deployment("attacked", "cpu", tenants, cores=server, carved=carved, program=program, settings=admin)


def build(root: Path) -> None:
    """Write the models of both tenants below `root`."""
    write_models(root)
    for name, text in (("spin", SPIN), ("fussy", FUSSY)):
        path = root / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(onnx.parser.parse_model(f"{HEADER} {text}").SerializeToString())


def _cores() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those of the victim's clients and of the attackers': some that the server keeps off, or else each tenant's own."""
    every = sorted(os.sched_getaffinity(0))
    own = apart(every, None)
    return (own[:1], own[1:]) if own else (tuple(every[1:2]), tuple(every[:1]))


def _one() -> dict[str, object]:
    return {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}


def _as(key: str, ask: Inquiry) -> Ask:
    return Ask(post(ask.path, {"Authorization": f"Bearer {key}"} | ask.headers, ask.body))


def _gone(pid: int, until: float) -> bool:
    """Whether this process ends in time, as those do that hear of the end of the one that started them."""
    while Path(f"/proc/{pid}").exists():
        if perf_counter() > until:
            return False
        sleep(_LOOK)
    return True
