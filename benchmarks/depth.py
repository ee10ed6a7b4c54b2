"""`python -m benchmarks.depth`: does the stream stay full? Four clients in this process against the engine back to back.

`--http` asks a server instead, of one tenant with the whole device: once with the launch loop, once without, in turns.

One tenant has all granules. Its requests go the way of `uvicorn server.app:app`: a lane on the event loop, a link, a worker.
Compared is the same executor kind on the same partition, driven by one thread that always has two inferences enqueued.
A process of its own, as a process may split a GPU only once. It prints JSON.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Collection
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import uvloop

from engines import Engine, RuntimeSettings, load_engine
from greenlane.options import count, positive
from partitions import Device, DeviceLost, Partition, open_device
from server.config.tenant import TenantConfig
from server.errors import RequestError
from server.launch_loop.library import SWITCH
from server.link.messages import Done
from server.link.slots import Slot
from server.tenants.local_frontend import open_local
from server.workers.gil_priority import GilPriorities
from server.workers.placement import Placement
from server.workers.session import Endpoint
from server.workers.worker import Worker

from . import nets
from .asks import TOLERANCE
from .cases import Request
from .client import Load, drive
from .inside import quiet
from .nets import MOST_ROWS, NETS, Array
from .seat import Seat, all_at_once, back_to_back, open_seat
from .servers import launch
from .sidebyside import WARM_UP

CLIENTS = 4
ROUNDS = 3
MODELS = ("mob", "enc")
OVER_HTTP = (("tiny", 1), ("tiny", 32), ("mob", 1), ("mob", 8))
"""Models and connections of `--http`."""
KEY = "depth/1#1"


class Clients:
    """A tenant without HTTP: its lane on the running event loop, its worker on a partition. `close` leaves the partition."""

    def __init__(self, engine: Engine, partition: Partition, device: Device) -> None:
        config = TenantConfig(name="depth", granules=len(device.granules), models=("*",))
        self._frontend = open_local(config, only=True)
        self._lane = self._frontend.tenant.lane
        self._signature = engine.signature
        self._executor = engine.bind(partition)
        memory = self._frontend.link.arena.memory
        self._pinned = device.pin(memory.address, memory.nbytes)
        self._worker = Worker(Placement(partition, {KEY: self._executor}), self._lost, GilPriorities())

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        """Called when a client disconnects: none does here."""

    def open(self) -> None:
        """Begin to serve, on the running event loop."""
        self._frontend.open(self)
        self._worker.serve(Endpoint(self._frontend.link, self._pinned))

    async def close(self) -> None:
        """Finish what is in flight, and free the executor."""
        await self._frontend.drained()
        self._worker.halt()
        self._executor.close()
        self._frontend.close()
        self._pinned.close()

    async def rate(self, inputs: list[Array], wanted: list[Array], seconds: float) -> tuple[float, int]:
        """Each client asks again as soon as it was answered; inferences a second of all, and how many answers were wrong."""
        start = perf_counter()
        until = start + seconds
        pairs = await asyncio.gather(*(self._client(x, y, until) for x, y in zip(inputs, wanted, strict=True)))
        took = perf_counter() - start
        return sum(done for done, _ in pairs) / took, sum(wrong for _, wrong in pairs)

    async def _client(self, x: Array, wanted: Array, until: float) -> tuple[int, int]:
        room, done, wrong = self._signature.output_bytes(self._signature.check([x.shape])), 0, 0
        data = x.view(np.uint8).ravel()
        while perf_counter() < until:
            slot = self._lane.take_slot()
            (start,) = slot.lay_out(self._signature, [x.nbytes], room)
            np.copyto(np.frombuffer(slot.view, np.uint8, x.nbytes, start), data)
            ended = await self._run(slot, (x.shape,))
            if done % 64 == 0:
                extent = ended.outputs[0]
                got = np.frombuffer(slot.view, np.float32, extent.nbytes // 4, extent.offset)
                wrong += not np.abs(got - wanted).max() <= TOLERANCE * np.abs(wanted).max()
            self._lane.release(slot)
            done += 1
        return done, wrong

    def _run(self, slot: Slot, shapes: tuple[tuple[int, ...], ...]) -> "asyncio.Future[Done]":
        """The completion of the request in this slot; its errors are the caller's."""
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()

        def on_done(end: Done | RequestError) -> None:
            if isinstance(end, Done):
                future.set_result(end)
            else:
                future.set_exception(end)

        self._lane.submit(slot, KEY, shapes, on_done)
        return future

    def _lost(self, error: DeviceLost) -> None:
        raise error


def bare_rate(seat: Seat, seconds: float) -> float:
    """Inferences a second of one thread that never lets the stream run empty. Blocks."""
    start = perf_counter() + 0.05
    (done,) = all_at_once([(seat, lambda s: back_to_back(s, start, start + seconds, GilPriorities()))])
    return float(done / seconds)


async def measure(engine: Engine, partition: Partition, device: Device, inputs: list[Array], seconds: float) -> dict[str, Any]:
    """Both in turns; figures of one model."""
    seat = open_seat(device, engine, partition, inputs[0])
    wanted = []
    for x in inputs:
        with closing(open_seat(device, engine, partition, x)) as other:
            wanted.append(other.answer().ravel())
    clients = Clients(engine, partition, device)
    clients.open()
    try:
        await clients.rate(inputs, wanted, 0.2)  # Slots are pinned, and all is warm.
        pairs: list[tuple[float, float]] = []
        wrong = 0
        for _ in range(ROUNDS):
            bare = await asyncio.to_thread(bare_rate, seat, seconds)
            ours, off = await clients.rate(inputs, wanted, seconds)
            wrong += off
            pairs.append((bare, ours))
    finally:
        await clients.close()
        seat.close()
    ratio = median(ours / bare for bare, ours in pairs)
    return {"back to back, 1/s": [b for b, _ in pairs], "clients, 1/s": [o for _, o in pairs], "ratio": ratio, "wrong": wrong}


