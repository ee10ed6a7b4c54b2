"""Model repositories for end-to-end tests, written in ONNX's textual form."""

from pathlib import Path

import onnx.parser

HEADER = '<ir_version: 8, opset_import: ["": 17]>'

IDENTITY = "identity (float[rows, columns] x) => (float[rows, columns] y) { y = Identity(x) }"
ADD = "add (int32[n] a, int32[n] b) => (int32[n] sum, int32[n] difference) { sum = Add(a, b)  difference = Sub(a, b) }"
TEXT = "text (string[n] words) => (string[n] same) { same = Identity(words) }"
ROWS = "rows (float[batch, 3] x) => (float[batch, 3] y) { y = Neg(x) }"
PICK = "pick (float[4] x, int64[1] at) => (float[1] y) { y = Gather(x, at) }"
HALF = "half (float16[n] x) => (float16[n] y) { y = Identity(x) }"
BRAIN = "brain (bfloat16[n] x) => (bfloat16[n] y) { y = Identity(x) }"
SCALED = "scaled (float[n] x) => (float[n] y) <float[1] by = {FACTOR}> { y = Mul(x, by) }"

SPIN = """spin (int64 turns, float[n, n] x) => (float[n, n] y) <bool go = {1}> {
  y = Loop (turns, go, x) <body = turn (int64 i, bool on, float[n, n] last) => (bool again, float[n, n] next) {
    again = Identity(on)  product = MatMul(last, last)  next = Tanh(product)
  }>
}"""
"""Runs for as long as its input says: `turns` matrix products, one after another."""

ODD_NAME = "50% café"
"""A model's name that no path can hold as it is."""


def write(root: Path, name: str, text: str, version: int = 1, config: str = "") -> Path:
    """Add a model to the repository and return its file."""
    path = root / name / str(version) / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(onnx.parser.parse_model(f"{HEADER} {text}").SerializeToString())
    if config:
        (root / name / "config.pbtxt").write_text(config)
    return path


def standard(root: Path) -> Path:
    """A repository with one model of each kind that the tests talk to."""
    write(root, "identity", IDENTITY)
    write(root, "add", ADD)
    write(root, "text", TEXT)
    write(root, "rows", ROWS, config="max_batch_size: 4")
    write(root, "pick", PICK)
    write(root, "half", HALF)
    write(root, "brain", BRAIN)
    write(root, "spin", SPIN)
    write(root, ODD_NAME, IDENTITY)
    for version, factor in ((1, 10), (2, 20), (10, 100)):
        text = SCALED.replace("FACTOR", str(factor))
        write(root, "scaled", text, version, config="version_policy { all {} }")
    return root


def replace(root: Path, name: str, text: str, version: int = 1) -> None:
    """Put another model in a model's place in one step, so that no server reads a half-written file."""
    new = write(root, ".new", text)
    new.replace(root / name / str(version) / "model.onnx")


def broken(root: Path) -> Path:
    """A repository most of whose models are broken, each in another way."""
    write(root, "whole", IDENTITY)
    path = write(root, "truncated", IDENTITY)
    path.write_bytes(path.read_bytes()[:-20])
    for name, content in (("garbage", b"no model" * 99), ("void", b"")):
        write(root, name, IDENTITY).write_bytes(content)
    for name in ("word", "mixed"):
        write(root, name, IDENTITY)
        (root / name / "1").rename(root / name / "one")
    write(root, "mixed", IDENTITY, version=2)
    (root / "bare").mkdir()
    write(root, "contradicted", IDENTITY, config='input [ { name: "x" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]')
    write(root, "prose", IDENTITY, config="This is no configuration but a sentence.")
    write(root, "tritons", IDENTITY, config="instance_group [ { count: 2 kind: KIND_CPU } ]\ndynamic_batching { }")
    return root
