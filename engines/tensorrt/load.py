"""Loads TensorRT plans: checks that they fit this library and GPU, or refuses them with the reason, and deserialises them."""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from partitions.cuda.device import CudaDevice, CudaPartition

from ..errors import Cancelled, EngineError, ModelRefused
from ..model_files.artifact import PORTABLE, Artifact, PlanFile, read_artifact, read_plan
from ..model_files.cache_folder import replace_file
from ..model_files.onnx_writer import FLOAT, model, node, value
from ..model_files.profiles import Profile, Range
from ..settings import RuntimeSettings, streaming_budget
from ..signature import Signature, TensorSpec
from ..verification.rule import tolerance
from ..verification.steady import RUNS
from ..verification.verdicts import Verdicts
from .api import TensorRT, find_tensorrt
from .building.builder import BuildOptions
from .building.builds import Builds
from .engine import TensorRTEngine, refusing
from .graph_mode import EngineTraits
from .kernel_cache import CacheKey
from .plan import LoadedPlan
from .release import releasing
from .shared_kernels import KernelCaches
from .verifying import Verifier, verdicts_file

log = logging.getLogger("greenlane.engines")

CACHE_MAKER = model("kernels", [node("Add", ["x", "x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])], [])
"""The model of the small engine that shared caches of kernels are made of: see `load_cache_maker`."""

DEFAULTS = RuntimeSettings()

TOLERATED_REASONS = frozenset({"UNSUPPORTED_CC"})
"""Reasons in spite of which a plan is tried: TensorRT-RTX 1.6 denies compute capability 9.0 and runs on it nevertheless."""


@releasing()
def load_tensorrt(
    path: Path,
    device: CudaDevice,
    settings: RuntimeSettings = DEFAULTS,
    max_batch: int | None = None,
    builds: Builds | None = None,
) -> TensorRTEngine:
    """Load a plan, or one that `builds` makes from an ONNX file for `max_batch` rows. Blocks.

    Plans, and kernels unless `settings` say otherwise, are kept in the cache of `builds`; without `builds` or a cache, in the
    model's folder. Raises ModelRefused, DeviceLost, and Cancelled if `builds` are closed meanwhile. Logs a warning for
    `settings` that have no effect with the installed library.
    """
    builds = builds or Builds()
    api = find_tensorrt()
    try:
        settings = settings.effective(str(api), api.features)
    except ModelRefused as error:
        raise ModelRefused(f"{path}: {error}") from error
    with ExitStack() as context:
        with refusing(f"loading {path}"):
            major, minor = context.enter_context(device.current()).compute_capability  # The library needs a current context.
        return _load(path, device, api, settings, builds, max_batch, f"{major}.{minor}")


def _load(
    path: Path,
    device: CudaDevice,
    api: TensorRT,
    settings: RuntimeSettings,
    builds: Builds,
    max_batch: int | None,
    capability: str,
) -> TensorRTEngine:
    given = path
    if path.suffix == ".onnx":
        path, file = _built(path, device, api, settings, builds, max_batch, capability)
    elif settings.build_profiles:
        raise ModelRefused(
            f"{path}: it is built already, so build_profiles have no effect; leave them out, or serve the ONNX file"
        )
    else:
        file = read_plan(path)
    kernels = file.artifact.kernels_digest() if file.artifact else ""
    digest = kernels or hashlib.sha256(file.plan).hexdigest()
    settings = _with_cache(settings, builds, digest)
    _check(path, file, api, capability)
    with device.driver_memory.changing(in_turn=True):
        plan = api.deserialize(file.plan, str(path))
    _check_tensors(path, plan)
    streamed = _stream_weights(path, plan, api, settings, file)
    caches = _shared_caches(api, device, builds) if kernels and "cache_path" in api.features else None
    description = _described(file.artifact) if file.artifact else _described_by(plan, api)
    weights = _weights(plan, file)
    return TensorRTEngine(
        _loaded(path, given, device, api, plan, description, settings, digest, builds, streamed, weights, caches)
    )


def make_ahead(
    path: Path, device: CudaDevice, settings: RuntimeSettings, max_batch: int | None, builds: Builds, partition: CudaPartition
) -> object:
    """Have children make what a model would wait for when it is loaded and bound to such a partition: its plan, its kernels,
    and what its answers are compared with.

    Blocks, perhaps for minutes; this process loads nothing. The caller keeps the result until the model is bound. Makes nothing
    with a library that times kernels on the GPU, and of a plan without a description. Raises ModelRefused, Cancelled.
    """
    api = find_tensorrt()
    if api.library not in PORTABLE:
        return None
    settings = settings.effective(str(api), api.features)
    given = path
    if path.suffix == ".onnx":
        path = builds.plan(path, _options(settings, max_batch), api.library, api.version, gpu=device.index)
    artifact = read_artifact(path)
    digest = artifact.kernels_digest() if artifact else ""
    if not (artifact and digest):
        return None
    artifact.check(str(path), api.library, api.version)
    loaded = _loaded(
        path, given, device, api, None, _described(artifact), _with_cache(settings, builds, digest), digest, builds
    )
    if loaded.verifier:
        loaded.verifier.expect(loaded.warm_up_sets(partition))
    loaded.compile_kernels_in_child(partition)
    return loaded


def _built(
    path: Path,
    device: CudaDevice,
    api: TensorRT,
    settings: RuntimeSettings,
    builds: Builds,
    max_batch: int | None,
    capability: str,
) -> tuple[Path, PlanFile]:
    """The plan of an ONNX file. One that is damaged although nothing says that it has changed is built again."""
    measured = "" if api.library in PORTABLE else f"{device.name} {capability}"
    asked = path, _options(settings, max_batch), api.library, api.version, measured, device.index
    # A child that builds on this GPU takes memory of it. One that builds what is portable has no GPU.
    building = nullcontext if api.library in PORTABLE else device.driver_memory.changing_in_child
    with building():
        plan = builds.plan(*asked)
    try:
        return plan, read_plan(plan)
    except ModelRefused:
        with building():
            plan = builds.plan(*asked, trusting=False)
        return plan, read_plan(plan)


def _shared_caches(api: TensorRT, device: CudaDevice, builds: Builds) -> tuple[KernelCaches, Any] | None:
    """The caches that engines share, with the engine to make them of; None where there is no such engine."""

    def load() -> Any:
        with device.driver_memory.changing(in_turn=True):
            return load_cache_maker(api, builds, device.index)

    maker = builds.kernels.maker(device.index, load)
    return None if maker is None else (builds.kernels, maker)


def _options(settings: RuntimeSettings, max_batch: int | None) -> BuildOptions:
    """How to build an ONNX file for these settings."""
    profiles = tuple(Profile({name: Range(*shapes) for name, shapes in profile}) for profile in settings.build_profiles)
    flags = () if settings.weight_streaming_budget is None else ("weight_streaming",)
    return BuildOptions(profiles, max_batch or BuildOptions().max_batch, flags=flags)


class _Description(NamedTuple):
    """What is known of a plan before it is run: `source` is the digest of the ONNX file that it was built from, or ""."""

    signature: Signature
    profiles: tuple[Profile, ...]
    source: str = ""


def _described(artifact: Artifact) -> _Description:
    return _Description(replace(artifact.signature, same_sizes=True), artifact.profiles, artifact.source)


def _described_by(plan: Any, api: TensorRT) -> _Description:
    signature = replace(_signature(plan, api), same_sizes=True)
    return _Description(signature, _profiles(plan, signature))


def _with_cache(settings: RuntimeSettings, builds: Builds, digest: str) -> RuntimeSettings:
    """With the file that keeps its kernels. By digest, as most model files have the same name."""
    if not builds.cache or settings.cache_path is not None:
        return settings
    return settings.merge(cache_path=builds.cache.path() / f"kernels-{digest[:32]}.cache")


def _loaded(
    path: Path,
    given: Path,
    device: CudaDevice,
    api: TensorRT,
    plan: Any,
    description: _Description,
    settings: RuntimeSettings,
    digest: str,
    builds: Builds,
    streamed: int = 0,
    weights: int = 0,
    caches: tuple[KernelCaches, Any] | None = None,
) -> LoadedPlan:
    """Of the library's `plan`, None while it is not loaded. `given` is the model's file."""
    signature, profiles, source = description
    chosen = settings.profile
    if chosen is not None and chosen >= len(profiles):
        raise ModelRefused(f"{path}: profile {chosen} is asked for, but it has {len(profiles)}, numbered from 0")
    usable = profiles if chosen is None else profiles[chosen : chosen + 1]
    dynamic = any(-1 in spec.shape for spec in signature.inputs)
    traits = EngineTraits(dynamic, streamed, native="cuda_graph_strategy" in api.features)
    limited, key = _limited(signature, usable), CacheKey(digest, f"{api.library} {api.version}", device.uuid)
    onnx = given if given.suffix == ".onnx" else given.with_suffix(".onnx") if source else None
    verifier = (
        None if settings.verify == "off" else _verifier(path, onnx, source, limited, settings, (*key[:2], device.name), builds)
    )
    return LoadedPlan(path, device, api, plan, limited, profiles, settings, traits, key, builds, weights, caches, verifier)


def _verifier(
    path: Path,
    onnx: Path | None,
    source: str,
    signature: Signature,
    settings: RuntimeSettings,
    key: Sequence[str],
    builds: Builds,
) -> Verifier:
    """What judges its answers, by the ONNX file that it was built from, if that is there.

    `key` says which plan, library and kind of GPU it is.
    """
    kept = settings.cache_file(path)
    strategy = settings.dynamic_shapes_kernel_specialization_strategy
    rule = f"{RUNS} runs, {tolerance('TF32')}"  # A verdict by another rule is none.
    where = verdicts_file(kept.parent, *key, source, strategy, rule) if kept else None
    there = onnx if onnx and onnx.is_file() else None
    return Verifier(path, there, source, signature, builds, Verdicts(where), settings.verify == "required")


def _check(path: Path, file: PlanFile, api: TensorRT, capability: str) -> None:
    """Refuse a plan that does not fit according to its file or the library, before deserialising it. Raises ModelRefused."""
    if file.artifact:
        file.artifact.check(str(path), api.library, api.version, capability)
    verdict, reasons = api.validity(file.plan)
    why = ", ".join(reason.lower().replace("_", " ") for reason in reasons)
    if verdict == "INVALID" and set(reasons) - TOLERATED_REASONS:
        raise ModelRefused(f"{path}: {api} says that the plan does not fit here: {why}; build it again with `greenlane build`")
    if reasons or verdict == "SUBOPTIMAL":
        log.warning("%s: %s calls the plan %s here (%s); loading it nevertheless", path, api, verdict, why or "no reason")


def _check_tensors(path: Path, plan: Any) -> None:
    """Refuse tensors that an executor cannot pass as separate memory on the GPU. Raises ModelRefused."""
    for name in (plan.get_tensor_name(index) for index in range(plan.num_io_tensors)):
        if plan.is_shape_inference_io(name):
            raise ModelRefused(f"{path}: the values of {name!r} decide shapes, which is not served; make it a constant")
        if hasattr(plan, "get_aliased_input_tensor") and (alias := plan.get_aliased_input_tensor(name)):
            raise ModelRefused(f"{path}: output {name!r} is written over input {alias!r}, which is not served")


def _stream_weights(path: Path, plan: Any, api: TensorRT, settings: RuntimeSettings, file: PlanFile) -> int:
    """Set how many bytes of weights stay on the GPU, before there is a context. Returns how many are streamed."""
    streamable = plan.streamable_weights_size if "weight_streaming_budget" in api.features else 0
    if not streamable:
        if (budget := settings.weight_streaming_budget) is not None:
            why = "it was not built to stream weights, or has none that could be (`greenlane build --flag weight_streaming`)"
            raise ModelRefused(f"{path}: a weight_streaming_budget of {budget} bytes has no effect: {why}; leave it out")
        return 0
    baked = file.artifact.options.get("weight_streaming_budget") if file.artifact else None
    asked, automatic = settings.weight_streaming_budget, plan.get_weight_streaming_automatic_budget
    plan.weight_streaming_budget_v2 = streaming_budget(asked, baked, streamable, automatic)
    return max(0, int(streamable) - int(plan.weight_streaming_budget_v2))


def _weights(plan: Any, file: PlanFile) -> int:
    """Bytes of weights on the GPU; the plan's size where the library does not say. Of streamed ones, those that stay there."""
    if not hasattr(plan, "get_engine_stat"):
        return len(file.plan)
    total, streamable = int(plan.get_engine_stat()), int(plan.streamable_weights_size)
    return max(0, total - streamable + int(plan.weight_streaming_budget_v2)) if streamable else total


def _signature(plan: Any, api: TensorRT) -> Signature:
    """The signature of a bare plan, which does not have the names of dimensions."""
    names = [plan.get_tensor_name(index) for index in range(plan.num_io_tensors)]
    specs = {name: _spec(plan, api, name) for name in names}
    inputs = [name for name in names if plan.get_tensor_mode(name).name == "INPUT"]
    return Signature(tuple(specs[n] for n in inputs), tuple(specs[n] for n in names if n not in inputs))


def _spec(plan: Any, api: TensorRT, name: str) -> TensorSpec:
    dims = tuple(size if size >= 0 else "" for size in plan.get_tensor_shape(name))
    return TensorSpec(name, api.datatype(name, plan.get_tensor_dtype(name)), dims)


def _profiles(plan: Any, signature: Signature) -> tuple[Profile, ...]:
    """The engine's profiles. At least one, though an engine without dynamic inputs may have none."""
    dynamic = [spec.name for spec in signature.inputs if -1 in spec.shape]
    return tuple(
        Profile({name: Range(*(tuple(dims) for dims in plan.get_tensor_profile_shape(name, number))) for name in dynamic})
        for number in range(max(1, plan.num_optimization_profiles))
    )


def _limited(signature: Signature, profiles: Sequence[Profile]) -> Signature:
    """The signature with limits, so that it refuses sizes that no profile has before a request is queued."""
    return replace(signature, inputs=tuple(_within(spec, profiles) for spec in signature.inputs))


def _within(spec: TensorSpec, profiles: Sequence[Profile]) -> TensorSpec:
    ranges = [profile.ranges[spec.name] for profile in profiles if spec.name in profile.ranges]
    if not ranges:
        return spec
    least, most = (zip(*(getattr(range_, end) for range_ in ranges), strict=True) for end in ("min", "max"))
    return replace(spec, limits=tuple(zip(map(min, least), map(max, most), strict=True)))


def load_cache_maker(api: TensorRT, builds: Builds, gpu: int) -> Any:
    """A small engine for shared caches of kernels, or None for a reason that is logged. A context must be current.

    The library makes a cache from an engine, and the cache must not outlive that engine. If a model's engine made it, the
    model's weights would stay in the GPU's memory until the last engine that shares the cache is closed. The small engine has
    no weights.
    Blocks for seconds if its plan is not in the cache of `builds` yet. Raises Cancelled once these are closed.
    """
    if builds.cache is None:
        return None
    path = builds.cache.path() / "kernels.onnx"
    try:
        if not path.exists():
            replace_file(path, CACHE_MAKER)
        plan = builds.plan(path, BuildOptions(), api.library, api.version, gpu=gpu)
        return api.deserialize(read_plan(plan).plan, str(plan))
    except Cancelled:
        raise
    except (EngineError, OSError) as error:
        log.info("models of one structure do not share their kernels: %s", error)
        return None
