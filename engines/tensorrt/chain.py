"""TensorRT engines one after another as one: their contexts are run in turn, in one capture, and share memory on the device.

What an engine takes of an earlier one it reads where that wrote it, so nothing is copied between them. To an executor all
this looks like one instance with one context, so graphs, staging, streams and moves are those of any engine.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

from cuda.core import Stream

from partitions.cuda.device import SideStream

from ..errors import ModelRefused
from ..model_files.profiles import Profile, Range
from ..settings import RuntimeSettings
from ..signature import Shape, TensorSpec
from ..wiring import Wiring
from .context import Context
from .graph_mode import Situation, Way, fall_back, obstacle, refusal
from .instance import Beside, Instance, open_copies, open_instance
from .kernel_cache import CacheKey, CacheStatistics
from .plan import LoadedPlan

NOTHING_OF_ITS_OWN = Way(capture=True, native=False)
"""How each step's contexts are made: to be captured."""


class ChainedPlan(LoadedPlan):
    """Several plans as one, for a chain's executors. Holds the plans of engines that stay their owners'."""

    def __init__(self, plans: Sequence[LoadedPlan], wiring: Wiring, settings: RuntimeSettings) -> None:
        first = plans[0]
        name = Path(" + ".join(part.path.name for part in plans))
        library = SimpleNamespace(num_aux_streams=max(part.plan.num_aux_streams for part in plans))
        key = CacheKey("", "", "")  # It has no kernels of its own.
        whole = (_profile(plans, wiring),)
        super().__init__(name, first.device, first.api, library, wiring.signature, whole, settings, Situation(), key)
        self.plans = tuple(plans)
        self.wiring = wiring
        self.names = [label or part.path.name for label, part in zip(wiring.labels, plans, strict=True)]
        """What errors call each of them."""

    def usual(self, profile: int) -> list[tuple[Shape, ...]]:
        """As for any plan. Where a dimension has no name, a later step may allow less than is known here: `opt` alone."""
        sets = super().usual(profile)
        if not isinstance(self.settings.warm_up, str):
            return sets
        if any("" in spec.dims for spec in self.signature.inputs):
            return sets[-1:]
        return [*(shapes for shapes in sets[:-1] if self._is_taken(shapes)), sets[-1]]

    def _is_taken(self, shapes: tuple[Shape, ...]) -> bool:
        """Whether each step that takes nothing but inputs of the chain has a profile for these."""
        known = {spec.name: shape for spec, shape in zip(self.signature.inputs, shapes, strict=True)}
        first = [(part, takes) for part, takes in zip(self.plans, self.wiring.takes, strict=True) if set(takes) <= set(known)]
        return all(
            any(part.profiles[number].fits(_named(part, [known[name] for name in takes])) for number in part.usable)
            for part, takes in first
        )

    def hindrance(self) -> str:
        """Which engine cannot be captured, and why; empty where it may be tried."""
        named = zip(self.names, self.plans, strict=True)
        found = ((name, obstacle(part.settings, part.situation)) for name, part in named)
        return next((f"{name}: {why}" for name, why in found if why), "")


class ChainedContext(Context):
    """A context of each step, as if they were one. `lock` is held for all: nothing else uses them.

    `contexts` are each step's by profile, `addresses` each step's memory.
    """

    def __init__(
        self, loaded: ChainedPlan, contexts: Sequence[Mapping[int, Context]], addresses: Sequence[Sequence[int]]
    ) -> None:
        self.lock = Lock()
        self.profile = 0
        self.shapes: tuple[Shape, ...] | None = None
        self.compiled: set[tuple[Shape, ...]] = set()
        self._chain = loaded
        self._contexts = tuple(contexts)
        self._addresses = tuple(addresses)
        self._set: list[Context] = []
        self._results: tuple[Shape, ...] = ()

    def __repr__(self) -> str:
        return f"<ChainedContext of {self._chain.path.name}, shapes {self.shapes}>"

    def settle(self) -> None:
        for contexts in self._contexts:
            for context in contexts.values():
                context.settle()

    def use_streams(self, extra: Sequence[SideStream]) -> None:
        for contexts, part in zip(self._contexts, self._chain.plans, strict=True):
            for context in contexts.values():
                context.use_streams(extra[: part.plan.num_aux_streams])

    def set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        """For each step those that come of the ones before. Raises TensorMismatch for what a step does not take."""
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
        """Those of the steps, which stay, whatever is given here."""
        for contexts, own in zip(self._contexts, self._addresses, strict=True):
            for context in contexts.values():
                context.set_addresses(own)

    def execute(self, stream: Stream, captured: bool = False, then: Stream | None = None) -> str:
        for context, name in zip(self._set, self._chain.names, strict=True):
            if refused := context.execute(stream, captured, then):
                return f"{name}: {refused}"
        if not captured and self.shapes:
            self.compiled.add(self.shapes)
        return ""

    def close(self) -> None:
        """Nothing: the steps' contexts go with their instances."""


