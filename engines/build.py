"""`python -m engines.build`: builds an ONNX model into an engine file. `tensorrt.building.builder` does the building."""

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from partitions.mps import stay_outside
from partitions.regular_file import check_writable, open_regular

from .errors import Cancelled, ModelRefused
from .model_files.cache_folder import replace_file
from .model_files.onnx_file import read_onnx
from .model_files.profiles import Profile, Range, agrees, make_range, parse_shape, shape_text
from .signature import Shape, dims_text
from .tensorrt.api import LIBRARIES, find_tensorrt
from .tensorrt.building.builder import DEFAULTS, BuildOptions, build, build_cached
from .tensorrt.building.progress import Printer, Step

__all__ = ["DEFAULTS", "BuildOptions", "build", "build_cached", "main"]

Draft = dict[str, dict[str, Any]]
"""The options of one profile: by option, by input, a shape; and under "sms", "sms"."""


def main(arguments: Sequence[str] | None = None, program: str = "python -m engines.build") -> int:
    """Run a command line and return the exit status: 0 built, 1 refused, 2 wrong usage, 130 interrupted."""
    parser = _parser(program)
    options = parser.parse_args(arguments)
    stay_outside()  # A client of an operator's MPS daemon would count there, and its fault would end the others.
    if options.max_batch is not None and options.profiles and all(map(_shapes, options.profiles)):
        parser.error("argument --max-batch: every profile has a --min, --opt or --max, which give the batch sizes")
    printer = Printer(sys.stderr)
    with _log_to_stderr(printer), _interrupt() as interrupted:
        try:
            _build_file(options, printer, interrupted)
        except Cancelled as error:
            return _report(printer, str(error), 130)
        except (ModelRefused, ValueError) as error:
            return _report(printer, str(error), 1)
    return 0


def _build_file(options: argparse.Namespace, printer: Printer, interrupted: threading.Event) -> None:
    def progress(step: Step) -> bool:
        printer(step)
        return not interrupted.is_set()

    source, output = options.model, options.output or options.model.with_suffix(".plan")
    if output.is_dir():
        raise ModelRefused(f"{output}: is a directory; expected a file's name, such as {output / source.stem}.plan")
    onnx = _read(source)
    _check(options.profiles or (), onnx)
    if output.exists() and output.samefile(source):
        raise ModelRefused(f"{output}: is the model itself; expected the name of another file")
    try:
        check_writable(output.with_name(f"{output.name}.tmp"))  # As `replace_file`; better now than in minutes.
    except OSError as error:
        raise ModelRefused(f"{output}: cannot be written: {error.strerror}: {error.filename}") from error
    begun, api = time.monotonic(), find_tensorrt([options.library] if options.library else tuple(LIBRARIES))
    data = build(onnx, _options(options), progress, api=api, path=source)
    _write(output, data)
    printer.clear()
    print(f"{output}: {len(data):,} bytes in {time.monotonic() - begun:.1f} s with {api}")


def _check(drafts: Sequence[Draft], onnx: bytes) -> None:
    """Refuse shapes that the model does not have, by the option that gave them.

    The builder would only see ranges, with what was left out filled in.
    """
    declared = {value.name: value.dims for value in read_onnx(onnx).inputs}
    for word, name, shape in (given for draft in drafts for given in _shapes(draft)):
        if name in declared and not agrees(shape, declared[name]):
            raise ModelRefused(
                f"--{word} {name}:{shape_text(shape)}: the model's input {name!r} is {dims_text(declared[name])}"
            )


def _shapes(draft: Draft) -> list[tuple[str, str, Shape]]:
    """The shapes given for one profile, each with its option and its input."""
    return [(word, name, shape) for word in Range._fields for name, shape in draft.get(word, {}).items()]


def _read(source: Path) -> bytes:
    try:
        with open_regular(source) as file:
            return file.read()
    except OSError as error:
        raise ModelRefused(f"{source}: {error.strerror}") from error


def _write(output: Path, data: bytes) -> None:
    try:
        replace_file(output, data)
    except OSError as error:
        raise ModelRefused(f"{output}: cannot be written: {error.strerror}") from error


def _report(printer: Printer, text: str, status: int) -> int:
    printer.clear()
    print(text, file=sys.stderr)
    return status


def _options(options: argparse.Namespace) -> BuildOptions:
    return BuildOptions(
        profiles=tuple(map(_profile, options.profiles or ())),
        max_batch=DEFAULTS.max_batch if options.max_batch is None else options.max_batch,
        targets=options.target,
        optimization_level=options.optimization_level,
        max_aux_streams=options.max_aux_streams,
        flags=tuple(options.flag),
        weight_streaming_budget=options.weight_streaming_budget,
    )


