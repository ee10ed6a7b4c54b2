"""Small ONNX models for tests, built from ONNX's textual form (https://onnx.ai/onnx/repo-docs/Syntax.html)."""

from pathlib import Path

import onnx.helper
import onnx.parser

HEADER = '<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]>\n'

FUSSY = """
fussy (float[n] x) => (float[n] y)
<float[1] table = {0}>
{
  index = Cast<to = 7>(x)
  y = Gather(table, index)
}
"""
"""Zeros for zeros; raises for anything that is 1 or more."""

INDEXED = f"""indexed (float[n, 3] x) => (float[n, 3, 2] y) <float[100, 2] t = {{{", ".join(map(str, range(200)))}}}>
{{ i = Cast<to = 7>(x) y = Gather<axis = 0>(t, i) }}"""
"""Beside a row that is 1000 times as large it leaves its table."""

DISTINCT = "distinct (float[n] x) => (float[m] y) { y = Unique<sorted = 0>(x) }"
"""What is there once, in order: how much that is, is known only afterwards."""

PASSING = "passing (float[rows, columns] x) => (float[rows, columns] x, float[rows, columns] y) { y = Neg(x) }"
"""Its first output is its input, which no node computes; its second one is the negative."""

COPYING = """copying (float[rows, columns] x) => (float[rows, columns] same, float[rows, columns] y)
{ same = Identity(x) y = Neg(x) }"""
"""PASSING for plans, whose tensors have names of their own."""

LATCH = """
latch (int64[1] released, int64 most) => (int64 turns)
<int64 zero = {0}, int64[1] held = {0}, bool yes = {1}, int64[1] axes = {0}>
{
  turns = Loop(most, yes, zero) <body = turn (int64 index, bool going, int64 before) => (bool again, int64 after) {
    shut = Equal(released, held)
    again = Squeeze(shut, axes)
    one = Constant<value = int64 {1}>()
    after = Add(before, one)
  }>
}
"""
"""Loops until the memory of `released` is not 0, or `most` times; its output is the number of iterations."""

ENDLESS = """endless (float[n] x) => (float[n] y) <bool go = {1}, int64 turns = {9000000000000000000}> {
  y = Loop(turns, go, x) <body = turn (int64 index, bool going, float[n] before) => (bool again, float[n] after)
  { again = Identity(going) after = Tanh(before) }>
}"""
"""Runs for as long as it is let."""


def classifier(*dims: int | str) -> bytes:
    """A mean over height and width: `x` has these dimensions and `y` the first two, as Paddle exports a classifier."""
    kind = onnx.TensorProto.FLOAT
    nodes = [onnx.helper.make_node("GlobalAveragePool", ["x"], ["mean"]), onnx.helper.make_node("Flatten", ["mean"], ["y"])]
    declared = (onnx.helper.make_tensor_value_info(name, kind, sizes) for name, sizes in (("x", dims), ("y", dims[:2])))
    x, y = declared
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "classifier", [x], [y]), ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    return model.SerializeToString()


def save(path: Path, source: str) -> Path:
    """Write the model whose graph this is, and return where."""
    path.write_bytes(onnx.parser.parse_model(HEADER + source).SerializeToString())
    return path


def identity(datatype: str = "float", dims: str = "rows, columns") -> str:
    """`y` is `x`, of ONNX's element type `datatype`."""
    return f"identity ({datatype}[{dims}] x) => ({datatype}[{dims}] y) {{ y = Identity(x) }}"
