"""`greenlane init`: a configuration and the demo's models in a folder, to start from."""

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from . import demo
from .config.section import ConfigError

CONFIGURATION = """\
[server]
default_tenant = "acme"       # for requests that name none
[models]
repository = "models"         # Triton's layout: models/NAME/1/model.onnx
[tenants.acme]
cores = 1
models = ["*"]
[tenants.globex]              # its requests send X-Tenant: globex
cores = 1
models = ["identity"]
"""


def main(arguments: Sequence[str], program: str) -> int:
    """Run a command line, and return the exit status. Blocks."""
    about = "Write a configuration of two tenants on two cores, and the demo's models, into a folder to start from."
    status = "exit status: 0 written; 1 there is something already, or it cannot be written; 2 the command line is wrong"
    parser = argparse.ArgumentParser(prog=program, description=about, epilog=status)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help="where; by default the current folder")
    folder = Path(parser.parse_args(arguments).folder)
    file = folder / "greenlane.toml"
    try:
        write(folder)
    except FileExistsError as error:
        print(f"{program}: {error.filename} exists already, and stays as it is; name another folder", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{program}: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    command = _command()
    print(f"wrote {file} and {folder / 'models'}; next: {command} check {file}, {command} --config {file}")
    return 0


def _command() -> str:
    """`greenlane`, or with its path, as it was called, where a shell would not find it by its name."""
    called = Path(sys.argv[0])
    return "greenlane" if called.name != "greenlane" or shutil.which("greenlane") else str(called)


def write(folder: Path) -> None:
    """Write both into this folder. Raises FileExistsError where one is there, OSError, and ConfigError as `demo.build` does."""
    file, models = folder / "greenlane.toml", folder / "models"
    for path in (file, models):
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    demo.build(models)
    file.write_text(CONFIGURATION, encoding="utf-8")
