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

from .errors import ModelRefused
from .signature import Signature, obstacle

Sample = int | tuple[tuple[str, tuple[int, ...]], ...]
"""What to be ready for: a batch of so many rows, or a shape for inputs by their names, the others as they are usual."""

Ranges = tuple[tuple[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]], ...]
"""An optimization profile: the smallest, the usual and the largest shape of inputs, by their names."""

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cuda_graph_strategy": ("disabled", "whole_graph_capture"),
        "dynamic_shapes_kernel_specialization_strategy": ("lazy", "eager", "none"),
        "allocation_strategy": ("static", "on_profile_change", "user_managed"),
        "graphs": ("on", "off", "required"),
        "copies": ("sm", "engine", "auto"),
        "execution_mode": ("sequential", "parallel"),
        "graph_optimization": ("all", "extended", "basic", "none"),
    }
)

_WARM_UP = ("opt", "usual")

_COUNTS: Mapping[str, str] = MappingProxyType(
    {"profile": "a profile's number from 0", "weight_streaming_budget": "a number of bytes from 0"}
)

ONNX_RUNTIMES = (
    "intra_op_threads",
    "inter_op_threads",
    "execution_mode",
    "graph_optimization",
    "memory_arena",
    "memory_pattern",
)
"""The fields of RuntimeSettings that only ONNX Runtime honours."""

# The others are ours: no library has a part in them.
_NEEDS_THE_LIBRARY = (
    *ONNX_RUNTIMES,
    "cuda_graph_strategy",
    "dynamic_shapes_kernel_specialization_strategy",
    "allocation_strategy",
    "cache_path",
    "weight_streaming_budget",
)

_REFUSED_IN_VAIN = ("cache_path", "weight_streaming_budget")
"""Of these, what is asked for in vain is refused where others are warned of: memory and start-ups are planned by them."""

_LACKING_ON_CPU: Mapping[str, str] = MappingProxyType(
    {
        "graphs": "has no CUDA graphs",
        "cuda_graph_strategy": "has no CUDA graphs",
        "dynamic_shapes_kernel_specialization_strategy": "compiles no kernels for shapes",
        "allocation_strategy": "allocates its memory itself",
        "cache_path": "compiles no kernels that could be kept",
        "copies": "computes in the host's memory, so nothing is copied",
        "profile": "has no optimization profiles",
        "build_profiles": "has no optimization profiles",
        "weight_streaming_budget": "streams no weights",
        "instances": "runs one inference at a time on a partition's cores",
    }
)
"""Why a setting means nothing where ONNX Runtime serves; what is not named here it honours."""

