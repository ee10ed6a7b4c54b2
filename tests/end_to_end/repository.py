"""Model repositories for end-to-end tests, written in ONNX's textual form."""

import json
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
TILE = "tile (float[n] x, int64[1] times) => (float[m] y) { y = Tile(x, times) }"

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


COUNTDOWN = """countdown (float[1] x, float[1] bad, int64 turns) => (float[1] y, float[1] next, bool[1] done)
<float[1] table = {0}, float[1] one = {1}, int64 none = {0}, bool yes = {1}>
{
  hit = Equal(x, bad)
  index = Cast<to = 7>(hit)
  nothing = Gather(table, index)
  spun = Loop(turns, yes, none) <body = turn (int64 number, bool going, int64 before) => (bool again, int64 after) {
    again = Identity(going)
    step = Constant<value = int64 {1}>()
    after = Add(before, step)
  }>
  wasted = Mul(spun, none)
  late = Cast<to = 1>(wasted)
  sum = Add(x, nothing)
  y = Add(sum, late)
  next = Sub(y, one)
  done = LessOrEqual(y, one)
}"""
"""One step: it raises if `x` is `bad`, and takes as long as `turns` turns of a loop."""
LOOP = {"feed": {"next": "x"}, "steps": 100000, "until": "done", "outputs": ["y"]}


def in_parts(root: Path) -> None:
    """Add `countdown`, which answers in parts, and `identity`."""
    loop = json.dumps(LOOP).replace('"', '\\"')
    parameter = f'parameters {{ key: "greenlane.loop" value {{ string_value: "{loop}" }} }}'
    write(root, "countdown", COUNTDOWN, config=parameter)
    write(root, "identity", IDENTITY)


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
