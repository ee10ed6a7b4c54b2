"""TensorRT plans on a GPU: deserialised once, bound to green contexts, run by `engines.tensorrt_run`."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuda.core import Buffer

from partitions import DeviceLost, Partition, PartitionError
from partitions.cuda import CudaDevice, CudaPartition
from partitions.faults import translated

from .artifact import PORTABLE, read_plan
from .builder import build_cached
from .copies import LENGTH, compile_kernels, open_copier
from .errors import ExecutionFailed, ModelRefused
from .profiles import Profile, Range
from .settings import RuntimeSettings
from .signature import Shape, Signature, TensorSpec
from .tensorrt_api import TensorRT, find_tensorrt, first_error, listening
from .tensorrt_run import TensorRTExecutor

log = logging.getLogger("greenlane.engines")

SERVING = RuntimeSettings(dynamic_shapes_kernel_specialization_strategy="eager")
"""Kernels of a new shape are compiled before it runs: a captured graph keeps the kernels that it was captured with."""


class TensorRTEngine:
    """A deserialised plan; see `engines.base.Engine` for the contract."""

    platform = "tensorrt_plan"

    def __init__(
        self, path: Path, api: TensorRT, plan: Any, signature: Signature, profile: Profile, settings: RuntimeSettings
    ) -> None:
        self.path = path
        self.api = api
        self.signature = signature
        self.profile = profile
        self.settings = settings
        self._plan = plan

    def __repr__(self) -> str:
        return f"<TensorRTEngine {self.path.name} {self.signature!r}, {self.api}>"

    def bind(self, partition: Partition) -> TensorRTExecutor:
        if not isinstance(partition, CudaPartition):
            raise ModelRefused(f"{self.path}: TensorRT serves partitions of a GPU, not {partition!r}")
        with _refusing(f"binding {self.path} to {partition!r}"):
            return partition.run(lambda: self._open(partition))

    def close(self) -> None:
        """Free the plan's weights; its executors must be closed before."""
        self._plan = None

    def _open(self, partition: CudaPartition) -> TensorRTExecutor:
        """On a thread attached to the partition."""
        with ExitStack() as made:
            device = partition.device.make_current()
            context = self._context()
            buffers = [self._buffer(context, spec, partition, made) for spec in self._specs]
            kernels = compile_kernels(device)
            copier = open_copier(device, partition.stream, kernels, len(self.signature.inputs), len(self._specs))
            made.callback(copier.close)
            events = [device.create_event() for _ in range(LENGTH)]
            executor = TensorRTExecutor(self, partition, context, buffers, copier, events)
            made.callback(executor.close)
            executor.warm_up([self._best(spec) for spec in self.signature.inputs])
            made.pop_all()
            return executor

    @property
    def _specs(self) -> tuple[TensorSpec, ...]:
        return (*self.signature.inputs, *self.signature.outputs)

    def _context(self) -> Any:
        """A context with every input at its largest, so that it says how large the outputs can be."""
        if count := self._plan.num_aux_streams:
            raise ModelRefused(f"{self.path}: the plan uses {count} streams of its own; build it with max_aux_streams 0")
        with listening() as heard:
            context = self._plan.create_execution_context(*self._runtime_config())
        if context is None:
            raise ModelRefused(f"{self.path}: {self.api} gives no context: {first_error(heard)}")
        for spec in self.signature.inputs:
            context.set_input_shape(spec.name, self._largest(spec))
        return context

    def _runtime_config(self) -> tuple[Any, ...]:
        if "runtime_config" not in self.api.features:
            return ()
        config = self._plan.create_runtime_config()
        for name, kind in _STRATEGIES.items():
            if name in self.api.features:
                setattr(config, name, getattr(getattr(self.api.module, kind), getattr(self.settings, name).upper()))
        return (config,)

    def _buffer(self, context: Any, spec: TensorSpec, partition: CudaPartition, made: ExitStack) -> Buffer:
        given = spec in self.signature.inputs
        nbytes = spec.nbytes(self._largest(spec)) if given else context.get_max_output_size(spec.name)
        if nbytes < 0:
            raise ModelRefused(f"{self.path}: the size of output {spec.name!r} depends on data, which is not served")
        buffer = partition.device.make_current().allocate(max(1, nbytes), stream=partition.stream)
        made.callback(buffer.close)
        context.set_tensor_address(spec.name, int(buffer.handle))
        return buffer

    def _largest(self, spec: TensorSpec) -> Shape:
        return self.profile.ranges[spec.name].max if spec.name in self.profile.ranges else spec.shape

    def _best(self, spec: TensorSpec) -> Shape:
        return self.profile.ranges[spec.name].opt if spec.name in self.profile.ranges else spec.shape


