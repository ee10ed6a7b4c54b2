"""`python -m engines.inspect`: prints what an engine file contains, and what its engine reports where a GPU can load it."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from partitions.mps import stay_outside

from .errors import ModelRefused
from .model_files.artifact import Artifact, PlanFile, read_plan
from .model_files.onnx_file import OnnxFile, read_onnx
from .signature import TensorSpec, dims_text
from .tensorrt.api import TensorRT, engine_facts, find_tensorrt

Row = tuple[str, str]

_MAGIC = b"trt"
"""The second to fourth byte of a plan: TensorRT's begin with ftrt, TensorRT-RTX's with vtrt."""


def main(arguments: Sequence[str] | None = None, program: str = "python -m engines.inspect") -> int:
    """Run a command line and return the exit status, as the help says."""
    options = _parser(program).parse_args(arguments)
    stay_outside()  # As `engines.build`.
    try:
        file = _read(options.file)
    except ModelRefused as error:
        print(error, file=sys.stderr)
        return 1
    rows = [("file", f"{options.file}, {_bytes(options.file.stat().st_size)}"), *file_rows(file), *engine_report(file)]
    print("\n".join(f"{label:<12} {text}" for label, text in rows))
    return 0


def _read(path: Path) -> PlanFile:
    """Read an engine file. Raises ModelRefused, also for a file that cannot be a plan."""
    file = read_plan(path)
    if file.artifact is None and bytes(file.plan[1:4]) != _MAGIC:
        what = "not an engine file" if read_onnx(bytes(file.plan)) == OnnxFile() else "an ONNX model"
        raise ModelRefused(f"{path}: {what}; expected what `greenlane build` makes of an ONNX model, or a bare plan")
    return file


def file_rows(file: PlanFile) -> Iterator[Row]:
    """The contents of the file. Calls no library."""
    if file.artifact is None:
        yield "plan", f"{_bytes(len(file.plan))}, bare: only the library that built it can say what it holds"
        return
    yield "plan", _bytes(len(file.plan))
    yield from _build_rows(file.artifact)
    yield from (("input", _tensor(spec)) for spec in file.artifact.signature.inputs)
    yield from (("output", _tensor(spec)) for spec in file.artifact.signature.outputs)
    yield from ((f"profile {index}", str(profile)) for index, profile in enumerate(file.artifact.profiles))
    yield "at build", _facts(file.artifact.facts) if file.artifact.facts else "no GPU was available to load the engine"


def engine_report(file: PlanFile) -> Iterator[Row]:
    """The library's and the engine's report, or why there is none."""
    try:
        yield from _engine_report(find_tensorrt(), file)
    except ModelRefused as error:
        yield "engine", f"not loaded: {error}"


def _engine_report(api: TensorRT, file: PlanFile) -> Iterator[Row]:
    yield "installed", str(api)
    verdict, reasons = api.validity(file.plan)
    yield (
        "validity",
        f"{verdict}: {', '.join(reasons)}" if reasons else "unknown without a GPU" if verdict == "INVALID" else verdict,
    )
    if file.artifact:
        file.artifact.check("the file", api.library, api.version)
    yield from engine_rows(api.deserialize(file.plan, "the plan"))


def engine_rows(engine: Any) -> Iterator[Row]:
    """The report of a library's engine."""
    yield "engine", _facts(engine_facts(engine))
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        yield (
            engine.get_tensor_mode(name).name.lower(),
            f"{name} {engine.get_tensor_dtype(name).name} {list(engine.get_tensor_shape(name))}",
        )


def _build_rows(artifact: Artifact) -> Iterator[Row]:
    yield "library", f"{artifact.library} {artifact.version}, on {artifact.platform}"
    yield "source", f"sha256 {artifact.source}"
    if artifact.structure:
        yield "kernels", f"of sha256 {artifact.kernels_digest()}; plans with the same share them"
    yield "targets", ", ".join(artifact.targets) or "the library's default set of GPUs"
    yield "options", ", ".join(f"{name} {value}" for name, value in artifact.options.items())
    yield "network", f"{artifact.layers} layer{'s' * (artifact.layers != 1)}"


def _tensor(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.datatype} {dims_text(spec.dims)}"


def _bytes(count: int) -> str:
    return f"{count:,} byte{'s' * (count != 1)}"


def _facts(facts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in facts.items())


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Print what an engine file takes, gives, was built from and fits. The engine is loaded if there is a GPU.",
        epilog="exit status: 0 printed; 1 the file cannot be read, or is not an engine file; 2 the command line is wrong",
    )
    parser.add_argument("file", type=Path, metavar="FILE.plan", help="an engine file of `greenlane build`, or a bare plan")
    return parser


if __name__ == "__main__":
    sys.exit(main())
