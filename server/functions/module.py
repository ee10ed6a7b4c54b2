"""Runs `model.py` once, and calls its functions. Everything here runs on a model's own thread."""

import sys
from collections.abc import Callable
from itertools import count
from types import ModuleType
from typing import Any

from engines import Signature

from .arrays import Data, Raw, arrays, check_shapes, checked
from .definition import Functions

_numbers = count(1)


class FunctionModule:
    """The module of one version of a model. `label` names that in errors."""

    def __init__(self, functions: Functions, label: str) -> None:
        self._functions = functions
        self._label = label
        self._module: ModuleType | None = None

    def __repr__(self) -> str:
        return f"<FunctionModule {self._functions.path}{'' if self._module else ', not run'}>"

    def load(self) -> None:
        """Run the file. Nothing is written beside it, as Python does for what is imported."""
        functions = self._functions
        module = ModuleType(f"greenlane_model_{next(_numbers)}", None)
        module.__file__ = functions.path
        sys.modules[module.__name__] = module  # Where pickle and dataclasses look for it.
        try:
            exec(compile(functions.source, functions.path, "exec"), module.__dict__)
        except BaseException:
            self.close(module)
            raise
        self._module = module

    def close(self, module: ModuleType | None = None) -> None:
        """Forget the module."""
        module, self._module = module or self._module, None
        if module:
            sys.modules.pop(module.__name__, None)

    def preprocess(self, tensors: list[Raw]) -> list[Data]:
        """The model's inputs for a client's. Raises what the function raises, or Failed for what it returned."""
        what = f"{self._label}: preprocess"
        return checked(what, self._function("preprocess")(arrays(tensors)), self._functions.inner.inputs)

    def postprocess(self, tensors: list[Raw], signature: Signature) -> list[Data]:
        """A client's outputs, which are to be those of `signature`, for the model's. Raises as `preprocess` does."""
        what = f"{self._label}: postprocess"
        found = checked(what, self._function("postprocess")(arrays(tensors)), signature.outputs)
        check_shapes(what, signature, found)
        return found

    def _function(self, name: str) -> Callable[[Any], Any]:
        found: Callable[[Any], Any] = getattr(self._module, name)
        return found
