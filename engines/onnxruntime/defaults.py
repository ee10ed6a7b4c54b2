"""The values that an ONNX model has of its own for inputs which need not be given: its initializers of their names.

A file may keep them in five fields or in another file, so ONNX Runtime reads them: as a model of one constant.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from ..errors import ModelRefused
from ..memory import view
from ..model_files.onnx_file import initializer
from ..signature import Default, TensorSpec
from .errors import tidy
from .small_models import constant
from .texts import of_array


def with_default(spec: TensorSpec, kind: int, model: memoryview, path: Path) -> TensorSpec:
    """The input with the initializer of its name, in a model's bytes, for its default; without where there is none.

    `kind` is its TensorProto.DataType; beside `path` there may be files of weights. Blocks. Raises ModelRefused.
    """
    tensor = initializer(model, spec.name)
    if tensor is None:
        return spec
    try:
        value = of_array(_value(constant(bytes(tensor), spec.name, kind), path.parent))
    except Exception as error:
        raise ModelRefused(f"{path}: input {spec.name!r}, which is optional: {tidy(error, path.parent)}") from error
    return replace(spec, default=Default(value.shape, bytes(view(value.address, value.nbytes))))


def _value(model: bytes, folder: Path) -> "np.ndarray[Any, np.dtype[Any]]":
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    (value,) = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, {})
    return np.asarray(value)
