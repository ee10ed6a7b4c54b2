"""How bindings are run: by the library's own function, or by its public one."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from engines.onnxruntime.session import Runner
from tests import models


class Public:
    """A session of a version of the library that has nothing but what is public."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.ran: list[Any] = []
        self._it = session

    def run_with_iobinding(self, binding: ort.IOBinding, options: ort.RunOptions) -> None:
        self.ran.append(binding)
        self._it.run_with_iobinding(binding, options)


def bound(path: Path, x: "np.ndarray[Any, Any]", y: "np.ndarray[Any, Any]") -> tuple[ort.InferenceSession, ort.IOBinding]:
    source = "double (float[n, 4] x) => (float[n, 4] y) { y = Add(x, x) }"
    session = ort.InferenceSession(models.save(path, source), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, 1, x.shape, x.ctypes.data)
    binding.bind_output("y", "cpu", 0, 1, y.shape, y.ctypes.data)
    return session, binding


@pytest.mark.parametrize("public", [False, True])
def test_a_binding_runs_in_the_memory_it_names(tmp_path: Path, public: bool) -> None:
    x, y = np.array([[1, 2, 3, 4]], np.float32), np.zeros((1, 4), np.float32)
    session, binding = bound(tmp_path / "model.onnx", x, y)
    shown: Any = Public(session) if public else session
    runner = Runner(shown)
    handle = runner.handle_of(binding)
    runner.run(handle, ort.RunOptions())
    assert y.tolist() == [[2, 4, 6, 8]]
    assert (handle is binding) == public
    assert not public or shown.ran == [binding]


@pytest.mark.parametrize("public", [False, True])
def test_a_run_that_was_stopped_before_it_began_fails(tmp_path: Path, public: bool) -> None:
    x, y = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    session, binding = bound(tmp_path / "model.onnx", x, y)
    shown: Any = Public(session) if public else session
    runner, options = Runner(shown), ort.RunOptions()
    options.terminate = True
    with pytest.raises(RuntimeError, match="terminate"):
        runner.run(runner.handle_of(binding), options)
    assert not y.any()
