"""The limit on outputs whose size the data decides."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from engines import Executor, OutputsTooLarge, RuntimeSettings, Tensor, load_engine
from partitions.cpu import CpuPartition
from tests import models
from tests.engines.tensors import Array
from tests.memory import Peak, anonymous

MIB = 1 << 20
LIMIT = 64 * MIB
EXPAND = "expand (float[1] x, int64[1] n) => (float[m] y) { y = Expand(x, n) }"
UNRANKED = "expand (float[1] x, int64[r] n) => (float[] y) { y = Expand(x, n) }"
"""As exporters write it where the data decides how many dimensions there are, too."""
BETWEEN = "between (float[1] x, int64[1] n) => (int64[1, m] y) { z = Expand(x, n) s = ReduceSum(z) y = NonZero(s) }"


def bound(tmp_path: Path, partition: CpuPartition, source: str, **settings: Any) -> Executor:
    path = models.save(tmp_path / "m.onnx", source)
    return load_engine(path, settings=RuntimeSettings(memory_limit=LIMIT, **settings)).bind(partition)


def expand(executor: Executor, nbytes: int) -> int:
    return shape(executor, np.ones(1, np.float32), np.array([nbytes // 4]))[0] * 4


def shape(executor: Executor, *inputs: Array) -> tuple[int, ...]:
    """Of the only output, which is dropped."""
    (output,) = executor.enqueue([Tensor.of(each) for each in inputs]).wait()
    return output.shape


@pytest.mark.parametrize(("source", "nbytes"), [(EXPAND, 96 * MIB), (EXPAND, 16 << 30), (UNRANKED, 96 * MIB)])
def test_outputs_over_the_limit_are_refused_and_take_no_memory(
    tmp_path: Path, partition: CpuPartition, source: str, nbytes: int
) -> None:
    """Those of up to twice the limit are taken, as tensors between the layers may have as much, and are freed again."""
    executor, before = bound(tmp_path, partition, source), anonymous()
    peak = Peak()
    with pytest.raises(OutputsTooLarge, match=rf"at least {nbytes} bytes .* may have {LIMIT} \(memory_limit\)") as raised:
        expand(executor, nbytes)
    assert raised.value.nbytes == nbytes
    assert anonymous() - before < 16 * MIB
    assert peak.nbytes < (0 if nbytes > 2 * LIMIT else nbytes) + 16 * MIB
    assert expand(executor, 4 * MIB) == 4 * MIB


def test_what_earlier_outputs_left_is_not_in_the_way(tmp_path: Path, partition: CpuPartition) -> None:
    executor = bound(tmp_path, partition, EXPAND)
    for size in (1, 3, 9, 27, 60, 2, 50, 64):
        assert expand(executor, size * MIB) == size * MIB


def test_tensors_between_the_layers_may_take_as_much_again(tmp_path: Path, partition: CpuPartition) -> None:
    executor = bound(tmp_path, partition, BETWEEN)
    assert shape(executor, np.ones(1, np.float32), np.array([25 * MIB])) == (1, 1)
    before = anonymous()
    with pytest.raises(OutputsTooLarge):
        shape(executor, np.ones(1, np.float32), np.array([1 << 30]))
    assert anonymous() - before < 16 * MIB


def test_weights_do_not_count(tmp_path: Path, partition: CpuPartition) -> None:
    """They are larger than the limit, and their packed copies come from the same arena."""
    source = "weights (float[b, 4096] x) => (int64[r, n] y) { z = MatMul(x, w) y = NonZero(z) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {source}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4096, 1024), np.float32), "w"))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    executor = load_engine(path, settings=RuntimeSettings(memory_limit=4 * MIB)).bind(partition)
    assert shape(executor, np.ones((8, 4096), np.float32)) == (2, 8 * 1024)


def test_memory_of_a_session_that_keeps_none_is_freed_by_each_run(tmp_path: Path, partition: CpuPartition) -> None:
    executor, before = bound(tmp_path, partition, EXPAND, memory_arena=False), anonymous()
    for _ in range(2):
        assert expand(executor, 60 * MIB) == 60 * MIB
    shape(executor, np.ones(1, np.float32), np.array([1]))
    assert anonymous() - before < 16 * MIB


def test_memory_of_a_closed_session_is_freed(tmp_path: Path, partition: CpuPartition) -> None:
    executor, before = bound(tmp_path, partition, EXPAND), anonymous()
    expand(executor, 60 * MIB)
    assert anonymous() - before > 30 * MIB
    executor.close()
    assert anonymous() - before < 16 * MIB


def test_a_scalar_has_a_known_size(tmp_path: Path, partition: CpuPartition) -> None:
    executor = bound(tmp_path, partition, "sum (float[n] x) => (float y) { z = Add(x, x) y = ReduceSum<keepdims = 0>(z) }")
    assert shape(executor, np.ones(40 * MIB, np.float32)) == ()


def test_a_model_whose_outputs_have_known_sizes_has_no_limit(tmp_path: Path, partition: CpuPartition) -> None:
    executor = bound(tmp_path, partition, "double (float[n] x) => (float[n] y) { y = Add(x, x) }")
    assert shape(executor, np.ones(40 * MIB, np.float32)) == (40 * MIB,)