def _profile(draft: Draft) -> Profile:
    shapes = {word: draft.get(word, {}) for word in Range._fields}
    names = dict.fromkeys(name for given in shapes.values() for name in given)
    ranges = {name: make_range(*(given.get(name) for given in shapes.values())) for name in names}
    return Profile(ranges, draft.get("sms", {}).get("sms"))


class _ProfileAction(argparse.Action):
    """--min, --opt, --max and --sms belong to the --profile before them; those before any --profile make up one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        drafts: list[Draft] = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, drafts)
        word = str(option).lstrip("-")
        if word == "profile" or not drafts:
            drafts.append({})
        if word != "profile":
            name, value = values if word != "sms" else ("sms", values)
            if name in drafts[-1].setdefault(word, {}):
                parser.error(f"argument {option}: given twice for one profile; --profile begins another")
            drafts[-1][word][name] = value


_EXAMPLES = """examples:
  {program} model.onnx
      a plan for every GPU that the library supports, for batches of 1 to 8 if the first dimension is dynamic
  {program} model.onnx -o model.plan --min x:1x3x224x224 --opt x:4x3x224x224 --max x:8x3x512x512
      sizes of dynamic inputs; what is left out of the three is the next larger one given
  {program} model.onnx --profile --sms 48 --max x:8x128 --profile --sms 16 --max x:1x128
      two profiles, for a partition of 48 SMs and one of 16
  {program} model.onnx --target 8.6,12.0
      a plan for two kinds of GPU only

exit status: 0 built, 1 refused, 2 wrong usage, 130 interrupted; nothing is written unless it is 0
"""


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Build an engine file from an ONNX model. TensorRT-RTX needs no GPU for it; TensorRT does.",
        epilog=_EXAMPLES.replace("{program}", program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL.onnx", help="the model; its weights may be in files of the same folder"
    )
    output = "engine file, whose folder is made if there is none; default: the model's name with .plan"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=output)
    parser.add_argument("--library", choices=list(LIBRARIES), help="which library to build with; default: the first installed")
    _add_profiles(parser.add_argument_group("profiles, repeatable"))
    parser.add_argument("--target", type=_list, default=(), metavar="8.6,12.0", help="compute capabilities to build for")
    parser.add_argument("--optimization-level", type=int, metavar="0..5", help="how hard to search; default: the library's, 3")
    aux = "streams the engine may use in addition to the caller's, on the partition that it is bound to; default: 1"
    parser.add_argument("--max-aux-streams", type=int, default=1, metavar="N", help=aux)
    budget = "bytes of weights to keep on the GPU, with --flag weight_streaming; default: the library's"
    parser.add_argument("--weight-streaming-budget", type=int, metavar="BYTES", help=budget)
    flag = "a builder flag of the library, such as weight_streaming, or no_tf32 to clear one; repeatable"
    parser.add_argument("--flag", action="append", default=[], metavar="NAME", help=flag)
    return parser


def _add_profiles(group: Any) -> None:
    profile = {"action": _ProfileAction, "dest": "profiles"}
    group.add_argument("--profile", nargs=0, help="begin another profile, to which the options below belong", **profile)
    for word, which in (("min", "smallest"), ("opt", "usual"), ("max", "largest")):
        help_ = f"{which} shape of a dynamic input"
        group.add_argument(f"--{word}", type=_shape, metavar="NAME:1x3x224x224", help=help_, **profile)
    sms = "the size of partition that the profile is for, in SMs; preferred there, and a warning on smaller ones"
    group.add_argument("--sms", type=int, metavar="N", help=sms, **profile)
    batch = f"for profiles without --min, --opt and --max: batches of 1 to N; default: {DEFAULTS.max_batch}"
    group.add_argument("--max-batch", type=int, metavar="N", help=batch)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


@contextmanager
def _log_to_stderr(printer: Printer) -> Iterator[None]:
    """Show the log on stderr while the command runs."""
    handler = _LogHandler(printer)
    logger = logging.getLogger("greenlane")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _LogHandler(logging.Handler):
    def __init__(self, printer: Printer) -> None:
        super().__init__()
        self._printer = printer

    def emit(self, record: logging.LogRecord) -> None:
        self._printer.clear()
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


@contextmanager
def _interrupt() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets. A KeyboardInterrupt raised in one of the library's callbacks would be lost."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
