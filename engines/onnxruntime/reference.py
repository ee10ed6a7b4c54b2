"""Answers to compare an engine's with: ONNX Runtime's on the CPU, of the ONNX file that the engine was built from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from ..errors import ModelRefused
from ..model_files.onnx_file import index_bounds, precisions
from ..signature import Shape, Signature
from ..verification.order import Sample
from ..verification.rule import is_usable, row_error
from ..verification.samples import ATTEMPTS, draw, rounded
from .errors import clean_message

Array = np.ndarray[Any, np.dtype[Any]]


class Reference:
    """ONNX Runtime's session of a model, in this process and without the server's partitions. One thread at a time."""

    def __init__(self, path: Path, signature: Signature, threads: int = 1, optimised: bool = True) -> None:
        """`optimised`: with ONNX Runtime's optimisations of graphs. Blocks to read the file. Raises ModelRefused."""
        self.path = path
        self.signature = signature
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        if not optimised:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            data = path.read_bytes()
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ModelRefused(
                f"{path}: ONNX Runtime does not load it, so there is no reference: {clean_message(error, path.parent)}"
            ) from error
        self.precisions = precisions(data)
        self._bounds = index_bounds(data)
        self._names = [spec.name for spec in signature.outputs]

    def sample(self, shapes: Sequence[Shape], seed: int = 0) -> Sample:
        """Inputs of these shapes and the answer to them. Blocks. Raises ModelRefused where no inputs have a usable answer."""
        specs, why = self.signature.inputs, ""
        for attempt in range(ATTEMPTS):
            inputs = draw(specs, shapes, self._bounds, seed, attempt)
            try:
                outputs = self.run(inputs)
            except ModelRefused as error:
                why = str(error)
                continue
            if is_usable(self.signature.outputs, outputs):
                return Sample(inputs, outputs)
            why = "its answers to random inputs are not finite, or all 0"
        raise ModelRefused(f"{self.path.name}: {why}")

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """The answer to these inputs. Blocks. Raises ModelRefused with ONNX Runtime's error."""
        feeds = {spec.name: each for spec, each in zip(self.signature.inputs, inputs, strict=True)}
        try:
            return [_encoded(np.asarray(each)) for each in self._session.run(self._names, feeds)]
        except Exception as error:
            raise ModelRefused(f"ONNX Runtime: {clean_message(error, self.path.parent)}") from error

    def sensitivity(self, sample: Sample, seed: int = 0) -> float:
        """By how much the answer changes if the inputs are rounded as TF32 rounds them. Blocks. Raises ModelRefused."""
        changed = self.run(rounded(self.signature.inputs, sample.inputs, seed))
        pairs = zip(self.signature.outputs, sample.outputs, changed, strict=True)
        return max((row_error(a, b) for spec, a, b in pairs if spec.datatype.name in ("FP16", "FP32", "FP64")), default=0.0)


def _encoded(array: Array) -> Array:
    """Texts as the bytes that clients get."""
    if array.dtype != object:
        return array
    found = np.empty(array.size, object)
    found[:] = [each.encode() if isinstance(each, str) else each for each in array.flat]
    return found.reshape(array.shape)