_STRATEGIES = {
    "cuda_graph_strategy": "CudaGraphStrategy",
    "dynamic_shapes_kernel_specialization_strategy": "DynamicShapesKernelSpecializationStrategy",
}


def load_tensorrt(path: Path, device: CudaDevice, settings: RuntimeSettings | None = None) -> TensorRTEngine:
    """Load a plan, or build one of an ONNX file into a cache beside it. Blocks. Raises ModelRefused, DeviceLost.

    Warns of `settings` that have no effect with the library that is installed; by default they are SERVING.
    """
    api = find_tensorrt()
    with _refusing(f"loading {path}"):
        capability = _capability(device)
    if path.suffix == ".onnx":
        measured = "" if api.library in PORTABLE else f"{device.name} {capability}"
        path = build_cached(path, path.parent / ".greenlane", api=api, device=measured)
    file = read_plan(path)
    if file.artifact:
        file.artifact.check(str(path), api.library, api.version, capability)
    plan = api.deserialize(file.plan, str(path))
    signature = file.artifact.signature if file.artifact else _signature(plan, api)
    profile = file.artifact.profiles[0] if file.artifact else _profile(plan, signature)
    settings = settings.effective(str(api), api.features) if settings else SERVING
    return TensorRTEngine(path, api, plan, _limited(signature, profile), profile, settings)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """What CUDA and a first run say as ModelRefused, but for errors after which nothing works: DeviceLost."""
    try:
        with translated(what):
            yield
    except DeviceLost:
        raise
    except (PartitionError, ExecutionFailed) as error:
        raise ModelRefused(str(error)) from error


def _capability(device: CudaDevice) -> str:
    """Leaves the device current in this thread, which the library needs to build or load."""
    major, minor = device.make_current().compute_capability
    return f"{major}.{minor}"


def _signature(plan: Any, api: TensorRT) -> Signature:
    """What a bare plan says of itself; it has forgotten the names of dimensions."""
    names = [plan.get_tensor_name(index) for index in range(plan.num_io_tensors)]
    specs = {name: _spec(plan, api, name) for name in names}
    inputs = [name for name in names if plan.get_tensor_mode(name).name == "INPUT"]
    return Signature(tuple(specs[n] for n in inputs), tuple(specs[n] for n in names if n not in inputs))


def _spec(plan: Any, api: TensorRT, name: str) -> TensorSpec:
    dims = tuple(size if size >= 0 else "" for size in plan.get_tensor_shape(name))
    return TensorSpec(name, api.datatype(name, plan.get_tensor_dtype(name)), dims)


def _profile(plan: Any, signature: Signature) -> Profile:
    dynamic = [spec.name for spec in signature.inputs if -1 in spec.shape]
    return Profile({name: Range(*(tuple(dims) for dims in plan.get_tensor_profile_shape(name, 0))) for name in dynamic})


def _limited(signature: Signature, profile: Profile) -> Signature:
    """The signature that refuses what the profile does not hold, before it waits in a queue."""
    inputs = tuple(
        replace(spec, limits=tuple(zip(range_.min, range_.max, strict=True)))
        if (range_ := profile.ranges.get(spec.name))
        else spec
        for spec in signature.inputs
    )
    return replace(signature, inputs=inputs)