_MEANS_NOTHING_SPECIAL = (
    *(("graphs", "on"), ("graphs", "off"), ("cuda_graph_strategy", "disabled"), ("instances", 1)),
    *(("intra_op_threads", 0), ("inter_op_threads", 0), ("execution_mode", "sequential"), ("graph_optimization", "all")),
    *(("memory_arena", True), ("memory_pattern", True)),
)
"""Settings that hold anywhere: they ask for nothing that a library could lack."""


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
      `usual` ones besides: the smallest, the largest, and the powers of two of a batch that varies; or a tuple of what is
      asked for: batch sizes, and shapes by the names of inputs, as in `(1, 4, (("x", (8, 3, 224, 224)),))`. A shape that
      nothing was ready for holds its tenant up while kernels are compiled, 0.35 s for a ResNet-18 on an H100.
    - `batch_padding`: an inference of fewer rows than any that is ready runs as the next larger batch that is, the rows
      beyond being the memory's last content. Only for models whose rows do not depend on each other; `pads` says where it
      holds. Libraries that need no shape to be ready, as ONNX Runtime, run each batch as it is.
    - `profile`: the one optimization profile to run with; None takes for each shape one that fits.
    - `optional_inputs`: names of weights that may be given as inputs, where the model file lets them: its overridable
      initializers. Only ONNX Runtime has them.
    - `build_profiles`: the optimization profiles that an ONNX file is built with where that happens as it is loaded: of each
      the smallest, the usual and the largest shape of inputs by their names. Without any, batches as `load_engine` says.
    - `weight_streaming_budget`: bytes of weights to keep on the GPU where the engine can stream them; None is what the
      engine was built with, or asks the library. An ONNX file is built so that its weights can be streamed.
    - `intra_op_threads`, `inter_op_threads`: threads within an operator, and operators beside each other; the latter only
      where `execution_mode` is `parallel`. 0 is as many as there are cores, and there are never more, see `threads`.
    - `graph_optimization`: which of ONNX Runtime's optimizations are made of the graph. `memory_arena`, `memory_pattern`:
      whether it keeps memory that it has used, and plans what a run takes.
    """

    graphs: str = "on"
    cuda_graph_strategy: str = "disabled"
    dynamic_shapes_kernel_specialization_strategy: str = "eager"
    allocation_strategy: str = "static"
    cache_path: str | os.PathLike[str] | None = None
    copies: str = "sm"
    warm_up: str | tuple[Sample, ...] = "opt"
    profile: int | None = None
    build_profiles: tuple[Ranges, ...] = ()
    weight_streaming_budget: int | None = None
    batch_padding: bool = False
    optional_inputs: tuple[str, ...] = ()
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    execution_mode: str = "sequential"
    graph_optimization: str = "all"
    memory_arena: bool = True
    memory_pattern: bool = True

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")
        if not isinstance(self.cache_path, (str, os.PathLike, NoneType)):
            raise ValueError(f"cache_path is {self.cache_path!r}; expected a path, '' for none, or None for beside the plan")
        if not _is_warm_up(self.warm_up):
            raise ValueError(
                f"warm_up is {self.warm_up!r}; expected {' or '.join(map(repr, _WARM_UP))}, or a tuple of batch sizes from 1 "
                'and of shapes by input, as in (1, 4) or ((("x", (8, 16)),),)'
            )
        if not isinstance(self.build_profiles, tuple) or not all(map(_is_ranges, self.build_profiles)):
            raise ValueError(
                f"build_profiles is {self.build_profiles!r}; expected a tuple, for each profile one with three shapes for "
                'each input, as in ((("x", ((1, 16), (8, 16), (32, 16))),),)'
            )
        for name in ("batch_padding", "memory_arena", "memory_pattern"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} is {value!r}; expected True or False")
        for name in ("intra_op_threads", "inter_op_threads"):
            if (value := getattr(self, name)) is None or not _is_count(value):
                raise ValueError(f"{name} is {value!r}; expected a number of threads, or 0 for one a core")
        if not (isinstance(self.optional_inputs, tuple) and all(isinstance(name, str) for name in self.optional_inputs)):
            raise ValueError(f"optional_inputs is {self.optional_inputs!r}; expected a tuple of names")
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

    def threads(self, cores: int) -> tuple[int, int]:
        """Threads within an operator and operators beside each other on so many cores, which share one thread: no more
        than there are cores in all. Where operators run in parallel they have them first.
        """
        beside = min(self.inter_op_threads or cores, cores) if self.execution_mode == "parallel" else 1
        within = cores - beside + 1
        return min(self.intra_op_threads or within, within), beside

    def pads(self, signature: Signature) -> bool:
        """Whether inferences are padded, of a model with this signature: where that is asked for, every tensor can carry
        rows, and nothing hinders telling them apart again.
        """
        try:
            return self.batch_padding and obstacle(signature.with_max_batch(1)) is None
        except ModelRefused:
            return False

    def effective(self, library: str, supported: Collection[str]) -> "RuntimeSettings":
        """What of them holds with a library that honours only the fields in `supported`: the others get their defaults.

        `library` is its name in the UserWarning that every field gets which was set in vain. Raises ModelRefused for a cache
        of kernels or a budget for weights that it lacks.
        """
        defaults = RuntimeSettings()
        lost = [name for name in _NEEDS_THE_LIBRARY if name not in supported]
        changed = {name: value for name in lost if (value := getattr(self, name)) != getattr(defaults, name) and value != ""}
        for name, why in lacking(library, supported, changed).items():
            if name in _REFUSED_IN_VAIN:
                raise ModelRefused(f"{why}, and {changed[name]!r} is asked for; leave it out")
            warnings.warn(f"{why}: {changed[name]!r} has no effect", UserWarning, stacklevel=2)
        kept = {name: getattr(defaults, name) for name in lost}
        return replace(self, **kept | ({"cache_path": ""} if "cache_path" in lost else {}))


OVERRIDABLE = ("graphs", "copies", "batch_padding")
"""What an executor can change for a while: the others are in its contexts, or in what is loaded."""


def overridden(settings: RuntimeSettings, changes: Mapping[str, Any]) -> RuntimeSettings:
    """The settings with these changed. Raises TypeError for one that cannot be changed for a while, ValueError for a value."""
    changed = settings.merge(**changes)
    if fixed := [name for name in changes if name not in OVERRIDABLE]:
        raise TypeError(f"{', '.join(fixed)} cannot be overridden, as it is loaded so; expected {', '.join(OVERRIDABLE)}")
    return changed


def lacking(library: str, supported: Collection[str], asked: Mapping[str, object]) -> dict[str, str]:
    """Why this library, which honours only the fields in `supported`, cannot honour settings that are asked for, by field."""
    lost = [name for name in _NEEDS_THE_LIBRARY if name in asked and name not in supported]
    return {name: f"{library} has no {name}" for name in lost if (name, asked[name]) not in _MEANS_NOTHING_SPECIAL}


def lacking_on_cpu(asked: Mapping[str, object]) -> dict[str, str]:
    """The same of ONNX Runtime on a CPU, of `instances` too: how many executors of one engine a partition is to have."""
    lost = [name for name in asked if name in _LACKING_ON_CPU and (name, asked[name]) not in _MEANS_NOTHING_SPECIAL]
    return {name: f"ONNX Runtime on a CPU {_LACKING_ON_CPU[name]}" for name in lost}


def streaming_budget(asked: int | None, baked: int | None, streamable: int, automatic: Callable[[], int]) -> int:
    """Bytes of weights to keep on the GPU: what was `asked` for, else what was `baked` in, else what the library says.

    Never more than can be streamed, and 0 where the library cannot say.
    """
    budget = baked if asked is None else asked
    try:
        return min(automatic() if budget is None else budget, streamable)
    except RuntimeError:
        return 0


def _is_ranges(value: object) -> bool:
    pairs = value if isinstance(value, tuple) and value else ((),)
    return all(isinstance(pair, tuple) and len(pair) == 2 and _is_named_range(*pair) for pair in pairs)


def _is_named_range(name: object, shapes: object) -> bool:
    three = shapes if isinstance(shapes, tuple) and len(shapes) == 3 else (None,)
    return isinstance(name, str) and all(isinstance(shape, tuple) and all(map(_is_count, shape)) for shape in three)


def _is_warm_up(value: object) -> bool:
    if isinstance(value, str):
        return value in _WARM_UP
    return isinstance(value, tuple) and bool(value) and all(_is_size(item) or _is_shapes(item) for item in value)


def _is_shapes(value: object) -> bool:
    """Whether these are shapes by the names of inputs."""
    pairs = value if isinstance(value, tuple) and value else ((),)
    return all(isinstance(pair, tuple) and len(pair) == 2 and _is_named_shape(*pair) for pair in pairs)


def _is_named_shape(name: object, shape: object) -> bool:
    return isinstance(name, str) and isinstance(shape, tuple) and all(map(_is_size, shape))


def _is_size(value: object) -> bool:
    return _is_count(value) and bool(value)


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
