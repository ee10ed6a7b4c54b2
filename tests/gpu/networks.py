"""Networks of our own for the GPU: random weights from a fixed seed, shapes that real models have."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from engines.model_files.profiles import Profile, Range
from engines.tensorrt.building.builder import DEFAULTS, BuildOptions, build

Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


class Draft:
    """An ONNX graph that is being built; every method returns the name of the tensor it adds."""

    def __init__(self, seed: int = 1) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(seed)

    def weight(self, *shape: int) -> str:
        fan = int(np.prod(shape[1:])) or 1
        return self.constant(self._random.standard_normal(shape).astype(np.float32) / np.sqrt(fan).astype(np.float32))

    def constant(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def named(self, name: str, source: str) -> None:
        self.nodes.append(helper.make_node("Identity", [source], [name]))

    def conv(self, x: str, inputs: int, outputs: int, size: int = 3, stride: int = 1) -> str:
        pads = [size // 2] * 4
        return self.op("Conv", x, self.weight(outputs, inputs, size, size), pads=pads, strides=[stride, stride])

    def dense(self, x: str, inputs: int, outputs: int) -> str:
        return self.op("Add", self.op("MatMul", x, self.weight(inputs, outputs)), self.weight(outputs))

    def finish(self, inputs: dict[str, tuple], outputs: dict[str, tuple], integers: frozenset[str] = frozenset()) -> bytes:
        def values(table: dict[str, tuple]) -> list[onnx.ValueInfoProto]:
            kinds = {True: TensorProto.INT64, False: TensorProto.FLOAT}
            return [helper.make_tensor_value_info(name, kinds[name in integers], dims) for name, dims in table.items()]

        graph = helper.make_graph(self.nodes, "network", values(inputs), values(outputs), self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        return model.SerializeToString()


@dataclass(frozen=True)
class Network:
    """An ONNX file's bytes, the smallest, best and largest shapes of its dynamic inputs, and shapes to try."""

    onnx: bytes
    ranges: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    tries: tuple[Shapes, ...]
    integers: frozenset[str] = frozenset()
    datatype: str = "FP32"
    reference: bytes = b""
    """The same in FP32, which ONNX Runtime computes on a CPU; empty for `onnx` itself."""

    def batch(self, rows: int) -> Shapes | None:
        """The optimum shapes with this batch; None if the network cannot have it."""
        fits = all(least[0] <= rows <= most[0] for least, _, most in self.ranges.values())
        return {name: (rows, *best[1:]) for name, (_, best, _) in self.ranges.items()} if fits else None


def mlp() -> Network:
    draft, x = Draft(), "x"
    for inputs, outputs in ((784, 512), (512, 512)):
        x = draft.op("Relu", draft.dense(x, inputs, outputs))
    draft.named("y", draft.dense(x, 512, 10))
    tries = tuple({"x": (batch, 784)} for batch in (1, 3, 8))
    return Network(draft.finish({"x": ("b", 784)}, {"y": ("b", 10)}), {"x": ((1, 784), (8, 784), (8, 784))}, tries)


def resnet(seed: int = 1) -> Network:
    """Half the width of ResNet-18: a stem, eight blocks of two convolutions each, a head."""
    draft = Draft(seed)
    x = draft.op("Relu", draft.conv("x", 3, 32, 7, 2))
    x = draft.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    width = 32
    for wider in (32, 32, 64, 64, 128, 128, 256, 256):
        stride = 1 if wider == width else 2
        y = draft.op("Relu", draft.conv(x, width, wider, 3, stride))
        y = draft.conv(y, wider, wider)
        x = x if stride == 1 else draft.conv(x, width, wider, 1, 2)
        x, width = draft.op("Relu", draft.op("Add", x, y)), wider
    x = draft.op("Flatten", draft.op("GlobalAveragePool", x))
    draft.named("y", draft.dense(x, 256, 1000))
    shape = (3, 224, 224)
    tries = tuple({"x": (batch, *shape)} for batch in (1, 8))
    ranges = {"x": ((1, *shape), (8, *shape), (8, *shape))}
    return Network(draft.finish({"x": ("b", *shape)}, {"y": ("b", 1000)}), ranges, tries)


def bottlenecks() -> Network:
    """ResNet-50 without its normalisations: four groups of blocks of three convolutions, each group with a branch beside."""
    draft = Draft()
    x = draft.op("Relu", draft.conv("x", 3, 64, 7, 2))
    x = draft.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    width = 64
    for group, blocks in enumerate((3, 4, 6, 3)):
        inner, wider = 64 << group, 256 << group
        for block in range(blocks):
            stride = 2 if group and not block else 1
            y = draft.op("Relu", draft.conv(x, width, inner, 1))
            y = draft.op("Relu", draft.conv(y, inner, inner, 3, stride))
            y = draft.conv(y, inner, wider, 1)
            beside = x if block else draft.conv(x, width, wider, 1, stride)
            x, width = draft.op("Relu", draft.op("Add", beside, y)), wider
    draft.named("y", draft.dense(draft.op("Flatten", draft.op("GlobalAveragePool", x)), width, 1000))
    shape = (3, 224, 224)
    tries = tuple({"x": (batch, *shape)} for batch in (1, 2, 3, 8))
    ranges = {"x": ((1, *shape), (4, *shape), (8, *shape))}
    return Network(draft.finish({"x": ("b", *shape)}, {"y": ("b", 1000)}), ranges, tries)


