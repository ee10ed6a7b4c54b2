"""TensorRT engines that run one after another as one: in one capture, with shared memory on the device.

What a step takes from an earlier step it reads where that has written it, so nothing is copied between them. To an executor
this looks like one instance with one context, so graphs, staging, streams and moves work as for any engine.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import RLock
from types import SimpleNamespace

from cuda.core import Stream

from partitions.cuda.device import CudaPartition, SideStream

from ..errors import ModelRefused
from ..memory import added
from ..model_files.profiles import Profile, Range
from ..settings import RuntimeSettings
from ..signature import Shape, TensorSpec
from ..wiring import Wiring
from .context import Context
from .graph_mode import EngineTraits, GraphMode, fall_back, obstacle, refusal
from .instance import BackgroundContexts, Instance, Judge, open_copies, open_instance
from .kernel_cache import CacheKey, CacheStatistics, RuntimeCache
from .plan import LoadedPlan


class ChainedPlan(LoadedPlan):
    """Several plans as one, for a chain's executors. The engines that own the plans have to stay open."""

    def __init__(self, plans: Sequence[LoadedPlan], wiring: Wiring, settings: RuntimeSettings) -> None:
        first = plans[0]
        name = Path(" + ".join(part.path.name for part in plans))
        library = SimpleNamespace(num_aux_streams=max(part.plan.num_aux_streams for part in plans))
        key = CacheKey("", "", "")  # The steps' instances keep the kernels.
        whole = (_profile(plans, wiring),)
        super().__init__(name, first.device, first.api, library, wiring.signature, whole, settings, EngineTraits(), key)
        self.plans = tuple(plans)
        self.wiring = wiring
        self.names = [label or part.path.name for label, part in zip(wiring.labels, plans, strict=True)]
        """The names of the steps in errors."""

    @property
    def structure(self) -> Hashable:
        return tuple(part.structure for part in self.plans)

    @property
    def streamed(self) -> int:
        return sum(part.streamed for part in self.plans)

    @property
    def executor_memory(self) -> dict[str, int]:
        return added(part.executor_memory for part in self.plans)

    def warm_up_shapes(self, profile: int) -> list[tuple[Shape, ...]]:
        """As for any plan. Only `opt` where a dimension has no name: a later step may then allow less than is known here."""
        sets = super().warm_up_shapes(profile)
        if not isinstance(self.settings.warm_up, str):
            return sets
        if any("" in spec.dims for spec in self.signature.inputs):
            return sets[-1:]
        return [*(shapes for shapes in sets[:-1] if self._is_taken(shapes)), sets[-1]]

    def _is_taken(self, shapes: tuple[Shape, ...]) -> bool:
        """Whether each step whose inputs are all inputs of the chain has a profile for these shapes."""
        known = {spec.name: shape for spec, shape in zip(self.signature.inputs, shapes, strict=True)}
        first = [(part, takes) for part, takes in zip(self.plans, self.wiring.takes, strict=True) if set(takes) <= set(known)]
        return all(
            any(part.profiles[number].fits(_named(part, [known[name] for name in takes])) for number in part.usable)
            for part, takes in first
        )

    def capture_obstacle(self) -> str:
        """Which step cannot be captured, and why; empty where it may be tried."""
        named = zip(self.names, self.plans, strict=True)
        found = ((name, obstacle(part.settings, part.traits)) for name, part in named)
        return next((f"{name}: {why}" for name, why in found if why), "")


