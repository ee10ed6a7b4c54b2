"""What a GPU says that it has moved, and the kernel of cores, through a whole server: account, metrics, status and files."""

import csv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from partitions.base import Bandwidth
from partitions.health import Health
from partitions.resctrl import CoreGroups
from server.config.tenant import TenantConfig
from tests.simulation.resctrl import KernelPath, groups, lay_out, meters

from .harness import Served, configuration, cores, serving
from .processes import Running, configure, running_script, tenant
from .virtual import VirtualDevice
from .wire import FOREVER, SMALL, Connection, infer, lane, posted, spin, until

WORKS = 20
GB = 10**9
ADDRESS = "0000:4e:00.0"


@pytest.fixture
def served(standard: Path, tmp_path: Path) -> Iterator[Served]:
    tenants = [TenantConfig(name=name, granules=2, models=("identity",)) for name in ("acme", "globex")]
    with serving(configuration(standard, *tenants, usage_dir=tmp_path / "usage"), VirtualDevice(4)) as served:
        yield served


async def says(served: Served, moved: dict[str, int]) -> None:
    """A reading of the device comes, and is counted."""
    observers = served.application.observers()
    observers.health.take(ADDRESS, "0", Health(moved=moved, memory_bandwidth=3 * 10**12))
    await observers.accountant.collect()


def usage(http: httpx.Client) -> tuple[dict[str, Any], dict[str, Any]]:
    """The device's, and acme's."""
    found = http.get("/admin/usage").json()
    return found["devices"][0], next(each for each in found["tenants"] if each["tenant"] == "acme")


def rates(http: httpx.Client) -> dict[str, Any]:
    """What the status page shows of each tenant's model."""
    return {each["tenant"]: each["bytes_per_second"] for each in http.get("/admin/status").json()["models"]}


def test_it_is_in_the_account_the_metrics_the_status_and_the_files(served: Served, tmp_path: Path) -> None:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        device, acme = usage(http)
        assert (device["moved"], device["background"], device["moved_seconds"], acme["moved"]) == (None, None, 0, None)
        assert "moved_bytes_total{" not in http.get("/metrics").text
        assert set(rates(http).values()) == {None}
        served.call(says(served, {"memory": 5 * GB, "pcie_in": 0, "pcie_out": 0}))
        for _ in range(WORKS):
            assert infer(http, "identity", SMALL, headers={"x-tenant": "acme"}).status_code == 200
        until(lambda: usage(http)[1]["models"][0]["works"] >= WORKS)
        served.call(says(served, {"memory": 45 * GB, "pcie_in": 3 * GB, "pcie_out": GB}))
        device, acme = usage(http)
        written = http.get("/metrics").text
        shown = rates(http)
        served.application.observers().health.take(ADDRESS, "0", Health(lost=True))
        assert set(rates(http).values()) == {None}, "it does not say any more"
    assert device["moved"] == {"memory": 40 * GB, "pcie_in": 3 * GB, "pcie_out": GB, "by": "measured"}
    assert device["moved_seconds"] > 0
    assert acme["moved"] == acme["models"][0]["moved"]
    assert acme["moved"]["by"] == "estimated", "one window says too little"
    for path in ("memory", "pcie_in", "pcie_out"):
        assert acme["moved"][path] > 0
        assert acme["moved"][path] + device["background"][path] == device["moved"][path]
    samples = [each for family in text_string_to_metric_families(written) for each in family.samples]
    by = {
        each.labels["by"]: each.value
        for each in samples
        if each.name == "greenlane_moved_bytes_total" and (each.labels["tenant"], each.labels["path"]) == ("acme", "memory")
    }
    assert by == {"estimated": acme["moved"]["memory"], "measured": 0}
    background = {each.labels["path"]: each.value for each in samples if each.name == "greenlane_background_moved_bytes_total"}
    assert background == {path: device["background"][path] for path in background}
    assert sum(each.name == "greenlane_moved_residual_ratio" for each in samples) == 3
    assert shown["acme"]["memory"] > 0
    assert shown["acme"]["by"] == "estimated"
    assert shown["globex"] is None
    served.call(served.application.observers().accountant.write())
    (path,) = (tmp_path / "usage").iterdir()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert sum(int(row["memory_bytes"] or 0) for row in rows) == 40 * GB
    assert {row["moved_by"] for row in rows if row["model"]} == {"estimated"}


class Moving(VirtualDevice):
    """Says what it moves."""

    def bandwidth(self) -> Bandwidth:
        return Bandwidth(memory=GB, unit=GB, pcie=GB)


@pytest.mark.parametrize(("keys", "named"), [({}, True), ({"pcie": 0.5}, True), ({"memory_bandwidth": 0.5}, False)])
def test_a_hog_whose_memory_nothing_holds_is_named_in_the_advice(standard: Path, keys: dict[str, Any], named: bool) -> None:
    acme = TenantConfig(name="acme", granules=2, models=("identity",), **keys)
    globex = TenantConfig(name="globex", granules=2, models=("identity",))
    with (
        serving(configuration(standard, acme, globex), Moving(4)) as served,
        httpx.Client(base_url=served.url, timeout=60) as http,
        ThreadPoolExecutor(1) as threads,
    ):
        asked = threads.submit(httpx.get, f"{served.url}/admin/advice?seconds=1", timeout=60)
        for number in count(1):
            for name in ("acme", "globex"):
                assert infer(http, "identity", SMALL, headers={"x-tenant": name}).status_code == 200
            served.call(says(served, {"memory": number * GB, "pcie_in": 0, "pcie_out": 0}))
            if asked.done():
                break
        said = asked.result().json()["tenants"]["acme"]["bandwidth"]
    assert any('`memory_bandwidth = "auto"` would hold acme' in each for each in said) == named


