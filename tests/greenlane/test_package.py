"""`import greenlane`: its public names, and what the package says of itself."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import greenlane
import server
from greenlane import own

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", greenlane.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    value = getattr(greenlane, name)
    assert value is getattr(greenlane, name)
    assert name == "__version__" or value.__module__.partition(".")[0] in own.PACKAGES


def test_public_names_are_sorted_and_listed() -> None:
    assert greenlane.__all__ == sorted(greenlane.__all__)
    assert set(greenlane.__all__) <= set(dir(greenlane))


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'greenlane' has no attribute 'nothing'"):
        _ = greenlane.nothing


def test_public_names_of_a_foreign_package_are_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(greenlane, "Application", raising=False)
    monkeypatch.setitem(sys.modules, "server", ModuleType("server"))
    with pytest.raises(ImportError, match="hides Greenlane's package 'server'"):
        _ = greenlane.Application


def test_there_is_one_version() -> None:
    assert greenlane.__version__ == importlib.metadata.version("greenlane") == server.__version__


def test_every_package_says_that_it_is_typed() -> None:
    assert all((ROOT / package / "py.typed").is_file() for package in ("greenlane", *own.PACKAGES))


def test_metadata_is_complete() -> None:
    metadata = importlib.metadata.metadata("greenlane").json
    assert {"author", "classifier", "keywords", "project_url", "license_expression", "summary", "requires_python"} <= set(
        metadata
    )
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert {"Documentation", "Source", "Issues", "Changelog"} <= set(known)


def test_readme_links_are_absolute_for_pypi() -> None:
    described = importlib.metadata.metadata("greenlane").get_payload()
    links = re.findall(r"\]\(([^)\s]+)", str(described))
    assert links
    assert not [link for link in links if not link.startswith(("https://", "http://", "#"))]