def alone(kind: str, repository: Path, models: Collection[str], seconds: float) -> dict[str, dict[str, float]]:
    """Of each engine on all of the device: inferences a second back to back, and the p50 in microseconds of one at a time."""
    found = {}
    with ExitStack() as stack:
        device = stack.enter_context(closing(open_device(kind)))
        partition = stack.enter_context(closing(device.carve(range(len(device.granules)))))
        for name in models:
            path, x = repository / name / "1" / "model.onnx", NETS[kind][name].draw(1, 0)
            settings = RuntimeSettings(copies="auto", warm_up="usual")
            engine = stack.enter_context(closing(load_engine(path, device, settings, MOST_ROWS)))
            with closing(open_seat(device, engine, partition, x)) as seat:
                rate = median(bare_rate(seat, seconds) for _ in range(ROUNDS))
                found[name] = {"back to back, 1/s": rate, "one at a time, p50 us": seat.on_thread(lambda: _p50(seat, seconds))}
    return found


def _p50(seat: Seat, seconds: float) -> float:
    took, until = [], perf_counter() + seconds
    while perf_counter() < until:
        began = perf_counter()
        seat.enqueue().wait()
        took.append(perf_counter() - began)
    return median(took) * 1e6


def over_http(kind: str, repository: Path, seconds: float) -> list[dict[str, Any]]:
    """A row for each of OVER_HTTP, with the launch loop and without. Blocks. Raises LoadFailed."""
    names = list(dict.fromkeys(name for name, _ in OVER_HTTP))
    nets.write_all(repository, kind)
    engines = alone(kind, repository, names, seconds)
    granules = _granules(kind)
    text = f"""
        [server]
        default_tenant = "depth"
        [models]
        repository = "{repository}"
        [device]
        backend = "{kind}"
        mps = "off"
        [tenants.depth]
        granules = {granules}
        models = ["tiny", "mob"]
    """
    with ExitStack() as stack:
        servers = {}
        for how, switch in (("loop", "1"), ("no loop", "0")):
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="greenlane-depth-")))
            servers[how] = stack.enter_context(launch(folder, text, {SWITCH: switch}))
        rows = []
        for name, connections in OVER_HTTP:
            ask = request_of(name, NETS[kind][name].draw(1, 0))
            rounds: dict[str, list[Load]] = {how: [] for how in servers}
            for server in servers.values():
                drive(server.port, ask, connections, WARM_UP)
            for _ in range(ROUNDS):
                for how, server in servers.items():
                    rounds[how].append(drive(server.port, ask, connections, seconds))
            rows += [_http_row(name, connections, how, loads, engines[name]) for how, loads in rounds.items()]
    return rows


def _granules(kind: str) -> int:
    with closing(open_device(kind)) as device:
        return len(device.granules)


def request_of(name: str, x: Array) -> Request:
    """A request for one inference, in binary both ways."""
    entry = {"name": "x", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [entry]}).encode()
    return Request(f"/v2/models/{name}/infer", {"Inference-Header-Content-Length": str(len(head))}, head + x.tobytes())


def _http_row(name: str, connections: int, how: str, loads: list[Load], engine: dict[str, float]) -> dict[str, Any]:
    """Medians over rounds."""
    rate, p50, p99 = (median(getattr(load, figure) for load in loads) for figure in ("rate", "p50", "p99"))
    return {
        "model": name,
        "connections": connections,
        "worker": how,
        "1/s": rate,
        "p50 us": p50,
        "p99 us": p99,
        "of back to back": rate / engine["back to back, 1/s"],
        "p50 over the engine, us": p50 - engine["one at a time, p50 us"],
        "engine": engine,
    }


def main() -> int:
    """Run a command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.depth", description="Four clients against back to back.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=positive, default=2.0, help="length of a round; default: 2")
    parser.add_argument("--clients", type=count, default=CLIENTS, help=f"default: {CLIENTS}")
    parser.add_argument("--repository", type=Path, required=True, help="models, as benchmarks.change writes them")
    parser.add_argument("--http", action="store_true", help="ask a server over HTTP, with the launch loop and without")
    options = parser.parse_args()
    if options.http:
        print(json.dumps(over_http(options.device, options.repository, options.seconds), indent=2))
        return 0
    print(json.dumps(run(options.device, options.repository, options.clients, options.seconds), indent=2))
    return 0


def run(kind: str, repository: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Every model on all of the device. Blocks. Raises DeviceUnavailable, ModelRefused."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        device = stack.enter_context(closing(open_device(kind)))
        partition = stack.enter_context(closing(device.carve(range(len(device.granules)))))
        stack.enter_context(quiet())
        settings = RuntimeSettings(copies="auto", warm_up="usual")
        for name in MODELS:
            net = NETS[kind][name]
            inputs = [net.draw(1, seed) for seed in range(clients)]
            path = repository / name / "1" / "model.onnx"
            engine = stack.enter_context(closing(load_engine(path, device, settings, MOST_ROWS)))
            found[name] = uvloop.run(measure(engine, partition, device, inputs, seconds))
    return found


if __name__ == "__main__":
    sys.exit(main())
