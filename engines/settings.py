"""How an engine is run, as opposed to built: settings that are checked when they are made, on every backend alike.

They are not kept with an engine: whoever loads it says how it is to run.
"""

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cuda_graph_strategy": ("disabled", "whole_graph_capture"),
        "dynamic_shapes_kernel_specialization_strategy": ("lazy", "eager", "none"),
        "allocation_strategy": ("static", "on_profile_change", "user_managed"),
        "graphs": ("on", "off", "required"),
        "copies": ("sm", "engine", "auto"),
        "warm_up": ("opt", "usual"),
    }
)

_COUNTS: Mapping[str, str] = MappingProxyType(
    {"profile": "a profile's number from 0", "weight_streaming_budget": "a number of bytes from 0"}
)

# The others are ours: no library has a part in them.
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

    - `graphs`: an inference is submitted as one CUDA graph where that can be (`on`), or call by call (`off`); `required`
      refuses to bind what cannot be.
    - `cuda_graph_strategy`: `whole_graph_capture` lets the library replay its part as one launch where `graphs` are `off`
      or stand only around the engine. A graph of ours that holds the copies too goes before it.
    - `dynamic_shapes_kernel_specialization_strategy`: kernels for a new shape are compiled before it runs (`eager`), in
      the background (`lazy`), or never (`none`). A captured graph keeps the kernels it was captured with, so `lazy`
      and dynamic inputs are not captured.
    - `allocation_strategy`: who gives an execution context its memory, and when.
    - `cache_path`: the file, or the folder, that keeps compiled kernels from one run to the next, and that executors find
      each other's in; None is a file beside the plan. With "" each executor compiles its own and keeps them in memory.
    - `copies`: inputs and outputs are moved by the partition's own multiprocessors (`sm`), by the copy engines that all
      tenants share (`engine`), or by whichever suits their size (`auto`).
    - `warm_up`: what has been run, and captured, before an executor is bound: the `opt` shape of each profile, or the
      `usual` ones besides: the smallest, the largest, and the powers of two of a batch that varies. A shape that nothing
      was ready for holds its tenant up while kernels are compiled, 0.35 s for a ResNet-18 on an H100.
    - `batch_padding`: an inference of fewer rows than any set of shapes that is ready runs as the next larger batch that is.
      Only for models whose rows do not depend on each other: what lies in the rows beyond is not defined.
    - `profile`: the one optimization profile to run with; None takes for each shape one that fits.
    - `weight_streaming_budget`: bytes of weights to keep on the GPU where the engine can stream them; None is what the
      engine was built with, or asks the library.
    """

    graphs: str = "on"
    cuda_graph_strategy: str = "disabled"
    dynamic_shapes_kernel_specialization_strategy: str = "eager"
    allocation_strategy: str = "static"
    cache_path: str | os.PathLike[str] | None = None
    copies: str = "sm"
    warm_up: str = "opt"
    batch_padding: bool = False
    profile: int | None = None
    weight_streaming_budget: int | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")
        if not isinstance(self.cache_path, (str, os.PathLike, NoneType)):
            raise ValueError(f"cache_path is {self.cache_path!r}; expected a path, '' for none, or None for beside the plan")
        for name, expected in _COUNTS.items():
            if not _is_count(value := getattr(self, name)):
                raise ValueError(f"{name} is {value!r}; expected {expected}, or None")

    def cache_file(self, plan: Path) -> Path | None:
        """The file for this plan's kernels, `~` being the user's home; None where nothing is to be kept."""
        name = f"{plan.name}.cache"
        if self.cache_path is None:
            return plan.with_name(name)
        path = Path(self.cache_path).expanduser()
        return None if not os.fspath(self.cache_path) else path / name if path.is_dir() else path

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


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
