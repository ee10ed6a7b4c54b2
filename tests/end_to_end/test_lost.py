"""A device that is lost under load: all requests are answered at once, and the process exits, to be restarted."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import DATATYPES, Engine, Signature, TensorSpec
from partitions import DeviceLost
from server.config.tenant import TenantConfig
from server.device import model_loader as libraries
from server.host.leaving import NEEDS_RESTART
from tests.fakes import FakeDevice, FakeEngine, Script

from .harness import PATIENCE, configuration, serving
from .wire import until

FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))
REQUEST = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.5]}]}
CLIENTS = 6


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """The script of every engine that is loaded from now on."""
    script = Script()

    def load(path: Path, device: Any = None, settings: Any = None, max_batch: Any = None, builds: Any = None) -> Engine:
        return FakeEngine(SIGNATURE, script)

    monkeypatch.setattr(libraries, "load_engine", load)
    return script


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_text("a fake")
    return tmp_path


@pytest.mark.parametrize("direct", [False, True], ids=["asgi", "direct"])
def test_losing_the_device_under_load_answers_all_requests_and_exits_with_70(root: Path, script: Script, direct: bool) -> None:
    tenants = [TenantConfig(name=name, granules=2, models=("m",)) for name in ("acme", "globex")]
    abandoned: list[int] = []
    gone = threading.Event()

    def abandon(status: int) -> None:
        abandoned.append(status)
        gone.set()

    def ask(tenant: str) -> httpx.Response:
        return httpx.post(f"{served.url}/v2/models/m/infer", json=REQUEST, headers={"X-Tenant": tenant}, timeout=PATIENCE)

    with (
        serving(configuration(root, *tenants), FakeDevice((1,) * 4), direct, abandon) as served,
        ThreadPoolExecutor(2 * CLIENTS) as pool,
    ):
        assert ask("acme").status_code == 200
        gate = script.hold("run")
        asking = [pool.submit(ask, tenant.name) for tenant in tenants for _ in range(CLIENTS)]
        gate.wait_for_arrival(2)
        until(lambda: sum(t.lane.slots.statistics().used for t in served.service.tenants.values()) == 2 * CLIENTS)
        assert httpx.get(f"{served.url}/v2/health/ready").status_code == 200
        for point in ("run", "enqueue"):
            for nth in range(4 * CLIENTS):
                script.fail(point, nth - 1, DeviceLost("CUDA error 700"))
        gate.open()
        assert gone.wait(PATIENCE)
        assert abandoned == [NEEDS_RESTART] == [70]
        answers = [asked.result(PATIENCE) for asked in asking]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) >= 2 * CLIENTS - 2, "those that run already may still end well"
        for answer in (*refused, ask("acme"), ask("globex")):
            assert (answer.status_code, answer.json()) == (503, {"error": "the device is lost: CUDA error 700"})
            assert answer.headers["retry-after"]
        ready = httpx.get(f"{served.url}/v2/health/ready")
        assert ready.status_code == 503
        assert "lost" in ready.json()["error"]
        assert httpx.get(f"{served.url}/v2/health/live").status_code == 200
    assert abandoned == [NEEDS_RESTART]
