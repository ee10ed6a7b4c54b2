"""`model.py` as it is read, without running it."""

from pathlib import Path

import pytest

from engines import ModelRefused, Signature, TensorSpec
from engines.datatypes import DATATYPES
from server.repository.functions_file import read_functions

BOTH = """
raise SystemExit("this is not run")
INPUTS = [{"name": "text", "datatype": "BYTES", "shape": [-1, 1]}]
OUTPUTS: list = [{"name": "score", "datatype": "FP32", "shape": (-1, 2)}]
def preprocess(inputs): ...
def postprocess(outputs): ...
"""
FLOATS = DATATYPES["FP32"]
INNER = Signature((TensorSpec("x", FLOATS, ("n", 4)),), (TensorSpec("y", FLOATS, ("n",)),), max_batch=4)


def write(root: Path, text: str, version: str = "") -> Path:
    path = root / "m" / version / "model.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root / "m"


def test_tensors_are_read_without_running_it(tmp_path: Path) -> None:
    found = read_functions(write(tmp_path, BOTH), "1")
    assert found
    outer, functions = found.outer(INNER), found.definition(INNER)
    assert repr(outer) == "<Signature text BYTES[-1, 1] -> score FP32[-1, 2], batch 4>"
    assert (functions.inner, functions.preprocess, functions.postprocess) == (INNER, True, True)
    assert functions.source == BOTH


def test_a_versions_own_file_goes_first(tmp_path: Path) -> None:
    write(tmp_path, BOTH)
    model = write(tmp_path, "def postprocess(outputs): ...", "2")
    one, two = read_functions(model, "1"), read_functions(model, "2")
    assert one
    assert two
    assert (one.where, two.where) == ("m/model.py", "m/2/model.py")
    assert two.outer(INNER) == INNER


@pytest.mark.parametrize("text", ["class TritonPythonModel: ...", "x = 1", ""])
def test_a_file_without_functions_is_something_else(tmp_path: Path, text: str) -> None:
    assert read_functions(write(tmp_path, text), "1") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1\ndef preprocess(:", "^m/model.py, line 2: not Python: "),
        ("x = '\0'", "^m/model.py: not Python: "),
        ("def postprocess(o): ...\nINPUTS = []", "INPUTS, but no function preprocess, which takes them"),
        ("def preprocess(o): ...\nINPUTS = list()", "INPUTS: not a literal; it is read without running"),
        ("def preprocess(o): ...\nINPUTS = []", r"INPUTS: \[\]; expected a list of tensors"),
        ('def preprocess(o): ...\nINPUTS = [{"name": "x"}]', r"INPUTS\[0\]: .*; expected .*datatype"),
        (
            'def preprocess(o): ...\nINPUTS = [{"name": "x", "datatype": "float", "shape": []}]',
            "datatype is 'float'; expected one of",
        ),
        (
            'def preprocess(o): ...\nINPUTS = [{"name": "x", "datatype": "FP32", "shape": [-2]}]',
            r"shape is \[-2\]; expected sizes",
        ),
        ('def preprocess(o): ...\nINPUTS = [{"name": "x", "datatype": [], "shape": []}]', r"datatype is \[\]; expected one of"),
        ('def preprocess(o): ...\nINPUTS = [{"name": "\\udc80", "datatype": "FP32", "shape": []}]', "name is .*; expected te"),
        (f'def preprocess(o): ...\nINPUTS = [{{"name": "x", "datatype": "FP32", "shape": [{1 << 70}]}}]', "expected sizes"),
        ("async def preprocess(o): ...", "m/model.py: async def preprocess; expected def"),
        ('def preprocess(o): ...\nINPUTS = 2 * [{"name": "x", "datatype": "FP32", "shape": [1]}]', "not a literal"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_functions(write(tmp_path, text), "1")


def test_tensors_of_a_model_that_takes_batches_begin_with_the_batch(tmp_path: Path) -> None:
    text = 'def preprocess(o): ...\nINPUTS = [{"name": "x", "datatype": "FP32", "shape": [1, 2]}]'
    found = read_functions(write(tmp_path, text), "1")
    assert found
    with pytest.raises(
        ModelRefused, match=r"m/model.py: 'x' has shape \[1, 2\]; expected -1 first, as the model takes batches"
    ):
        found.outer(INNER)
