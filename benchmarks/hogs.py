"""Models that do hardly anything but move bytes: through memory, a cache or PCIe. Ordinary ONNX, made on the spot.

All have a number or sixteen as the input x, and a small output y. `mib` is how much they move at a time, or keep in use. For
all but `cached` that is more than the device's last cache holds, or nothing reaches memory. What a compiler could compute
before, fuse away or leave out it does not get: everything depends on x, each pass on the result of the one before,
and what is to be written is written by an operator that libraries do not fuse with the next. A pass is
repeated some `times`, as an inference of a fraction of a millisecond would leave the device waiting for the next one.
"""

import math

import numpy as np

from tests.gpu.networks import Draft, Network

_FURTHER = 8
"""Rows by which `random` may begin further on, and that its table has at the end besides."""


def reading(mib: int, times: int = 1) -> Network:
    """Reads a weight. ONNX Runtime, which does not fuse the two operators of a pass, also writes and reads as much again."""
    draft, x = Draft(), "x"
    weight = draft.constant(_numbers(mib << 6, 4096))
    for _ in range(times):
        rows = draft.op("ReduceMax", draft.op("Mul", weight, x), axes=[1])
        x = draft.op("Tanh", draft.op("ReduceMax", rows, axes=[0]))
    return _finished(draft, x)


def writing(mib: int, times: int = 1) -> Network:
    """Writes many channels of a small image, of which few numbers are read."""
    draft, x = Draft(), "x"
    image, weight = draft.constant(_numbers(1, 1, 1024, 1024)), draft.constant(_numbers(mib // 4, 1, 1, 1))
    for _ in range(times):
        x = draft.op("Tanh", _few(draft, draft.op("Conv", draft.op("Add", image, x), weight)))
    return _finished(draft, x)


def copying(mib: int, times: int = 1) -> Network:
    """Reads and writes all of an image of 16 channels, by convolutions of each channel by itself."""
    draft, side = Draft(), math.isqrt(mib << 14)
    x = draft.op("Mul", draft.constant(_numbers(1, 16, side, side)), "x")
    for _ in range(times):
        weight = draft.constant(_numbers(16, 1, 3, 3, scale=0.25))
        x = draft.op("Relu", draft.op("Conv", x, weight, pads=[1] * 4, group=16))
    return _finished(draft, _few(draft, x))


def random(mib: int, times: int = 1) -> Network:
    """Reads rows of 32 bytes, a sector each, of a table, an eighth of all in an order that nothing foresees."""
    draft, x, rows = Draft(), "x", mib << 15
    table = draft.constant(_numbers(rows, 8))
    order = np.random.default_rng(2).integers(0, rows - _FURTHER, rows // 8, np.int32)
    places = draft.constant(order)
    least, most = (draft.constant(np.asarray(value, np.float32)) for value in (0, _FURTHER - 1))
    for _ in range(times):
        start = draft.op("Cast", draft.op("Clip", x, least, most), to=6)  # INT32
        found = draft.op("Gather", table, draft.op("Add", places, start), axis=0)
        x = draft.op("Mul", x, draft.op("ReduceMax", draft.op("ReduceMax", found, axes=[2], keepdims=0), axes=[1]))
    return _finished(draft, x)


def cached(mib: int, times: int = 64) -> Network:
    """Reads a matrix again and again, which is small enough for a cache. It is computed, so that there is one of it."""
    draft, side = Draft(), math.isqrt(mib << 18)
    near_one = draft.op("Clip", "x", *(draft.constant(np.asarray(value, np.float32)) for value in (0.999, 1.001)))
    matrix = draft.op("Mul", draft.constant(_numbers(side, side, scale=math.sqrt(6 / side), least=-0.5)), near_one)
    x = draft.op("Mul", draft.constant(_numbers(1, side)), near_one)
    for _ in range(times):
        x = draft.op("Relu", draft.op("MatMul", x, matrix))
    return _finished(draft, draft.op("ReduceMax", x, axes=[1]))


def outgoing(mib: int = 4) -> Network:
    """Sixteen numbers in, eight out, and a second output of so many MiB that no client has to ask for."""
    draft = Draft()
    draft.named("y", draft.op("MatMul", "x", draft.constant(_numbers(16, 8))))
    draft.named("z", draft.op("Mul", draft.op("ReduceMax", "x", axes=[1]), draft.constant(_numbers(1, mib << 18))))
    return Network(draft.finish({"x": (1, 16)}, {"y": (1, 8), "z": (1, mib << 18)}), {}, ())


def _numbers(*shape: int, scale: float = 1.0, least: float = 0.0) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """Uniform ones, from `least` to a width of 1 above it, scaled."""
    found = np.random.default_rng(1).random(shape, np.float32)
    found += np.float32(least)
    found *= np.float32(scale)
    return found


def _few(draft: Draft, image: str) -> str:
    """The largest of few numbers of an image, as 1 by 1."""
    pools = draft.op("MaxPool", image, kernel_shape=[2, 2], strides=[256, 256])
    return draft.op("ReduceMax", draft.op("ReduceMax", pools, axes=[2, 3], keepdims=0), axes=[1])


def _finished(draft: Draft, y: str) -> Network:
    draft.named("y", y)
    return Network(draft.finish({"x": (1, 1)}, {"y": (1, 1)}), {}, ())
