"""`python -m benchmarks.engine`: what an inference costs beyond the engine, on a GPU, with no server around it.

A row is one network and batch on so many SMs, with or without graphs, its copies done by SMs or by the copy engines.
All times are medians in microseconds:
- `engine`: the engine alone, replayed back to back as a graph without copies; it depends on network, batch and SMs only.
- `submit`: `Executor.enqueue`, until it returns.
- `wait`: the same thread enqueues and blocks until it has ended; `over` the engine is what copies and host cost.
- `await`: from the same call on a tenant's thread until an asyncio task has resumed, which an eventfd woke, as between a
  worker and the HTTP side. What it is over `wait` is the price of not blocking the event loop.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path
from statistics import median, quantiles
from threading import Thread
from typing import Any

from . import needs  # noqa: F401

# isort: split
import numpy as np

from engines import EngineError, Executor, RuntimeSettings, Tensor, Work, load_engine
from greenlane.options import positive
from partitions import Device, DeviceUnavailable, Partition, open_device
from tests.engines.tensors import Memory
from tests.gpu.networks import NETWORKS, Network, Shapes, feed, plan

BATCHES = (1, 8)
FEWEST = 7
"""Inferences that a figure is of at least, however long they take."""
TURN = 50
"""Inferences of the engine alone between two waits."""
STOP = 1 << 32
ROOM = 32 << 20
"""Bytes for outputs, more than any of the networks gives."""
SWITCH_INTERVAL = 0.0005
"""Seconds, as the server sets it: what a busy Python thread may keep the others waiting."""

Ask = Callable[[], Work]


@dataclass(frozen=True, slots=True)
class Case:
    """The configuration of a row, besides network and batch."""

    sms: int
    graphs: str
    copies: str


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds; `engine` is None where it cannot be captured."""

    network: str
    batch: int
    case: Case
    engine: float | None
    submit: float
    submit_p99: float
    wait: float
    wait_p99: float
    resumed: float
    resumed_p99: float

    @property
    def over(self) -> float:
        """The resumed await over the blocking wait."""
        return self.resumed - self.wait

    def __str__(self) -> str:
        alone = "-" if self.engine is None else f"{self.engine:,.0f}"
        beyond = "-" if self.engine is None else f"{self.wait - self.engine:,.0f}"
        return (
            f"{self.network:9}{self.batch:3} {self.case.sms:4} {self.case.graphs:>4} {self.case.copies:>7} {alone:>8}"
            f" {self.submit:8,.0f} {self.wait:8,.0f} {beyond:>7} {self.resumed:8,.0f} {self.over:6,.0f}"
        )


HEADING = f"{'network':7}batch  SMs  graphs copies   engine   submit     wait    over    await   over"


class Tenant:
    """A thread of a partition that enqueues and waits when an event loop asks it to: an eventfd each way."""

    def __init__(self, partition: Partition, ask: Ask) -> None:
        self.began = 0.0
        """When it last began to enqueue."""
        self._partition = partition
        self._ask = ask
        self._asked, self._ended = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
        self._resume: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._thread = Thread(target=self._run)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self._ended, self._hear)
        self._thread.start()

    async def once(self, loop: asyncio.AbstractEventLoop) -> float:
        """One inference; seconds from its beginning until this task has resumed."""
        self._resume = loop.create_future()
        os.eventfd_write(self._asked, 1)
        await self._resume
        return time.perf_counter() - self.began

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        os.eventfd_write(self._asked, STOP)
        self._thread.join()
        loop.remove_reader(self._ended)
        os.close(self._asked)
        os.close(self._ended)

    def _hear(self) -> None:
        os.eventfd_read(self._ended)
        if self._failure and self._resume:
            self._resume.set_exception(self._failure)
        elif self._resume:
            self._resume.set_result(None)

    def _run(self) -> None:
        self._partition.attach()
        while os.eventfd_read(self._asked) < STOP:
            try:
                self.began = time.perf_counter()
                self._ask().wait()
            except Exception as error:
                self._failure = error
            os.eventfd_write(self._ended, 1)


