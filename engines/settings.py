"""How an engine is run, as opposed to built: settings that are checked when they are created, the same for every library.

They are not stored with an engine: the caller that loads it chooses them.
"""

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any

from .errors import ModelRefused, did_you_mean
from .signature import Shape, Signature, obstacle

Sample = int | tuple[tuple[str, tuple[int, ...]], ...]
"""Something to warm up with: a batch of so many rows, or shapes of inputs by name, with the usual ones for the others."""

Ranges = tuple[tuple[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]], ...]
"""An optimization profile: the smallest, the usual and the largest shape of each input, by name."""


@dataclass(frozen=True, slots=True)
class Loop:
    """How a model is run again and again for one answer, which has a part for each run.

    - `feed`: which outputs are which inputs of the next run: pairs of names.
    - `steps`: the most runs.
    - `until`: an output; the run in which an element of it is not zero is the last.
    - `outputs`: the names of those that make a part, () for all.
    """

    feed: tuple[tuple[str, str], ...]
    steps: int
    until: str | None = None
    outputs: tuple[str, ...] = ()


_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cuda_graph_strategy": ("disabled", "whole_graph_capture"),
        "dynamic_shapes_kernel_specialization_strategy": ("lazy", "eager", "none"),
        "allocation_strategy": ("static", "on_profile_change", "user_managed"),
        "graphs": ("on", "off", "required"),
        "copies": ("sm", "engine", "auto"),
        "execution_mode": ("sequential", "parallel"),
        "verify": ("on", "off", "required"),
        "graph_optimization": ("all", "extended", "basic", "none"),
    }
)

_WARM_UP = ("opt", "usual")

_COUNTS: Mapping[str, str] = MappingProxyType(
    {
        "profile": "a profile's number from 0",
        "weight_streaming_budget": "a number of bytes from 0",
        "memory_limit": "a number of bytes from 0",
        "trial_limit": "a number of seconds from 0",
    }
)

ONNX_RUNTIMES = (
    "intra_op_threads",
    "inter_op_threads",
    "execution_mode",
    "graph_optimization",
    "memory_arena",
    "memory_pattern",
    "memory_limit",
    "trial_limit",
)
"""The fields of RuntimeSettings that only ONNX Runtime has."""

# The other settings do not depend on a library.
_LIBRARY_SETTINGS = (
    *ONNX_RUNTIMES,
    "cuda_graph_strategy",
    "dynamic_shapes_kernel_specialization_strategy",
    "allocation_strategy",
    "cache_path",
    "weight_streaming_budget",
)

_REFUSED_WITHOUT_EFFECT = ("cache_path", "weight_streaming_budget")
"""Settings that are refused where they have no effect, while others are a warning: memory and start-up times are planned by
them.
"""

_UNSUPPORTED_ON_CPU: Mapping[str, str] = MappingProxyType(
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
    }
)
"""Why a setting has no meaning on ONNX Runtime; it has all those that are not named here."""