class ChainedContext(Context):
    """A context of each step, as if they were one. Hold `lock` for all of them; nothing else uses them.

    `contexts` are each step's by profile, `addresses` each step's memory.
    """

    def __init__(
        self, loaded: ChainedPlan, contexts: Sequence[Mapping[int, Context]], addresses: Sequence[Sequence[int]]
    ) -> None:
        self.lock = RLock()  # As the garbage collector may find another executor of its instance meanwhile.
        self.profile = 0
        self.shapes: tuple[Shape, ...] | None = None
        self.compiled: set[tuple[Shape, ...]] = set()
        self._chain = loaded
        self._contexts = tuple(contexts)
        self._addresses = tuple(addresses)
        self._set: list[Context] = []
        self._results: tuple[Shape, ...] = ()

    def wait_until_idle(self) -> None:
        for contexts in self._contexts:
            for context in contexts.values():
                context.wait_until_idle()

    def use_streams(self, aux_streams: Sequence[SideStream]) -> None:
        for contexts, part in zip(self._contexts, self._chain.plans, strict=True):
            for context in contexts.values():
                context.use_streams(aux_streams[: part.plan.num_aux_streams])

    def set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        """Set the shapes of each step, which follow from the steps before. Raises TensorMismatch for shapes that a step
        refuses.
        """
        if shapes == self.shapes:
            return
        self.shapes = None
        chosen = []

        def choose(index: int, taken: tuple[Shape, ...], profile: int) -> tuple[Shape, ...]:
            chosen.append(self._contexts[index][profile])
            chosen[-1].set_shapes(taken)
            return chosen[-1].output_shapes()

        self._results = follow(self._chain, shapes, choose)
        self._set, self.shapes = chosen, shapes

    def output_shapes(self) -> tuple[Shape, ...]:
        return self._results

    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Set the steps' own addresses again; `addresses` is not used."""
        for contexts, own in zip(self._contexts, self._addresses, strict=True):
            for context in contexts.values():
                context.set_addresses(own)

    def execute(self, stream: Stream, captured: bool = False, ordered_stream: Stream | None = None) -> str:
        for context, name in zip(self._set, self._chain.names, strict=True):
            if refused := context.execute(stream, captured, ordered_stream):
                return f"{name}: {refused}"
        if not captured and self.shapes:
            self.compiled.add(self.shapes)
        return ""

    def close(self) -> None:
        """Do nothing: the steps' instances own the contexts."""


def follow(
    loaded: ChainedPlan, shapes: tuple[Shape, ...], choose: Callable[[int, tuple[Shape, ...], int], tuple[Shape, ...]]
) -> tuple[Shape, ...]:
    """The shapes of the chain's outputs, for these input shapes.

    `choose(step, input_shapes, profile)` is called for each step and returns the shapes of its outputs. Raises TensorMismatch,
    and what `choose` raises.
    """
    wiring = loaded.wiring
    known = {spec.name: shape for spec, shape in zip(wiring.signature.inputs, shapes, strict=True)}
    for index, (part, takes, gives) in enumerate(zip(loaded.plans, wiring.takes, wiring.gives, strict=True)):
        taken = tuple(known[name] for name in takes)
        part.signature.check(taken)
        given = choose(index, taken, part.profile_for(taken, part.usable[0]))
        known |= {name: shape for name, shape in zip(gives, given, strict=True) if name}
    return tuple(known[spec.name] for spec in wiring.signature.outputs)


class ChainedBackgroundContexts(BackgroundContexts):
    """The steps' background contexts, as if they were one: see `instance.BackgroundContexts`."""

    def __init__(self, loaded: ChainedPlan, instances: Sequence[Instance]) -> None:
        self._chain = loaded
        self._steps = tuple(instances)
        backgrounds = [instance.background.contexts for instance in instances]
        self._whole = ChainedContext(loaded, backgrounds, [instance.addresses for instance in instances])

    def compile(
        self,
        shapes: tuple[Shape, ...],
        profile: int,
        stream: Stream,
        aux_streams: Sequence[SideStream],
        partition: CudaPartition,
        judge: Judge,
    ) -> tuple[Shape, ...]:
        """The steps' shapes are not judged, which are others than those of requests for a step by itself."""

        def choose(index: int, taken: tuple[Shape, ...], profile: int) -> tuple[Shape, ...]:
            streams = aux_streams[: self._chain.plans[index].plan.num_aux_streams]
            return self._steps[index].background.compile(taken, profile, stream, streams, partition, lambda _: None)

        return follow(self._chain, shapes, choose)

    def context(self, profile: int) -> Context:
        return self._whole

    def close(self) -> None:
        """Do nothing: the steps' instances own everything."""


