"""`python -m benchmarks.answers --device cuda --output answers.json`: are the answers of real networks right, shape by shape?

Runs `greenlane verify` on networks with random weights, three at a time, and prints what each found as one JSON document:
how many shapes agree with ONNX Runtime on the CPU in each of 16 runs, which do not, and by how much. Those of PyTorch are
exported in processes of their own meanwhile; one that cannot be exported here is listed with the reason.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenlane.load.machine import describe

from .nets import encoder, mobilenet

Shapes = dict[str, tuple[int, ...]]
_CONFIG = """\
[device]
backend = "{device}"
mps = "off"
[models]
repository = "{folder}"
[tenants.a]
granules = 1
models = ["*"]
"""


@dataclass(frozen=True, slots=True)
class Network:
    """What makes the ONNX file, the smallest and largest shapes of its inputs, and how many to compare."""

    make: Callable[[Path], None]
    least: Shapes
    most: Shapes
    count: int


def _encs(path: Path) -> None:
    path.write_bytes(encoder(layers=3, tokens="s"))


def _mobilenet_v2(path: Path) -> None:
    path.write_bytes(mobilenet())


def _torchvision(name: str, sizes: bool = True) -> Callable[[Path], None]:
    """`sizes`: with any height and width, otherwise with 224."""

    def make(path: Path) -> None:
        import torchvision

        _export(getattr(torchvision.models, name)(weights=None), path, image=sizes)

    return make


def _timm(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        import timm

        _export(timm.create_model(name, pretrained=False), path, image=False)

    return make


def _bert(path: Path) -> None:
    from transformers import BertConfig, BertModel

    _export_text(BertModel(BertConfig(num_hidden_layers=6, attn_implementation="eager")), path)


def _gpt2(path: Path) -> None:
    from transformers import GPT2Config, GPT2Model

    _export_text(GPT2Model(GPT2Config(n_layer=6, use_cache=False, attn_implementation="eager")), path)


_ROWS: tuple[Shapes, Shapes] = {"x": (1, 3, 224, 224)}, {"x": (32, 3, 224, 224)}
_IDS: tuple[Shapes, Shapes] = {"ids": (1, 8), "mask": (1, 8)}, {"ids": (8, 192), "mask": (8, 192)}
NETWORKS = {
    "encs": Network(_encs, {"x": (1, 16, 512)}, {"x": (8, 256, 512)}, 200),
    "resnet50_224": Network(_torchvision("resnet50", sizes=False), *_ROWS, 32),
    "efficientnet_b0": Network(_torchvision("efficientnet_b0"), {"x": (1, 3, 64, 64)}, {"x": (8, 3, 224, 224)}, 40),
    "resnet50": Network(_torchvision("resnet50"), {"x": (1, 3, 64, 64)}, {"x": (8, 3, 224, 224)}, 80),
    "bert": Network(_bert, *_IDS, 100),
    "mobilenet_v3_large": Network(_torchvision("mobilenet_v3_large"), {"x": (1, 3, 96, 96)}, {"x": (8, 3, 224, 224)}, 60),
    "gpt2": Network(_gpt2, *_IDS, 100),
    "mobilenet_v2": Network(_mobilenet_v2, *_ROWS, 32),
    "vit_small_patch16_224": Network(_timm("vit_small_patch16_224"), *_ROWS, 32),
}


def _export(model: Any, path: Path, image: bool) -> None:
    import torch

    axes = {0: "n", 2: "h", 3: "w"} if image else {0: "n"}
    _write(model, (torch.randn(2, 3, 224, 224),), path, ["x"], ["y"], {"x": axes, "y": {0: "n"}})


def _export_text(model: Any, path: Path) -> None:
    import torch

    class Whole(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, return_dict=False)[0]

    given = torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)
    each = {0: "n", 1: "s"}
    _write(Whole(), given, path, ["ids", "mask"], ["y"], {"ids": each, "mask": each, "y": each})


def _write(model: Any, given: Any, path: Path, inputs: list[str], outputs: list[str], axes: Any) -> None:
    import torch

    torch.manual_seed(0)
    asked = {"input_names": inputs, "output_names": outputs, "dynamic_axes": axes, "opset_version": 17}
    with torch.no_grad():
        try:
            torch.onnx.export(model.eval(), given, str(path), dynamo=False, **asked)
        except TypeError:  # An older PyTorch, which has that exporter only.
            torch.onnx.export(model.eval(), given, str(path), **asked)


def _shape_words(option: str, shapes: Shapes) -> list[str]:
    return [word for name, shape in shapes.items() for word in (option, f"{name}:{'x'.join(map(str, shape))}")]


def _verify(name: str, folder: Path, exporting: "subprocess.Popen[bytes]", device: str, until: float, scale: float) -> Any:
    """What `greenlane verify` says of a network as JSON, or why it says nothing."""
    network, path = NETWORKS[name], folder / name / "model.onnx"
    try:
        _, said = exporting.communicate(timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        exporting.kill()
        return {"error": "its export had not ended in time"}
    if exporting.returncode:
        return {"error": f"not exported: {said.decode(errors='replace').strip()[-300:]}"}
    config = path.with_name("config.toml")
    config.write_text(_CONFIG.format(device=device, folder=folder))
    left = until - time.monotonic()
    if left < 5:
        return {"error": "no time was left"}
    count = max(2, round(network.count * scale))
    words = ["--config", str(config), "--count", str(count), "--seconds", f"{left:.0f}", "--json", "-"]
    words += [*_shape_words("--from", network.least), *_shape_words("--to", network.most)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "greenlane", "verify", str(path), *words], capture_output=True, timeout=left + 60
        )
    except subprocess.TimeoutExpired:
        return {"error": "did not end in time"}
    try:
        return {"status": done.returncode, **json.loads(done.stdout)}
    except ValueError:
        return {"status": done.returncode, "error": done.stderr.decode(errors="replace").strip()[-600:]}


def _summary(found: Any) -> Any:
    """Without the shapes that are right."""
    shapes = found.get("shapes", [])
    return {**found, "shapes": [each for each in shapes if each["verdict"] != "right"]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answers", description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--only", default=",".join(NETWORKS), help="networks with commas between; default: all")
    parser.add_argument("--within", type=float, default=150.0, metavar="S", help="seconds for all of it; default: 150")
    parser.add_argument("--side", type=int, default=3, metavar="N", help="networks at a time; default: 3")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="more or fewer shapes; default: 1")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all of it there; printed are no right shapes")
    parser.add_argument("--export", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.export:
        NETWORKS[options.export[0]].make(Path(options.export[1]))
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder, exports = Path(made), {}
        for name in options.only.split(","):
            (folder / name).mkdir()
            command = [sys.executable, "-m", "benchmarks.answers", "--export", name, str(folder / name / "model.onnx")]
            exports[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        with ThreadPoolExecutor(options.side) as pool:
            until = began + options.within
            asked = {
                name: pool.submit(_verify, name, folder, child, options.device, until, options.scale)
                for name, child in exports.items()
            }
            found = {name: future.result() for name, future in asked.items()}
    document = {"seconds": round(time.monotonic() - began, 1), **describe(" ".join(sys.argv)), "networks": found}
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({**document, "networks": {name: _summary(each) for name, each in found.items()}}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
