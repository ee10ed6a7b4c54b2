"""Which shapes to compare: all between the smallest and the largest, or so many of them. Pure."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence

from engines import ModelRefused, Signature, TensorMismatch
from engines.model_files.profiles import agrees, shape_text
from engines.signature import Shape, dims_text

ROWS = 8
"""Rows of the largest batch where nothing says how large it may be."""


def ends(signature: Signature, least: Mapping[str, Shape], most: Mapping[str, Shape]) -> tuple[list[Shape], list[Shape]]:
    """The smallest and the largest shape of each input: those given, else the engine's limits, else 1 to ROWS rows.

    Raises ModelRefused for an input that there is not, a shape that does not fit, and other sizes that vary without limits.
    """
    _check_names(signature, (*least, *most))
    found: tuple[list[Shape], list[Shape]] = [], []
    for spec in signature.inputs:
        varies = [axis for axis, dim in enumerate(spec.dims) if isinstance(dim, str)]
        if spec.name in least and spec.name in most:
            pair = least[spec.name], most[spec.name]
            for shape in pair:
                if not agrees(shape, spec.dims):
                    raise ModelRefused(f"{spec.name}:{shape_text(shape)}: the model's input is {dims_text(spec.dims)}")
        elif spec.limits:
            low, high = zip(*spec.limits, strict=True)
            pair = (
                tuple(low),
                tuple(min(size, signature.max_batch or size) if not axis else size for axis, size in enumerate(high)),
            )
        elif varies in ([], [0]):
            rows = signature.max_batch or ROWS
            low, high = (tuple(n if isinstance(dim, str) else dim for dim in spec.dims) for n in (1, rows))
            pair = low, high
        else:
            raise ModelRefused(
                f"sizes of input {spec.name} {dims_text(spec.dims)} vary; say which to compare with --from and --to, or --shape"
            )
        for shapes, shape in zip(found, pair, strict=True):
            shapes.append(shape)
    return found


def grid(signature: Signature, least: Sequence[Shape], most: Sequence[Shape], count: int, seed: int) -> list[tuple[Shape, ...]]:
    """At most `count` sets of input shapes, in order, the two ends among them; the same for the same arguments.

    Dimensions of one name have one size, and so have all first dimensions that vary.
    """
    keys: dict[object, tuple[int, int]] = {}
    for number, spec in enumerate(signature.inputs):
        for axis, dim in enumerate(spec.dims):
            if isinstance(dim, str):
                low, high = keys.get(_key(number, axis, dim), (0, math.inf))
                keys[_key(number, axis, dim)] = int(max(low, least[number][axis])), int(min(high, most[number][axis]))
    ranges = list(keys.values())
    every = math.prod(high - low + 1 for low, high in ranges)
    numbers = list(range(every))
    if every > count:
        between = random.Random(seed).sample(range(1, every - 1), max(0, count - 2))
        numbers = [0, *sorted(between), every - 1][:count]
    return [_shapes(signature, dict(zip(keys, _sizes(number, ranges), strict=True))) for number in numbers]


def named(signature: Signature, asked: Mapping[str, Shape]) -> tuple[Shape, ...]:
    """The shapes of all inputs where these are given by name. Raises ModelRefused."""
    _check_names(signature, asked, "--shape: ")
    shapes = tuple(asked.get(spec.name, spec.shape) for spec in signature.inputs)
    try:
        signature.check(shapes)
    except TensorMismatch as error:
        raise ModelRefused(f"--shape: {error}") from error
    return shapes


def _check_names(signature: Signature, asked: Iterable[str], option: str = "") -> None:
    names = [spec.name for spec in signature.inputs]
    if unknown := [name for name in asked if name not in names]:
        raise ModelRefused(f"{option}there is no input {unknown[0]!r}; the model has {', '.join(names) or 'none'}")


def _key(number: int, axis: int, dim: str) -> object:
    return "rows" if not axis else dim or (number, axis)


def _sizes(number: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    sizes = []
    for low, high in reversed(ranges):
        number, rest = divmod(number, high - low + 1)
        sizes.append(low + rest)
    return sizes[::-1]


def _shapes(signature: Signature, sizes: Mapping[object, int]) -> tuple[Shape, ...]:
    return tuple(
        tuple(sizes[_key(number, axis, dim)] if isinstance(dim, str) else dim for axis, dim in enumerate(spec.dims))
        for number, spec in enumerate(signature.inputs)
    )
