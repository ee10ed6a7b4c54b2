"""What is compiled is told from its source, and never run in place of a newer one."""

import logging
import os
import pickle
import runpy
import sys
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

from engines import Signature, TensorSpec
from engines.datatypes import DATATYPES
from server.host import compiled
from server.scheduling.batching import Batching
from server.scheduling.lane import LaneStatistics
from server.scheduling.slot_pool import SlotStatistics
from server.tenants.catalog import Entry, Served
from server.tenants.frontend import Counted, Report
from server.tenants.statistics import ModelStatistics, Size

LIBRARY = f"front{EXTENSION_SUFFIXES[0]}"
SOURCE = b"x = 1\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one module as scripts/compile leaves it."""
    (tmp_path / "server").mkdir()
    (tmp_path / "setup.py").touch()
    (tmp_path / "server" / "front.py").write_bytes(SOURCE)
    (tmp_path / "server" / LIBRARY).touch()
    (tmp_path / "server" / f"compiled__mypyc{EXTENSION_SUFFIXES[0]}").touch()
    (tmp_path / "server" / compiled.SUMS).write_text(f"{sha256(SOURCE).hexdigest()}  server/http/connection.py\n")
    return tmp_path


def refused(root: Path) -> None:
    with pytest.raises(
        compiled.Outdated, match=r"changed since scripts/compile: server/http/connection.py; run it again, or .*--remove"
    ):
        compiled.ensure_current(root)


def test_what_was_compiled_of_these_sources_may_run_whatever_their_age(checkout: Path) -> None:
    os.utime(checkout / "server" / LIBRARY, (1, 1))
    compiled.ensure_current(checkout)


def test_a_source_that_changed_since_is_named_with_what_to_do_whatever_its_age(checkout: Path) -> None:
    (checkout / "server" / "front.py").write_bytes(b"x = 2\n")
    os.utime(checkout / "server" / "front.py", (1, 1))
    refused(checkout)


def test_what_nobody_knows_the_source_of_is_refused(checkout: Path) -> None:
    (checkout / "server" / compiled.SUMS).unlink()
    refused(checkout)


def test_a_source_that_runs_among_compiled_ones_is_refused(checkout: Path) -> None:
    (checkout / "server" / LIBRARY).rename(checkout / "server" / f"other{EXTENSION_SUFFIXES[0]}")
    refused(checkout)


def test_what_another_python_would_run_is_not_looked_at(checkout: Path) -> None:
    (checkout / "server" / "front.py").write_bytes(b"x = 2\n")
    for path in (checkout / "server").glob("*.so"):
        path.rename(path.with_name(path.name.replace("cpython-", "cpython-9")))
    compiled.ensure_current(checkout)


def test_what_was_installed_elsewhere_does_not_change(checkout: Path) -> None:
    (checkout / "server" / "front.py").write_bytes(b"x = 2\n")
    (checkout / "setup.py").unlink()
    compiled.ensure_current(checkout)


def test_what_is_compiled_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, file in (("server.a", LIBRARY), ("server.b__mypyc", "b__mypyc.so"), ("other.c", LIBRARY), ("server.d", None)):
        module = ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
    with caplog.at_level(logging.INFO, "greenlane"):
        compiled.announce()
    assert "server.a" in compiled.modules()
    assert not {"server.b__mypyc", "other.c", "server.d"} & set(compiled.modules())
    assert f"compiled: {len(compiled.modules())} modules, from server.a to" in caplog.text


def test_every_module_that_is_compiled_is_there() -> None:
    modules = runpy.run_path(str(compiled.ROOT / "setup.py"))["COMPILED"]
    assert modules == sorted(modules)
    assert all((compiled.ROOT / path).is_file() for path in modules)


SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("n", 2)),), (), 3)
COUNTED = Counted("m", "1", ModelStatistics(sizes={1: Size(2, 3)}, failures={"OTHER": 1}), 4)


@pytest.mark.parametrize(
    "told",
    [
        Report((COUNTED,), (Entry("m", "1", "READY"),), LaneStatistics(1, 2, 3, 4, 5), SlotStatistics(1, 2, 3)),
        Served("m", "1", "m/1#1", SIGNATURE, "onnxruntime_onnx", {}, Batching(SIGNATURE, 3, 0.1, (2,))),
    ],
    ids=lambda told: type(told).__name__,
)
def test_what_processes_tell_each_other_arrives_as_it_was(told: object) -> None:
    assert pickle.loads(pickle.dumps(told)) == told
