"""Shapes that the library answers wrongly are run in another way or refused, on a simulated GPU with a real reference."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import ExecutionFailed
from engines.model_files.onnx_file import source_digest
from engines.tensorrt.building.builds import Builds
from tests.engines.simulated import AFFINE, Bench, affine, assert_right, opened, rows
from tests.engines.small import model
from tests.engines.tensors import run
from tests.simulation.gpu import every_third

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as bench:
        yield bench
        for engine in bench.engines:
            engine.pool.release_all()
        bench.close()


def plan(bench: Bench) -> Path:
    """An engine file of AFFINE, with the ONNX file that it was built from beside it."""
    path = bench.artifact(source=source_digest(model(AFFINE), []))
    path.with_suffix(".onnx").write_bytes(model(AFFINE))
    return path


def wrong(bench: Bench, *counts: int) -> None:
    """The library answers these numbers of rows wrongly."""
    bench.gpu.wrong_for = lambda shapes: shapes[0][0] in counts


def bind(bench: Bench, path: Path, **settings: Any) -> Any:
    return bench.load(path, **{"warm_up": (1,), "batch_padding": True, "verify": "on", **settings}).bind(bench.partition)


def others(executor: Any) -> dict[int, Any]:
    """What is said of shapes that were not found right, by their rows."""
    return {each["shapes"][0][0]: each for each in executor.describe()["verified"]["others"]}


def prepared(executor: Any, count: int) -> None:
    """Wait until what is needed for so many rows was prepared in the background."""
    if (future := executor.preparing([(count, 3)])) is not None:
        future.result(60)


@pytest.mark.parametrize("background", [False, True])
def test_a_wrong_shape_runs_with_more_rows_and_then_in_parts(
    bench: Bench, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "greenlane.engines")
    executor = bind(bench, plan(bench))
    wrong(bench, 3, 8)
    for count in (3, 8, 2):
        if background:
            prepared(executor, count)
        for _ in range(20):
            assert_right(executor, rows(count))
    assert others(executor)[3]["runs_as"] == [[4, 3]]
    assert others(executor)[8]["runs_as"] == [[4, 3]]
    assert [each["verdict"] for each in others(executor).values()] == ["wrong", "wrong"]
    notes = executor.describe()["notes"]
    assert any(note.startswith("shape 8x3 runs with 4x3: output 'y' is off by ") for note in notes)
    assert sum("shape 3x3 runs with 4x3" in record.getMessage() for record in caplog.records) == 1
    executor.close()


def test_a_shape_with_no_right_way_is_refused_and_others_are_served(bench: Bench) -> None:
    executor = bind(bench, plan(bench), batch_padding=False)
    wrong(bench, 3)
    for _ in range(2):
        prepared(executor, 2)
        with pytest.raises(ExecutionFailed, match=r"does not answer shape 3x3: output 'y' is off by .*models.NAME. verify"):
            executor.enqueue([bench.pinned(rows(3))[0]], bench.room())
    assert_right(executor, rows(2))
    assert others(executor)[3]["refused"] is True
    assert "shape 3x3 is refused: output 'y' is off by" in executor.describe()["notes"][0]
    with pytest.raises(ExecutionFailed, match="does not answer shape 3x3"):
        prepared(bind(bench, plan(bench), batch_padding=False), 3)


def test_a_wrong_shape_of_the_warm_up_does_not_keep_a_model_from_being_served(bench: Bench) -> None:
    wrong(bench, 2)
    executor = bind(bench, plan(bench), warm_up=(1, 2, 4), batch_padding=False)
    assert_right(executor, rows(1))
    assert_right(executor, rows(4))
    assert others(executor)[2]["refused"]


def test_verdicts_are_kept_beside_the_kernels(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plan(bench)
    wrong(bench, 4)
    first = bind(bench, path, warm_up=(1, 4))
    assert others(first)[4]["runs_as"] == [[5, 3]]
    asked = []
    monkeypatch.setattr(Builds, "compute_reference", lambda self, request: asked.append(request))
    second = bind(bench, path, warm_up=(1, 4), copies="engine")
    assert asked == []
    for executor in (first, second):
        assert_right(executor, rows(4))
        assert_right(executor, rows(1))
    (file,) = bench.folder.glob("answers-*.json")
    file.write_text("[")
    bind(bench, path, copies="auto")
    assert len(asked) == 1


@pytest.mark.parametrize(("verify", "served"), [("on", True), ("required", False), ("off", True)])
def test_without_an_onnx_file_shapes_are_served_unless_that_is_required(bench: Bench, verify: str, served: bool) -> None:
    executor = bind(bench, bench.plan(), verify=verify)
    if served:
        assert_right(executor, rows(1))
    else:
        with pytest.raises(ExecutionFailed, match="not verified: there is no ONNX file to compare with"):
            run(executor, rows(1))
    if verify != "off":
        assert others(executor)[1]["verdict"] == "unverified"


def test_without_graphs_the_reference_is_computed_while_others_are_served(bench: Bench) -> None:
    executor = bind(bench, plan(bench), graphs="off", batch_padding=False)
    wrong(bench, 3)
    pending = executor.preparing([(3, 3)])
    assert_right(executor, rows(1))
    pending.result(60)
    assert executor.preparing([(3, 3)]) is None
    with pytest.raises(ExecutionFailed, match="does not answer shape 3x3"):
        run(executor, rows(3))
    prepared(executor, 2)
    assert_right(executor, rows(2))
    assert executor.preparing([(3, 3)]) is executor.preparing([(2, 3)]) is None


def test_an_onnx_file_that_a_plan_was_not_built_from_decides_nothing(bench: Bench) -> None:
    path = plan(bench)
    path.with_suffix(".onnx").write_bytes(model(AFFINE.replace("three = {3}", "three = {4}")))
    executor = bind(bench, path)
    assert_right(executor, rows(1))
    name = path.with_suffix(".onnx").name
    assert others(executor)[1]["why"] == f"not verified: {name}: it is not the file that the plan was built from"


def test_parts_are_not_launched_without_the_interpreter(bench: Bench) -> None:
    executor = bind(bench, plan(bench))
    wrong(bench, 7, 8)
    data = rows(7)
    room = bench.room()
    (given,) = bench.pinned(data)
    (answer,) = executor.enqueue([given], room).wait()
    assert (answer.address, answer.array(executor.engine.signature.outputs[0].datatype).tolist()) == (
        room.address,
        affine(data).tolist(),
    )
    assert executor.recipe([(7, 3)], lambda: None) is None
    assert others(executor)[7]["runs_as"] == [[4, 3]]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_shape_that_is_answered_rightly_now_and_then_runs_with_others(bench: Bench, background: bool, graphs: str) -> None:
    executor = bind(bench, plan(bench), graphs=graphs)
    bench.gpu.wrong_for = every_third(lambda shapes: shapes[0][0] == 3)
    if background:
        prepared(executor, 3)
    for _ in range(20):
        assert_right(executor, rows(3))
    assert others(executor)[3]["runs_as"] == [[4, 3]]
    assert re.match(r"output 'y' is unsteady: it differs by .* in \d+ runs of the same inputs", others(executor)[3]["why"])


def test_an_unsteady_plan_without_its_onnx_file_is_refused_and_stays_so(bench: Bench) -> None:
    bench.gpu.wrong_for = every_third(lambda shapes: shapes[0][0] == 2)
    path = bench.plan()
    for copies in ("sm", "engine"):
        each = bind(bench, path, copies=copies, batch_padding=False)
        with pytest.raises(ExecutionFailed, match=r"does not answer shape 2x3: output 'y' is unsteady.*models.NAME. verify"):
            run(each, rows(2))
        assert_right(each, rows(1))
        assert others(each)[2]["verdict"] == "wrong"
        bench.gpu.wrong_for = lambda shapes: False
    run(bind(bench, path, verify="off"), rows(2))


def test_a_network_that_draws_random_numbers_is_served(bench: Bench) -> None:
    # So many columns that two answers differ as much as any two others: of three numbers they may happen to be alike.
    noisy = "noisy (float[n, 64] x) => (float[n, 64] y) { r = RandomNormalLike(x) y = Add(x, r) }"
    ranges = {"x": [(1, 64), (2, 64), (8, 64)]}
    path = bench.artifact(noisy, ranges, source=source_digest(model(noisy), []))
    path.with_suffix(".onnx").write_bytes(model(noisy))
    executor = bind(bench, path)
    run(executor, np.ones((1, 64), np.float32))
    assert others(executor)[1]["verdict"] == "unverified"
