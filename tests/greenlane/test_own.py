"""Another package called `server`, `engines` or `partitions` that precedes Greenlane's is named, and not imported."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from greenlane import own

RAISES = "raise SystemExit('imported')"


def write(folder: Path, kind: str, name: str) -> Path:
    """A package, a folder without __init__.py, or a module of this name."""
    if kind == "module":
        path = folder / f"{name}.py"
    else:
        path = folder / name
        path.mkdir()
    if kind != "folder":
        (path if kind == "module" else path / "__init__.py").write_text(RAISES)
    return path


def started(*words: str, at: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*words], cwd=at, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", own.PACKAGES)
@pytest.mark.parametrize("kind", ["package", "module"])
def test_a_foreign_package_in_the_current_folder_is_named_and_not_imported(tmp_path: Path, kind: str, name: str) -> None:
    path = write(tmp_path, kind, name)
    done = started(sys.executable, "-m", "greenlane", "check", "c.toml", at=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"greenlane: {path} hides Greenlane's package {name!r}, which is {own.HOME / name};")
    assert "Traceback" not in done.stderr


def test_a_foreign_package_on_pythonpath_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "package", "server")
    script = str(Path(sys.executable).with_name("greenlane"))
    done = started(script, "--port", "0", at=tmp_path.parent, PYTHONPATH=str(tmp_path))
    assert (done.returncode, f"greenlane: {path} hides" in done.stderr) == (1, True)
    assert "or take it out of PYTHONPATH" in done.stderr


def test_the_command_ignores_foreign_packages_in_the_current_folder(tmp_path: Path) -> None:
    write(tmp_path, "package", "server")
    script = str(Path(sys.executable).with_name("greenlane"))
    done = started(script, "check", "absent.toml", at=tmp_path)
    assert done.returncode == 2
    assert "absent.toml: cannot be read" in done.stderr


def test_a_folder_without_init_file_counts_where_python_would_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "folder", "server")
    monkeypatch.delitem(sys.modules, "server")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "editable" not in repr(finder)])
    with pytest.raises(own.ForeignPackage, match=f"{path} hides"):
        own.require_own_packages()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "PACKAGES", ("not_a_package_of_ours",))
    with pytest.raises(own.ForeignPackage, match=r"'not_a_package_of_ours' is missing from .*; install greenlane again"):
        own.require_own_packages()


def test_a_module_that_a_program_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "server", ModuleType("server"))
    with pytest.raises(own.ForeignPackage, match=r"^<server> hides Greenlane's package 'server'"):
        own.require_own_packages()


def test_own_packages_pass() -> None:
    own.require_own_packages()


def test_processes_do_not_get_the_current_folder_on_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(own.HOME)
    own.protect_children()
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.delenv("PYTHONSAFEPATH")
    own.protect_children()
    assert os.environ["PYTHONSAFEPATH"] == "1"
