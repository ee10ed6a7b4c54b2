"""`model.py` beside a model: which functions it has and what tensors clients see, read without running it."""

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines import ModelRefused, Signature, TensorSpec
from engines.datatypes import DATATYPES
from partitions.regular_file import open_regular

from ..functions.definition import Functions
from ..protocol.json_document import short

FILENAME = "model.py"
MOST_BYTES = 1 << 20
"""Bytes of a `model.py`; it travels between processes whenever its model is loaded."""
_MOST_SIZE = (1 << 31) - 1
_FUNCTIONS = ("preprocess", "postprocess")
_TENSORS = {"INPUTS": "preprocess", "OUTPUTS": "postprocess"}
_KEYS = {"name", "datatype", "shape"}


@dataclass(frozen=True, slots=True)
class FunctionsFile:
    """A `model.py` with functions. `inputs` and `outputs` are what it says that clients see, None where it says nothing.

    `where` names the file in errors.
    """

    path: Path
    source: str
    functions: frozenset[str]
    inputs: tuple[TensorSpec, ...] | None
    outputs: tuple[TensorSpec, ...] | None
    where: str

    def outer(self, inner: Signature) -> Signature:
        """What clients see of a model with this signature. Raises ModelRefused."""
        if inner.in_parts:
            raise ModelRefused(f"{self.where}: the model answers in parts, and has no {FILENAME} then; take the file away")
        for spec in (*(self.inputs or ()), *(self.outputs or ())) if inner.max_batch else ():
            if not spec.dims or spec.dims[0] != "":
                why = f"expected -1 first, as the model takes batches of up to {inner.max_batch}"
                raise ModelRefused(f"{self.where}: {spec.name!r} has shape {list(spec.shape)}; {why}")
        inputs = inner.inputs if self.inputs is None else self.inputs
        outputs = inner.outputs if self.outputs is None else self.outputs
        return replace(inner, inputs=inputs, outputs=outputs)

    def definition(self, inner: Signature) -> Functions:
        """What the process that runs them needs."""
        return Functions(str(self.path), self.where, self.source, inner, *(name in self.functions for name in _FUNCTIONS))


def read_functions(model: Path, version: str) -> FunctionsFile | None:
    """The functions of a version of the model in this directory, None if it has none: the version's own, or the model's.

    A `model.py` without either function is something else, such as a model of Triton's Python backend. Raises ValueError that
    says what is wrong with the file, and OSError.
    """
    for path, where in ((model / version / FILENAME, f"{model.name}/{version}"), (model / FILENAME, model.name)):
        try:
            with open_regular(path) as file:
                content = file.read(MOST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            continue
        return _read(path, content, f"{where}/{FILENAME}")
    return None


def _read(path: Path, content: bytes, where: str) -> FunctionsFile | None:
    if len(content) > MOST_BYTES:
        raise ValueError(f"{where}: more than {MOST_BYTES} bytes; keep what is large in files beside it, or in a package")
    try:
        source = content.decode()
        tree = ast.parse(source)
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ValueError(f"{where}{line}: not Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where}: not Python: {error}") from error
    if found := [node.name for node in tree.body if isinstance(node, ast.AsyncFunctionDef) and node.name in _FUNCTIONS]:
        raise ValueError(f"{where}: async def {found[0]}; expected def, as functions run on a thread")
    functions = frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS)
    if not functions:
        return None
    stated: dict[str, tuple[TensorSpec, ...] | None] = dict.fromkeys(_TENSORS)
    for name, value in _assignments(tree):
        if _TENSORS[name] not in functions:
            raise ValueError(
                f"{where}: {name}, but no function {_TENSORS[name]}, which {'takes' if name == 'INPUTS' else 'gives'} them"
            )
        stated[name] = _tensors(value, f"{where}: {name}")
    return FunctionsFile(path, source, functions, stated["INPUTS"], stated["OUTPUTS"], where)


def _assignments(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    """The values of INPUTS and OUTPUTS."""
    found = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and target.id in _TENSORS and value is not None:
                found.append((target.id, value))
    return found


def _tensors(value: ast.expr, where: str) -> tuple[TensorSpec, ...]:
    try:
        entries = ast.literal_eval(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where}: not a literal; it is read without running the file, so write the list out") from error
    if not isinstance(entries, list | tuple) or not entries:
        raise ValueError(f"{where}: {short(repr(entries))}; expected a list of tensors, each with name, datatype and shape")
    found = tuple(_tensor(entry, f"{where}[{index}]") for index, entry in enumerate(entries))
    names = [spec.name for spec in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{where}: {short(repr(twice[0]))} given twice")
    return found


def _tensor(entry: Any, where: str) -> TensorSpec:
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise ValueError(f'{where}: {short(repr(entry))}; expected {{"name": ..., "datatype": ..., "shape": [...]}}')
    name, datatype, shape = entry["name"], entry["datatype"], entry["shape"]
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"{where}: name is {short(repr(name))}; expected text")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise ValueError(f"{where}: datatype is {short(repr(datatype))}; expected one of {', '.join(DATATYPES)}")
    if not isinstance(shape, list | tuple) or any(type(size) is not int or not -1 <= size <= _MOST_SIZE for size in shape):
        raise ValueError(f"{where}: shape is {short(repr(shape))}; expected sizes, -1 for those that vary")
    return TensorSpec(name, DATATYPES[datatype], tuple("" if size < 0 else size for size in shape))
