"""Builds ONNX models into plan files, and keeps the plans, and timings of kernels, in a cache directory.

TensorRT-RTX builds on the CPU for every kind of GPU; TensorRT measures on the GPU that it builds for. The precision is that of
the ONNX file: neither library changes types any more.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from partitions.cuda.current_context import restored
from partitions.regular_file import open_regular

from ...errors import Cancelled, ModelRefused
from ...model_files.artifact import FORMAT, PORTABLE, Artifact, read_plan, this_platform
from ...model_files.cache_folder import replace_file
from ...model_files.known_plans import known_plan, record, states_of
from ...model_files.onnx_file import (
    MOST_BYTES,
    Declared,
    OnnxFile,
    blame,
    read_onnx,
    source_digest,
    structure_digest,
    weight_files,
)
from ...model_files.profiles import Profile, complete
from ...signature import Signature, TensorSpec
from ..api import Message, TensorRT, clean_message, collect_messages, find_tensorrt, first_error
from ..release import releasing
from .progress import BuildWatch, Progress, monitor

log = logging.getLogger("greenlane.engines")

StreamFor = Callable[[int], int]
"""From a number of SMs to the handle of a stream on such a partition, which must exist until the build has ended."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build. Raises ValueError naming the field.

    - `profiles`: sizes of dynamic inputs; without any, batches of 1 to `max_batch`.
    - `targets`: compute capabilities, such as "8.6"; none for the library's default, which for TensorRT-RTX is every GPU from
      Ampere on.
    - `optimization_level`: 0 to 5; None for the library's default.
    - `max_aux_streams`: streams that the engine may use in addition to the caller's. Each is one more stream on the partition
      of every executor. TensorRT-RTX is given one at least: see `LEAST_AUX_STREAMS`.
    - `flags`: the library's builder flags in lower case, such as "weight_streaming", or "no_tf32" to clear one.
    - `weight_streaming_budget`: bytes of weights to keep on the GPU, unless the settings at load say otherwise. Needs that
      flag. None leaves it to the library.
    """

    profiles: tuple[Profile, ...] = ()
    max_batch: int = 8
    targets: tuple[str, ...] = ()
    optimization_level: int | None = None
    max_aux_streams: int = 1
    flags: tuple[str, ...] = ()
    weight_streaming_budget: int | None = None

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"max_batch is {self.max_batch}; expected 1 or more")
        for index, profile in enumerate(self.profiles):
            if profile.sms is not None and profile.sms < 1:
                raise ValueError(f"profile {index}: sms is {profile.sms}; expected 1 or more")
        if self.optimization_level not in (None, *range(6)):
            raise ValueError(f"optimization_level is {self.optimization_level}; expected 0 to 5")
        if self.max_aux_streams < 0:
            raise ValueError(f"max_aux_streams is {self.max_aux_streams}; expected 0 or more")
        if (budget := self.weight_streaming_budget) is not None and (budget < 0 or "weight_streaming" not in self.flags):
            raise ValueError(f"weight_streaming_budget is {budget}; expected 0 or more, and the flag weight_streaming")


DEFAULTS = BuildOptions()

LEAST_AUX_STREAMS = {"tensorrt_rtx": 1}
"""The fewest auxiliary streams with which a library builds engines that answer rightly.

TensorRT-RTX 1.6.1 without any runs branches of a network before what they wait for: on an H100 66 of 96 answers of a ResNet-50
were wrong, by up to 0.3 of the reference and each time otherwise; with one, two or seven allowed none was (2026-11-26, the
library alone, tests/gpu/results/2026-11-26-h100-4e2e814-aux-streams.log).
"""


@releasing()
def build(
    onnx: bytes,
    options: BuildOptions = DEFAULTS,
    progress: Progress | None = None,
    *,
    api: TensorRT | None = None,
    path: Path | None = None,
    stream_for: StreamFor | None = None,
    timings: Path | None = None,
) -> bytes:
    """Build a model and return the engine file's bytes. Blocks for seconds to minutes, without the GIL; one build a thread.

    `path` is where the model came from: weights in separate files are looked for in its folder. `timings` is the file in which
    a library that times kernels keeps what it has timed. Profiles that are chosen by default are logged. The CUDA context that
    is current in the calling thread stays so, though the library uses the GPU.

    Raises ModelRefused with the library's first error, Cancelled, or what `progress` raised.
    """
    where = path or "the model"
    job = Job(api or find_tensorrt(), onnx, options, path, stream_for, timings, BuildWatch(progress or (lambda step: True)))
    try:
        with restored(), collect_messages() as messages:
            return job.run(messages)
    except ModelRefused as error:
        if job.watch.cancelled:
            raise job.watch.error or Cancelled(f"{where}: the build was cancelled") from None
        raise ModelRefused(f"{where}: {error}") from error


def build_cached(
    onnx_path: Path,
    cache_dir: Path,
    options: BuildOptions = DEFAULTS,
    progress: Progress | None = None,
    *,
    api: TensorRT | None = None,
    device: str = "",
) -> Path:
    """The engine file for a model's file, built in this process unless `cache_dir` has it; see `find_or_build`.

    A server builds in a child process instead: `engines.tensorrt.building.builds`.
    """
    library = api or find_tensorrt()
    request = PlanRequest(onnx_path, cache_dir, options, library.library, library.version, device)
    kept = timings_file(request)
    return find_or_build(request, lambda onnx: build(onnx, options, progress, api=library, path=onnx_path, timings=kept))


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan for a model's file, built with these options for this version of the library, and the directory to keep it in.

    `device` is the GPU, where the library measures on it and the plan depends on it.
    """

    onnx_path: Path
    cache_dir: Path
    options: BuildOptions
    library: str
    version: str
    device: str = ""


