"""Sessions of the library, with the settings of a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort

from ..errors import ModelRefused
from ..model_files.onnx_file import blame
from ..settings import RuntimeSettings
from .errors import clean_message, with_cure
from .model_copy import ModelCopy

_LEVELS = {"all": "ORT_ENABLE_ALL", "extended": "ORT_ENABLE_EXTENDED", "basic": "ORT_ENABLE_BASIC", "none": "ORT_DISABLE_ALL"}


def open_session(model: ModelCopy, path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    """A session of this copy of the file at `path`, whose folder may have its weights. Raises ModelRefused."""
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    try:
        return ort.InferenceSession(model.path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelRefused(
            f"{path}: failed to load: {blame(model.view(), with_cure(clean_message(error, path.parent)))}"
        ) from error


def session_options(settings: RuntimeSettings, cores: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = settings.threads(cores)
    if settings.execution_mode == "parallel":
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, _LEVELS[settings.graph_optimization])
    options.enable_cpu_mem_arena, options.enable_mem_pattern = settings.memory_arena, settings.memory_pattern
    options.log_severity_level = 4  # Errors are raised; do not print them as well.
    for pool in ("intra", "inter"):
        options.add_session_config_entry(f"session.{pool}_op.allow_spinning", "0")
    return options


class Runner:
    """Runs the bindings of one session by the function of the library that its public one, in Python, calls in the end.

    What that does before takes as long as a small model, and is for captured graphs, which there are none of here. Where a
    version of the library is built in another way, `run` is the public one. `run(handle, options)` blocks, without the GIL;
    `handle` is what `handle_of` returns for a binding of this session. The caller keeps the binding meanwhile.
    """

    def __init__(self, session: ort.InferenceSession) -> None:
        inner: Any = getattr(session, "_sess", None)
        self._session = session
        self._is_public = inner is None
        self.run: Callable[[Any, ort.RunOptions], None] = self._run_public if inner is None else inner.run_with_iobinding

    def handle_of(self, binding: ort.IOBinding) -> Any:
        """What `run` takes for this binding."""
        return binding if self._is_public else binding._iobinding

    def _run_public(self, binding: ort.IOBinding, options: ort.RunOptions) -> None:
        options.add_run_config_entry("gpu_graph_id", "-1")  # Without it, a C++ exception is thrown and caught: 20 us.
        self._session.run_with_iobinding(binding, options)
