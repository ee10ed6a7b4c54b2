"""TensorRT engines one after another as one: their contexts are run in turn, in one capture, and share memory on the device.

What an engine takes of an earlier one it reads where that wrote it, so nothing is copied between them. To an executor all
this looks like one instance with one context, so graphs, staging, streams and moves are those of any engine.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

from cuda.core import Stream

from partitions.cuda import SideStream

from .cache import CacheKey
from .chain import Wiring
from .errors import ModelRefused
from .profiles import Profile
from .settings import RuntimeSettings
from .signature import Shape
from .tensorrt_context import Context
from .tensorrt_graphs import Situation, Way, fall_back, obstacle, refusal
from .tensorrt_instance import Instance, open_copies, open_instance
from .tensorrt_plan import LoadedPlan

NOTHING_OF_ITS_OWN = Way(capture=True, native=False)
"""How each step's contexts are made: to be captured."""


class ChainedPlan(LoadedPlan):
    """Several plans as one, for a chain's executors. Holds the plans of engines that stay their owners'."""

    def __init__(self, plans: Sequence[LoadedPlan], wiring: Wiring, settings: RuntimeSettings) -> None:
        first = plans[0]
        name = Path(" + ".join(part.path.name for part in plans))
        library = SimpleNamespace(num_aux_streams=max(part.plan.num_aux_streams for part in plans))
        key = CacheKey("", "", "")  # It has no kernels of its own.
        whole = (Profile({}),)
        super().__init__(name, first.device, first.api, library, wiring.signature, whole, settings, Situation(), key)
        self.plans = tuple(plans)
        self.wiring = wiring

    def usual(self, profile: int) -> list[tuple[Shape, ...]]:
        """The `opt` shape of each input, by the first step that takes it."""
        found: dict[str, Shape] = {}
        for part, takes in zip(self.plans, self.wiring.takes, strict=True):
            for name, shape in zip(takes, part.shapes(part.usable[0], "opt"), strict=True):
                found.setdefault(name, shape)
        return [tuple(found[spec.name] for spec in self.signature.inputs)]

    def hindrance(self) -> str:
        """Which engine cannot be captured, and why; empty where it may be tried."""
        found = ((part.path.name, obstacle(part.settings, part.situation)) for part in self.plans)
        return next((f"{name}: {why}" for name, why in found if why), "")


class ChainedContext(Context):
    """A context of each step, as if they were one. `lock` is held for all: nothing else uses them."""

    def __init__(self, loaded: ChainedPlan, instances: Sequence[Instance]) -> None:
        self.lock = Lock()
        self.profile = 0
        self.shapes: tuple[Shape, ...] | None = None
        self.compiled: set[tuple[Shape, ...]] = set()
        self._chain = loaded
        self._instances = tuple(instances)
        self._set: list[Context] = []
        self._results: tuple[Shape, ...] = ()

    def __repr__(self) -> str:
        return f"<ChainedContext of {self._chain.path.name}, shapes {self.shapes}>"

    def settle(self) -> None:
        for instance in self._instances:
            for context in instance.contexts.values():
                context.settle()

    def use_streams(self, extra: Sequence[SideStream]) -> None:
        for instance, part in zip(self._instances, self._chain.plans, strict=True):
            for context in instance.contexts.values():
                context.use_streams(extra[: part.plan.num_aux_streams])

    def set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        """For each step those that come of the ones before."""
        if shapes == self.shapes:
            return
        self.shapes = None
        wiring = self._chain.wiring
        known = {spec.name: shape for spec, shape in zip(wiring.signature.inputs, shapes, strict=True)}
        chosen = []
        for part, instance, takes, gives in zip(self._chain.plans, self._instances, wiring.takes, wiring.gives, strict=True):
            taken = tuple(known[name] for name in takes)
            part.signature.check(taken)
            context = instance.contexts[part.profile_for(taken, part.usable[0])]
            context.set_shapes(taken)
            known |= {name: shape for name, shape in zip(gives, context.output_shapes(), strict=True) if name}
            chosen.append(context)
        self._set, self._results = chosen, tuple(known[spec.name] for spec in wiring.signature.outputs)
        self.shapes = shapes

    def output_shapes(self) -> tuple[Shape, ...]:
        return self._results

    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Nothing: they are those of the steps, which stay."""

    def execute(self, stream: Stream, captured: bool = False, then: Stream | None = None) -> str:
        for context, part in zip(self._set, self._chain.plans, strict=True):
            if refused := context.execute(stream, captured, then):
                return f"{part.path.name}: {refused}"
        if not captured and self.shapes:
            self.compiled.add(self.shapes)
        return ""

    def close(self) -> None:
        """Nothing: the steps' contexts go with their instances."""


class ChainedInstance(Instance):
    """An instance of each step. It prepares no shapes beside what it serves."""

    def __init__(
        self, loaded: ChainedPlan, way: Way, instances: Sequence[Instance], places: Sequence[tuple[int, int]], stream: Stream,
        made: ExitStack,
    ) -> None:  # fmt: skip
        copies = open_copies(loaded, stream, made)
        context = ChainedContext(loaded, instances)
        super().__init__(loaded, way, {0: context}, (), copies, None, stream, (), made.pop_all().close)
        self.addresses = [address for address, _ in places]
        self.sizes = [size for _, size in places]
        self._steps = tuple(instances)

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
        for part in loaded.plans:
            instances.append(open_instance(part, NOTHING_OF_ITS_OWN, part.usable, stream))
            made.callback(instances[-1].close)
            if surprising := instances[-1].unsized:
                raise ModelRefused(f"{loaded.path}: the size of output {surprising[0]!r} of {part.path.name} depends on data")
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
