"""The networks of the change experiment, in the shapes of real ones: a MobileNetV2, a transformer encoder, a tiny MLP.

Random weights from a seed, scaled so that activations keep their size: answers to different inputs differ by far more than
rounding. All have one FP32 input x and one FP32 output y, rows first. A CPU gets smaller ones of the same kinds.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.networks import Draft

Array = np.ndarray[Any, np.dtype[np.float32]]
IMAGE = (3, 224, 224)
MOST_ROWS = 8
"""The largest batch of each, but for `mean`."""
MANY_ROWS = 64
"""The largest batch of `mean`: 64 images are 38.5 MB."""
_BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""MobileNetV2's inverted residual blocks (Sandler et al. 2018, table 2): expansion, channels, how many, first stride."""


class _Layers(Draft):
    """Layers with weights of a chosen scale and a bias; every method returns the name of its output."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._chance = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float) -> str:
        return self.constant(self._chance.standard_normal(shape, np.float32) * np.float32(scale))

    def convolve(self, x: str, inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1) -> str:
        fan = inputs // groups * size * size
        weight = self.normal(outputs, inputs // groups, size, size, scale=(2 / fan) ** 0.5)
        sizes = {"kernel_shape": [size, size], "pads": [size // 2] * 4, "strides": [stride, stride], "group": groups}
        return self.op("Conv", x, weight, self.normal(outputs, scale=0.05), **sizes)

    def clipped(self, x: str) -> str:
        """ReLU6."""
        return self.op("Clip", x, self.constant(np.asarray(0, np.float32)), self.constant(np.asarray(6, np.float32)))

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        product = self.op("MatMul", x, self.normal(inputs, outputs, scale=inputs**-0.5))
        return self.op("Add", product, self.normal(outputs, scale=0.02))

    def normalized(self, x: str, width: int) -> str:
        scale = self.constant((1 + 0.1 * self._chance.standard_normal(width)).astype(np.float32))
        return self.op("LayerNormalization", x, scale, self.normal(width, scale=0.1), axis=-1)

    def gelu(self, x: str) -> str:
        half, one, root = (self.constant(np.asarray(value, np.float32)) for value in (0.5, 1.0, 2**-0.5))
        return self.op("Mul", self.op("Mul", x, half), self.op("Add", self.op("Erf", self.op("Mul", x, root)), one))


def mobilenet(seed: int = 21, image: tuple[int, int, int] = IMAGE, blocks: tuple[tuple[int, ...], ...] = _BLOCKS) -> bytes:
    """MobileNetV2 of width 1.0 with the batch norms folded away; 1000 classes."""
    net = _Layers(seed)
    x, width = net.clipped(net.convolve("x", 3, 32, 3, 2)), 32
    for expansion, channels, count, first in blocks:
        for number in range(count):
            stride, inner, y = first if number == 0 else 1, width * expansion, x
            if expansion > 1:
                y = net.clipped(net.convolve(y, width, inner))
            y = net.clipped(net.convolve(y, inner, inner, 3, stride, groups=inner))
            y = net.convolve(y, inner, channels)
            x = net.op("Add", x, y) if stride == 1 and width == channels else y
            width = channels
    x = net.clipped(net.convolve(x, width, 1280))
    net.named("y", net.linear(net.op("Flatten", net.op("GlobalAveragePool", x)), 1280, 1000))
    return net.finish({"x": ("n", *image)}, {"y": ("n", 1000)})


def encoder(seed: int = 22, layers: int = 6, width: int = 512, tokens: int | str = 128, heads: int = 8) -> bytes:
    """Transformer encoder layers that normalize after each half, GELU by erf; floats in and out. `tokens` may be a name."""
    net = _Layers(seed)
    count = -1 if isinstance(tokens, str) else tokens
    apart = net.constant(np.array([0, count, heads, width // heads], np.int64))
    joined = net.constant(np.array([0, count, width], np.int64))
    scale = net.constant(np.asarray((width // heads) ** -0.5, np.float32))
    x = net.normalized("x", width)
    for _ in range(layers):
        q, k, v = (net.op("Reshape", net.linear(x, width, width), apart) for _ in range(3))
        q, v = (net.op("Transpose", each, perm=[0, 2, 1, 3]) for each in (q, v))
        scores = net.op("Mul", net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 3, 1])), scale)
        seen = net.op("Transpose", net.op("MatMul", net.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        x = net.normalized(net.op("Add", x, net.linear(net.op("Reshape", seen, joined), width, width)), width)
        wide = net.gelu(net.linear(x, width, 4 * width))
        x = net.normalized(net.op("Add", x, net.linear(wide, 4 * width, width)), width)
    net.named("y", x)
    return net.finish({"x": ("n", tokens, width)}, {"y": ("n", tokens, width)})


def tiny(seed: int = 23) -> bytes:
    """64-128-128-8 with tanh between."""
    net, x, sizes = _Layers(seed), "x", (64, 128, 128, 8)
    for inputs, outputs in pairwise(sizes):
        x = net.linear(x, inputs, outputs)
        x = net.op("Tanh", x) if outputs != sizes[-1] else x
    net.named("y", x)
    return net.finish({"x": ("n", 64)}, {"y": ("n", 8)})


def mean(image: tuple[int, int, int] = IMAGE) -> bytes:
    """The mean of each colour: much to carry, hardly anything to compute."""
    net = Draft()
    net.named("y", net.op("Flatten", net.op("GlobalAveragePool", "x")))
    return net.finish({"x": ("n", *image)}, {"y": ("n", image[0])})


@dataclass(frozen=True, slots=True)
class Net:
    """A model: what makes its ONNX file of a seed, the shape of one row, and the largest batch."""

    make: Callable[[int], bytes]
    row: tuple[int, ...]
    most: int = MOST_ROWS

    def draw(self, rows: int, seed: int) -> Array:
        """So many rows of numbers, each row of another mean and spread."""
        chance = np.random.default_rng(seed)
        ones = (rows, *[1] * len(self.row))
        spread, middle = chance.uniform(0.3, 3, ones), chance.uniform(-2, 2, ones)
        return (chance.standard_normal((rows, *self.row), np.float32) * spread + middle).astype(np.float32)


SMALL_IMAGE = (3, 32, 32)
NETS: dict[str, dict[str, Net]] = {
    "cuda": {
        "mob": Net(mobilenet, IMAGE),
        "enc": Net(encoder, (128, 512)),
        "tiny": Net(tiny, (64,)),
        "mean": Net(lambda _: mean(), IMAGE, MANY_ROWS),
    },
    "cpu": {
        "mob": Net(lambda seed: mobilenet(seed, SMALL_IMAGE, _BLOCKS[:3]), SMALL_IMAGE),
        "enc": Net(lambda seed: encoder(seed, 1, 64, 16, 4), (16, 64)),
        "tiny": Net(tiny, (64,)),
        "mean": Net(lambda _: mean(SMALL_IMAGE), SMALL_IMAGE, MANY_ROWS),
    },
}
"""By device and name."""
SEEDS = {"mob": 21, "enc": 22, "tiny": 23, "mean": 24}


def write(root: Path, name: str, onnx: bytes, most: int = MOST_ROWS) -> None:
    """Put a model's only version into a repository, with its largest batch in its `config.pbtxt`."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(f"name: {json.dumps(name)}\nmax_batch_size: {most}\n")
    (folder / "model.onnx").write_bytes(onnx)


def write_all(root: Path, device: str) -> None:
    """The repository of the experiment. Models that are there already stay, with what was compiled for them."""
    for name, net in NETS[device].items():
        if not (root / name).exists():
            write(root, name, net.make(SEEDS[name]), net.most)
