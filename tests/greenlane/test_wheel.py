"""The wheel: what is in it, and that it serves the demo from wherever one stands, with nothing but what it declares."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

import pytest

from greenlane.own import PACKAGES

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).parents[2]
UPRIGHT = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [1, 1, 0, 0] * 16}
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "GREENLANE", "COV"))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([ROOT / "scripts" / "wheel", folder], check=True)
    return next(folder.glob("greenlane-*.whl"))


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs are of a new environment that holds the wheel, its extra `cpu`, and what these depend on."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    subprocess.run([*pip, "install", "--no-compile", f"{wheel}[cpu]"], env=ENVIRONMENT, check=True)
    return folder / "bin"


def test_the_wheel_holds_all_files_of_the_packages_and_nothing_else(wheel: Path) -> None:
    ours = [path for package in ("greenlane", *PACKAGES) for path in (ROOT / package).rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in ours if path.suffix not in (".pyc", ".c", ".h", ".md")}
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert {f"{package}/py.typed" for package in PACKAGES} < packed


@contextmanager
def serving(command: Path, at: Path) -> Iterator[str]:
    """The demo on a free port, started in this folder and ready: its URL. Ended by SIGTERM, which has to leave status 0."""
    with subprocess.Popen([command, "--port", "0"], cwd=at, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        log: list[str] = []
        try:
            while not log or "ready: " not in log[-1]:
                line = process.stderr.readline()
                assert line, "".join(log)
                log.append(line)
            yield next(line for line in log if "listening on " in line).split("listening on ")[1].strip()
            process.send_signal(signal.SIGTERM)
            log.append(process.communicate(timeout=30)[1])
        finally:
            process.kill()
    assert process.returncode == 0, "".join(log)
    assert "hot path: interpreted Python" in "".join(log)
    assert "ERROR" not in "".join(log)


def label(url: str) -> str:
    """What the demo's classifier says of an image of upright stripes."""
    body = json.dumps({"inputs": [UPRIGHT], "outputs": [{"name": "label"}]}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/stripes/infer", body, timeout=30) as answer:
        found: str = json.load(answer)["outputs"][0]["data"][0]
    return found


def ready(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/v2/health/live", timeout=30) as answer:
        return bool(answer.status == 200)


def test_the_wheel_serves_the_demo_from_an_empty_folder(scripts: Path, tmp_path: Path) -> None:
    with serving(scripts / "greenlane", tmp_path) as url:
        assert ready(url)
        assert label(url) == "vertical"
    assert not list(tmp_path.iterdir())


def test_no_process_of_it_imports_packages_of_the_current_folder(scripts: Path, tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('imported')")
    with serving(scripts / "greenlane", tmp_path) as url:
        assert label(url) == "vertical"