def follow(
    loaded: ChainedPlan,
    shapes: tuple[Shape, ...],
    choose: Callable[[int, tuple[Shape, ...], int], tuple[Shape, ...]],
) -> tuple[Shape, ...]:
    """The shapes of the chain's outputs. `choose` gives those of a step, by its number, its inputs' shapes and the profile.

    Raises TensorMismatch, and what `choose` raises.
    """
    wiring = loaded.wiring
    known = {spec.name: shape for spec, shape in zip(wiring.signature.inputs, shapes, strict=True)}
    for index, (part, takes, gives) in enumerate(zip(loaded.plans, wiring.takes, wiring.gives, strict=True)):
        taken = tuple(known[name] for name in takes)
        part.signature.check(taken)
        given = choose(index, taken, part.profile_for(taken, part.usable[0]))
        known |= {name: shape for name, shape in zip(gives, given, strict=True) if name}
    return tuple(known[spec.name] for spec in wiring.signature.outputs)


class ChainedBeside(Beside):
    """The steps' contexts that compile while others serve, as if they were one: see `tensorrt_instance.Beside`."""

    def __init__(self, loaded: ChainedPlan, instances: Sequence[Instance]) -> None:
        self._chain = loaded
        self._steps = tuple(instances)
        besides = [instance.beside.contexts for instance in instances]
        self._whole = ChainedContext(loaded, besides, [instance.addresses for instance in instances])

    def __repr__(self) -> str:
        return f"<ChainedBeside of {self._chain.path.name}>"

    def compile(
        self, shapes: tuple[Shape, ...], profile: int, stream: Stream, extra: Sequence[SideStream]
    ) -> tuple[Shape, ...]:
        def choose(index: int, taken: tuple[Shape, ...], profile: int) -> tuple[Shape, ...]:
            streams = extra[: self._chain.plans[index].plan.num_aux_streams]
            return self._steps[index].beside.compile(taken, profile, stream, streams)

        return follow(self._chain, shapes, choose)

    def context(self, profile: int) -> Context:
        return self._whole

    def close(self) -> None:
        """Nothing: what the steps have goes with their instances."""


class ChainedInstance(Instance):
    """An instance of each step."""

    def __init__(
        self, loaded: ChainedPlan, way: Way, instances: Sequence[Instance], places: Sequence[tuple[int, int]], stream: Stream,
        made: ExitStack,
    ) -> None:  # fmt: skip
        copies = open_copies(loaded, stream, made)
        context = ChainedContext(loaded, [each.contexts for each in instances], [each.addresses for each in instances])
        super().__init__(loaded, way, {0: context}, (), copies, None, stream, (), made.pop_all().close)
        self.addresses = [address for address, _ in places]
        self.sizes = [size for _, size in places]
        self.beside = ChainedBeside(loaded, instances)
        self.prepares = all(each.prepares for each in instances)
        self._steps = tuple(instances)

    def kernels(self) -> CacheStatistics:
        """Of all steps."""
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


def open_chain(loaded: LoadedPlan, way: Way, profiles: Sequence[int], stream: Stream) -> Instance:
    """As `open_instance`, of a ChainedPlan. Raises ModelRefused naming the engine that cannot be part of it."""
    if not isinstance(loaded, ChainedPlan):
        raise TypeError(f"{loaded!r} is no chain")
    if why := loaded.hindrance() if way.capture else "":
        if refused := refusal(loaded.settings, why):
            raise ModelRefused(f"{loaded.path}: {refused}")
        way = fall_back(Situation(), why)
        loaded.warn_once(way.notice)
    with ExitStack() as made:
        instances = []
        for part, called in zip(loaded.plans, loaded.names, strict=True):
            instances.append(open_instance(part, NOTHING_OF_ITS_OWN, part.usable, stream))
            made.callback(instances[-1].close)
            if surprising := instances[-1].unsized:
                raise ModelRefused(f"{loaded.path}: the size of output {surprising[0]!r} of {called} depends on data")
        return ChainedInstance(loaded, way, instances, _connect(loaded, instances), stream, made)


def _connect(loaded: ChainedPlan, instances: Sequence[Instance]) -> list[tuple[int, int]]:
    """Let each step read where the tensor was written; the places of the chain's inputs, then outputs, and their bytes."""
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
    """The sizes that every step takes; `opt` is that of the first step that takes an input, as far as the others allow."""
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
    """`sizes` are those chosen before of named dimensions."""
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
