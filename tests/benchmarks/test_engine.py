"""The measurements of `python -m benchmarks.engine` over a simulated GPU; its figures mean something on a real one only."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import engine as load
from benchmarks.engine import NETWORKS, alone, asking, main, measure, prefix
from engines import ExecutionFailed
from partitions import DeviceUnavailable
from tests.engines.simulated import Bench, affine, opened
from tests.engines.tensors import array


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as bench:
        yield bench


def test_an_inference_is_enqueued_waited_for_and_awaited_and_each_takes_longer(bench: Bench) -> None:
    data = np.ones((2, 3), np.float32)
    with closing(bench.bind()) as executor, asking(bench.device, executor, {"x": data}) as ask:
        assert array(ask().wait()[0]).tolist() == affine(data).tolist()
        submits, totals, resumed = measure(executor, bench.partition, ask, 0.01)
    assert len(submits) == len(totals) >= load.FEWEST <= len(resumed)
    assert all(0 < submit < total for submit, total in zip(submits, totals, strict=True))
    assert min(resumed) > 0


@pytest.mark.parametrize(
    ("settings", "call"),
    [({}, "cuGraphLaunch"), ({"copies": "engine"}, "IExecutionContext.execute_async_v3"), ({"graphs": "off"}, "")],
)
def test_the_engine_alone_is_replayed_without_its_copies_where_there_are_graphs(
    bench: Bench, settings: dict[str, str], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "FEWEST", 1)
    data = np.ones((2, 3), np.float32)
    with closing(bench.bind(**settings)) as executor, asking(bench.device, executor, {"x": data}) as ask:
        bench.gpu.log.clear()
        found: Any = alone(executor, bench.partition, ask, 0)
        assert (found is not None) == (bench.gpu.log.count(call) > load.TURN) == bool(call)
        assert array(ask().wait()[0]).tolist() == affine(data).tolist()


def test_the_engine_alone_is_measured_in_the_shapes_that_are_asked_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is launched again does not touch the context, which may hold other shapes by then."""
    monkeypatch.setattr(load, "FEWEST", 1)
    with closing(bench.bind()) as executor:
        for count in (5, 3):
            with asking(bench.device, executor, {"x": np.ones((count, 3), np.float32)}) as ask:
                for _ in range(4):
                    ask().wait()
        with asking(bench.device, executor, {"x": np.ones((5, 3), np.float32)}) as ask:
            alone(executor, bench.partition, ask, 0)
        assert executor.instance.contexts[0].shapes == ((5, 3),)


def test_an_error_on_a_tenants_thread_ends_the_measurement(bench: Bench) -> None:
    def ask() -> Any:
        raise ExecutionFailed("no")

    with pytest.raises(ExecutionFailed, match="no"):
        load.awaited(bench.partition, ask, 0)


@pytest.mark.parametrize(("sms", "count"), [(1, 1), (8, 1), (9, 2), (120, 15), (121, 16), (999, 16)])
def test_prefix_takes_as_many_granules_as_the_sms_need(sms: int, count: int) -> None:
    assert prefix([8] * 15 + [12], sms) == range(count)


def test_a_network_has_the_batches_that_its_profile_holds() -> None:
    batches = {name: [batch for batch in (1, 8) if make().batch(batch)] for name, make in NETWORKS.items()}
    assert batches == {"mlp": [1, 8], "resnet": [1, 8], "encoder": [1, 8], "anysize": [1], "several": [1, 8]}
    assert NETWORKS["several"]().batch(8) == {"a": (8, 64), "b": (8, 16)}


def test_a_table_and_a_file_have_a_row_for_each_case(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = bench.plan(
        "several (float[n, 64] a, float[n, 16] b) => (float[n, 64] y) { y = Add(a, a) }", NETWORKS["several"]().ranges
    )
    monkeypatch.setattr(load, "plan", lambda folder, network: plan)
    monkeypatch.setattr(load, "open_device", lambda kind: bench.device)
    assert main(["--networks", "several", "--sms", "8,all", "--seconds", "0.001", "--json", str(tmp_path / "out.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "132 SMs" in lines[0]
    assert len(lines) == 2 + 16
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    cases = {(row["batch"], row["case"]["sms"], row["case"]["graphs"], row["case"]["copies"]) for row in rows}
    assert cases == {(b, s, g, c) for b in (1, 8) for s in (8, 132) for g in ("on", "off") for c in ("sm", "engine")}
    assert all(row["submit"] < row["wait"] and row["over"] == row["resumed"] - row["wait"] for row in rows)


def test_cases_over_the_time_budget_are_skipped_with_a_message(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = bench.plan()
    monkeypatch.setattr(load, "plan", lambda folder, network: plan)
    monkeypatch.setattr(load, "open_device", lambda kind: bench.device)
    assert main(["--networks", "mlp", "--sms", "8", "--budget", "1e-9"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert "no time left for mlp" in printed.err


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(kind: str) -> None:
        raise DeviceUnavailable("CUDA device 0 cannot be carved")

    monkeypatch.setattr(load, "open_device", refuse)
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert capsys.readouterr().err == "this needs a GPU: CUDA device 0 cannot be carved\n"


@pytest.mark.parametrize(
    ("option", "why"), [("--networks=mpl", "'mpl' is no network; there are mlp"), ("--sms=0", "expected numbers of SMs from 1")]
)
def test_an_unknown_network_or_number_of_sms_is_refused(option: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option])
    assert why in capsys.readouterr().err
