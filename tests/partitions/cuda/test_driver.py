"""Private names of cuda.core are imported by one module, so that a new version of cuda.core breaks no more than that one."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


def imported(source: str) -> Iterator[str]:
    """The full name of every module and member that a module imports, at any depth. Relative imports are left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private(name: str) -> bool:
    return name.startswith("cuda.") and any(part.startswith("_") for part in name.split("."))


def test_the_private_names_of_cuda_core_are_recognised() -> None:
    source = (
        "from cuda.core import Device\nimport cuda.core._utils\ndef f():\n    from cuda.core._utils.cuda_utils import CUDAError"
    )
    found = [name for name in imported(source) if private(name)]
    assert found == ["cuda.core._utils", "cuda.core._utils.cuda_utils.CUDAError"]


def test_only_driver_imports_private_names_of_cuda_core() -> None:
    files = [path for package in ("engines", "partitions", "server") for path in (ROOT / package).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in files if any(map(private, imported(path.read_text())))}
    assert found == {"partitions/cuda/driver.py"}
