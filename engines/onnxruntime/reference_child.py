"""`python -m engines.onnxruntime.reference_child`: one reference, for the process that started this one.

The order comes on standard input, and messages go to standard output, as in `engines.tensorrt.build_child`. It has the lowest
normal priority, four threads at most and no GPU; a request of new shapes may wait for it, so it does not use idle time only.
"""

import json
import os
import pickle
import sys
import time
from typing import TYPE_CHECKING

from partitions.regular_file import open_regular

from ..children import die_with_parent, lower_priority
from ..errors import EngineError, ModelRefused
from ..model_files.onnx_file import source_digest, weight_files
from ..verification.order import Answered, ReferenceRequest, Shapes, write

if TYPE_CHECKING:
    from .reference import Reference

_THREADS = 4
_ENOUGH = 30.0
"""Seconds after which no further set is begun: what starts this ends it after twice as many (`REFERENCE_LIMIT`)."""
_LATE = Answered(None, f"its reference was not computed within {_ENOUGH:.0f} s", 0.0)


def main() -> int:
    """Execute the order and return the exit status, 0 if it was answered."""
    request, cores, parent = pickle.load(sys.stdin.buffer)
    die_with_parent(parent)
    lower_priority(cores)
    try:
        answer(request)
    except (EngineError, OSError) as error:
        print(json.dumps({"kind": "refused", "text": str(error)}), flush=True)
    else:
        print(json.dumps({"kind": "built", "path": str(request.target), "new": False}), flush=True)
    return 0


def answer(request: ReferenceRequest) -> None:
    """Compute and write what is asked for. Blocks. Raises ModelRefused, OSError."""
    if request.source:
        with open_regular(request.onnx_path) as file:
            data = file.read()
        if source_digest(data, weight_files(data, request.onnx_path.parent)) != request.source:
            raise ModelRefused(f"{request.onnx_path}: it is not the file that the plan was built from")
    try:
        from .reference import Reference
    except ImportError as error:
        raise ModelRefused(f"there is no reference without ONNX Runtime: {error}") from error
    began = time.monotonic()
    reference = Reference(request.onnx_path, request.signature, min(_THREADS, len(os.sched_getaffinity(0))))
    answers = []
    for shapes in request.sets:
        late = time.monotonic() - began > _ENOUGH
        answers.append(_LATE if late else _answer(reference, shapes, request.rounded))
    write(request.target, reference.precisions, answers)


def _answer(reference: "Reference", shapes: Shapes, rounded: bool) -> Answered:
    try:
        sample = reference.sample(shapes)
        return Answered(sample, "", reference.sensitivity(sample) if rounded else 0.0)
    except ModelRefused as error:
        return Answered(None, str(error) or "there is no answer", 0.0)


if __name__ == "__main__":
    sys.exit(main())
