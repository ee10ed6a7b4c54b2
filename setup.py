"""What pyproject.toml cannot say: which modules a compiled wheel has as machine code, and the libraries in C.

`GREENLANE_COMPILE=1 pip wheel .` compiles the modules that every inference passes through with mypyc. That takes two and a half
minutes of a core, half of them spread over all cores, and needs a C compiler and Python's headers. Without it the wheel is pure
Python. The sources are never compiled in place: a checkout always runs what it shows. `GREENLANE_OPTIMIZE` is the level of
`-O`, 3 by default; with 0, as in `.ci/run`, it takes a minute less.
"""

import os
import platform
import sys
import tomllib
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

FOLDERS = ("server/http", "server/inference", "server/link", "server/protocol", "server/scheduling", "server/workers")
"""The hot path. Each folder is compiled as a whole, so that calls between its modules are C calls."""

ALSO = (
    "engines/memo.py",
    "engines/onnxruntime/engine.py",
    "engines/onnxruntime/outputs.py",
    "engines/onnxruntime/session.py",
    "partitions/cpu.py",
    "server/accounts/meter.py",
    "server/tenants/relay.py",
    "server/tenants/uploads.py",
)
"""Modules of the hot path in other folders: inferences on CPU cores, counters, and the bytes of request bodies."""

INTERPRETED = {
    "server/http/connection_limits.py": "it puts another class in place of uvicorn's set, and compiled code insists on a set",
    "server/http/uvicorn_protocol.py": "it subclasses uvicorn's protocol, and uvicorn writes to its attributes",
    "server/link/listener.py": "its descriptor is closed by a weak reference, and compiled classes have none",
    "server/scheduling/lane_statistics.py": "what other processes send of it is checked by its annotations",
    "server/scheduling/queue_policy.py": "the same",
    "server/workers/worker_control.py": "it has async generators, which mypyc does not know",
}
"""Modules of those folders that stay Python, and why."""

COMPILER = ("mypy[mypyc]>=2.4,<3", "setuptools>=77", "types-protobuf")
MYPY = ("--config-file=pyproject.toml", "--ignore-missing-imports")
"""mypyc checks types before it compiles; the optional libraries need not be installed for that."""


def compiled() -> list[str]:
    """The sources to compile, sorted, relative to the root."""
    if missing := [name for name in (*INTERPRETED, *ALSO) if not (ROOT / name).is_file()]:
        sys.exit(f"setup.py names {', '.join(missing)}, which does not exist; follow what was renamed")
    modules = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("*.py")}
    return sorted({*modules, *ALSO} - INTERPRETED.keys() - {f"{folder}/__init__.py" for folder in FOLDERS})


def extensions() -> list[Any]:
    """One shared library with the code, and for each source a small extension module that Python prefers to it."""
    from mypyc.build import mypycify  # Only needed, and only installed, when compiling.

    os.chdir(ROOT)
    flags = ["-O2", "-std=gnu11"]
    libraries = [Extension("partitions.cuda.kernel_loads_c", ["partitions/cuda/kernel_loads.c"], extra_compile_args=flags)]
    if platform.machine() == "x86_64":
        libraries.append(Extension("server.launch_loop.loop_c", ["server/launch_loop/loop.c"], extra_compile_args=flags))
    level = os.environ.get("GREENLANE_OPTIMIZE", "3")
    modules = mypycify([*MYPY, *compiled()], opt_level=level, debug_level="0", group_name="server.compiled")
    for each in modules:  # For this warning gcc 12 looks up each line of a file of 70 MB from its beginning, for a minute.
        each.extra_compile_args = [*each.extra_compile_args, "-Wno-misleading-indentation"]
    if level != "0":  # The one file with the code is optimized when it is linked, in parts: the only step that uses all cores.
        [code] = [each for each in modules if each.name == "server.compiled__mypyc"]
        code.extra_compile_args.append("-flto=auto")
        code.extra_link_args = ["-flto=auto"]
    return libraries + modules


def main() -> None:
    options: dict[str, Any] = {}
    if os.environ.get("GREENLANE_COMPILE") == "1":
        if "editable_wheel" in sys.argv or "--inplace" in sys.argv:
            sys.exit("GREENLANE_COMPILE=1 is for wheels (pip wheel .): the sources of a checkout are not compiled in place")
        options["setup_requires"] = [*COMPILER, *PROJECT["dependencies"]]  # pip installs these, then asks for the wheel.
        if "bdist_wheel" in sys.argv:
            options["ext_modules"] = extensions()
            options["options"] = {"build_ext": {"parallel": True}}  # As many at a time as there are cores.
    setup(**options)


if __name__ == "__main__":
    main()
