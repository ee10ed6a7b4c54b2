"""Plans of the simulated TensorRT: an ONNX, and further properties."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAGIC = b"simulated plan\n"
BARE: Mapping[str, Any] = {
    "profiles": [{}],
    "aux_streams": 0,
    "streamable": 0,
    "shape_inputs": [],
    "aliases": {},
    "bounds": {},
    "built_for": [],
    "clusters": False,
}
"""What is known of a plan that says nothing of itself. `clusters`: its kernels are launched as clusters of thread blocks.

`bounds` are bytes of outputs whose size depends on data, `built_for` SMs of each profile, null for no green context's.
"""
Shape = tuple[int, ...]
Ranges = Mapping[str, Sequence[Shape]]
"""The smallest, best and largest shape of each dynamic input."""


def make_plan(onnx: bytes, *profiles: Ranges, **others: Any) -> bytes:
    """A plan that the simulated library can load, with a profile for each of these ranges; `others` are as in BARE."""
    facts = {**BARE, "profiles": profiles or [{}], **others}
    return b"".join([MAGIC, json.dumps(facts).encode(), b"\n", onnx])


def unpack(plan: bytes, known: Mapping[bytes, bytes]) -> tuple[bytes, Mapping[str, Any]]:
    """The ONNX and the properties; `known` are the ONNX of plans that do not carry theirs. Raises ValueError."""
    if plan in known:
        return known[plan], BARE
    if not plan.startswith(MAGIC):
        raise ValueError("Serialization (Magic tag does not match)")
    facts, _, onnx = plan.removeprefix(MAGIC).partition(b"\n")
    return onnx, json.loads(facts)
