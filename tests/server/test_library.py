"""Models from files to executors, and what is told about those that are in the way."""

import logging
from pathlib import Path

import pytest

from engines import DATATYPES, Engine, ModelRefused, RuntimeSettings, Signature, TensorSpec
from partitions import Partition
from server.batches import Batching
from server.library import Library, Read
from server.repository import Repository
from tests.fakes import FakeDevice, FakeEngine, Script

SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("n",)),), ())


@pytest.fixture
def partitions() -> list[Partition]:
    device = FakeDevice()
    return [device.carve([0]), device.carve([1])]


def add(root: Path, model: str, config: str = "", version: str = "1") -> None:
    (root / model / version).mkdir(parents=True)
    (root / model / version / "model.onnx").touch()
    (root / model / "config.pbtxt").write_text(config)


def library(root: Path, read: Read = lambda path, max_batch, settings: FakeEngine(SIGNATURE, Script())) -> Library:
    return Library(Repository(root, {}), read)


def refuse(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
    raise ModelRefused(f"{path}: no good")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records if record.name == "greenlane.models"]
    caplog.clear()
    return told


def test_a_warning_comes_once_for_a_model_and_not_for_every_tenant_and_load(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m", "instance_group { gpus: 0 }")
    models = library(tmp_path)
    for partition in [*partitions, *partitions]:
        assert models.load("m", partition).served
    assert messages(caplog) == ["m/config.pbtxt: ignored, as they mean nothing here: instance_group.gpus"]


def test_a_problem_comes_once_and_again_when_it_came_back(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m", "max_batch_size: -1")
    models, (first, second) = library(tmp_path), partitions
    models.load("m", first)
    models.load("m", second)
    assert messages(caplog) == [
        "model m is unavailable: m/config.pbtxt: max_batch_size is -1; expected 0 (no batching) or more"
    ]
    (tmp_path / "m" / "config.pbtxt").write_text("")
    assert models.load("m", first).served
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: -1")
    models.load("m", first)
    assert len(messages(caplog)) == 1


def test_a_problem_of_one_version_names_it_but_not_where_the_repository_lies(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m")
    library(tmp_path, refuse).load("m", partitions[0])
    assert messages(caplog) == ["model m 1 is unavailable: m/1/model.onnx: no good"]


def test_a_model_that_takes_batches_has_its_requests_joined_or_a_warning_why_not(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m", "max_batch_size: 4")
    add(tmp_path, "square", "max_batch_size: 4")
    square = Signature((TensorSpec("x", DATATYPES["FP32"], ("n", "n")),), ())
    models = library(tmp_path, lambda path, *_: FakeEngine(square if "square" in str(path) else SIGNATURE, Script()))
    (joined,), (alone,) = (models.load(name, partitions[0]).served for name in ("m", "square"))
    assert joined.batching == Batching(SIGNATURE.with_max_batch(4), 4)
    assert "dynamic_batching" in joined.config
    assert alone.batching is None
    assert messages(caplog) == [
        "model square 1: requests are not joined into batches: 'x' has the batch dimension 'n' in another place too: [n, n]"
    ]


def test_an_attempt_leaves_telling_to_its_caller(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m", "zzz: 1")
    loaded = library(tmp_path, refuse).attempt("m", partitions[0])
    assert loaded.told() == (
        "m/config.pbtxt: ignored, as they mean nothing here: zzz (there is no such field)",
        "model m 1 is unavailable: m/1/model.onnx: no good",
    )
    assert messages(caplog) == []


def test_an_engine_is_read_once_for_all_who_hold_it(tmp_path: Path, partitions: list[Partition]) -> None:
    add(tmp_path, "m")
    read: list[FakeEngine] = []

    def remember(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        read.append(FakeEngine(SIGNATURE, Script()))
        return read[-1]

    models = library(tmp_path, remember)
    loaded = [models.load("m", partition) for partition in partitions]
    assert len(read) == 1
    assert repr(models) == f"<Library <Repository {tmp_path}>, 1 engine>"
    assert {len(each.executors) for each in loaded} == {1}


def test_an_engine_is_made_for_the_batches_that_are_configured(tmp_path: Path, partitions: list[Partition]) -> None:
    asked: list[int | None] = []

    def read(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        asked.append(max_batch)
        return FakeEngine(SIGNATURE, Script())

    for config in ("", "max_batch_size: 0", "max_batch_size: 32"):
        add(tmp_path / config[-1:], "m", config=config)
        library(tmp_path / config[-1:], read).load("m", partitions[0])
    assert asked == [None, None, 32]


def test_a_repository_that_cannot_be_read_counts_as_empty_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert library(tmp_path / "gone").names() == []
    (told,) = messages(caplog)
    assert told.startswith("the model repository cannot be read, so it counts as empty: [Errno 2]")


def test_what_goes_wrong_in_a_library_is_a_problem_with_a_traceback(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m")

    def raise_it(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        raise RuntimeError("a bug")

    loaded = library(tmp_path, raise_it).load("m", partitions[0])
    assert [problem.reason for problem in loaded.problems] == ["a bug"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert caplog.records[0].exc_info