_SUPPORTED_ANYWHERE = (
    *(("graphs", "on"), ("graphs", "off"), ("cuda_graph_strategy", "disabled")),
    *(("intra_op_threads", 0), ("inter_op_threads", 0), ("execution_mode", "sequential"), ("graph_optimization", "all")),
    *(("memory_arena", True), ("memory_pattern", True)),
)
"""Settings that hold anywhere, as they ask for nothing that a library could lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Settings of one engine; equal when their values are. Raises ValueError naming the field, its value and the choices.

    - `graphs`: an inference is submitted as one CUDA graph where that is possible (`on`), or call by call (`off`); `required`
      refuses to bind an engine that cannot be captured.
    - `cuda_graph_strategy`: `whole_graph_capture` lets the library replay the engine as one launch where `graphs` are `off` or
      would hold the engine only. A captured graph that holds the copies too takes precedence.
    - `dynamic_shapes_kernel_specialization_strategy`: kernels for a new shape are compiled before it runs (`eager`), in the
      background (`lazy`), or never (`none`). A captured graph keeps the kernels it was captured with, so `lazy` with dynamic
      inputs is not captured.
    - `allocation_strategy`: how and when an execution context gets its memory.
    - `cache_path`: the file or folder that keeps compiled kernels from one run to the next, and that executors share; None is
      a file in the plan's folder. With "" each executor compiles its own and keeps them in memory.
    - `copies`: inputs and outputs are copied by the partition's SMs (`sm`), by the copy engines that all tenants share
      (`engine`), or by the one that suits their size (`auto`).
    - `warm_up`: what is run, and captured, before an executor is bound: the `opt` shape of each profile, or also the `usual`
      ones: the smallest, the largest, and the powers of two of a dynamic batch; or a tuple of batch sizes and of shapes by the
      names of inputs, as in `(1, 4, (("x", (8, 3, 224, 224)),))`. A shape that is not ready makes its tenant wait while
      kernels are compiled, 0.35 s for a ResNet-18 on an H100.
    - `batch_padding`: an inference of fewer rows than any batch that is ready runs as the next larger one that is; the
      additional rows are what the memory last contained. Only for models whose rows do not depend on each other; `pads` says
      where it holds. Libraries that need no shape to be ready, such as ONNX Runtime, run each batch as it is.
    - `verify`: whether answers are compared with a reference before others rely on them: of each set of shapes on a GPU, and of
      rows beside others before a server joins requests. With `on` what is seen to be wrong is run in another way or refused,
      and what cannot be compared is served; `required` refuses that too.
    - `profile`: the only optimization profile to run with; None chooses one that fits for each shape.
    - `optional_inputs`: names of weights that may be given as inputs, where the model file allows it: its overridable
      initializers. Only ONNX Runtime has them.
    - `usual_shapes`: shapes of inputs by name, -1 where they vary: what requests are known to have, and so warm-up with ONNX
      Runtime has unless `warm_up` says otherwise. TensorRT's engines have profiles for that.
    - `build_profiles`: the optimization profiles to build an ONNX file with when it is loaded: of each the smallest, the usual
      and the largest shape of inputs by name. Without any, batches as `load_engine` describes.
    - `weight_streaming_budget`: bytes of weights to keep on the GPU where the engine can stream them; None is what the engine
      was built with, or the library's choice. An ONNX file is built so that its weights can be streamed.
    - `intra_op_threads`, `inter_op_threads`: threads within an operator, and operators in parallel; the latter only where
      `execution_mode` is `parallel`. 0 is the number of cores, which is also the maximum; see `threads`.
    - `loop`: the model is run step by step, and answers in parts; None is once.
    - `graph_optimization`: ONNX Runtime's level of optimization. `memory_arena`, `memory_pattern`: whether it keeps memory
      that it has used, and plans the memory of a run.
    - `memory_limit`: bytes that the outputs of a run may have if the data decides their sizes (`Expand`, `NonZero`), which
      ONNX Runtime knows only when it takes the memory. The other tensors of the run may take as much again. None: no limit.
    - `trial_limit`: seconds that a run may take which no request asks for, as a warm-up: a model may never end for zeros. None:
      no limit.
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
    usual_shapes: tuple[tuple[str, Shape], ...] = ()
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    execution_mode: str = "sequential"
    graph_optimization: str = "all"
    memory_arena: bool = True
    memory_pattern: bool = True
    memory_limit: int | None = None
    trial_limit: int | None = None
    loop: Loop | None = None
    verify: str = "on"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")
        if not isinstance(self.cache_path, (str, os.PathLike, NoneType)):
            raise ValueError(f"cache_path is {self.cache_path!r}; expected a path, '' for none, or None for the plan's folder")
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
        if not (isinstance(self.usual_shapes, tuple) and all(map(_is_usual_shape, self.usual_shapes))):
            raise ValueError(
                f"usual_shapes is {self.usual_shapes!r}; expected a tuple of names with sizes from 0, or -1, "
                'as in (("x", (-1, 16)),)'
            )
        if not isinstance(self.loop, Loop | NoneType):
            raise ValueError(f"loop is {self.loop!r}; expected a Loop, or None")
        for name, expected in _COUNTS.items():
            if not _is_count(value := getattr(self, name)):
                raise ValueError(f"{name} is {value!r}; expected {expected}, or None")

    def cache_file(self, plan: Path) -> Path | None:
        """The file for this plan's kernels, with `~` as the user's home; None if nothing is to be kept."""
        name = f"{plan.name}.cache"
        if self.cache_path is None:
            return plan.with_name(name)
        path = Path(self.cache_path).expanduser()
        return None if not os.fspath(self.cache_path) else path / name if path.is_dir() else path

    def merge(self, **changes: Any) -> "RuntimeSettings":
        """The same with some fields changed. Raises TypeError for an unknown field, and ValueError."""
        for name in changes:
            if name not in (known := [field.name for field in fields(self)]):
                raise TypeError(f"no setting is called {name!r}; {did_you_mean(name, known)}there are {', '.join(known)}")
        return replace(self, **changes)

    def threads(self, cores: int) -> tuple[int, int]:
        """Threads within an operator, and operators in parallel, on so many cores.

        Both include the calling thread, and together there are no more threads than cores. Parallel operators get theirs
        first.
        """
        parallel = min(self.inter_op_threads or cores, cores) if self.execution_mode == "parallel" else 1
        within = cores - parallel + 1
        return min(self.intra_op_threads or within, within), parallel

    def pads(self, signature: Signature) -> bool:
        """Whether inferences of a model with this signature are padded.

        That is if the setting is on, every tensor can carry rows, and the rows can be separated again.
        """
        try:
            return self.batch_padding and obstacle(signature.with_max_batch(1)) is None
        except ModelRefused:
            return False

    def effective(self, library: str, supported: Collection[str]) -> "RuntimeSettings":
        """The settings with a library that has only the fields in `supported`: the others get their defaults.

        Each field that was set without effect is a UserWarning, which names the `library`. Raises ModelRefused for a kernel
        cache or a budget for weights that it does not have.
        """
        defaults = RuntimeSettings()
        unsupported = [name for name in _LIBRARY_SETTINGS if name not in supported]
        changed = {
            name: value for name in unsupported if (value := getattr(self, name)) != getattr(defaults, name) and value != ""
        }
        for name, why in unsupported_by(library, supported, changed).items():
            if name in _REFUSED_WITHOUT_EFFECT:
                raise ModelRefused(f"{why}, and {changed[name]!r} is asked for; leave it out")
            warnings.warn(f"{why}: {changed[name]!r} has no effect", UserWarning, stacklevel=2)
        kept = {name: getattr(defaults, name) for name in unsupported}
        return replace(self, **kept | ({"cache_path": ""} if "cache_path" in unsupported else {}))


OVERRIDABLE = ("graphs", "copies", "batch_padding")
"""Settings that an executor can override: the others are in its contexts, or in what is loaded."""


def overridden(settings: RuntimeSettings, changes: Mapping[str, Any]) -> RuntimeSettings:
    """The settings with these changes. Raises TypeError for a setting that cannot be overridden, ValueError for a value."""
    changed = settings.merge(**changes)
    if fixed := [name for name in changes if name not in OVERRIDABLE]:
        raise TypeError(f"{', '.join(fixed)} cannot be overridden, as it is loaded so; expected {', '.join(OVERRIDABLE)}")
    return changed


def unsupported_by(library: str, supported: Collection[str], asked: Mapping[str, object]) -> dict[str, str]:
    """Why this library, which has only the fields in `supported`, does not support the settings in `asked`, by field."""
    unsupported = [name for name in _LIBRARY_SETTINGS if name in asked and name not in supported]
    return {name: f"{library} has no {name}" for name in unsupported if (name, asked[name]) not in _SUPPORTED_ANYWHERE}


def unsupported_on_cpu(asked: Mapping[str, object]) -> dict[str, str]:
    """The same for ONNX Runtime on a CPU."""
    unsupported = [name for name in asked if name in _UNSUPPORTED_ON_CPU and (name, asked[name]) not in _SUPPORTED_ANYWHERE]
    return {name: f"ONNX Runtime on a CPU {_UNSUPPORTED_ON_CPU[name]}" for name in unsupported}


def streaming_budget(asked: int | None, baked: int | None, streamable: int, automatic: Callable[[], int]) -> int:
    """Bytes of weights to keep on the GPU: the budget `asked` for, or the one `baked` into the engine, or the library's.

    Never more than can be streamed, and 0 if the library does not know.
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


def _is_usual_shape(value: object) -> bool:
    match value:
        case (str(), tuple() as shape):
            return all(isinstance(size, int) and not isinstance(size, bool) and size >= -1 for size in shape)
    return False


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
