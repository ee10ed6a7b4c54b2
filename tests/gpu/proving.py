"""`python -m tests.gpu.proving [--tenants 15]`: `greenlane prove` of so many tenants that divide a GPU, each with an MLP and a
convolution; with MPS=on each has a device process.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.subjects import write
from greenlane.options import count

from .process import gpu_section

MODELS = "mlp", "conv"


def config(repository: Path, tenants: int, granules: int) -> str:
    """So many tenants that share so many granules evenly."""
    lines = ["[server]", 'drain_grace = "0s"', gpu_section(), "[models]", f'repository = "{repository}"']
    for number in range(tenants):
        models = ", ".join(f'"{model}"' for model in MODELS)
        lines += [f"[tenants.t{number:02}]", f"granules = {granules // tenants}", f"models = [{models}]", 'memory = "64MiB"']
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    """What is not known here goes to `greenlane prove`, whose exit status is returned."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.proving", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tenants", type=count, default=2)
    parser.add_argument("--granules", type=count, default=15, help="that they divide; default: 15, those of an H100 or H200")
    options, others = parser.parse_known_args(words)
    with TemporaryDirectory(prefix="greenlane-proving-") as folder:
        write(Path(folder, "models"), set(MODELS), plans=True)
        file = Path(folder, "greenlane.toml")
        file.write_text(config(Path(folder, "models"), options.tenants, options.granules), encoding="utf-8")
        command = [sys.executable, "-m", "greenlane", "prove", "--config", str(file), *others]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
