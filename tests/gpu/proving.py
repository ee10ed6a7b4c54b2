"""`python -m tests.gpu.proving [--tenants 15]`: `greenlane prove` of so many tenants that divide a GPU, each with an MLP and a
convolution; with MPS=on each has a device process.

With `--fence RATE` it is run twice for the first tenant, whose model does hardly anything but read its weights:
without a fence, where it has to find a leak, and with all others held to that rate, where it has to find none; the exit status
is 0 if both are so.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.arrangement import literal
from benchmarks.subjects import write
from greenlane.options import count

from .process import gpu_section

MODELS = "mlp", "conv"
FENCED = ("gemm",)
"""Of the first tenant, beside a fence."""
_LEAKS = 1
_WORDS = {0: "isolated", _LEAKS: "something leaks", 3: "not everything could be judged"}
"""Of the exit statuses of `greenlane prove`."""


def config(repository: Path, tenants: int, granules: int, first: Sequence[str] = MODELS, fence: str | None = None) -> str:
    """So many tenants that share so many granules evenly. The first has models of its own; the others have such a part of
    memory bandwidth and PCIe each, if that is given.
    """
    held = [] if fence is None else [f"{key} = {literal(fence)}" for key in ("memory_bandwidth", "pcie")]
    lines = ["[server]", 'drain_grace = "0s"', gpu_section(), "[models]", f'repository = "{repository}"']
    for number in range(tenants):
        models = ", ".join(f'"{model}"' for model in (MODELS if number else first))
        lines += [f"[tenants.t{number:02}]", f"granules = {granules // tenants}", f"models = [{models}]"]
        lines += ['memory = "64MiB"', *(held if number else ())]
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    """What is not known here goes to `greenlane prove`, whose exit status is returned."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.proving", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tenants", type=count, default=2)
    parser.add_argument("--fence", metavar="RATE", help="run twice, without a fence and with one")
    parser.add_argument("--json", type=Path, help="where the findings go; those without the fence to FILE-without.json")
    parser.add_argument("--granules", type=count, default=15, help="that they divide; default: 15, those of an H100 or H200")
    options, others = parser.parse_known_args(words)
    with TemporaryDirectory(prefix="greenlane-proving-") as folder:
        first = MODELS if options.fence is None else FENCED
        write(Path(folder, "models"), {*MODELS, *first}, plans=True)
        file, models, json = Path(folder, "greenlane.toml"), Path(folder, "models"), options.json

        def prove(fence: str | None, json: Path | None) -> int:
            file.write_text(config(models, options.tenants, options.granules, first, fence), encoding="utf-8")
            command = [sys.executable, "-m", "greenlane", "prove", "--config", str(file), *others]
            return subprocess.run([*command, *(["--json", str(json)] if json else [])], check=False).returncode

        if options.fence is None:
            return prove(None, json)
        others += ["--only", "t00"]
        without = prove(None, json and json.with_name(f"{json.stem}-without{json.suffix}"))
        held = prove(options.fence, json)
        print(f"without a fence: {_WORDS.get(without, without)}; with {options.fence}: {_WORDS.get(held, held)}", flush=True)
        return int(without != _LEAKS or held != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
