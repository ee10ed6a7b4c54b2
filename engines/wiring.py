"""How the steps of a chain fit together: which tensor of which step is which input. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from .base import Engine
from .errors import ModelRefused
from .signature import Signature, TensorSpec


@dataclass(frozen=True, slots=True)
class Step:
    """A model of a chain: the tensor that each of its inputs takes, and the one that each of its outputs becomes, by name.

    Every input has to be named. An output that is not named is dropped. `signature` is a restriction of the engine's
    signature, by default none; `label` is what errors call the step, by default its number.
    """

    engine: Engine
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    signature: Signature | None = None
    label: str = ""

    @property
    def effective_signature(self) -> Signature:
        """The signature of the step."""
        return self.signature or self.engine.signature


@dataclass(frozen=True, slots=True)
class Wiring:
    """A chain that was checked. `takes` and `gives` are the tensors of each step, in its model's order."""

    engines: tuple[Engine, ...]
    signature: Signature
    takes: tuple[tuple[str, ...], ...]
    gives: tuple[tuple[str | None, ...], ...]
    labels: tuple[str, ...]
    """The names of the steps in errors, empty by default."""


def wire(steps: Sequence[Step], outputs: Sequence[str]) -> Wiring:
    """Check that the steps fit together. Raises ModelRefused."""
    if not steps:
        raise ModelRefused("a chain of no steps; expected one or more")
    if streaming := [step for step in steps if step.engine.signature.in_parts]:
        raise ModelRefused(f"{streaming[0].label or 'a step'} answers in parts, so it cannot be a step of a chain")
    tensors = _Tensors([set(step.outputs.values()) for step in steps], any(step.engine.signature.same_sizes for step in steps))
    for number, step in enumerate(steps):
        label = step.label or f"step {number}"
        _check_names(label, step)
        names = tensors.add_inputs(number, label, step)
        tensors.add_outputs(label, step, names)
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
    """The tensors of a chain by name, while its steps are checked, and the sizes that steps allow for dimensions of inputs."""

    def __init__(self, later: Sequence[Collection[str]], same_sizes: bool) -> None:
        self.known: dict[str, TensorSpec] = {}
        self.inputs: list[str] = []
        """The tensors that no step gives."""
        self._later = later
        self._same_sizes = same_sizes
        self._sizes: dict[str, int] = {}
        self._limits: dict[str, tuple[int, int]] = {}

    def add_inputs(self, number: int, label: str, step: Step) -> dict[str, str]:
        """Look up a step's inputs; a tensor that no step gives becomes an input of the chain.

        Returns the chain's name of each of the model's named dimensions.
        """
        names: dict[str, str] = {}
        taken = [(spec, step.inputs[spec.name]) for spec in step.effective_signature.inputs]
        new = [tensor for _, tensor in taken if tensor not in self.known]
        for spec, tensor in sorted(taken, key=lambda each: each[1] in new):  # Known tensors first: they name the dimensions.
            if tensor not in self.known:
                if any(tensor in each for each in self._later[number:]):
                    raise ModelRefused(f"{label}: input {spec.name!r} takes {tensor!r}, which only a later step gives")
                self.known[tensor] = _chain_input(spec, tensor, names, number)
            _unify(label, spec, self.known[tensor], names)
            self._limit(label, spec, self.known[tensor])
        self.inputs += dict.fromkeys(new)
        return names

    def add_outputs(self, label: str, step: Step, names: Mapping[str, str]) -> None:
        """Add a step's outputs."""
        for spec in step.effective_signature.outputs:
            if (tensor := step.outputs.get(spec.name, "")) in self.known:
                raise ModelRefused(f"{label}: output {spec.name!r} gives {tensor!r}, which there is already")
            if tensor:
                self.known[tensor] = replace(spec, name=tensor, dims=_renamed(spec, names), limits=())

    def signature(self, outputs: Sequence[str]) -> Signature:
        """The chain's signature. The limits of its inputs are those that every step allows."""
        inputs = tuple(self._limited(self.known[name]) for name in self.inputs)
        return Signature(inputs, tuple(self._fixed(self.known[name]) for name in outputs), same_sizes=self._same_sizes)

    def _limit(self, label: str, spec: TensorSpec, tensor: TensorSpec) -> None:
        """Record the sizes that a step allows for the named dimensions of a tensor that it takes."""
        for axis, (ours, theirs) in enumerate(zip(spec.dims, tensor.dims, strict=True)):
            if not isinstance(theirs, str) or not theirs:
                continue
            if isinstance(ours, int):
                if (size := self._sizes.setdefault(theirs, ours)) != ours:
                    raise ModelRefused(f"{label}: dimension {axis} of input {spec.name!r} is {ours}, but {size} elsewhere")
            elif axis < len(spec.limits):
                least, most = self._limits.get(theirs, spec.limits[axis])
                self._limits[theirs] = max(least, spec.limits[axis][0]), min(most, spec.limits[axis][1])

    def _limited(self, spec: TensorSpec) -> TensorSpec:
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
    inputs = [spec.name for spec in step.effective_signature.inputs]
    outputs = [spec.name for spec in step.effective_signature.outputs]
    if missing := [name for name in inputs if name not in step.inputs]:
        raise ModelRefused(f"{label}: no tensor is given for input {missing[0]!r}; the model's are {', '.join(inputs)}")
    for named, real in ((step.inputs, inputs), (step.outputs, outputs)):
        if unknown := [name for name in named if name not in real]:
            raise ModelRefused(f"{label}: the model has no {unknown[0]!r}; there are {', '.join(real)}")
    if len(set(step.outputs.values())) < len(step.outputs):
        raise ModelRefused(f"{label}: two outputs give one tensor")


def _chain_input(spec: TensorSpec, tensor: str, names: Mapping[str, str], number: int) -> TensorSpec:
    """An input of the chain. Names of dimensions belong to a model, so a later step's get its number as a suffix."""
    own = f".{number}" if number else ""
    dims = tuple(names.get(dim, f"{dim}{own}") if isinstance(dim, str) and dim else dim for dim in spec.dims)
    return replace(spec, name=tensor, dims=dims)


def _unify(label: str, spec: TensorSpec, tensor: TensorSpec, names: dict[str, str]) -> None:
    """Check an input against its tensor, and record the chain's names of the model's named dimensions."""
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
    """Dimensions in the chain's names. Those that are not of the chain's inputs are known only after it ran."""
    return tuple(dim if isinstance(dim, int) else names.get(dim, "") for dim in spec.dims)
