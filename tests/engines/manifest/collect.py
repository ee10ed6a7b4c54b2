"""Writes down what a wheel of TensorRT's Python bindings offers: `python tests/engines/manifest/collect.py WHEEL...`

The bindings of the full TensorRT can be downloaded and imported without its libraries, which are large and need a GPU:

    pip download --no-deps tensorrt-cu12-bindings==10.11.0.33
    pip download --no-deps tensorrt-cu13-bindings==11.4.0.106
    pip download --no-deps tensorrt-rtx-cu13-bindings==1.6.1.120

For each wheel this compiles empty libraries (with gcc) that have the functions the bindings link to, imports the bindings in
a process of their own and writes `LIBRARY-VERSION.json` beside this file. No function of the library is called: names,
parameters, enumerations' values and which properties can be set are what pybind11 has registered by then. Run it with a
Python of the version that the wheel is for.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

SKIPPED = re.compile(r"^I\w+Layer$|^IPlugin|Plugin|Exception$|^I?Algorithm|Calibrator")
"""Classes that the project never uses: layers of networks, plugins and what 11.x has removed."""


def parameters(description: str) -> list[list[str]]:
    """The parameters of each overload in a pybind11 description, without `self`; an optional one has a `?` after its name."""
    signatures = re.findall(r"^(?:\d+\. )?\w+\((.*)\) ->", description, re.MULTILINE)
    return [[name for name in _names(signature) if name != "self"] for signature in signatures]


def _names(signature: str) -> list[str]:
    """`name`, `runtime_config?` of "name: str, runtime_config: tensorrt.IRuntimeConfig = None"."""
    while (flat := re.sub(r"\[[^\[\]]*\]|<[^<>]*>|\([^()]*\)", "", signature)) != signature:
        signature = flat
    pieces = [piece.partition(":") for piece in signature.split(", ") if ":" in piece]
    return [name.strip() + "?" * ("=" in rest) for name, _, rest in pieces]


def describe(module: Any) -> dict[str, Any]:
    """`version`, and `classes`: what each has, where a method is its overloads, a property whether it can be set."""
    classes = {name: kind for name, kind in vars(module).items() if isinstance(kind, type) and not SKIPPED.search(name)}
    return {"version": module.__version__, "classes": {name: _members(kind) for name, kind in sorted(classes.items())}}


def _members(kind: type) -> dict[str, Any]:
    if (members := getattr(kind, "__members__", None)) is not None:
        return {"values": {name: int(value) for name, value in members.items()}}
    found: dict[str, Any] = {"methods": {}, "properties": {}}
    if overridden := re.findall(r"def (\w+)\(self(?:, )?(.*)\):", kind.__doc__ or ""):
        found["overridden"] = {
            name: [each for each in names.split(", ") if each] for name, names in overridden if name != "__init__"
        }
    names = {name for base in kind.__mro__ if base is not object for name in vars(base)}
    for name in sorted(names):
        value = getattr(kind, name)
        if isinstance(value, property):
            found["properties"][name] = "read and set" if value.fset else "read"
        elif isinstance(value, type) and hasattr(value, "__members__"):
            found.setdefault("enumerations", {})[name] = {each: int(member) for each, member in value.__members__.items()}
        elif callable(value) and (not name.startswith("_") or name == "__init__"):
            found["methods"][name] = parameters(value.__doc__ or "")
    return found


def collect(wheel: Path) -> Path:
    """The manifest of a wheel, beside this file. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        (bindings,) = Path(folder).glob("*/*.so")
        _stub(bindings, Path(folder))
        environment = {**os.environ, "LD_LIBRARY_PATH": folder, "PYTHONPATH": folder}
        command = [sys.executable, __file__, "--describe", bindings.parent.name]
        text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found = json.loads(text)
    path = Path(__file__).with_name(f"{bindings.stem}-{found['version']}.json")
    path.write_text(written(found), encoding="utf-8")
    return path


def written(found: dict[str, Any]) -> str:
    """As JSON in which each class is one line, so that a change of one is a change of one line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kind)}" for name, kind in found["classes"].items())
    return f'{{"version": {json.dumps(found["version"])}, "classes": {{\n{lines}\n}}}}\n'


def _stub(bindings: Path, folder: Path) -> None:
    """Make the libraries that the bindings name, with functions that do nothing."""
    needed = re.findall(r"\(NEEDED\).*\[(libnv\S+|libtensorrt\S+)\]", _output("readelf", "-d", str(bindings)))
    wanted = re.findall(r"U (\w*(?:Infer|NvOnnx|Plugin|TRT)\w*)$", _output("nm", "-D", "-u", str(bindings)), re.MULTILINE)
    source = folder / "stub.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in wanted))
    for name in needed:
        subprocess.run(["gcc", "-shared", "-o", str(folder / name), str(source)], check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    if sys.argv[1:2] == ["--describe"]:
        sys.stdout.write(json.dumps(describe(__import__(sys.argv[2]))))
    else:
        for each in sys.argv[1:]:
            sys.stdout.write(f"{collect(Path(each))}\n")
