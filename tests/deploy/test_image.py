"""The image's file: what hadolint says of it, that it holds what runs, and what it promises of users and places."""

import re
import subprocess
import tomllib
from pathlib import Path

from .tools import hadolint

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Dockerfile"
LINES = FILE.read_text().splitlines()


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([hadolint(), "--no-color", FILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_copies_all_packages() -> None:
    copied = [line.split()[1:-1] for line in LINES if line.startswith("COPY ") and "--from" not in line]
    shipped = {name for names in copied for name in names}
    assert all((ROOT / name).exists() for name in shipped)
    assert "setup.py" in shipped, "or nothing is compiled"
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.rstrip("*") for package in packages} <= shipped


def test_scripts_wheel_finds_all_that_it_packs() -> None:
    packed = re.search(r"^cp -R (.*) \"\$copy\"$", (ROOT / "scripts" / "wheel").read_text(), re.MULTILINE)
    assert packed
    copied = " ".join(line for line in LINES if line.startswith("COPY "))
    assert [name for name in packed[1].split() if name not in copied.split()] == []


def test_the_image_does_not_run_as_root_and_has_a_health_check() -> None:
    words = [line.split()[0] for line in LINES if line and line[0].isupper()]
    assert "USER 10001" in LINES
    assert words.index("USER") < words.index("HEALTHCHECK") < words.index("ENTRYPOINT")


def test_a_container_is_restarted_after_a_reload_as_well() -> None:
    """Where an image names no signal to stop it, Docker takes each one of `docker kill` for the last, such as SIGHUP."""
    assert "STOPSIGNAL SIGTERM" in LINES


def test_the_base_is_pinned() -> None:
    (base,) = (line.removeprefix("ARG BASE=") for line in LINES if line.startswith("ARG BASE="))
    assert re.search(r":[\w.-]*\d", base)
    assert ":latest" not in base
    assert {line.split()[1] for line in LINES if line.startswith("FROM ")} == {"${BASE}"}
