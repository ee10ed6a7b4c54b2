"""Optimization profiles: the sizes an engine is built for, their defaults, and which one fits a request.

A profile has a range of shapes for every dynamic input, and the size of the partition that its kernels are tuned for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ..errors import ModelRefused, TensorMismatch, did_you_mean
from ..signature import Shape, Signature, TensorSpec, dims_text


class Range(NamedTuple):
    """The smallest shape an input may have, the one to be fastest at, and the largest."""

    min: Shape
    opt: Shape
    max: Shape

    def __str__(self) -> str:
        return "..".join(shape_text(shape) for shape in self)

    def fits(self, shape: Shape) -> bool:
        """Whether every dimension is between the smallest and the largest."""
        sizes = zip(self.min, shape, self.max, strict=False)
        return len(shape) == len(self.min) and all(least <= size <= most for least, size, most in sizes)


@dataclass(frozen=True, slots=True)
class Profile:
    """Ranges of the dynamic inputs by name; `sms`, the size of partition it is meant for; `tuned`, whether it was measured
    there.
    """

    ranges: Mapping[str, Range] = field(default_factory=dict)
    sms: int | None = None
    tuned: bool = False

    def __str__(self) -> str:
        ranges = ", ".join(f"{name} {range_}" for name, range_ in self.ranges.items()) or "no dynamic inputs"
        tuning = "" if self.sms is None else f"; {'tuned' if self.tuned else 'meant, but not tuned,'} for {self.sms} SMs"
        return ranges + tuning

    def fits(self, given: Mapping[str, Shape]) -> bool:
        """Whether the shapes of all its inputs, by name, are within its ranges."""
        return all(sizes.fits(given[name]) for name, sizes in self.ranges.items())


def parse_shape(text: str) -> tuple[str, Shape]:
    """Parse `name:1x3x224x224`. Raises ValueError."""
    name, colon, sizes = text.rpartition(":")
    parts = sizes.split("x")
    if not (colon and name) or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{text!r} is no shape; expected NAME:1x3x224x224")
    return name, tuple(map(int, parts))


def make_range(least: Shape | None, best: Shape | None, most: Shape | None) -> Range:
    """A range of one to three shapes. A missing minimum or optimum is the next larger one, a missing maximum the one before."""
    best = best or most or least or ()
    return Range(least or best, best, most or best)


def complete(
    profiles: Sequence[Profile], inputs: Sequence[TensorSpec], max_batch: int
) -> tuple[tuple[Profile, ...], list[str]]:
    """Profiles that cover every dynamic input, at least one, and a line of text for every range that was chosen by default.

    A profile without ranges gets batches of 1 to `max_batch` where only the first dimension is dynamic; other sizes cannot be
    guessed. Raises ModelRefused naming the profile, the input, what came and what was expected.
    """
    dynamic = [spec for spec in inputs if -1 in spec.shape]
    done, notes = [], []
    for index, profile in enumerate(profiles or [Profile()]):
        ranges = dict(profile.ranges) or {spec.name: _batches(spec, max_batch) for spec in dynamic}
        if not profile.ranges:
            notes += [f"profile {index}: no range given for input {name!r}: built for {ranges[name]}" for name in ranges]
        for name, range_ in ranges.items():
            _check(index, name, range_, inputs)
        for spec in dynamic:
            if spec.name not in ranges:
                raise ModelRefused(
                    f"profile {index}: no range for input {spec.name!r} of shape {dims_text(spec.dims)}; {_advice(spec)}"
                )
        done.append(Profile({spec.name: ranges[spec.name] for spec in dynamic}, profile.sms, profile.tuned))
    return tuple(done), notes


def choose(profiles: Sequence[Profile], signature: Signature, shapes: Sequence[Shape], active: int = 0) -> int:
    """The profile to run these shapes with: the active one if it fits, else the first that does. Raises TensorMismatch."""
    given = {spec.name: shape for spec, shape in zip(signature.inputs, shapes, strict=True)}
    for number in chain([active], range(len(profiles))):
        if profiles[number].fits(given):
            return number
    came = ", ".join(f"{name} {shape_text(given[name])}" for name in profiles[active].ranges)
    there = "; ".join(f"profile {index}: {profile}" for index, profile in enumerate(profiles))
    raise TensorMismatch(f"no profile of the engine fits {came}; it was built with {there}")


def best_profile(profiles: Sequence[Profile], usable: Sequence[int], sms: int) -> int:
    """The usable profile for a partition of this many SMs: the one for the most SMs that it has, else the first."""
    fitting = [number for number in usable if (profiles[number].sms or 0) <= sms]
    return max(fitting or usable[:1], key=lambda number: (profiles[number].sms or 0, -number))


def usual(profile: Profile, inputs: Sequence[TensorSpec]) -> list[tuple[Shape, ...]]:
    """Sets of input shapes to have ready, the most usual one last: the smallest, the largest, and, if only the batch varies,
    its powers of two.

    An inference of a shape that is not ready makes its tenant wait while kernels are compiled.
    """
    ranges = [profile.ranges.get(spec.name, Range(*[spec.shape] * 3)) for spec in inputs]
    sets = [tuple(getattr(each, word) for each in ranges) for word in ("min", "max")]
    varying = [each for each in ranges if each.min != each.max]
    if varying and all(each.min[1:] == each.max[1:] for each in varying):
        sets += [
            tuple(_of_batch(each, 1 << power) for each in ranges)
            for power in range(max(e.max[0] for e in varying).bit_length())
        ]
    last = tuple(each.opt for each in ranges)
    return [*(each for each in dict.fromkeys(sets) if each != last), last]


def _of_batch(sizes: Range, batch: int) -> Shape:
    if sizes.min == sizes.max:
        return sizes.min
    return min(max(batch, sizes.min[0]), sizes.max[0]), *sizes.min[1:]


def padded(shapes: tuple[Shape, ...], ready: Iterable[tuple[Shape, ...]]) -> tuple[Shape, ...] | None:
    """The smallest of the sets of shapes in `ready` that differs from `shapes` only in having more rows; None without one.

    Rows are the first dimension, of which all inputs have equally many.
    """
    rows = shapes[0][:1] if shapes else ()
    if not rows or rows == (0,) or any(shape[:1] != rows for shape in shapes):
        return None
    rest = [shape[1:] for shape in shapes]
    larger = [each for each in ready if each[0][:1] > rows and [shape[1:] for shape in each] == rest]
    return min((each for each in larger if len({shape[0] for shape in each}) == 1), default=None)


def shape_text(shape: Shape) -> str:
    """A shape as text: `1x3x224x224`."""
    return "x".join(map(str, shape))


def agrees(shape: Shape, dims: Sequence[int | str]) -> bool:
    """Whether a shape has as many dimensions, and the sizes of those that are not dynamic."""
    return len(shape) == len(dims) and all(isinstance(dim, str) or dim == size for size, dim in zip(shape, dims, strict=True))


def _batches(spec: TensorSpec, max_batch: int) -> Range:
    if -1 in spec.shape[1:]:
        raise ModelRefused(
            f"input {spec.name!r} has dynamic dimensions besides the first: {dims_text(spec.dims)}; {_advice(spec)}"
        )
    one, most = ((batch, *spec.shape[1:]) for batch in (1, max_batch))
    return Range(one, most, most)


def _check(index: int, name: str, range_: Range, inputs: Sequence[TensorSpec]) -> None:
    spec = next((spec for spec in inputs if spec.name == name), None)
    if spec is None:
        known = [spec.name for spec in inputs]
        raise ModelRefused(
            f"profile {index}: the model has no input {name!r}; {did_you_mean(name, known)}it has {', '.join(map(repr, known))}"
        )
    for word, shape in zip(Range._fields, range_, strict=True):
        if not agrees(shape, spec.dims):
            raise ModelRefused(
                f"profile {index}: {word} of input {name!r} is {shape_text(shape)}, but the model has {dims_text(spec.dims)}"
            )
    if not range_.fits(range_.opt) or 0 in range_.max:
        raise ModelRefused(
            f"profile {index}: input {name!r} has {range_}; expected min <= opt <= max in every dimension, max from 1"
        )


def _advice(spec: TensorSpec) -> str:
    pattern = "x".join(f"{dim if isinstance(dim, int) else f'<{dim or axis}>'}" for axis, dim in enumerate(spec.dims))
    return f"give --min, --opt and --max {spec.name}:{pattern}"
