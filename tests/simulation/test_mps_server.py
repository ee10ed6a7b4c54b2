"""A server with a device process for each tenant, under fake MPS daemons of two simulated GPUs."""

import os
from collections.abc import Iterator

import pytest

from tests.gpu import test_two_devices as real
from tests.gpu.networks import add
from tests.gpu.process import Served

from .mps import FakeMps
from .plans import make_plan

DEVICES = real.DEVICES.replace("index", 'mps = "on"\nindex')
test_repartitions = real.test_tenants_of_both_gpus_are_repartitioned_at_once


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    """As there; nothing is measured."""
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("mps")
    for name, network in real.NETWORKS.items():
        (add(folder / "models", name) / "model.plan").write_bytes(make_plan(network().onnx, network().ranges))
    fake = FakeMps(folder / "fake")
    os.mkfifo(folder / "lose")
    environment = {"LOSE": str(folder / "lose"), "PATH": f"{fake.folder}:{os.environ['PATH']}"}
    with real.serving(folder / "models", folder, DEVICES, real.TENANTS, "tests.simulation.losing", environment) as served:
        yield served


def test_each_tenant_gets_right_answers_from_a_process_of_its_own(server: Served) -> None:
    devices = server.admin("GET", "device")["devices"]
    assert [(each["kind"], each["tenants"], each["state"]) for each in devices] == [
        ("cuda", ["acme", "initech"], "serving"),
        ("cuda", ["globex"], "serving"),
    ]
    assert all(each["description"].startswith("Simulated H100 under MPS, 132 SMs in 15 granules") for each in devices)
    probed = server.admin("POST", "partitions/probe")
    assert probed["overlaps"] == []
    assert [each["located"] for each in probed["partitions"].values()] == [None] * 3
    assert len({server.device_process(name) for name in ("acme"[:1], "initech"[:1], "globex"[:1])}) == 3
    real.check_both(server)


def test_a_tenant_moves_to_the_other_gpu_and_back_to_a_process_of_its_own(server: Served) -> None:
    with real.Asking(server.port, "acme") as moving, real.Asking(server.port, "globex") as beside:
        for to in "10":
            moved = server.admin("PUT", "tenants/acme/device", {"device": to, "granules": 4})
            assert moved["partitions"]["acme"]["device"] == to
            moving.more()
            beside.more()
    assert (moving.wrong, beside.wrong) == ([], [])
    real.check_both(server)
