"""The measurement of `python -m benchmarks.pcie` over a simulated GPU; its figures mean something on a real one only."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine, pcie
from tests.engines.simulated import opened
from tests.simulation import Gpu, kernels


class InTurn(pcie.Bench):
    """Launches each once and waits for it: a simulated GPU does nothing until it is waited for."""

    def measure(
        self, hogs: Sequence[pcie.Runs], other: pcie.Runs | None, seconds: float, gap: float = 0.0004
    ) -> tuple[list[float], list[float]]:
        for each in (*hogs, *([other] if other else [])):
            each.launch()
            each.stream.sync()
        return [1.0] * len(hogs), [10.0] * 20


def move(gpu: Gpu, stream: Any, blocks: int, source: int, target: int, nbytes: int, *rest: int) -> Callable[[], None]:
    return lambda: gpu.copy(source, target, nbytes)


def work(gpu: Gpu, stream: Any, blocks: int, data: int, nbytes: int, sink: int, times: int) -> Callable[[], None]:
    return lambda: None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that a simulation copies in no time, its own form of the kernels, and no clock."""
    monkeypatch.setattr(pcie, "SIZES", (4096, 8192))
    monkeypatch.setattr(pcie, "MOST", 4 << 20)
    monkeypatch.setattr(pcie, "Bench", InTurn)
    monkeypatch.setitem(kernels.KERNELS, "move", move)  # type: ignore[arg-type]
    monkeypatch.setitem(kernels.KERNELS, "work", work)  # type: ignore[arg-type]


def test_every_way_and_size_is_measured_and_written_down(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path) as bench:
        monkeypatch.setattr(engine, "open_device", lambda _: bench.device)
        assert pcie.main(["--json", str(tmp_path / "pcie.json")]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "pcie.json").read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert len(found["one tenant"]) == 2 * (len(pcie.OUT) + len(pcie.IN))
    assert all(row["forty"] == [1.0, 1.0] and row["rate"] for row in found["one tenant"])
    assert len(found["product"]) == 12
    assert found["latency"]["out"]["1 x 512, 64 KB, 1 turns"]["8192"] == [10.0, 10.0]


def test_a_copy_of_each_way_arrives(small: None, tmp_path: Path) -> None:
    with opened(tmp_path) as bench, ExitStack() as made:
        measured = InTurn(bench.device, 2, made)
        for tenant, way in enumerate((pcie.ONE_BY_TURN, pcie.IN_MEGABYTES)):
            measured.measure([measured.copies(tenant, way, 3 << 20, out=True)], None, 1)
            assert not measured.host[tenant].bytes[: 3 << 20].any()