def timings_file(request: PlanRequest) -> Path:
    """Beside the plans: the timings of kernels that all plans of this version for this kind of GPU share."""
    what = json.dumps([request.library, request.version, request.device])
    return request.cache_dir / f"timings-{hashlib.sha256(what.encode()).hexdigest()[:32]}.cache"


def find(request: PlanRequest) -> Path | None:
    """The path of the engine file if it was found before, and nothing has changed since; see `engines.model_files.known_plans`.

    Reads none of these files. Blocks for a moment; raises nothing.
    """
    return known_plan(_record_path(request))


def find_or_build(request: PlanRequest, make: Callable[[bytes], bytes]) -> Path:
    """The path of an engine file. If the directory does not have it, `make` is called with the model's bytes to build it.

    The file's name is a digest of what it depends on: the model, its weights, the options, the library and the GPU. So models
    can share a directory. Which file it was is recorded there, if it can be written, for `find`. Blocks: if several processes
    want the same file, one builds it while the others wait. Raises ModelRefused and what `make` raises.
    """
    try:
        states = states_of([request.onnx_path])
        with open_regular(request.onnx_path, MOST_BYTES) as file:
            onnx = file.read()
        weights = weight_files(onnx, request.onnx_path.parent)
        states = {**states, **states_of(weights)}
        source = source_digest(onnx, weights)
    except OSError as error:
        raise ModelRefused(f"{error.filename or request.onnx_path}: {error.strerror}") from error
    path = request.cache_dir / f"{request.onnx_path.stem}-{_key(request, source)}.plan"
    if not _is_whole(path):
        with _locked(request, path):
            if not _is_whole(path):
                _write(request, path, make(onnx))
    record(_record_path(request), path, states)
    return path


def _record_path(request: PlanRequest) -> Path:
    return request.cache_dir / f"{request.onnx_path.stem}-{_key(request, str(request.onnx_path.absolute()))}.source"


