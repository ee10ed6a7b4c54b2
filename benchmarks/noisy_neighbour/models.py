"""A model repository that Greenlane and Triton serve as it is: the victim's model, and those of the aggressors."""

from pathlib import Path

from benchmarks.subjects import write

NAMES = ("mlp", "conv", "identity", "numbers")
"""The victim's, one that computes, one that does nothing, and one that has much to carry."""
MOST_ROWS = 8

_CONFIG = """\
name: "{name}"
backend: "onnxruntime"
max_batch_size: {rows}
instance_group [{{ count: 1 kind: KIND_CPU }}]
dynamic_batching {{ }}
parameters {{ key: "intra_op_thread_count" value: {{ string_value: "{threads}" }} }}
"""


def build(folder: Path, threads: int) -> None:
    """Write it; `threads` is how many ONNX Runtime uses for a model. Raises OSError if one of them is there already."""
    write(folder, set(NAMES), plans=False)
    for name in NAMES:
        (folder / name / "config.pbtxt").write_text(_CONFIG.format(name=name, rows=MOST_ROWS, threads=threads))