class VirtualCores(VirtualDevice):
    """They have numbers, by which the kernel knows them."""

    address = "0,1,2,3"


def counts(base: KernelPath, tenant: str, count: int) -> None:
    """The kernel has counted so much of this tenant's cores."""
    (group,) = [each for each in (*groups(base), *meters(base)) if each.name.split("-")[1] == tenant]
    (group / "mon_data/mon_L3_00/mbm_total_bytes").write_text(f"{count}\n")


def test_what_the_kernel_counts_of_cores_is_their_tenants(standard: Path, tmp_path: Path) -> None:
    shares = {"acme": 0.4, "globex": None}
    tenants = [
        TenantConfig(name=name, granules=2, models=("identity",), memory_bandwidth=share) for name, share in shares.items()
    ]
    base = lay_out(KernelPath(tmp_path), 8)
    config = configuration(standard, *tenants, usage_dir=tmp_path / "usage")
    with serving(config, VirtualCores(4)) as served, httpx.Client(base_url=served.url, timeout=60) as http:
        assert usage(http)[1]["moved"] is None
        served.controller.placements.cores = CoreGroups(KernelPath(tmp_path))
        served.call(replanned(served))
        counts(base, "acme", 5 * GB)
        until(lambda: usage(http)[1]["moved"])
        for _ in range(WORKS):
            assert infer(http, "identity", SMALL, headers={"x-tenant": "acme"}).status_code == 200
        until(lambda: usage(http)[1]["models"][0]["works"] >= WORKS)
        counts(base, "acme", 45 * GB)
        counts(base, "globex", 7 * GB)
        until(lambda: usage(http)[0]["moved"]["memory"] == 47 * GB)
        device, acme = usage(http)
        shown, written = rates(http), http.get("/metrics").text
        served.call(served.application.observers().accountant.write())
    assert acme["moved"] == {"memory": 40 * GB, "pcie_in": 0, "pcie_out": 0, "by": "measured"}, "whatever its models' parts are"
    assert 0 < acme["models"][0]["moved"]["memory"] <= 40 * GB
    assert device["background"]["memory"] == 0
    assert shown["acme"]["memory"] > 0
    samples = [each for family in text_string_to_metric_families(written) for each in family.samples]
    found = dict.fromkeys(shares, 0.0)
    for each in samples:
        if each.name == "greenlane_moved_bytes_total":
            found[each.labels["tenant"]] += each.value
    assert found == {"acme": 40 * GB, "globex": 7 * GB}
    (path,) = (tmp_path / "usage").iterdir()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert sum(int(row["memory_bytes"] or 0) for row in rows) == 47 * GB
    assert sum(int(row["memory_bytes"] or 0) for row in rows if row["tenant"] == "globex") == 7 * GB


async def replanned(served: Served) -> None:
    served.controller.placements.remake()
    await served.controller.placements.carried_out()


ON_CORES = """
import asyncio, sys
from pathlib import Path
from partitions.cpu import open_cpu
from partitions.resctrl import CoreGroups
from server.config.file import load
from server.control import placement_plans
from server.host import logs
from server.processes.serve import serve
from server.processes.supervision.listen import listen
from tests.simulation.resctrl import KernelPath

def opener(config):
    return open_cpu()

if __name__ == "__main__":
    path = Path(sys.argv[1])
    config = load(path)
    logs.configure(config.server.log_format, config.server.log_level)
    placement_plans.CoreGroups = lambda: CoreGroups(KernelPath(sys.argv[2]))
    listening = listen(config.server.host, config.server.port, {})
    asyncio.run(serve(config, opener, *listening, hosted=config.named_devices, read=lambda: load(path)))
"""
"""A server of processes on cores that the kernel of this folder counts."""


@pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")
def test_what_cores_move_while_their_tenant_goes_is_its_own(standard: Path, tmp_path: Path) -> None:
    base = lay_out(KernelPath(tmp_path / "root"), max(cores()) + 1)
    stays, goes = tenant("acme", "identity"), tenant("globex", "spin")
    config = configure(tmp_path / "c.toml", standard, stays + goes, drain_timeout='"100s"', default_tenant='"globex"')
    with (
        running_script(tmp_path, ON_CORES, config, tmp_path / "root", kind=Running) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(1) as threads,
    ):

        def moved(tenant: str) -> Any:
            found = next(each for each in http.get("/admin/usage").json()["tenants"] if each["tenant"] == tenant)
            return found["moved"] and found["moved"]["memory"]

        until(lambda: moved("globex") == 0)
        with Connection(server) as connection:
            connection.send(posted("spin", spin(FOREVER)))
            until(lambda: lane(http, "globex")["in_flight"] == 1)
            configure(tmp_path / "c.toml", standard, stays, drain_timeout='"100s"', default_tenant='"acme"')
            reload = threads.submit(httpx.post, f"{server.url}/admin/reload", timeout=60)
            until(lambda: "globex" not in http.get("/admin/partitions").text)
            counts(base, "globex", 5 * GB)
        assert reload.result().status_code == 200
        assert moved("globex") == 5 * GB
        until(lambda: [each.name.split("-")[1] for each in meters(base)] == ["acme"])
