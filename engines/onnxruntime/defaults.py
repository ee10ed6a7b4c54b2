"""The default values of optional inputs: the model's initializers of the same name.

A file may keep them in one of five fields or in another file, so ONNX Runtime reads them, as a model of one constant.
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
from .errors import clean_message
from .texts import constant, of_array


def with_default(spec: TensorSpec, kind: int, model: memoryview, path: Path) -> TensorSpec:
    """The input with the initializer of its name, from a model's bytes, as its default; unchanged if there is none.

    `kind` is its TensorProto.DataType. Weights may be in files in the folder of `path`. Blocks. Raises ModelRefused.
    """
    tensor = initializer(model, spec.name)
    if tensor is None:
        return spec
    try:
        value = of_array(_value(constant(bytes(tensor), spec.name, kind), path.parent))
    except Exception as error:
        raise ModelRefused(f"{path}: input {spec.name!r}, which is optional: {clean_message(error, path.parent)}") from error
    return replace(spec, default=Default(value.shape, bytes(view(value.address, value.nbytes))))


def _value(model: bytes, folder: Path) -> "np.ndarray[Any, np.dtype[Any]]":
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    (value,) = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, {})
    return np.asarray(value)