@contextmanager
def _locked(request: PlanRequest, path: Path) -> Iterator[None]:
    """Hold the lock of an engine file, and create its directory. Raises ModelRefused where nothing can be written there."""
    from filelock import FileLock

    lock = FileLock(f"{path}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise _unwritable(request, error) from error
    try:
        yield
    finally:
        lock.release()


def _write(request: PlanRequest, path: Path, data: bytes) -> None:
    try:
        replace_file(path, data)
    except OSError as error:
        raise _unwritable(request, error) from error


def _unwritable(request: PlanRequest, error: OSError) -> ModelRefused:
    """Clients read this error, so the path of the directory is only logged."""
    reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
    log.warning("%s: %s: %s", request.onnx_path, error.filename or request.cache_dir, reason)
    return ModelRefused(
        f"{request.onnx_path}: its plan cannot be kept in the cache directory: {reason}; name a directory that can be "
        "written (models.cache), or serve a .plan of `greenlane build`"
    )


def _separate(inputs: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
    """Give dimensions without a name, which a file may all call `?`, names of their own: the library wants one size for a name.

    The first of them keeps the file's, which the library goes on to look for.
    """
    placeholders = set()
    for tensor, spec in zip(inputs, specs, strict=True):
        for axis in [axis for axis, dim in enumerate(spec.dims) if dim == ""]:
            name = tensor.get_dimension_name(axis)
            if name in placeholders:
                tensor.set_dimension_name(axis, f"{tensor.name}.{axis}")
            elif name:
                placeholders.add(name)


def _key(request: PlanRequest, source: str) -> str:
    platform = "" if request.library in PORTABLE else this_platform()
    parts = [FORMAT, request.library, request.version, platform, source, request.device, asdict(request.options)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        return read_plan(path).artifact is not None
    except ModelRefused as error:
        log.warning("%s", error)
        return False


@dataclass(frozen=True, slots=True)
class Job:
    """One build. Its errors do not name the model; `build` adds that."""

    api: TensorRT
    onnx: bytes
    options: BuildOptions
    path: Path | None
    stream_for: StreamFor | None
    timings: Path | None
    watch: BuildWatch

    def run(self, messages: list[Message]) -> bytes:
        """`messages` receives what the library logs."""
        builder = self.api.module.Builder(self.api.logger)
        network = builder.create_network(0)
        parser = self.api.module.OnnxParser(network, self.api.logger)  # It owns the weights, so it must outlive the build.
        self._parse(parser, network)
        signature = self._signature(network, read_onnx(self.onnx))
        profiles, notes = complete(self.options.profiles, signature.inputs, self.options.max_batch)
        for note in notes:
            log.info("%s", note)
        config = builder.create_builder_config()
        self._configure(config)
        profiles = tuple(self.add(builder, config, index, profile) for index, profile in enumerate(profiles))
        plan = self._make(builder, network, config)
        if plan is None:
            raise ModelRefused(first_error(messages))
        for text in dict.fromkeys(message.text for message in messages if message.severity == "WARNING"):
            log.info("%s: %s", self.api, clean_message(text))
        return self._artifact(network, config, signature, profiles, plan).pack(plan)

    def _parse(self, parser: Any, network: Any) -> None:
        done = parser.parse(self.onnx, str(self.path)) if self.path else parser.parse(self.onnx)
        if not done:
            errors = [parser.get_error(index) for index in range(parser.num_errors)]
            raise ModelRefused(blame(self.onnx, parser_errors(errors)))
        if not network.num_outputs:
            raise ModelRefused(blame(self.onnx, "it has no outputs"))

    def _signature(self, network: Any, file: OnnxFile) -> Signature:
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        outputs = [network.get_output(index) for index in range(network.num_outputs)]
        if both := sorted({declared.name for declared in file.inputs} & {tensor.name for tensor in outputs}):
            raise ModelRefused(f"output {both[0]!r} has the name of an input, which a plan cannot have; rename one")
        for tensor in inputs:
            if tensor.is_shape_tensor:
                raise ModelRefused(f"the values of input {tensor.name!r} decide shapes; make it a constant of the model")
        for double in (declared.name for declared in (*file.inputs, *file.outputs) if declared.is_double):
            log.warning("%r is FP64 in the ONNX; %s serves it as FP32", double, self.api)
        specs = self._specs(inputs, file.inputs)
        _separate(inputs, specs)
        return Signature(specs, self._specs(outputs, file.outputs))

    def _specs(self, tensors: Sequence[Any], declared: Sequence[Declared]) -> tuple[TensorSpec, ...]:
        return tuple(self._spec(tensor, declared) for tensor in tensors)

    def _spec(self, tensor: Any, declared: Sequence[Declared]) -> TensorSpec:
        """Sizes are the library's, which has inferred them; names of dimensions are the file's."""
        sizes = tuple(tensor.shape)
        names = next((value.dims for value in declared if value.name == tensor.name and len(value.dims) == len(sizes)), sizes)
        dims = (size if size >= 0 else name if isinstance(name, str) else "" for size, name in zip(sizes, names, strict=True))
        return TensorSpec(tensor.name, self.api.datatype(tensor.name, tensor.dtype), tuple(dims))

    def _configure(self, config: Any) -> None:
        least = LEAST_AUX_STREAMS.get(self.api.library, 0)
        if self.options.max_aux_streams < least:
            why = "without auxiliary streams it answers wrongly now and then"
            raise ModelRefused(f"max_aux_streams is {self.options.max_aux_streams}; {self.api} needs {least} or more: {why}")
        config.max_aux_streams = self.options.max_aux_streams
        if self.options.optimization_level is not None:
            config.builder_optimization_level = self.options.optimization_level
        for flag in self.options.flags:
            self._set_flag(config, flag)
        if self.options.targets:
            self._set_targets(config)

    def _set_flag(self, config: Any, flag: str) -> None:
        members = {name.lower(): member for name, member in self.api.module.BuilderFlag.__members__.items()}
        if (name := flag.removeprefix("no_")) not in members:
            raise ModelRefused(f"{self.api} has no builder flag {name!r}; it has {', '.join(sorted(members))}")
        (config.clear_flag if flag.startswith("no_") else config.set_flag)(members[name])

    def _set_targets(self, config: Any) -> None:
        targets = self.api.targets()
        if missing := [target for target in self.options.targets if target not in targets]:
            have = (
                f"it has {', '.join(targets)}, or its own choice without targets"
                if targets
                else "it builds for the GPU it runs on"
            )
            raise ModelRefused(f"{self.api} has no target {', '.join(missing)}; {have}")
        config.num_compute_capabilities = len(self.options.targets)
        for index, target in enumerate(self.options.targets):
            config.set_compute_capability(targets[target], index)

    def add(self, builder: Any, config: Any, index: int, profile: Profile) -> Profile:
        """Add a profile to the configuration, and return it with `tuned` set.

        Without dynamic inputs the library would add a profile by itself, but only one; the engine has to have as many as its
        file says.
        """
        library_profile = builder.create_optimization_profile()
        for name, range_ in profile.ranges.items():
            library_profile.set_shape(name, *range_)
        sms = profile.sms
        if sms is None and self.api.library not in PORTABLE:
            profile = replace(profile, sms=self._whole_gpu(), tuned=True)
        else:
            profile = replace(profile, tuned=self._tune(library_profile, index, sms))
        if profile.ranges or profile.tuned or len(self.options.profiles) > 1:
            config.add_optimization_profile(library_profile)
        return profile

    def _whole_gpu(self) -> int:
        """The SMs of the GPU on which the library times kernels."""
        from cuda.core import Device  # Not installed where no library needs a GPU to build.

        return int(Device().resources.sm.sm_count)

    def _tune(self, library_profile: Any, index: int, sms: int | None) -> bool:
        if sms is None:
            return False
        if "profile_stream" in self.api.features and self.stream_for is not None:
            library_profile.profile_stream = self.stream_for(sms)
            return True
        why = "no partition to measure on" if "profile_stream" in self.api.features else f"{self.api} cannot"
        log.warning("profile %d: recorded as meant for %d SMs, but not tuned for them: %s", index, sms, why)
        return False

    def _make(self, builder: Any, network: Any, config: Any) -> bytes | None:
        watching = monitor(self.api.module, self.watch)
        config.progress_monitor = watching
        times_kernels = self.api.library not in PORTABLE
        with kept_timings(config, self.timings) if self.timings and times_kernels else nullcontext():
            memory = builder.build_serialized_network(network, config)
        return None if memory is None else bytes(memoryview(memory))

    def _recorded(self, config: Any) -> dict[str, Any]:
        """The options to record in the engine file."""
        options: dict[str, Any] = {
            "optimization_level": config.builder_optimization_level,
            "max_aux_streams": config.max_aux_streams,
            "flags": list(self.options.flags),
        }
        budget = self.options.weight_streaming_budget
        return options if budget is None else {**options, "weight_streaming_budget": budget}

    def _artifact(
        self, network: Any, config: Any, signature: Signature, profiles: tuple[Profile, ...], plan: bytes
    ) -> Artifact:
        return Artifact(
            library=self.api.library,
            version=self.api.version,
            targets=self.options.targets,
            source=source_digest(self.onnx, weight_files(self.onnx, self.path.parent if self.path else Path())),
            structure=structure_digest(self.onnx),
            signature=signature,
            profiles=profiles,
            options=self._recorded(config),
            layers=network.num_layers,
            facts=self.api.facts(plan),
        )


def parser_errors(errors: Sequence[Any]) -> str:
    """The first three errors of a parser as one text."""
    texts = [_parser_error(error) for error in errors[:3]]
    more = len(errors) - len(texts)
    return "; ".join(texts) + (f"; and {more} more" if more else "")


def _parser_error(error: Any) -> str:
    text = re.sub(r"^Assertion failed: .*?: (?=[A-Z])", "", clean_message(error.desc()))  # Remove the condition.
    if error.node() < 0:
        return f"input {error.file()!r}: {text}" if error.func() == "importInput" else text
    return f"node {error.node_name() or error.node()!r} ({error.node_operator()}): {text}"


@contextmanager
def kept_timings(config: Any, path: Path) -> Iterator[None]:
    """A build in the block, with this configuration, uses the timings in the file and adds its own. Blocks to read and write.

    They are what the full TensorRT has timed of kernels on a GPU; it ignores those of another version or kind of GPU.

    What other builds have added meanwhile stays. A file that cannot be read or written is logged, and costs time only.
    """
    known = b""
    try:
        known = _read(path)
    except OSError as error:
        log.warning("kernels are timed again: %s: %s", path, error.strerror)
    config.set_timing_cache(config.create_timing_cache(known), False)
    yield
    try:
        _add(config, path)
    except OSError as error:
        log.warning("timings of kernels are not kept for the next build: %s: %s", path, error.strerror)


def _add(config: Any, path: Path) -> None:
    from filelock import FileLock  # Only installed where TensorRT is.

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        cache = config.get_timing_cache()
        cache.combine(config.create_timing_cache(_read(path)), False)
        replace_file(path, bytes(memoryview(cache.serialize())))


def _read(path: Path) -> bytes:
    """What is in the file; nothing if it is missing. Raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
