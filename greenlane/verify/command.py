"""`greenlane verify`: chooses shapes, compares, and shows what was found."""

import json
import math
import os
import random
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT
from typing import Any

from engines import Engine, EngineError, Executor, ModelRefused, Signature, TensorMismatch, load_engine
from engines.model_files.artifact import read_plan
from engines.model_files.onnx_file import index_bounds, source_digest, weight_files
from engines.model_files.profiles import agrees, shape_text
from engines.onnxruntime.reference import Reference
from engines.signature import Shape, dims_text
from engines.verification.order import Sample
from engines.verification.rows import Array, dependence, run_on
from engines.verification.rule import Comparison, coarsest, explained, other_rows, tolerance
from engines.verification.steady import PART, repeated
from greenlane.models import check_name, configured
from partitions import Device, PartitionError
from server.command_line import configuration_file
from server.config.schema import ModelOptions
from server.config.tables import ConfigError
from server.device.ahead import open_builds
from server.device.model_loader import open_model_loader
from server.repository.model_settings import default_settings

from ..options import check_writable
from .options import Options


@dataclass(frozen=True, slots=True)
class Row:
    """What was found for one set of shapes: the error, None where nothing was compared, for the reason `why`."""

    shapes: tuple[Shape, ...]
    error: float | None
    tolerance: float
    verdict: str
    why: str = ""
    seconds: float = 0.0
    route: tuple[Shape, ...] | None = None
    """For a wrong one: the shapes that its rows would be run with, where they may be."""
    runs: int = 0
    """How often the same inputs were run; the error is that of the worst answer."""
    spread: float = 0.0
    """By how much its answers to them differ at most, as an error."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compared: an executor, and the ONNX file it computes."""

    name: str
    device: Device
    executor: Executor
    onnx: Path
    signature: Signature
    """The engine's, with the largest batch that is configured."""