class ChainedInstance(Instance):
    """An instance of each step, as if they were one."""

    def __init__(
        self,
        loaded: ChainedPlan,
        graph_mode: GraphMode,
        instances: Sequence[Instance],
        tensors: Sequence[tuple[int, int]],
        stream: Stream,
        made: ExitStack,
    ) -> None:
        copies = open_copies(loaded, stream, made)
        context = ChainedContext(loaded, [each.contexts for each in instances], [each.addresses for each in instances])
        super().__init__(loaded, graph_mode, {0: context}, (), copies, None, (), made.pop_all())
        self.addresses = [address for address, _ in tensors]
        self.sizes = [size for _, size in tensors]
        self.background = ChainedBackgroundContexts(loaded, instances)
        self.prepares = all(each.prepares for each in instances)
        self._steps = tuple(instances)

    @property
    def memory(self) -> dict[str, int]:
        """The sum over all steps."""
        return added(each.memory for each in self._steps)

    def kernel_caches(self) -> list[RuntimeCache]:
        """Those of all steps, each once."""
        return list(dict.fromkeys(cache for each in self._steps for cache in each.kernel_caches()))

    def kernels(self) -> CacheStatistics:
        """The sums over all steps."""
        found = [each.kernels() for each in self._steps]
        return CacheStatistics(
            sum(each.found for each in found), sum(each.saved for each in found), any(each.refused for each in found)
        )

    def clear(self, stream: Stream) -> None:
        for instance in self._steps:
            instance.clear(stream)

    def save(self) -> None:
        for instance in self._steps:
            instance.save()


def open_chain(loaded: LoadedPlan, graph_mode: GraphMode, profiles: Sequence[int], stream: Stream) -> Instance:
    """As `open_instance`, for a ChainedPlan. Raises ModelRefused naming the engine that cannot be part of it."""
    if not isinstance(loaded, ChainedPlan):
        raise TypeError(f"{loaded!r} is not a ChainedPlan")
    if why := loaded.capture_obstacle() if graph_mode.capture else "":
        if refused := refusal(loaded.settings, why):
            raise ModelRefused(f"{loaded.path}: {refused}")
        graph_mode = fall_back(EngineTraits(), why)
        loaded.warn_once(graph_mode.note)
    with ExitStack() as made:
        instances, step_mode = [], GraphMode(graph_mode.capture, native=False)
        for part, name in zip(loaded.plans, loaded.names, strict=True):
            instances.append(open_instance(part, step_mode, part.usable, stream))
            made.callback(instances[-1].close)
            if data_dependent := instances[-1].data_dependent:
                raise ModelRefused(f"{loaded.path}: the size of output {data_dependent[0]!r} of {name} depends on data")
        return ChainedInstance(loaded, graph_mode, instances, _connect(loaded, instances), stream, made)


def _connect(loaded: ChainedPlan, instances: Sequence[Instance]) -> list[tuple[int, int]]:
    """Let each step read its inputs where an earlier one writes them.

    Returns address and size in bytes of the chain's inputs, then its outputs.
    """
    found: dict[str, tuple[int, int]] = {}
    for instance, takes, gives in zip(instances, loaded.wiring.takes, loaded.wiring.gives, strict=True):
        for index, name in enumerate(takes):
            own = (instance.addresses[index], instance.sizes[index])
            instance.addresses[index] = found.setdefault(name, own)[0]
        for index, given in enumerate(gives, len(takes)):
            if given:
                found[given] = (instance.addresses[index], instance.sizes[index])
        for context in instance.contexts.values():
            context.set_addresses(instance.addresses)
    signature = loaded.wiring.signature
    return [found[spec.name] for spec in (*signature.inputs, *signature.outputs)]


def _profile(plans: Sequence[LoadedPlan], wiring: Wiring) -> Profile:
    """The sizes that every step takes. `opt` is that of the first step that takes an input, within the limits of the others."""
    best: dict[str, Shape] = {}
    for part, takes in zip(plans, wiring.takes, strict=True):
        for name, shape in zip(takes, part.shapes(part.usable[0], "opt"), strict=True):
            best.setdefault(name, shape)
    sizes: dict[str, int] = {}
    ranges = {}
    for spec in wiring.signature.inputs:
        if -1 in spec.shape:
            ranges[spec.name] = _range(spec, best[spec.name], sizes)
    return Profile(ranges)


def _range(spec: TensorSpec, best: Shape, sizes: dict[str, int]) -> Range:
    """`sizes` are those that were chosen before for named dimensions, and gets this input's."""
    least, opt, most = [], [], []
    for axis, (dim, size) in enumerate(zip(spec.dims, best, strict=True)):
        low, high = (dim, dim) if isinstance(dim, int) else spec.limits[axis] if axis < len(spec.limits) else (size, size)
        size = min(max(size, low), high)
        least.append(low)
        opt.append(sizes.setdefault(dim, size) if isinstance(dim, str) and dim else size)
        most.append(high)
    return Range(tuple(least), tuple(opt), tuple(most))


def _named(part: LoadedPlan, shapes: Sequence[Shape]) -> dict[str, Shape]:
    return {spec.name: shape for spec, shape in zip(part.signature.inputs, shapes, strict=True)}
