"""How models fit together that run one after another: which tensor of which step is which input; pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from .base import Engine
from .errors import ModelRefused
from .signature import Signature, TensorSpec


@dataclass(frozen=True, slots=True)
class Step:
    """A model of a chain: the tensor that each of its inputs takes, and the one that each of its outputs becomes, by name.

    Every input has to be named. An output that is not is dropped. `signature` is what the model is narrowed to, by default
    the engine's own; `label` is what errors call the step, by default its number.
    """

    engine: Engine
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    signature: Signature | None = None
    label: str = ""

    @property
    def narrowed(self) -> Signature:
        """What it takes and gives as a step."""
        return self.signature or self.engine.signature


@dataclass(frozen=True, slots=True)
class Wiring:
    """A chain that was found right. `takes` and `gives` are the tensors of each step, in its model's order."""

    engines: tuple[Engine, ...]
    signature: Signature
    takes: tuple[tuple[str, ...], ...]
    gives: tuple[tuple[str | None, ...], ...]
    labels: tuple[str, ...]
    """What errors call the steps, empty where nothing was said."""


def wire(steps: Sequence[Step], outputs: Sequence[str]) -> Wiring:
    """Check that the steps fit together; pure. Raises ModelRefused."""
    if not steps:
        raise ModelRefused("a chain of no steps; expected one or more")
    tensors = _Tensors([set(step.outputs.values()) for step in steps])
    for number, step in enumerate(steps):
        label = step.label or f"step {number}"
        _check_names(label, step)
        names = tensors.take(number, label, step)
        tensors.give(label, step, names)
    if missing := [name for name in outputs if name not in tensors.known or name in tensors.inputs]:
        raise ModelRefused(f"no step gives {', '.join(map(repr, missing))}")
    if not outputs:
        raise ModelRefused("a chain without outputs; expected one or more")
    takes = tuple(tuple(step.inputs[spec.name] for spec in step.engine.signature.inputs) for step in steps)
    gives = tuple(tuple(step.outputs.get(spec.name) for spec in step.engine.signature.outputs) for step in steps)
    return Wiring(
        tuple(step.engine for step in steps), tensors.signature(outputs), takes, gives, tuple(step.label for step in steps)
    )


class _Tensors:
    """The tensors of a chain by name, while its steps are looked at, and what the steps allow dimensions of inputs to be."""

    def __init__(self, later: Sequence[Collection[str]]) -> None:
        self.known: dict[str, TensorSpec] = {}
        self.inputs: list[str] = []
        """Those that no step gives."""
        self._later = later
        self._sizes: dict[str, int] = {}
        self._limits: dict[str, tuple[int, int]] = {}

    def take(self, number: int, label: str, step: Step) -> dict[str, str]:
        """Find a step's inputs; what no step gives becomes an input of the chain. Returns what the model's names of dimensions
        are called in the chain.
        """
        names: dict[str, str] = {}
        taken = [(spec, step.inputs[spec.name]) for spec in step.narrowed.inputs]
        fresh = [tensor for _, tensor in taken if tensor not in self.known]
        for spec, tensor in sorted(taken, key=lambda each: each[1] in fresh):  # Sizes that are known name those that are not.
            if tensor not in self.known:
                if any(tensor in each for each in self._later[number:]):
                    raise ModelRefused(f"{label}: input {spec.name!r} takes {tensor!r}, which only a later step gives")
                self.known[tensor] = _fresh(spec, tensor, names, number)
            _unify(label, spec, self.known[tensor], names)
            self._bound(label, spec, self.known[tensor])
        self.inputs += dict.fromkeys(fresh)
        return names

    def give(self, label: str, step: Step, names: Mapping[str, str]) -> None:
        """Add a step's outputs."""
        for spec in step.narrowed.outputs:
            if (tensor := step.outputs.get(spec.name, "")) in self.known:
                raise ModelRefused(f"{label}: output {spec.name!r} gives {tensor!r}, which there is already")
            if tensor:
                self.known[tensor] = replace(spec, name=tensor, dims=_renamed(spec, names), limits=())

    def signature(self, outputs: Sequence[str]) -> Signature:
        """The chain's, whose inputs are as small and as large as every step that takes them, or what comes of them, allows."""
        inputs = tuple(self._narrowed(self.known[name]) for name in self.inputs)
        return Signature(inputs, tuple(self._fixed(self.known[name]) for name in outputs))

    def _bound(self, label: str, spec: TensorSpec, tensor: TensorSpec) -> None:
        """Note what a step allows the named dimensions of a tensor that it takes to be."""
        for axis, (ours, theirs) in enumerate(zip(spec.dims, tensor.dims, strict=True)):
            if not isinstance(theirs, str) or not theirs:
                continue
            if isinstance(ours, int):
                if (size := self._sizes.setdefault(theirs, ours)) != ours:
                    raise ModelRefused(f"{label}: dimension {axis} of input {spec.name!r} is {ours}, but {size} elsewhere")
            elif axis < len(spec.limits):
                least, most = self._limits.get(theirs, spec.limits[axis])
                self._limits[theirs] = max(least, spec.limits[axis][0]), min(most, spec.limits[axis][1])

    def _narrowed(self, spec: TensorSpec) -> TensorSpec:
        limits = list(spec.limits)
        for axis, dim in enumerate(spec.dims):
            bound = self._limits.get(dim) if isinstance(dim, str) else None
            if bound and axis <= len(limits):
                limits[axis : axis + 1] = [bound]
                if bound[0] > bound[1]:
                    text = f"dimension {axis} of input {spec.name!r} would have to be {bound[0]} or more and {bound[1]} or less"
                    raise ModelRefused(f"no input suits every step: {text}")
        return self._fixed(replace(spec, limits=tuple(limits)))

    def _fixed(self, spec: TensorSpec) -> TensorSpec:
        dims = tuple(self._sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.dims)
        return replace(spec, dims=dims)


