"""Runs `model.py` once, and calls its functions. Everything here runs on a model's own thread."""

import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from itertools import count
from types import ModuleType
from typing import Any

from engines import Signature

from ..errors import Failed
from .arrays import Data, Raw, arrays, check_shapes, checked
from .definition import Functions
from .thread import text_of

log = logging.getLogger("greenlane.functions")

_numbers = count(1)


class FunctionModule:
    """The module of one version of a model. `label` names that in errors."""

    def __init__(self, functions: Functions, label: str) -> None:
        self._functions = functions
        self._label = label
        self._module: ModuleType | None = None

    def load(self) -> None:
        """Run the file. Nothing is written beside it, as Python does for what is imported.

        Raises Failed with the line and the exception that it raised, or with what is wrong with a function; the log has the
        traceback.
        """
        functions = self._functions
        module = ModuleType(f"greenlane_model_{next(_numbers)}", None)
        module.__file__ = functions.path
        sys.modules[module.__name__] = module  # Where pickle and dataclasses look for it.
        try:
            exec(compile(functions.source, functions.path, "exec"), module.__dict__)
            self._check(module)
        except BaseException as error:
            self.close(module)
            if isinstance(error, Exception | SystemExit) and not isinstance(error, Failed):
                log.error("%s: %s cannot be run", self._label, functions.where, exc_info=error)
                raise Failed(self._told(error)) from error
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

    def _check(self, module: ModuleType) -> None:
        """Raise Failed for a function that cannot be called with the tensors."""
        functions = self._functions
        for name in [name for name in ("preprocess", "postprocess") if getattr(functions, name)]:
            found, where = getattr(module, name, None), f"{functions.where}: {name}"
            if not callable(found):
                raise Failed(f"{where} is {type(found).__name__} once the file has run; expected a function")
            try:
                inspect.signature(found).bind({})
            except TypeError as error:
                raise Failed(f"{where}{inspect.signature(found)}: {error}; expected one argument, arrays by name") from error
            except ValueError:  # It does not say what it takes, as some functions in C.
                continue

    def _told(self, error: BaseException) -> str:
        """What was raised, and in which line of the file, for clients: without the repository's path."""
        functions = self._functions
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == functions.path]
        if isinstance(error, SyntaxError) and error.filename == functions.path:
            lines = [error.lineno]
        text = " ".join(text_of(error).split()).replace(functions.path.removesuffix(functions.where), "")
        where = f"{functions.where}, line {lines[-1]}" if lines else functions.where
        return f"{where}: {type(error).__name__}{text and f': {text}'}"

    def _function(self, name: str) -> Callable[[Any], Any]:
        found: Callable[[Any], Any] = getattr(self._module, name)
        return found
