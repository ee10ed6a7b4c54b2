"""The demo: a model repository written at start, of a classifier that needs no training and a model that copies its input.

`stripes` filters an image for lines in four directions and averages the squares of what each filter answers. Level
stripes answer in one of the straight directions only, slanted ones in one diagonal more than in the other, and a
checkerboard in both straight directions alike. Noise adds the same to every average, so differences are free of it, and
dividing by the sum makes contrast and brightness irrelevant. An image without pixels counts as one black pixel.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from engines.model_files.onnx_writer import FLOAT, STRING, floats, int64s, model, node, strings, value
from partitions import open_device
from partitions.installing import install_command

from .config.schema import Config, DeviceConfig, ModelsConfig
from .config.server import ServerConfig
from .config.tables import ConfigError
from .config.tenant import TenantConfig

SOURCE = "demo"
"""The name of its configuration in messages."""

LABELS = ("horizontal", "vertical", "diagonal", "checkerboard")
"""The classes of `stripes`, in the order of its probabilities."""

_BORDER = [0, 0, 1, 1, 0, 0, 1, 1]
_LINES = [
    [-1, -1, -1, 2, 2, 2, -1, -1, -1],  # level
    [-1, 2, -1, -1, 2, -1, -1, 2, -1],  # upright
    [2, -1, -1, -1, 2, -1, -1, -1, 2],  # falling
    [-1, -1, 2, -1, 2, -1, 2, -1, -1],  # rising
]
"""The four filters, 3 by 3 each."""

_STRIPES_CONFIG = """\
name: "stripes"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "image" data_type: TYPE_FP32 dims: [ 1, -1, -1 ] } ]
output [ { name: "probabilities" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


def build(root: Path, on_gpu: bool = False) -> None:
    """Write the repository below `root`, replacing files. Blocks. Raises ConfigError where ONNX Runtime is not installed.

    `on_gpu`: as TensorRT takes them. Sizes vary in the batch only, images have 8 by 8 pixels, and there are no texts.
    """
    if find_spec("onnxruntime") is None:  # Only the engine imports it.
        need = f"the demo needs {install_command('cpu')}; or name a configuration with --config or GREENLANE_CONFIG"
        raise ConfigError([f"{need} (there is no onnxruntime)"])
    for name, data in (("stripes", _stripes(on_gpu)), ("identity", _identity(on_gpu))):
        directory = root / name / "1"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "model.onnx").write_bytes(data)
    if not on_gpu:
        (root / "stripes" / "config.pbtxt").write_text(_STRIPES_CONFIG, encoding="utf-8")


@contextmanager
def configuration() -> Iterator[Config]:
    """The demo's configuration, of two tenants, or one on a machine of one core. Its repository is removed at the end."""
    granules = len(open_device("cpu").granules)
    with tempfile.TemporaryDirectory(prefix="greenlane-demo-") as folder:
        build(Path(folder))
        yield config(Path(folder), granules)


def config(root: Path, granules: int) -> Config:
    """acme may call both models, globex only `identity`; each has half of the granules, if there are at least two."""
    tenants = [TenantConfig(name="acme", granules=max(1, granules - granules // 2), models=("*",))]
    if granules > 1:
        tenants.append(TenantConfig(name="globex", granules=granules // 2, models=("identity",)))
    return Config(
        server=ServerConfig(default_tenant="acme"),
        device=DeviceConfig(backend="cpu"),
        models=ModelsConfig(repository=root),
        tenants={tenant.name: tenant for tenant in tenants},
        source=SOURCE,
    )


def _stripes(on_gpu: bool) -> bytes:
    nodes = [
        node("Shape", ["image"], ["size"]),
        node("Sub", ["smallest", "size"], ["lacking"]),
        node("Max", ["lacking", "before"], ["after"]),
        node("Concat", ["before", "after"], ["ends"], axis=0),
        node("Pad", ["image", "ends"], ["present"]),
        node("Pad", ["present", "border"], ["framed"], mode="edge"),
        node("Conv", ["framed", "lines"], ["answers"]),
        node("Clip", ["answers", "least", "most"], ["bounded"]),
        node("Mul", ["bounded", "bounded"], ["squares"]),
        node("GlobalAveragePool", ["squares"], ["means"]),
        node("Flatten", ["means"], ["flat"]),
        node("Split", ["flat"], ["level", "upright", "falling", "rising"], axis=1),
        node("Sub", ["level", "upright"], ["tilt"]),
        node("Relu", ["tilt"], ["horizontal"]),
        node("Neg", ["tilt"], ["counter_tilt"]),
        node("Relu", ["counter_tilt"], ["vertical"]),
        node("Sub", ["falling", "rising"], ["slant"]),
        node("Abs", ["slant"], ["diagonal"]),
        node("Min", ["level", "upright"], ["alike"]),
        node("Mul", ["alike", "part"], ["checkerboard"]),
        node("Concat", LABELS, ["evidence"], axis=1),
        node("ReduceSum", ["evidence", "axis"], ["sum"]),
        node("Add", ["sum", "nothing"], ["total"]),
        node("Div", ["evidence", "total"], ["shares"]),
        node("Mul", ["shares", "certainty"], ["scores"]),
        node("Softmax", ["scores"], ["probabilities"], axis=1),
    ]
    constants = [
        int64s("border", _BORDER),
        int64s("before", [0, 0, 0, 0]),
        int64s("smallest", [0, 0, 1, 1]),
        int64s("axis", [1]),
        floats("lines", (4, 1, 3, 3), [weight for line in _LINES for weight in line]),
        floats("least", (), [-1e6]),
        floats("most", (), [1e6]),
        floats("nothing", (), [1e-5]),
        floats("part", (), [0.65]),
        floats("certainty", (), [10]),
    ]
    outputs, size = [value("probabilities", FLOAT, ("batch", 4))], (8, 8) if on_gpu else ("height", "width")
    if not on_gpu:
        nodes.append(node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0))
        nodes.append(node("Gather", ["labels", "best"], ["label"]))
        constants.append(strings("labels", LABELS))
        outputs.append(value("label", STRING, ("batch",)))
    return model("stripes", nodes, [value("image", FLOAT, ("batch", 1, *size))], outputs, constants)


def _identity(on_gpu: bool) -> bytes:
    x, y = (value(name, FLOAT, ("rows", 2 if on_gpu else "columns")) for name in "xy")
    return model("identity", [node("Identity", ["x"], ["y"])], [x], [y], [])