def _check_names(label: str, step: Step) -> None:
    inputs = [spec.name for spec in step.narrowed.inputs]
    outputs = [spec.name for spec in step.narrowed.outputs]
    if missing := [name for name in inputs if name not in step.inputs]:
        raise ModelRefused(f"{label}: nothing is said of input {missing[0]!r}; the model's are {', '.join(inputs)}")
    for named, real in ((step.inputs, inputs), (step.outputs, outputs)):
        if unknown := [name for name in named if name not in real]:
            raise ModelRefused(f"{label}: the model has no {unknown[0]!r}; there are {', '.join(real)}")
    if len(set(step.outputs.values())) < len(step.outputs):
        raise ModelRefused(f"{label}: two outputs give one tensor")


def _fresh(spec: TensorSpec, tensor: str, names: Mapping[str, str], number: int) -> TensorSpec:
    """An input of the chain. Names of dimensions are a model's own: those of a later one are others than the first's."""
    own = f".{number}" if number else ""
    dims = tuple(names.get(dim, f"{dim}{own}") if isinstance(dim, str) and dim else dim for dim in spec.dims)
    return replace(spec, name=tensor, dims=dims)


def _unify(label: str, spec: TensorSpec, tensor: TensorSpec, names: dict[str, str]) -> None:
    """Check an input against its tensor, and learn what the model's names of dimensions are called in the chain."""
    fits = len(spec.dims) == len(tensor.dims) and all(
        isinstance(ours, str) or isinstance(theirs, str) or ours == theirs
        for ours, theirs in zip(spec.dims, tensor.dims, strict=False)
    )
    if spec.datatype != tensor.datatype or not fits:
        raise ModelRefused(
            f"{label}: input {spec.name!r} is {spec.datatype} {list(spec.shape)}, "
            f"but {tensor.name!r} is {tensor.datatype} {list(tensor.shape)}"
        )
    for ours, theirs in zip(spec.dims, tensor.dims, strict=True):
        if isinstance(ours, str) and ours and isinstance(theirs, str) and theirs:
            names.setdefault(ours, theirs)


def _renamed(spec: TensorSpec, names: Mapping[str, str]) -> tuple[int | str, ...]:
    """What is not of the chain's inputs is known only once it ran."""
    return tuple(dim if isinstance(dim, int) else names.get(dim, "") for dim in spec.dims)
