"""The demo's model repository, built on the spot: a classifier that needs no training, and a model that does nothing.

`stripes` filters an image for lines in four directions and averages the squares of what each filter answers. Level
stripes answer in one of the straight directions only, slanted ones in one diagonal more than in the other, and a
checkerboard in both straight directions alike. Noise adds the same to every average, so differences are free of it, and
dividing by the sum makes contrast and brightness irrelevant. An image without any pixels is taken for one black pixel.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partitions import open_device

from .config.schema import Config, ConfigError, DeviceConfig, ModelsConfig, ServerConfig, TenantConfig

log = logging.getLogger("greenlane.demo")

LABELS = ("horizontal", "vertical", "diagonal", "checkerboard")
"""What `stripes` tells apart, in the order of its probabilities."""

# ONNX's textual form: https://onnx.ai/onnx/repo-docs/Syntax.html
_STRIPES = """
<ir_version: 8, opset_import: ["": 17], producer_name: "greenlane">
stripes (float[batch, 1, height, width] image) => (float[batch, 4] probabilities, string[batch] label)
<
  int64[8] border = {0, 0, 1, 1, 0, 0, 1, 1},
  int64[4] before = {0, 0, 0, 0},
  int64[4] smallest = {0, 0, 1, 1},
  float[4, 1, 3, 3] lines = {
    -1, -1, -1,   2,  2,  2,  -1, -1, -1,
    -1,  2, -1,  -1,  2, -1,  -1,  2, -1,
     2, -1, -1,  -1,  2, -1,  -1, -1,  2,
    -1, -1,  2,  -1,  2, -1,   2, -1, -1
  },
  float least = {-1e6},
  float most = {1e6},
  float nothing = {1e-5},
  float part = {0.65},
  float certainty = {10},
  int64[1] axis = {1},
  string[4] labels = {LABELS}
>
{
  size = Shape(image)
  lacking = Sub(smallest, size)
  after = Max(lacking, before)
  ends = Concat<axis=0>(before, after)
  present = Pad(image, ends)
  framed = Pad<mode="edge">(present, border)
  answers = Conv(framed, lines)
  bounded = Clip(answers, least, most)
  squares = Mul(bounded, bounded)
  means = GlobalAveragePool(squares)
  flat = Flatten(means)
  level, upright, falling, rising = Split<axis=1>(flat)
  tilt = Sub(level, upright)
  horizontal = Relu(tilt)
  counter_tilt = Neg(tilt)
  vertical = Relu(counter_tilt)
  slant = Sub(falling, rising)
  diagonal = Abs(slant)
  alike = Min(level, upright)
  checkerboard = Mul(alike, part)
  evidence = Concat<axis=1>(horizontal, vertical, diagonal, checkerboard)
  sum = ReduceSum(evidence, axis)
  total = Add(sum, nothing)
  shares = Div(evidence, total)
  scores = Mul(shares, certainty)
  probabilities = Softmax<axis=1>(scores)
  best = ArgMax<axis=1, keepdims=0>(scores)
  label = Gather(labels, best)
}
"""

_STRIPES_CONFIG = """\
name: "stripes"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "image" data_type: TYPE_FP32 dims: [ 1, -1, -1 ] } ]
output [ { name: "probabilities" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""

_IDENTITY = """
<ir_version: 8, opset_import: ["": 17], producer_name: "greenlane">
identity (float[rows, columns] x) => (float[rows, columns] y) { y = Identity(x) }
"""


def build(root: Path) -> None:
    """Write the repository below `root`, over what may be there. Blocks. Raises ConfigError without the `cpu` extra."""
    try:
        import onnx.parser  # Only those who ask for the demo need it.
    except ImportError as error:
        need = "the demo needs scripts/install cpu; or name a configuration with --config or GREENLANE_CONFIG"
        raise ConfigError([f"{need} ({error})"]) from error

    labels = ", ".join(f'"{label}"' for label in LABELS)
    for name, source in (("stripes", _STRIPES.replace("LABELS", labels)), ("identity", _IDENTITY)):
        directory = root / name / "1"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "model.onnx").write_bytes(onnx.parser.parse_model(source).SerializeToString())
    (root / "stripes" / "config.pbtxt").write_text(_STRIPES_CONFIG, encoding="utf-8")


@contextmanager
def configuration() -> Iterator[Config]:
    """A configuration that serves the demo to two tenants, for as long as it is held; to one where there is one core."""
    granules = len(open_device("cpu").granules)
    with tempfile.TemporaryDirectory(prefix="greenlane-demo-") as folder:
        build(Path(folder))
        if granules == 1:
            log.warning("this machine has one core to share out, so the demo has one tenant, acme, instead of two")
        yield config(Path(folder), granules)


def config(root: Path, granules: int) -> Config:
    """acme is served both models, globex only the identity; each on half of the granules, if there are two."""
    acme = TenantConfig(name="acme", granules=max(1, granules - granules // 2), models=("*",))
    globex = TenantConfig(name="globex", granules=granules // 2, models=("identity",))
    tenants = (acme, globex) if granules > 1 else (acme,)
    return Config(
        server=ServerConfig(default_tenant="acme"),
        device=DeviceConfig(backend="cpu"),
        models=ModelsConfig(repository=root),
        tenants={tenant.name: tenant for tenant in tenants},
        source="demo",
    )
