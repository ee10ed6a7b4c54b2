"""How an engine is run, as opposed to built: settings that are checked when they are made, on every backend alike.

They are not kept with an engine: whoever loads it says how it is to run.
"""

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cuda_graph_strategy": ("disabled", "whole_graph_capture"),
        "dynamic_shapes_kernel_specialization_strategy": ("lazy", "eager", "none"),
        "allocation_strategy": ("static", "on_profile_change", "user_managed"),
        "copies": ("auto", "sm", "engine"),
    }
)

# `copies` is ours: no library has a part in it.
_NEEDS_THE_LIBRARY = (
    "cuda_graph_strategy",
    "dynamic_shapes_kernel_specialization_strategy",
    "allocation_strategy",
    "cache_path",
    "weight_streaming_budget",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Settings of one engine; equal when their values are. Raises ValueError naming the field, its value and the choices.

    - `cuda_graph_strategy`: `whole_graph_capture` lets the library replay an inference as one launch.
    - `dynamic_shapes_kernel_specialization_strategy`: kernels for a new shape are compiled in the background (`lazy`),
      before it runs (`eager`), or never (`none`).
    - `allocation_strategy`: who gives an execution context its memory, and when.
    - `cache_path`: the file that keeps compiled kernels from one run to the next; "" keeps them in memory only.
    - `copies`: inputs and outputs are moved by the partition's own multiprocessors (`sm`), by the copy engines that all
      tenants share (`engine`), or by whichever hurts less (`auto`).
    - `weight_streaming_budget`: bytes of weights to keep on the GPU where the engine can stream them; None asks the library.
    """

    cuda_graph_strategy: str = "disabled"
    dynamic_shapes_kernel_specialization_strategy: str = "lazy"
    allocation_strategy: str = "static"
    cache_path: str | os.PathLike[str] = "~/.cache/greenlane/kernels"
    copies: str = "auto"
    weight_streaming_budget: int | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")
        if not isinstance(self.cache_path, (str, os.PathLike)):
            raise ValueError(f"cache_path is {self.cache_path!r}; expected a path, or '' for none")
        if not _is_budget(self.weight_streaming_budget):
            raise ValueError(
                f"weight_streaming_budget is {self.weight_streaming_budget!r}; expected a number of bytes from 0, or None"
            )

    @property
    def cache_file(self) -> Path | None:
        """`cache_path` with `~` for the user's home; None where nothing is to be kept."""
        return Path(self.cache_path).expanduser() if os.fspath(self.cache_path) else None

    def merge(self, **changes: Any) -> "RuntimeSettings":
        """The same with some fields changed. Raises TypeError on a field that there is not, and ValueError."""
        for name in changes:
            if name not in (known := [field.name for field in fields(self)]):
                near = get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise TypeError(f"no setting is called {name!r}; {hint}there are {', '.join(known)}")
        return replace(self, **changes)

    def effective(self, library: str, supported: Collection[str]) -> "RuntimeSettings":
        """What of them holds with a library that honours only the fields in `supported`: the others get their defaults.

        `library` is its name in the UserWarning that every field gets which was set in vain.
        """
        defaults = RuntimeSettings()
        lost = [name for name in _NEEDS_THE_LIBRARY if name not in supported]
        for name in lost:
            if (value := getattr(self, name)) != getattr(defaults, name) and value != "":
                warnings.warn(f"{library} has no {name}: {value!r} has no effect", UserWarning, stacklevel=2)
        kept = {name: getattr(defaults, name) for name in lost}
        return replace(self, **kept | ({"cache_path": ""} if "cache_path" in lost else {}))


def streaming_budget(asked: int | None, baked: int | None, streamable: int, automatic: Callable[[], int]) -> int:
    """Bytes of weights to keep on the GPU: what was `asked` for, else what was `baked` in, else what the library says.

    Never more than can be streamed, and 0 where the library cannot say.
    """
    budget = baked if asked is None else asked
    try:
        return min(automatic() if budget is None else budget, streamable)
    except RuntimeError:
        return 0


def _is_budget(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
