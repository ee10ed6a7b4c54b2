"""The models of the isolation experiment: victims small and large, and one for each way of being a nuisance.

All are made on the spot with random weights. Rows are the first dimension, where a model has it variable.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from tests.gpu.networks import Draft, Network, mlp, resnet

from . import hogs, nets
from .nets import IMAGE, Array

AT_ONCE = 4
"""Models that are made at the same time."""
ROWS = 64
"""The largest batch: 64 images are 38 MB."""


def identity() -> Network:
    """Its input."""
    draft = Draft()
    draft.named("y", "x")
    return Network(draft.finish({"x": ("b", 16)}, {"y": ("b", 16)}), _rows(16), ())


def numbers() -> Network:
    """The same for 90,000 of them: a megabyte of JSON each way, the most that a server takes by default."""
    draft = Draft()
    draft.named("y", "x")
    return Network(draft.finish({"x": ("b", 90_000)}, {"y": ("b", 90_000)}), _rows(90_000), ())


def conv(channels: int = 64, side: int = 56) -> Network:
    """Eight convolutions over a small image: 1.6 GFLOP a row of 13 KB."""
    draft, x, width = Draft(), "x", 1
    for _ in range(8):
        x, width = draft.op("Relu", draft.conv(x, width, channels)), channels
    draft.named("y", draft.op("Flatten", draft.op("GlobalAveragePool", x)))
    return Network(draft.finish({"x": ("b", 1, side, side)}, {"y": ("b", channels)}), _rows(1, side, side), ())


def image() -> Network:
    """The mean of each colour: much to carry, nothing to compute."""
    draft = Draft()
    draft.named("y", draft.op("GlobalAveragePool", "x"))
    return Network(draft.finish({"x": ("b", *IMAGE)}, {"y": ("b", 3, 1, 1)}), _rows(*IMAGE), ())


def elementwise(millions: int) -> Network:
    """One number multiplied with `millions` of them and added to as many others: 8 bytes read for each, far past any cache."""
    draft, length = Draft(), millions << 20
    product = draft.op("Mul", "x", draft.weight(1, length))
    draft.named("y", draft.op("ReduceMax", draft.op("Add", product, draft.weight(1, length)), axes=[1]))
    return Network(draft.finish({"x": (1, 1)}, {"y": (1, 1)}), {}, ())


def wide() -> Network:
    """Sixteen numbers repeated until they are 8 MB."""
    draft = Draft()
    draft.named("y", draft.op("Mul", "x", draft.constant(np.ones((2**17, 16), np.float32))))
    return Network(draft.finish({"x": (1, 16)}, {"y": (2**17, 16)}), {}, ())


@cache
def gemm(width: int = 8192, layers: int = 2) -> Network:
    """Layers whose weights, 537 MB, no cache holds: one row takes as long as reading them does. Kept, as it takes seconds."""
    draft, x, chance = Draft(), "x", np.random.default_rng(1)
    for _ in range(layers):
        weight = chance.random((width, width), np.float32)
        weight -= np.float32(0.5)
        weight *= np.float32((24 / width) ** 0.5)
        x = draft.op("Relu", draft.op("MatMul", x, draft.constant(weight)))
    draft.named("y", x)
    return Network(draft.finish({"x": ("b", width)}, {"y": ("b", width)}), _few(width), ())


def _few(*shape: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Made for one row, and able to take some."""
    return {"x": ((1, *shape), (1, *shape), (nets.MOST_ROWS, *shape))}


def _net(name: str) -> Network:
    """One of the change experiment, as a GPU has it."""
    net = nets.NETS["cuda"][name]
    return Network(net.make(nets.SEEDS[name]), _few(*net.row), ())


def _rows(*shape: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    return {"x": ((1, *shape), (ROWS, *shape), (ROWS, *shape))}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with one FP32 input x, of which one row has this shape, and one FP32 output y.

    `on_gpu` makes a larger one for a GPU, where that has to be larger to do what it is about. `mib` is what an inference moves
    through memory, a cache or over PCIe, on cores and on a GPU; 0 for models that are not about that. `kept` is the size of the
    weights that a GPU keeps; what is beyond it is streamed. "" for all.
    """

    name: str
    network: Callable[[], Network]
    row: tuple[int, ...]
    on_gpu: Callable[[], Network] | None = None
    mib: tuple[float, float] = (0, 0)
    kept: str = ""


def _hog(
    name: str, make: Callable[[int, int], Network], cores: tuple[int, int], gpu: tuple[int, int], each: float = 1
) -> Subject:
    """One that moves `each` byte of so many MiB so many times, on cores and on a GPU."""
    moved = cores[0] * cores[1] * each, gpu[0] * gpu[1] * each
    return Subject(name, lambda: make(*cores), (1,), lambda: make(*gpu), moved)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("identity", identity, (16,)),
        Subject("numbers", numbers, (90_000,)),
        Subject("mlp", mlp, (784,)),
        Subject("resnet", resnet, IMAGE),
        Subject("conv", conv, (1, 56, 56)),
        Subject("image", image, IMAGE),
        Subject("elementwise", lambda: elementwise(8), (1,)),
        Subject("wide", wide, (16,)),
        Subject("gemm", gemm, (8192,)),
        *(Subject(name, partial(_net, name), nets.NETS["cuda"][name].row) for name in ("mob", "enc", "tiny")),
        _hog("reading", hogs.reading, (64, 1), (512, 4)),
        _hog("writing", hogs.writing, (64, 1), (512, 4)),
        _hog("copying", hogs.copying, (64, 1), (256, 4), each=2),
        _hog("random", hogs.random, (64, 1), (512, 8), each=1 / 8),
        _hog("cached16", hogs.cached, (16, 8), (16, 64)),
        _hog("cached40", hogs.cached, (40, 8), (40, 64)),
        Subject("outgoing", hogs.outgoing, (16,), mib=(4, 4)),
        Subject("streamed", partial(gemm, 4096, 8), (4096,), mib=(512, 448), kept="64MiB"),
    )
}


def write(root: Path, names: set[str], plans: bool) -> None:
    """Write these models as version 1 in a repository below `root`; `plans` for a GPU, ONNX otherwise. Blocks."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda name: _write(root / name / "1", SUBJECTS[name], plans), sorted(names)))


def _write(folder: Path, subject: Subject, plans: bool) -> None:
    folder.mkdir(parents=True)
    network = ((subject.on_gpu if plans else None) or subject.network)()
    path = folder / ("model.plan" if plans else "model.onnx")
    path.write_bytes(plan(network, bool(subject.kept)) if plans else network.onnx)


def plan(network: Network, streams: bool = False) -> bytes:
    """An engine file, for batches from one row to all, which may stream its weights. Blocks.

    Needs TensorRT, and no GPU if that is TensorRT-RTX.
    """
    from engines.model_files.profiles import Profile, Range
    from engines.tensorrt.building.builder import BuildOptions, build

    ranges = {name: Range(*shapes) for name, shapes in network.ranges.items()}
    return build(network.onnx, BuildOptions(profiles=(Profile(ranges),), flags=("weight_streaming",) if streams else ()))


def expected(network: Network, x: Array) -> Array:
    """The output of the model, computed by ONNX Runtime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(network.onnx, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]  # type: ignore[no-any-return]
