"""`greenlane init`: a configuration and the demo's models in a folder, to start from."""

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory

from engines.model_files.cache_folder import replace_file

from . import demo
from .app import open_alone
from .config.schema import DeviceConfig
from .config.tables import ConfigError

_BEGIN = """\
[server]
default_tenant = "acme"       # for requests that name none
[models]
repository = "models"         # Triton's layout: models/NAME/1/model.onnx
[tenants.acme]
{share}
models = ["*"]
"""
_SECOND = """\
[tenants.globex]              # its requests send X-Tenant: globex
{share}
models = ["{models}"]
"""
_ON_GPU = """
memory_bandwidth = "auto"     # as much of the GPU's as it has SMs, while the other tenant works
pcie = "auto"
"""


def configuration(granules: int, models: str = "identity", share: str = "cores", size: int = 1) -> str:
    """A file that shares out so many granules to two tenants, or one granule to one. `models` are the second tenant's.

    `share` is the key of shares, in units of which each granule has `size`.
    """
    second, more = granules // 2, _ON_GPU.rstrip() if share == "sms" and granules > 1 else ""
    begin = _BEGIN.format(share=f"{share} = {max(1, granules - second) * size}{more}")
    return begin + _SECOND.format(share=f"{share} = {second * size}{more}", models=models) if second else begin


def main(arguments: Sequence[str], program: str) -> int:
    """Run a command line, and return the exit status. Blocks."""
    about = (
        "Write a configuration that shares out this machine's GPU, where TensorRT is installed, or else its cores to two "
        "tenants, and the demo's models, into a folder to start from. A folder of models that is there already is kept, and "
        "served."
    )
    status = "exit status: 0 written; 1 there is something already, or it cannot be written; 2 the command line is wrong"
    parser = argparse.ArgumentParser(prog=program, description=about, epilog=status)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help="where; by default the current folder")
    folder = Path(parser.parse_args(arguments).folder)
    file = folder / "greenlane.toml"
    try:
        kept = write(folder)
    except FileExistsError as error:
        print(f"{program}: {error.filename} exists already, and stays as it is; name another folder", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{program}: cannot write {error.filename or folder}: {error.strerror}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    command, models = _command(), folder / "models"
    wrote = f"wrote {file} for the models in {models}" if kept else f"wrote {file} and {models}"
    named = quote(str(file))
    print(f"{wrote}; next: {command} check {named}, {command} --config {named}")
    return 0


def _command() -> str:
    """`greenlane`, or with its path, as it was called, where a shell would not find it by its name."""
    called = Path(sys.argv[0])
    return "greenlane" if called.name != "greenlane" or shutil.which("greenlane") else quote(str(called))


def write(folder: Path) -> bool:
    """Write the configuration into this folder, and the demo's models unless something is in its `models`. Whether that is so.

    Each of the two is there whole or not at all.

    Raises FileExistsError where a file would be replaced, OSError, and ConfigError as `demo.build` does.
    """
    file, models = folder / "greenlane.toml", folder / "models"
    kept = models.is_dir() and any(models.iterdir())
    for path in (file,) if models.is_dir() else (file, models):
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with closing(open_alone(DeviceConfig())) as device:
        share, sizes = ("cores" if device.unit == "core" else "sms"), device.granules
    # The smallest, as a GPU's last granule may have more SMs.
    text = configuration(len(sizes), "*" if kept else "identity", share, min(sizes))
    if not kept:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".models-") as made:
            demo.build(Path(made, "models"), on_gpu=share == "sms")
            Path(made, "models").rename(models)
    replace_file(file, text.encode())
    return kept
