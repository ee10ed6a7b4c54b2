"""Small models of every datatype, and what ONNX Runtime itself makes of inputs: what the server's answers are compared with."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tests.end_to_end.repository import write

Arrays = dict[str, Any]

KINDS = {
    "FP16": ("float16", "<f2"),
    "FP32": ("float", "<f4"),
    "FP64": ("double", "<f8"),
    "INT8": ("int8", "<i1"),
    "INT16": ("int16", "<i2"),
    "INT32": ("int32", "<i4"),
    "INT64": ("int64", "<i8"),
    "UINT8": ("uint8", "<u1"),
    "UINT16": ("uint16", "<u2"),
    "UINT32": ("uint32", "<u4"),
    "UINT64": ("uint64", "<u8"),
    "BOOL": ("bool", "?"),
    "BYTES": ("string", "O"),
}
"""Datatypes of the protocol: ONNX's word and numpy's code. Texts are objects of numpy's. It has no BF16."""

TEXTS = {
    f"same_{kind.lower()}": f"same ({word}[n, m] x) => ({word}[n, m] y) {{ y = Identity(x) }}"
    for kind, (word, _) in KINDS.items()
}
TEXTS |= {
    "sums": "sums (int32[n] a, int32[n] b) => (int32[n] sum, int32[n] difference) { sum = Add(a, b)  difference = Sub(a, b) }",
    "rows": "rows (float[batch, 3] x) => (float[batch, 3] y) { y = Neg(x) }",
    "mixed": "mixed (float[n] x, string[n] s, int64 k) => (float[n] y, string[n] t, int64 l) "
    "{ y = Neg(x)  t = Identity(s)  l = Neg(k) }",
    "turned": "turned (double[n, m] x) => (double[m, n] y, double total) "
    "{ y = Transpose(x)  total = ReduceSum<keepdims = 0>(x) }",
}
CONFIGS = {"rows": "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 200 }"}
_MARK = "stand-in: "
MOST_ROWS = 8
"""Of the model `rows`."""


class Oracle:
    """The models of a repository, run without a server. One thread at a time."""

    def __init__(self, root: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        paths = {name: str(root / name / "1" / "model.onnx") for name in TEXTS}
        self._sessions = {name: onnxruntime.InferenceSession(path, options) for name, path in paths.items()}

    def outputs(self, model: str, inputs: Mapping[str, Any]) -> Arrays:
        """What the model makes of them, by name.

        Python's ONNX Runtime takes UTF-8 only. All models pass texts on as they are, so other texts have a stand-in there.
        """
        session = self._sessions[model]
        names = self.output_names(model)
        found = session.run(names, {name: _each(_stand_in, array) for name, array in inputs.items()})
        return dict(zip(names, [_each(_stood_for, array) for array in found], strict=True))

    @property
    def models(self) -> list[str]:
        """Their names."""
        return list(self._sessions)

    def output_names(self, model: str) -> list[str]:
        """In the model's order."""
        return [output.name for output in self._sessions[model].get_outputs()]

    def inputs(self, model: str) -> dict[str, tuple[str, list[Any]]]:
        """The datatype and the dimensions of each input, those of any size as their names."""
        words = {word: kind for kind, (word, _) in KINDS.items()}
        return {given.name: (words[given.type[7:-1]], given.shape) for given in self._sessions[model].get_inputs()}


def _each(change: Callable[[str], str], array: Any) -> Any:
    """The same with each text changed."""
    if array.dtype != object:
        return array
    return np.array([change(each) for each in array.flat], object).reshape(array.shape)


def _stand_in(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return _MARK + text.encode(errors="surrogateescape").hex()
    return text


def _stood_for(text: str) -> str:
    return bytes.fromhex(text.removeprefix(_MARK)).decode(errors="surrogateescape") if text.startswith(_MARK) else text


def repository(root: Path) -> Path:
    """Write all models."""
    for name, text in TEXTS.items():
        write(root, name, text, config=CONFIGS.get(name, ""))
    return root
