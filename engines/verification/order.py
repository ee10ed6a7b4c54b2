"""The order to a child process that computes a reference, and what it leaves in a file."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..signature import Shape, Signature

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = tuple[Shape, ...]


class Sample(NamedTuple):
    """Inputs and the answer to them, an array for each tensor."""

    inputs: list[Array]
    outputs: list[Array]


@dataclass(frozen=True, slots=True)
class ReferenceRequest:
    """The request to compute the answers of an ONNX file to random inputs of these sets of shapes.

    `source` is the digest that the file is to have, "" for any. `target` is the file for the result, which is one request's
    alone. `rounded`: also by how much the answers change if the inputs are rounded.
    """

    onnx_path: Path
    source: str
    signature: Signature
    sets: tuple[Shapes, ...]
    target: Path
    rounded: bool = False


class Answered(NamedTuple):
    """What the file has for one set of shapes: a sample, or why there is none; and the sensitivity if it was asked for."""

    sample: Sample | None
    why: str
    sensitivity: float


class Reference(NamedTuple):
    """Answers by shapes, and which datatypes coarser than FP32 the file computes with."""

    coarse: frozenset[str]
    answers: Mapping[Shapes, Answered]


def write(target: Path, coarse: frozenset[str], answers: Sequence[Answered]) -> None:
    """Write the answers, in the order of the request's sets, and which datatypes coarser than FP32 the file computes with."""
    content: dict[str, Any] = {"coarse": np.array(sorted(coarse), dtype=str)}
    for number, answered in enumerate(answers):
        content[f"{number}.why"] = np.array(answered.why)
        content[f"{number}.sensitivity"] = np.array(answered.sensitivity)
        for kind, arrays in (answered.sample or Sample([], []))._asdict().items():
            content |= {f"{number}.{kind}.{index}": array for index, array in enumerate(arrays)}
    with target.open("wb") as file:
        np.savez(file, **content)


def read(request: ReferenceRequest) -> Reference:
    """What `write` wrote, which is removed. Blocks. Raises OSError, ValueError."""
    try:
        with np.load(request.target, allow_pickle=False) as content:
            coarse = frozenset(map(str, content["coarse"]))
            return Reference(coarse, {each: _answered(content, at, request) for at, each in enumerate(request.sets)})
    finally:
        os.unlink(request.target)


def _answered(content: Mapping[str, Any], number: int, request: ReferenceRequest) -> Answered:
    def arrays(kind: str, count: int) -> Iterator[Array]:
        return (np.asarray(content[f"{number}.{kind}.{index}"]) for index in range(count))

    why, sensitivity = str(content[f"{number}.why"]), float(content[f"{number}.sensitivity"])
    if why:
        return Answered(None, why, sensitivity)
    signature = request.signature
    inputs, outputs = arrays("inputs", len(signature.inputs)), arrays("outputs", len(signature.outputs))
    return Answered(Sample(list(inputs), list(outputs)), "", sensitivity)