def blocking(ask: Ask, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds to enqueue, and until it has ended, of inferences one after another on the calling thread."""
    submits, totals = [], []
    for _ in _turns(seconds):
        began = time.perf_counter()
        work = ask()
        submits.append(time.perf_counter() - began)
        work.wait()
        totals.append(time.perf_counter() - began)
    return submits, totals


def awaited(partition: Partition, ask: Ask, seconds: float) -> list[float]:
    """Seconds until the task that asked has resumed, of inferences one after another."""

    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        tenant = Tenant(partition, ask)
        tenant.start(loop)
        try:
            return [await tenant.once(loop) for _ in _turns(seconds)]
        finally:
            tenant.close(loop)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run())


def alone(executor: Any, partition: Any, ask: Ask, seconds: float) -> float | None:
    """Seconds of the engine without copies. On an attached thread, nothing in flight; None where it has no graphs."""
    from engines.cuda.capture import capture

    ask().wait()
    prepared = next(
        reversed(executor._shapes._ready.values())
    )  # The last inference's, whose graph did not need its shapes set.
    context = prepared.context
    context.set_shapes(prepared.shapes)
    partition.stream.sync()
    with ExitStack() as after:
        launch = context.execute  # With a graph of the library's own it is a launch, and must not be captured.
        if executor.instance.graph_mode.capture:
            launch = after.enter_context(
                closing(capture(partition, lambda side: context.execute(side.stream, captured=True)))
            ).launch
        elif not executor.instance.graph_mode.native:
            return None
        return median([_replay(launch, partition.stream) for _ in _turns(seconds)])


def _replay(launch: Callable[[Any], object], stream: Any) -> float:
    began = time.perf_counter()
    for _ in range(TURN):
        launch(stream)
    stream.sync()
    return (time.perf_counter() - began) / TURN


def measure(executor: Executor, partition: Partition, ask: Ask, seconds: float) -> tuple[list[float], list[float], list[float]]:
    """Seconds to enqueue, to wait, and to the resumed await, once graphs were captured. Blocks, three times `seconds` or so."""
    partition.run(lambda: [ask().wait() for _ in range(3)])
    submits, totals = partition.run(lambda: blocking(ask, seconds))
    return submits, totals, awaited(partition, ask, seconds)


@contextmanager
def asking(device: Device, executor: Executor, arrays: dict[str, Any]) -> Iterator[Ask]:
    """Inferences of these inputs, which are pinned, as the room for their outputs is."""
    with ExitStack() as pinned:

        def memory(nbytes: int) -> Memory:
            made = Memory(max(1, nbytes))
            pinned.enter_context(closing(device.pin(*made.room[:2])))
            return made

        inputs = []
        for spec in executor.engine.signature.inputs:
            array = np.ascontiguousarray(arrays[spec.name])
            here = memory(array.nbytes)
            here.bytes[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
            inputs.append(Tensor(array.shape, here.room.address, array.nbytes, here))
        outputs = memory(ROOM)
        yield lambda: executor.enqueue(inputs, outputs.room)


def prefix(granules: Sequence[int], sms: int) -> range:
    """The first granules that hold so many SMs, or all."""
    reached = [total >= sms for total in accumulate(granules)]
    return range(reached.index(True) + 1 if True in reached else len(granules))


class Experiment:
    """Networks built into `folder`; remembers how long each engine takes alone. Call `rows` once."""

    def __init__(self, device: Device, folder: Path, seconds: float, report: Callable[[str], None]) -> None:
        self._device = device
        self._folder = folder
        self._seconds = seconds
        self._report = report
        self._alone: dict[tuple[str, int, int], float | None] = {}

    def rows(self, networks: Sequence[str], sms: Sequence[int], ends: float) -> Iterator[Row]:
        """Until `ends`, a time.monotonic(): what was not measured by then is left out, and said."""
        paths = {name: self._build(name) for name in networks}
        for (graphs, copies), name in product(product(("on", "off"), ("sm", "engine")), networks):
            settings = RuntimeSettings(graphs=graphs, copies=copies)
            with closing(load_engine(paths[name], self._device, settings)) as engine:
                for count in sms:
                    case = Case(sum(self._device.granules[g] for g in prefix(self._device.granules, count)), graphs, copies)
                    if time.monotonic() > ends:
                        self._report(f"no time left for {name} {case}\n")
                        continue
                    yield from self._case(engine, name, case, prefix(self._device.granules, count))

    def _build(self, name: str) -> Path:
        self._report(f"building {name}")
        folder = self._folder / name
        folder.mkdir()
        return plan(folder, NETWORKS[name]())

    def _case(self, engine: Any, name: str, case: Case, granules: Sequence[int]) -> Iterator[Row]:
        self._report(f"binding {name} to {case.sms} SMs, graphs {case.graphs}, copies {case.copies}")
        network = NETWORKS[name]()
        with closing(self._device.carve(granules)) as partition:
            try:
                executor = engine.bind(partition)
            except EngineError as error:
                self._report(f"{name} {case}: {error}\n")
                return
            with closing(executor):
                for batch in BATCHES:
                    if shapes := network.batch(batch):
                        yield self._row(executor, partition, network, name, batch, case, shapes)

    def _row(
        self, executor: Executor, partition: Partition, network: Network, name: str, batch: int, case: Case, shapes: Shapes
    ) -> Row:
        self._report(f"measuring {name} {batch} on {case.sms} SMs, graphs {case.graphs}, copies {case.copies}")
        with asking(self._device, executor, feed(network, shapes, 0)) as ask:
            times = measure(executor, partition, ask, self._seconds)
            key = (name, batch, case.sms)
            if key not in self._alone:
                self._alone[key] = partition.run(lambda: alone(executor, partition, ask, self._seconds))
            return Row(name, batch, case, _microseconds(self._alone[key]), *_summaries(times))


@contextmanager
def opened_gpu() -> Iterator[Device]:
    """The GPU. Ends the process with 2 where there is none that can be carved."""
    try:
        device = open_device("cuda")
    except DeviceUnavailable as error:
        print(f"this needs a GPU: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    with closing(device):
        yield device


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status. Raises SystemExit where there is no GPU that can be carved."""
    options = _parser().parse_args(arguments)
    sys.setswitchinterval(SWITCH_INTERVAL)
    with opened_gpu() as device, tempfile.TemporaryDirectory(prefix="greenlane-engine-") as folder:
        print(f"{device.describe()}\n{HEADING}")
        experiment = Experiment(device, Path(folder), options.seconds, _progress)
        rows = [_show(row) for row in experiment.rows(options.networks, options.sms, time.monotonic() + options.budget)]
        if options.json:
            found = {"device": device.describe(), "rows": [{**asdict(row), "over": row.over} for row in rows]}
            Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description="What an inference costs beyond the engine."
    )
    names = ",".join(NETWORKS)
    parser.add_argument("--networks", type=_networks, default=list(NETWORKS), metavar="A,B", help=f"of {names}; default: all")
    parser.add_argument("--sms", type=_sms, default=_sms("8,16,32,64,all"), metavar="N,N", help="default: 8,16,32,64,all")
    parser.add_argument("--seconds", type=positive, default=0.06, help="of each measurement; default: 0.06")
    parser.add_argument(
        "--budget", type=positive, default=200, help="seconds after which no further row is begun; default: 200"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    return parser


def _networks(text: str) -> list[str]:
    for name in (names := text.split(",")):
        if name not in NETWORKS:
            raise argparse.ArgumentTypeError(f"{name!r} is no network; there are {', '.join(NETWORKS)}")
    return names


def _sms(text: str) -> list[int]:
    """`all` is more than any GPU has."""
    if not all(part == "all" or (part.isdecimal() and int(part)) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}; expected numbers of SMs from 1, or all, with commas between")
    return [sys.maxsize if part == "all" else int(part) for part in text.split(",")]


def _turns(seconds: float) -> Iterator[int]:
    """Until so many seconds are over, but FEWEST at least."""
    ends, turn = time.perf_counter() + seconds, 0
    while turn < FEWEST or time.perf_counter() < ends:
        yield turn
        turn += 1


def _summaries(times: Sequence[list[float]]) -> Iterator[float]:
    """The median and the 99th percentile of each, in microseconds."""
    for each in times:
        yield median(each) * 1e6
        yield quantiles(each, n=100)[98] * 1e6


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, as the server's is, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _progress(text: str) -> None:
    if sys.stderr.isatty() or text.endswith("\n"):
        print(f"\r{text:100}\r" if not text.endswith("\n") else text, end="", file=sys.stderr, flush=True)


def _show(row: Row) -> Row:
    print(row, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
