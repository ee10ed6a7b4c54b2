"""What an ONNX Runtime session says that it takes."""

from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engines import load_engine
from engines.onnxruntime.arenas import heap_bytes
from partitions.cpu import open_cpu

SIDE = 1536
WEIGHTS = SIDE * SIDE * 4
"""Bytes: large enough that nothing else in the process matters."""


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """One matrix multiplication."""
    weights = numpy_helper.from_array(np.ones((SIDE, SIDE), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", SIDE])],
        [weights],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_session_takes_what_the_heap_grew_by_which_is_at_least_its_weights(dense: Path) -> None:
    with closing(open_cpu()) as device, closing(device.carve([0])) as partition, closing(load_engine(dense)) as engine:
        assert engine.memory == {"file": dense.stat().st_size}
        assert engine.executor_memory == {"session": dense.stat().st_size}
        with closing(engine.bind(partition)) as executor:
            taken = executor.memory["session"]
            assert WEIGHTS <= taken <= 4 * WEIGHTS
            assert engine.executor_memory == {"session": taken}
        assert executor.memory == {}


def test_the_heap_is_what_was_allocated_and_not_freed() -> None:
    before = heap_bytes()
    kept = bytearray(WEIGHTS)
    grown = heap_bytes() - before
    del kept
    assert 0 <= grown - WEIGHTS < WEIGHTS / 10
    assert abs(heap_bytes() - before) < WEIGHTS / 10
