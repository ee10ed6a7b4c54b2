"""The changes, a function each: it makes the change on a bench while neighbours are timed, and returns their latency.

What only one of them needs is loaded before and unloaded after it, when nothing is timed.
"""

import shutil
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import median
from time import perf_counter, sleep

import numpy as np
import onnx

from greenlane.load.jobs import Ask, ClosedLoop, Tally
from greenlane.load.processes import run
from greenlane.load.wire import Caller

from .asks import inference
from .bench import FRESH, MOVERS, PATIENCE, STREAMED, WATCHER, Bench
from .goals import Felt
from .nets import MANY_ROWS, write
from .outcomes import Outcome
from .subjects import gemm

EVERY = 0.5
"""Seconds from one order to the repository to the next."""
ODD_ROWS = (3, 5, 6, 7)
"""Batches that no warm-up knows."""
APART = 0.25
"""Seconds between them, for what is felt late to be seen."""


def quiet(bench: Bench, _: int, seconds: float) -> Outcome:
    """Nothing changes: the worst of such a time is known afterwards."""
    return Outcome(felt=bench.watch((WATCHER, *MOVERS), lambda: sleep(seconds), quiet=seconds)[1])


def repartition(bench: Bench, puts: int, seconds: float) -> Outcome:
    """PUTs that give one granule of one mover to the other and back, while all three tenants are asked."""
    mob, enc = (bench.shares[name] for name in MOVERS)
    plans = cycle([{"mob": mob + 1, "enc": enc - 1}, {"mob": mob - 1, "enc": enc + 1}])
    longest = {name: bench.longest_work(name) for name in MOVERS}

    def change() -> list[tuple[int, float]]:
        until = perf_counter() + seconds
        done: list[tuple[int, float]] = []
        while len(done) < puts and perf_counter() < until:
            done.append(bench.repartition(next(plans)))
        return done

    done, found = bench.watch((WATCHER, *MOVERS), change)
    status, _ = bench.repartition({"mob": mob, "enc": enc})
    longest = {name: max(longest[name], bench.longest_work(name)) for name in MOVERS}
    outcome = Outcome(felt=found, over=(WATCHER,))
    outcome.expect([*(status for status, _ in done), status], "PUTs")
    if len(done) < puts:
        outcome.flaws.append(f"only {len(done)} of {puts} PUTs were done in {seconds:g} s")
    times = [took for _, took in done]
    for each in found:
        if each.tenant in MOVERS:
            outcome.value("movers", each.tenant, each.worst - longest[each.tenant])
    # The first two meet shares that nothing was compiled for yet.
    outcome.value("put", f"{len(times[2:])} PUTs", max(times[2:], default=float("nan")))
    outcome.figures = {
        "PUTs": len(done),
        "PUT, median, s": median(times),
        "PUT, most, s": max(times),
        "first two PUTs, s": times[:2],
        "longest work in flight, ms": longest,
    }
    return outcome


def reload(bench: Bench, _: int, seconds: float) -> Outcome:
    """A tenant loads, reloads and unloads two models of its own twice a second; another mover and the watcher are timed."""
    orders = cycle(
        [("load", "tiny"), ("load", "mob"), ("load", "tiny"), ("unload", "mob"), ("unload", "tiny"), ("load", "mob")]
    )

    def change() -> list[tuple[int, float]]:
        began, done = perf_counter(), []
        while (now := perf_counter()) < began + seconds:
            done.append((bench.order(*next(orders), "enc"), perf_counter() - now))
            sleep(max(0.0, now + EVERY - perf_counter()))
        return done

    done, found = bench.watch((WATCHER, "mob"), change)
    for model in ("tiny", "mob"):
        bench.order("unload", model, "enc")
    outcome = _ratios(found)
    outcome.expect([status for status, _ in done], "orders")
    outcome.figures = {"orders": len(done), "an order, most, s": max(took for _, took in done)}
    return outcome


def build(bench: Bench, _: int, seconds: float) -> Outcome:
    """A tenant loads networks that were never seen, one after the other; another mover and the watcher are timed."""
    return _load_fresh(bench, seconds, _as_another_network)


def retrain(bench: Bench, _: int, seconds: float) -> Outcome:
    """The same with other weights of the networks that are served, whose kernels are loaded: new versions of models."""
    return _load_fresh(bench, seconds, lambda onnx_bytes, _: onnx_bytes)


def _load_fresh(bench: Bench, seconds: float, changed: Callable[[bytes, int], bytes]) -> Outcome:
    seeds = int(perf_counter() * 1e6)
    for number, name in enumerate(FRESH):
        shutil.rmtree(bench.repository / name, ignore_errors=True)
        made = bench.nets[("mob", "enc")[number % 2]].make(seeds + number)
        write(bench.repository, name, changed(made, seeds + number))

    def change() -> list[tuple[int, float]]:
        until = perf_counter() + seconds
        done: list[tuple[int, float]] = []
        for name in FRESH:
            began = perf_counter()
            if began < until or not done:
                done.append((bench.order("load", name, "enc"), perf_counter() - began))
        return done

    done, found = bench.watch((WATCHER, "mob"), change)
    for name in FRESH:
        bench.order("unload", name, "enc")
        shutil.rmtree(bench.repository / name)
    outcome = _ratios(found)
    outcome.expect([status for status, _ in done], "loads")
    outcome.figures = {"builds": len(done), "a build and load, s": [took for _, took in done]}
    outcome.unexercised = "" if bench.device == "cuda" else "nothing is built on a CPU"
    return outcome