def run(options: Options) -> int:
    """Compare, print, and return the exit status, as the command's help says."""
    said = sys.stderr if options.json == "-" else sys.stdout  # Standard output is the JSON document's alone.
    try:
        check_writable(options.json)
        with redirect_stdout(said):
            status, document = _run(options)
    except (ConfigError, EngineError, OSError, PartitionError) as error:
        print(f"greenlane: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"greenlane: there is no memory for such shapes; give smaller ones: {error}".rstrip(": "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + SIGINT
    if options.json:
        content = json.dumps(document, indent=2)
        if options.json == "-":
            print(content)
        else:
            Path(options.json).write_text(content + "\n", encoding="utf-8")
    return status


def _run(options: Options) -> tuple[int, dict[str, Any]]:
    began = time.monotonic()
    with _opened(options) as subject:
        signature = subject.signature
        on_gpu = subject.device.kind == "cuda"
        reference = Reference(subject.onnx, signature, len(os.sched_getaffinity(0)), optimised=on_gpu)
        precision = coarsest(reference.precisions, rounds=on_gpu)
        if options.shapes:
            wanted = [named(signature, each) for each in options.shapes]
        else:
            wanted = grid(signature, *ends(signature, options.least, options.most), options.count, options.seed)
        print(f"{subject.name} on {subject.device.describe()}, {precision}: tolerance {tolerance(precision):.2g}", flush=True)
        rows: list[Row] = []
        for shapes, sample in zip(wanted, _ahead(reference, wanted, options.seed), strict=False):
            rows.append(_compare(subject.executor, reference, shapes, sample, precision, options.seed))
            print(_line(rows[-1]), flush=True)
            if options.seconds and time.monotonic() - began > options.seconds and len(rows) < len(wanted):
                print(f"stopped after {options.seconds:g} s: {len(wanted) - len(rows)} shapes were not compared")
                break
        depends, unknown = _rows(subject, reference, wanted, options.seed)
        if not depends:
            rows = [_routed(row, rows, subject, reference, precision, options.seed) for row in rows]
        for text in _conclusions(rows, depends, unknown):
            print(text)
    wrong = [row for row in rows if row.verdict == "wrong"]
    status = 1 if wrong or depends else 0 if any(row.verdict == "right" for row in rows) else 2
    return status, {
        "model": subject.name,
        "device": subject.device.describe(),
        "precision": precision,
        "tolerance": tolerance(precision),
        "asked": len(wanted),
        "compared": sum(row.error is not None for row in rows),
        "wrong": len(wrong),
        "worst_right": max((row.error for row in rows if row.verdict == "right" and row.error is not None), default=None),
        "rows_depend": depends or None,
        "rows_unknown": unknown or None,
        "seconds": round(time.monotonic() - began, 1),
        "shapes": [
            {
                "shapes": [list(shape) for shape in row.shapes],
                "error": _number(row.error),
                "verdict": row.verdict,
                "why": row.why,
                "route": None if row.route is None else [list(shape) for shape in row.route],
                "runs": row.runs,
                "spread": _number(row.spread),
                "seconds": round(row.seconds, 3),
            }
            for row in rows
        ],
    }


def _number(error: float | None) -> float | str | None:
    """JSON has no infinity."""
    return error if error is None or error < float("inf") else "inf"


def _ahead(reference: Reference, wanted: Sequence[tuple[Shape, ...]], seed: int) -> Iterator[Future[Sample]]:
    """The reference's answers, each computed while the engine prepares itself for the shapes before."""
    with ThreadPoolExecutor(1, "reference") as pool:
        waiting: deque[Future[Sample]] = deque()
        try:
            for shapes in wanted:
                waiting.append(pool.submit(reference.sample, shapes, seed))
                if len(waiting) > 1:
                    yield waiting.popleft()
            yield from waiting
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _compare(
    executor: Executor, reference: Reference, shapes: tuple[Shape, ...], asked: Future[Sample], precision: str, seed: int
) -> Row:
    began, limit = time.monotonic(), tolerance(precision)

    def repeat(inputs: Sequence[Array]) -> Generator[list[Array], None, None]:
        while True:
            yield run_on(executor, inputs)

    def row(error: float | None, verdict: str, why: str = "", runs: int = 0, spread: float = 0.0) -> Row:
        return Row(shapes, error, limit, verdict, why, time.monotonic() - began, runs=runs, spread=spread)

    try:
        sample = asked.result()
        tried = repeated(repeat, sample.inputs, executor.engine.signature.outputs, sample.outputs, precision)
        found = tried.found or Comparison("", 0.0, limit)
        if tried.steady and found.agrees:
            return row(found.error, "right", "", tried.runs, tried.spread.error)
        sensitivity = reference.sensitivity(sample, seed)
        if found.error <= explained(sensitivity) if tried.steady else tried.spread.error <= PART * sensitivity:
            verdict, why = "unverified", f"rounding the inputs alone changes the reference by {sensitivity:.2g}"
        else:
            verdict, why = "wrong", f"output {found.output}" if tried.steady else tried.why_not()
        return row(found.error, verdict, why, tried.runs, tried.spread.error)
    except EngineError as error:
        return row(None, "unverified", str(error))


def _rows(subject: Subject, reference: Reference, wanted: Sequence[tuple[Shape, ...]], seed: int) -> tuple[str, str]:
    """As `dependence`, by the reference's answers: a shape that the engine answers wrongly would say nothing of rows."""
    signature = subject.signature
    if not all(spec.dims and isinstance(spec.dims[0], str) for spec in (*signature.inputs, *signature.outputs)) or not wanted:
        return "", "there are no rows"
    bounds = index_bounds(subject.onnx.read_bytes())
    usual = wanted[len(wanted) // 2]
    return dependence(reference.run, signature, usual, coarsest(reference.precisions, rounds=False), bounds, seed)


def _routed(row: Row, rows: Sequence[Row], subject: Subject, reference: Reference, precision: str, seed: int) -> Row:
    """A wrong row with what the server would run in its place: the first other number of rows that is right."""
    signature = subject.signature
    if row.verdict != "wrong" or any(shape[:1] != row.shapes[0][:1] for shape in row.shapes):
        return row
    most = min([spec.limits[0][1] for spec in signature.inputs if spec.limits], default=signature.max_batch or ROWS)
    known = {each.shapes: each for each in rows}
    for other in other_rows(row.shapes, most):
        asked: Future[Sample] = Future()
        try:
            asked.set_result(reference.sample(other, seed))
        except ModelRefused as error:
            asked.set_exception(error)
        found = known.get(other) or _compare(subject.executor, reference, other, asked, precision, seed)
        if found.verdict == "right":
            return replace(row, route=other)
    return row


def _line(row: Row) -> str:
    shapes = " ".join(map(shape_text, row.shapes))
    error = "-" if row.error is None else f"{row.error:.1e}"
    return f"{shapes:<24} {error:>8}  {row.verdict}{row.why and f': {row.why}'}"


def _conclusions(rows: Sequence[Row], depends: str, unknown: str) -> Iterator[str]:
    for row in rows:
        if row.route:
            yield f"{' '.join(map(shape_text, row.shapes))} would run with {' '.join(map(shape_text, row.route))}"
    counts = {word: sum(row.verdict == word for row in rows) for word in ("right", "wrong", "unverified")}
    yield f"{len(rows)} shape{'s' * (len(rows) != 1)}: " + ", ".join(f"{number} {word}" for word, number in counts.items())
    if depends:
        yield f"rows depend on each other: {depends}; requests must not be joined"
    elif unknown:
        yield f"whether rows depend on each other is not known: {unknown}"
    else:
        yield "rows do not depend on each other: they may be joined"


@contextmanager
def _opened(options: Options) -> Iterator[Subject]:
    """The executor to compare, on the whole device. Raises ConfigError, PartitionError, ModelRefused."""
    with ExitStack() as stack:
        path, config, device = stack.enter_context(configured(options.model, configuration_file(options.config)))
        if path:
            settings = default_settings(config.device).merge(verify="off")  # Wrong shapes are to be seen, and not to be routed.
            if options.least and device.kind == "cuda" and path.suffix == ".onnx":
                ranges = tuple((name, (options.least[name], options.most[name], options.most[name])) for name in options.least)
                settings = settings.merge(build_profiles=(ranges,))
            engine: Engine = load_engine(path, device, settings, ROWS, open_builds(config.models))
            stack.callback(engine.close)
            partition = stack.enter_context(closing(device.carve(range(len(device.granules)))))
            executor, source, rows = engine.bind(partition), path, 0
            stack.callback(executor.close)
        else:
            loader = stack.enter_context(closing(open_model_loader(config, device, builds=open_builds(config.models))))
            check_name(options.model, loader, config.source)
            if steps := loader.steps(options.model):
                raise ModelRefused(f"model {options.model} is an ensemble; compare its steps: {', '.join(steps)}")
            given = config.models.options.get(options.model, ModelOptions())
            loader.use_options({**config.models.options, options.model: given.model_copy(update={"verify": "off"})})
            partition = stack.enter_context(closing(device.carve(range(len(device.granules)))))
            loaded = loader.attempt(options.model, partition)
            for each in loaded.executors.values():
                stack.callback(each.close)
            if not loaded.served:
                raise ModelRefused(f"model {loaded.name} cannot be served: {loaded.why()}")
            served = max(loaded.served, key=lambda each: int(each.version))
            executor, source = loaded.executors[served.key], loaded.sources[served.key].file.path
            rows = served.signature.max_batch
        partition.attach()
        signature = replace(executor.engine.signature, max_batch=rows)
        yield Subject(options.model, device, executor, _onnx_of(source), signature)


def _onnx_of(path: Path) -> Path:
    """The ONNX file that a model's file is, or was built from. Raises ModelRefused."""
    if path.suffix == ".onnx":
        return path
    beside, artifact = path.with_suffix(".onnx"), read_plan(path).artifact
    if not beside.is_file():
        raise ModelRefused(f"{path}: there is no {beside.name} beside it, which is what its answers are compared with")
    data = beside.read_bytes()
    if artifact and artifact.source != source_digest(data, weight_files(data, beside.parent)):
        raise ModelRefused(f"{path}: it was built from another file than {beside.name} beside it")
    return beside


ROWS = 8
"""Rows of the largest batch where nothing says how large it may be."""


def ends(signature: Signature, least: Mapping[str, Shape], most: Mapping[str, Shape]) -> tuple[list[Shape], list[Shape]]:
    """The smallest and the largest shape of each input: those given, else the engine's limits, else 1 to ROWS rows.

    Raises ModelRefused for an input that there is not, a shape that does not fit, and other sizes that vary without limits.
    """
    _check_names(signature, (*least, *most))
    found: tuple[list[Shape], list[Shape]] = [], []
    for spec in signature.inputs:
        varies = [axis for axis, dim in enumerate(spec.dims) if isinstance(dim, str)]
        if spec.name in least and spec.name in most:
            pair = least[spec.name], most[spec.name]
            for shape in pair:
                if not agrees(shape, spec.dims):
                    raise ModelRefused(f"{spec.name}:{shape_text(shape)}: the model's input is {dims_text(spec.dims)}")
        elif spec.limits:
            low, high = zip(*spec.limits, strict=True)
            pair = (
                tuple(low),
                tuple(min(size, signature.max_batch or size) if not axis else size for axis, size in enumerate(high)),
            )
        elif varies in ([], [0]):
            rows = signature.max_batch or ROWS
            low, high = (tuple(n if isinstance(dim, str) else dim for dim in spec.dims) for n in (1, rows))
            pair = low, high
        else:
            raise ModelRefused(
                f"sizes of input {spec.name} {dims_text(spec.dims)} vary; say which to compare with --from and --to, or --shape"
            )
        for shapes, shape in zip(found, pair, strict=True):
            shapes.append(shape)
    return found


def grid(signature: Signature, least: Sequence[Shape], most: Sequence[Shape], count: int, seed: int) -> list[tuple[Shape, ...]]:
    """At most `count` sets of input shapes, in order, the two ends among them; the same for the same arguments.

    Dimensions of one name have one size, and so have all first dimensions that vary. Raises ModelRefused if one has none.
    """
    keys: dict[object, tuple[int, int]] = {}
    for number, spec in enumerate(signature.inputs):
        for axis, dim in enumerate(spec.dims):
            if isinstance(dim, str):
                low, high = keys.get(_key(number, axis, dim), (0, math.inf))
                keys[_key(number, axis, dim)] = int(max(low, least[number][axis])), int(min(high, most[number][axis]))
    ranges = list(keys.values())
    if none := next(((low, high) for low, high in ranges if low > high), None):
        raise ModelRefused(f"there is no size from {none[0]} to {none[1]}, as --from and --to say of a dimension")
    every = math.prod(high - low + 1 for low, high in ranges)
    numbers: Sequence[int] = range(min(every, count))
    if every > count:
        between = random.Random(seed).sample(range(1, min(every - 1, sys.maxsize)), max(0, count - 2))
        numbers = [0, *sorted(between), every - 1][:count]
    return [_shapes(signature, dict(zip(keys, _sizes(number, ranges), strict=True))) for number in numbers]


def named(signature: Signature, asked: Mapping[str, Shape]) -> tuple[Shape, ...]:
    """The shapes of all inputs where these are given by name. Raises ModelRefused."""
    _check_names(signature, asked, "--shape: ")
    shapes = tuple(asked.get(spec.name, spec.shape) for spec in signature.inputs)
    try:
        signature.check(shapes)
    except TensorMismatch as error:
        raise ModelRefused(f"--shape: {error}") from error
    return shapes


def _check_names(signature: Signature, asked: Iterable[str], option: str = "") -> None:
    names = [spec.name for spec in signature.inputs]
    if unknown := [name for name in asked if name not in names]:
        raise ModelRefused(f"{option}there is no input {unknown[0]!r}; the model has {', '.join(names) or 'none'}")


def _key(number: int, axis: int, dim: str) -> object:
    return "rows" if not axis else dim or (number, axis)


def _sizes(number: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    sizes = []
    for low, high in reversed(ranges):
        number, rest = divmod(number, high - low + 1)
        sizes.append(low + rest)
    return sizes[::-1]


def _shapes(signature: Signature, sizes: Mapping[object, int]) -> tuple[Shape, ...]:
    return tuple(
        tuple(sizes[_key(number, axis, dim)] if isinstance(dim, str) else dim for axis, dim in enumerate(spec.dims))
        for number, spec in enumerate(signature.inputs)
    )
