"""What is compiled is told from its source, and never run in place of a newer one."""

import logging
import os
import pickle
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from engines import Signature, TensorSpec
from engines.datatypes import DATATYPES
from server import compiled
from server.batches import Batching
from server.catalog import Entry, Served
from server.desk import Counted, Report
from server.lane import LaneStatistics
from server.pool import SlotStatistics
from server.statistics import ModelStatistics, Size

LIBRARY = "front.cpython-311-x86_64-linux-gnu.so"


def checkout(root: Path, source: float, library: float) -> Path:
    """A checkout with one compiled module, both of these ages in seconds since 1970."""
    (root / "server").mkdir()
    (root / "setup.py").touch()
    for name, age in (("front.py", source), (LIBRARY, library), ("compiled__mypyc.cpython-311.so", library)):
        (root / "server" / name).touch()
        os.utime(root / "server" / name, (age, age))
    return root


def test_a_source_that_changed_since_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(compiled.Outdated, match=r"changed since scripts/compile: server/front.py; run it again, or .*--remove"):
        compiled.ensure_current(checkout(tmp_path, source=2, library=1))


def test_a_source_that_was_there_before_is_not(tmp_path: Path) -> None:
    compiled.ensure_current(checkout(tmp_path, source=1, library=2))


def test_what_was_installed_elsewhere_may_be_of_any_age(tmp_path: Path) -> None:
    root = checkout(tmp_path, source=2, library=1)
    (root / "setup.py").unlink()
    compiled.ensure_current(root)


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