def _as_another_network(onnx_bytes: bytes, number: int) -> bytes:
    """The same layers under a name that none has had, so that no kernels are known for them."""
    model = onnx.load_model_from_string(onnx_bytes)
    model.graph.node[0].name = f"first of {number}"
    return bytes(model.SerializeToString())


def rows(bench: Bench, _: int, seconds: float) -> Outcome:
    """Each mover in turn asks for batches that nothing was ready for; the other mover and the watcher are timed."""
    outcome = Outcome(over=(WATCHER, *MOVERS))
    for own, other in (MOVERS, MOVERS[::-1]):
        caller = Caller(bench.port, PATIENCE)
        ask = _ask_rows(bench, caller, own)
        warm = [ask(bench.nets[own].most) for _ in range(13)][3:]

        def change(ask: Callable[[int], tuple[int, float]] = ask) -> list[tuple[int, float]]:
            done = []
            for count in ODD_ROWS:
                done += [ask(count), ask(count)]
                sleep(APART)
            return done

        done, found = bench.watch((WATCHER, other), change, quiet=bench.seconds / 2)
        caller.close()
        outcome.felt += found
        outcome.expect([status for status, _ in (*warm, *done)], f"batches of {own}")
        largest = max(took for _, took in warm)
        outcome.value("own", own, max(took for _, took in done) - largest)
        outcome.figures[f"{own}: first requests, ms"] = {count: done[2 * at][1] for at, count in enumerate(ODD_ROWS)}
        outcome.figures[f"{own}: the largest warm batch, most, ms"] = largest
    return outcome


def bodies(bench: Bench, _: int, seconds: float) -> Outcome:
    """A mover gets bodies of 38 MB, 600 KB and 1 KB mixed, as fast as it answers; the other mover and the watcher are timed."""
    asks = tuple(
        bench.request(model, count, tenant="mob")
        for model, count in (("mean", MANY_ROWS), ("mob", 1), ("tiny", 4), ("mob", 1), ("tiny", 4))
    )
    return _flooded(bench, seconds, ("mean", "tiny"), asks)


def stream(bench: Bench, _: int, seconds: float) -> Outcome:
    """A mover asks for a model, as fast as it answers, of whose 134 MB of weights a GPU keeps an eighth and reads the rest from
    the host for each inference; the other mover and the watcher are timed.
    """
    width, folder = 2048 if bench.device == "cuda" else 64, bench.repository / STREAMED
    shutil.rmtree(folder, ignore_errors=True)
    write(bench.repository, STREAMED, gemm(width, 8).onnx)
    if bench.device == "cuda":
        with (folder / "config.pbtxt").open("a") as file:
            file.write('parameters { key: "greenlane.weight_budget" value { string_value: "16MiB" } }\n')
    outcome = _flooded(bench, seconds, (STREAMED,), (inference(STREAMED, "mob", np.ones((1, width), np.float32)),))
    shutil.rmtree(folder)
    outcome.unexercised = "" if bench.device == "cuda" else "nothing is streamed to a CPU"
    return outcome


def _flooded(bench: Bench, seconds: float, models: Sequence[str], asks: tuple[Ask, ...]) -> Outcome:
    """The first mover, which has further models meanwhile, is asked as fast as it answers."""
    outcome = Outcome()
    outcome.expect([bench.order("load", model, "mob") for model in models], "loads")
    job = ClosedLoop(name="mixed", port=bench.port, asks=asks, connections=4, behaviour="flood", seconds=seconds, ahead=0.1)
    ran, outcome.felt = bench.watch((WATCHER, "enc"), lambda: run([job]))
    for model in models:
        bench.order("unload", model, "mob")
    (tally,) = (result for result in ran[1] if isinstance(result, Tally))
    if others := {status: count for status, count in tally.statuses.items() if status != 200}:
        outcome.flaws.append(f"the flood was answered with {others}")
    for each in outcome.felt:
        outcome.value("ratio", each.tenant, each.ratio)
        outcome.value("worst", each.tenant, each.worst)
    outcome.figures = {
        "answers a second": tally.statuses.get(200, 0) / tally.seconds,
        "MB a second": (tally.sent + tally.received) / tally.seconds / 1e6,
    }
    return outcome


CHANGES: dict[str, Callable[[Bench, int, float], Outcome]] = {
    "quiet": quiet, "rows": rows, "repartition": repartition, "reload": reload, "build": build, "retrain": retrain,
    "bodies": bodies, "stream": stream,
}  # fmt: skip
"""In the order in which they are done: first what nothing else may have compiled before. Given a bench, PUTs, and seconds."""


def _ratios(found: list[Felt]) -> Outcome:
    outcome = Outcome(felt=found, over=tuple(each.tenant for each in found))
    for each in found:
        outcome.value("ratio", each.tenant, each.ratio)
    return outcome


def _ask_rows(bench: Bench, caller: Caller, model: str) -> Callable[[int], tuple[int, float]]:
    def ask(count: int) -> tuple[int, float]:
        answer, seconds = caller.timed(bench.request(model, count, seed=count))
        return answer.status, seconds * 1e3

    return ask