def encoder(layers: int = 4, d: int = 256, tokens: int = 128) -> Network:
    """Token ids through an embedding (Gather) and single-head attention blocks with LayerNorm."""
    draft = Draft()
    x = draft.op("Gather", draft.weight(1000, d), "ids")

    def norm(x: str) -> str:
        ones, zeros = np.ones(d, np.float32), np.zeros(d, np.float32)
        return draft.op("LayerNormalization", x, draft.constant(ones), draft.constant(zeros), axis=-1)

    for _ in range(layers):
        q, k, v = (draft.dense(norm(x), d, d) for _ in range(3))
        scores = draft.op("MatMul", q, draft.op("Transpose", k, perm=[0, 2, 1]))
        scaled = draft.op("Mul", scores, draft.constant(np.float32(d**-0.5)))
        x = draft.op("Add", x, draft.dense(draft.op("MatMul", draft.op("Softmax", scaled, axis=-1), v), d, d))
        x = draft.op("Add", x, draft.dense(draft.op("Relu", draft.dense(norm(x), d, 4 * d)), 4 * d, d))
    draft.named("y", x)
    integers = frozenset({"ids"})
    model = draft.finish({"ids": ("b", tokens)}, {"y": ("b", tokens, d)}, integers)
    tries = tuple({"ids": (batch, tokens)} for batch in (1, 4))
    return Network(model, {"ids": ((1, tokens), (4, tokens), (8, tokens))}, tries, integers)


def anysize() -> Network:
    """Convolutions over images of any height and width."""
    draft, x, width = Draft(), "x", 3
    for wider in (16, 32, 32):
        x, width = draft.op("Relu", draft.conv(x, width, wider)), wider
    draft.named("y", draft.conv(x, width, 4, 1))
    model = draft.finish({"x": (1, 3, "h", "w")}, {"y": (1, 4, "h", "w")})
    tries = tuple({"x": (1, 3, h, w)} for h, w in ((32, 32), (56, 40), (17, 33), (96, 96)))
    return Network(model, {"x": ((1, 3, 16, 16), (1, 3, 56, 56), (1, 3, 96, 96))}, tries)


def several() -> Network:
    """Two inputs, three outputs."""
    draft = Draft()
    a, b = draft.dense("a", 64, 32), draft.dense("b", 16, 32)
    draft.named("sum", draft.op("Add", a, b))
    draft.named("product", draft.op("Mul", a, b))
    draft.named("both", draft.op("Concat", a, b, axis=1))
    outputs = {"sum": ("n", 32), "product": ("n", 32), "both": ("n", 64)}
    ranges = {"a": ((1, 64), (4, 64), (16, 64)), "b": ((1, 16), (4, 16), (16, 16))}
    tries = tuple({"a": (n, 64), "b": (n, 16)} for n in (1, 5, 16))
    return Network(draft.finish({"a": ("n", 64), "b": ("n", 16)}, outputs), ranges, tries)


NETWORKS: dict[str, Callable[[], Network]] = {
    "mlp": mlp, "resnet": resnet, "encoder": encoder, "anysize": anysize, "several": several,
}  # fmt: skip


def add(root: Path, name: str) -> Path:
    """Where the file of a new model's only version goes."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    return folder


def plan(folder: Path, network: Network, options: BuildOptions = DEFAULTS) -> Path:
    """Build it, for its own ranges unless the options have profiles; gives the engine file."""
    ranges = {name: Range(*shapes) for name, shapes in network.ranges.items()}
    path = folder / "model.plan"
    path.write_bytes(build(network.onnx, replace(options, profiles=options.profiles or (Profile(ranges),))))
    return path


FEW, MORE = (Profile({"x": Range(*((rows, 784) for rows in sizes))}) for sizes in ((1, 2, 2), (3, 8, 8)))
"""Two profiles of `mlp`, which have no batch in common."""


def feed(network: Network, shapes: Shapes, seed: int) -> Arrays:
    """Random inputs of these shapes, in FP32 but of values that the network's data type has."""
    chance = np.random.default_rng(seed)
    return {
        name: chance.integers(0, 1000, shape)
        if name in network.integers
        else decoded(encoded(chance.random(shape, np.float32), network.datatype), network.datatype)
        for name, shape in shapes.items()
    }


def encoded(array: np.ndarray, datatype: str) -> np.ndarray:
    """FP32 as this type; BF16 as its 16 bits, rounded to nearest. Integers as they are."""
    if array.dtype != np.float32 or datatype == "FP32":
        return array
    if datatype == "FP16":
        return array.astype(np.float16)
    return ((np.ascontiguousarray(array).view(np.uint32) + 0x8000) >> 16).astype(np.uint16).reshape(array.shape)


def decoded(array: np.ndarray, datatype: str) -> np.ndarray:
    """Back as FP32."""
    if datatype == "BF16" and array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).reshape(array.shape)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def typed(network: Network, datatype: str) -> Network:
    """The same network with weights, inputs, outputs and all between in FP16 or BF16."""
    kind = {"FP16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16}[datatype]
    model = onnx.load_model_from_string(network.onnx)
    for weight in model.graph.initializer:
        if weight.data_type == TensorProto.FLOAT:
            bits = encoded(numpy_helper.to_array(weight), datatype).tobytes()
            weight.CopyFrom(TensorProto(name=weight.name, dims=weight.dims, data_type=kind, raw_data=bits))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = kind
    return replace(network, onnx=model.SerializeToString(), datatype=datatype, reference=network.onnx)
