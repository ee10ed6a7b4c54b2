from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from engines import DATATYPES, ModelRefused, TensorSpec, wire
from engines.onnxruntime.texts import with_default
from engines.signature import Default
from tests.engines.tensors import Array


def saved(tensor: TensorProto) -> bytes:
    return bytes(helper.make_model(helper.make_graph([], "g", [], [], [tensor])).SerializeToString())


def spec(name: str) -> TensorSpec:
    return TensorSpec("w", DATATYPES[name], ("n",))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("INT64", np.arange(300, dtype=np.int64).reshape(3, 100)),
        ("FP64", np.array(2.5, np.float64)),
        ("FP16", np.zeros((0, 3), np.float16)),
        ("BOOL", np.array([True, False])),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_a_weight_s_value_is_read_in_whichever_field_it_is(name: str, array: Array, raw: bool, tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(array, "w")
    if not raw:
        values = array.ravel().view(np.uint16) if array.dtype == np.float16 else array.ravel()
        tensor = helper.make_tensor("w", tensor.data_type, array.shape, values.tolist())
    found = with_default(spec(name), tensor.data_type, memoryview(saved(tensor)), tmp_path / "m.onnx")
    assert found.default == Default(array.shape, array.tobytes())


def test_texts_are_read_too(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.array(["a", "grün"], object), "w")
    found = with_default(spec("BYTES"), TensorProto.STRING, memoryview(saved(tensor)), tmp_path / "m.onnx")
    assert found.default == Default((2,), wire.pack([b"a", "grün".encode()]))


def test_a_weight_that_is_not_there_has_no_value(tmp_path: Path) -> None:
    model = memoryview(saved(numpy_helper.from_array(np.zeros(1), "v")))
    assert with_default(spec("FP64"), TensorProto.DOUBLE, model, tmp_path / "m.onnx") == spec("FP64")


def test_a_weight_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.zeros(1), "w")
    tensor.raw_data = b"short"
    with pytest.raises(ModelRefused, match=r"m\.onnx: input 'w', which is optional: "):
        with_default(spec("FP64"), TensorProto.DOUBLE, memoryview(saved(tensor)), tmp_path / "m.onnx")
