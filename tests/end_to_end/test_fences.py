"""Tenants that are held to shares of bandwidth, in real processes: reloads, repartitions, and processes that are killed."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from . import repository
from .fixtures import Site
from .harness import cores
from .processes import Load, Running, holder_pid, running_apart, running_devices, tenant
from .wire import FOREVER, Connection, answered, as_before, client, index, infer, lane, posted, request, spin, tensor, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

FORMS: dict[str, tuple[Any, str]] = {
    "device process": (running_devices, '[device]\nbackend = "cpu"\ncores = "0-1"\n'),
    "device process each": (running_apart, '[device]\nbackend = "cpu"\ncores = "0-1"\nmps = "on"\n'),
}

LARGE = request(tensor("x", "FP32", [1, 10_000], [1.0] * 10_000))
"""40 ms of 1 MB/s: more than a request takes on a busy machine."""
GLOBEX = "X-Tenant: globex"


class Fenced(Site):
    """A server of acme, which is fenced, and of globex, which is not, and whose HTTP has a helper."""

    def write(self, *more: str, **keys: object) -> Path:
        """Write the file, with more tables; `keys` are acme's."""
        keys = {"granules": 3, "memory_bandwidth": 0.5, **keys}
        acme = tenant("acme", "identity", "spin", **{key: value for key, value in keys.items() if value is not None})
        return super().write(acme, tenant("globex", "identity", "spin", http_processes=2), *more)

    def fence(self, name: str = "acme") -> dict[str, Any]:
        """What is shown of it; empty for none."""
        with client(self.server) as http:
            partition = http.get("/admin/partitions").json()["partitions"][name]
        return dict(partition.get("fence") or {})


@pytest.fixture(params=FORMS)
def site(request: pytest.FixtureRequest, standard: Path, tmp_path: Path) -> Iterator[Fenced]:
    start, device = FORMS[request.param]
    site = Fenced(tmp_path, standard, device)
    with start(site.write(pcie="1MB/s")) as server:
        site.server = server
        until(lambda: site.fence().get("granules") == [0, 1])
        yield site


def pages(server: Running) -> int:
    """How many activity pages the supervisor and the device processes have, or have mapped."""
    count = 0
    for pid in (server.popen.pid, *server.devices()):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                count += "memfd:greenlane activity" in os.readlink(f"/proc/{pid}/fd/{descriptor}")
    return count


def held_by_a_helper(server: Running, opened: ExitStack) -> tuple[Connection, int]:
    """A connection of globex's in its process that is not the lead, and that process's id."""
    found: list[tuple[Connection, int]] = []

    def connect() -> bool:
        connection = opened.enter_context(Connection(server))
        connection.send(posted("identity", LARGE, GLOBEX))
        assert connection.answer().status == 200
        if (pid := holder_pid(server, connection)) != server.pid("globex"):
            found.append((connection, pid))
        return bool(found)

    until(connect)
    return found[0]


def waited(site: Fenced, server: Running, *busy: str, of: str = "acme") -> bool:
    """Whether works of acme, or another, come to wait for its share of PCIe while these tenants have a request open each."""
    before = site.fence(of)["waits"]
    with ExitStack() as opened, client(server, of) as http:
        for name in busy:
            opened.enter_context(Connection(server)).send(posted("spin", spin(FOREVER), f"X-Tenant: {name}"))
            until(lambda name=name: lane(http, name)["in_flight"] == 1)  # type: ignore[misc]
        for _ in range(9):
            assert infer(http, "identity", LARGE).status_code == 200
    return bool(site.fence(of)["waits"] > before)


def test_a_fenced_tenant_is_held_through_reloads_repartitions_and_the_end_of_processes(site: Fenced) -> None:
    server = site.server
    found = site.fence()
    assert [each["model"] for each in found.pop("models")] == ["identity/1", "spin/1"]
    assert found == {
        "memory_bandwidth": 2 * 10**12,
        "granules": [0, 1],
        "launches": 0,
        "pcie": 10**6,
        "waits": 0,
        "cores": "",
        "moved": None,
        "paced": False,
        "notes": [],
        "problems": [],
    }
    assert site.fence("globex") == {}
    assert waited(site, server, "globex")
    with Load(server, "acme") as load:
        site.write(memory_bandwidth=0.25)
        assert site.reload().status_code == 200
        until(lambda: site.fence().get("granules") == [0])
        load.more()
        site.write(memory_bandwidth=0.5, pcie="1MB/s")
        assert site.reload().status_code == 200
        until(lambda: site.fence().get("granules") == [0, 1])
        with client(server) as http:
            assert http.put("/admin/partitions", json={"acme": 2}).status_code == 200
        until(lambda: "it needs no narrower placement" in str(site.fence().get("notes")))
        assert site.fence()["granules"] == []
        with client(server) as http:
            assert http.put("/admin/partitions", json={"acme": 3}).status_code == 200
        until(lambda: site.fence().get("granules") == [0, 1])
        os.kill(server.pid("globex"), signal.SIGKILL)
        with client(server, "globex") as http:
            until(lambda: answered(http) == 200)
        load.more()
    assert load.wrong == []
    assert waited(site, server, "globex"), "its pages outlive its processes"
    with ExitStack() as opened, client(server, "globex") as http:
        connection, pid = held_by_a_helper(server, opened)
        connection.send(posted("spin", spin(FOREVER), GLOBEX))
        until(lambda: lane(http, "globex")["in_flight"] == 1)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not waited(site, server))
    for pid in server.devices():
        os.kill(pid, signal.SIGKILL)
    with client(server, "acme") as http:
        until(lambda: as_before(http))
    until(lambda: site.fence().get("granules") == [0, 1])
    assert waited(site, server, "globex")


def test_a_tenant_that_misses_its_target_for_its_share_of_pcie_reads_so(standard: Path, tmp_path: Path) -> None:
    site = Fenced(tmp_path, standard, FORMS["device process"][1])
    with running_devices(site.write(pcie="1MB/s", target_p99="1ms")) as server, client(server) as http:
        site.server = server
        until(lambda: site.fence() != {})
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(http.get, "/admin/advice?seconds=2")
            while not asked.done():
                assert waited(site, server, "globex")
        said = asked.result().json()["tenants"]["acme"]
    assert said["verdict"] == "more"
    (sentence,) = said["bandwidth"]
    assert "waited for acme's `pcie` of 1 MB/s" in sentence


@pytest.mark.parametrize("form", FORMS)
def test_a_tenant_goes_while_it_loads_a_model_for_whose_size_its_share_of_pcie_is_small(tmp_path: Path, form: str) -> None:
    start, device = FORMS[form]
    models = repository.standard(tmp_path / "models")
    large = repository.write(models, "large", repository.IDENTITY)
    site = Fenced(tmp_path, models, device)
    with start(site.write(pcie="1MB/s", models=["*"])) as server, ExitStack() as opened:
        site.server = server
        until(lambda: site.fence() != {})
        opened.enter_context(Connection(server)).send(posted("spin", spin(FOREVER), GLOBEX))
        with client(server) as http, client(server, "acme") as acme, ThreadPoolExecutor(1) as threads:
            until(lambda: lane(http, "globex")["in_flight"] == 1)
            assert http.post("/admin/tenants/acme/models/large/unload").status_code == 200
            large.write_bytes(b"\xff" * 10**8)  # 100 s of that share; then it is no model.
            for more, status in ((tenant("initech", "large"), 409), ("", 200)):
                loading = threads.submit(http.post, "/admin/tenants/acme/models/large/load")
                until(lambda: {"name": "large", "state": "LOADING"} in index(acme))
                Site.write(site, tenant("globex", "identity", "spin", http_processes=2), more)
                assert http.post("/admin/reload", timeout=50).status_code == status
                assert loading.result().status_code == 400
                until(lambda status=status: status == 200 or site.fence().get("pcie") == 10**6)  # type: ignore[misc]
        assert site.fence("globex") == {}


@pytest.mark.parametrize("form", FORMS)
def test_a_tenant_is_fenced_while_it_serves_for_the_sake_of_those_that_come(standard: Path, tmp_path: Path, form: str) -> None:
    start, device = FORMS[form]
    site = Fenced(tmp_path, standard, device)
    own, initech = {"granules": 2}, tenant("initech", "spin", http_processes=2)

    def reload(*more: str, **keys: object) -> None:
        site.write(*more, **own, **keys)
        assert (answer := site.reload()).status_code == 200, answer.text

    with start(site.write(**own, memory_bandwidth=None)) as server:
        site.server = server
        assert site.fence() == {}
        with Load(server, "acme") as load, Load(server, "globex") as other:
            reload(memory_bandwidth=0.25, pcie="1MB/s")
            until(lambda: site.fence().get("granules") == [0])
            load.more()
            other.more()
        assert load.wrong == other.wrong == []
        assert waited(site, server, "globex")
        there = pages(server)
        with Load(server, "acme") as load:
            for _ in range(2):  # The second time it has the name of one that has gone.
                reload(initech, pcie="1MB/s")
                until(lambda: waited(site, server, "initech"))
                load.more()
                reload(pcie="1MB/s")
                load.more()
                until(lambda: pages(server) <= there)
            reload(initech, pcie="1MB/s")
            load.more()
        assert load.wrong == []
        for pid in server.devices():
            os.kill(pid, signal.SIGKILL)
        with client(server, "acme") as http:
            until(lambda: as_before(http))
        until(lambda: waited(site, server, "initech"))
        reload(initech, memory_bandwidth=None)
        until(lambda: site.fence() == {})


@pytest.mark.parametrize("form", FORMS)
def test_tenants_that_come_together_know_each_other(standard: Path, tmp_path: Path, form: str) -> None:
    start, device = FORMS[form]
    site = Fenced(tmp_path, standard, device)
    keys = {"granules": 1, "memory_bandwidth": None, "pcie": "1MB/s"}
    both = tenant("initech", "identity", "spin", pcie="1MB/s"), tenant("hooli", "identity", "spin", pcie="1MB/s")
    with start(site.write(**keys)) as server:
        site.server = server
        site.write(*both, **keys)
        assert (answer := site.reload()).status_code == 200, answer.text
        until(lambda: site.fence("hooli") != {})
        for busy, held in pairwise(("globex", "acme", "initech", "hooli", "acme")):
            until(lambda busy=busy, held=held: waited(site, server, busy, of=held))  # type: ignore[misc]


def test_a_fenced_tenant_that_moves_to_another_device_is_held_there_for_the_sake_of_others(
    standard: Path, tmp_path: Path
) -> None:
    site = Fenced(tmp_path, standard)
    devices = [f'[devices.{name}]\nbackend = "cpu"\ncores = "{core}"\n' for name, core in zip("01", cores()[:2], strict=True)]
    acme = tenant("acme", "identity", "spin", device="0", granules=2, memory_bandwidth=0.25, pcie="1MB/s")
    others = tenant("globex", "identity", "spin", device="0") + tenant("hooli", "identity", device="1")
    with running_devices(Site.write(site, *devices, acme, others)) as server:
        site.server = server
        until(lambda: site.fence().get("granules") == [0])
        assert waited(site, server, "globex")
        Site.write(site, *devices, acme, others, tenant("initech", "spin", device="1"))
        assert site.reload().status_code == 200
        until(lambda: not waited(site, server, "initech"))  # It is on another device; globex was at work a moment ago.
        with client(server) as http:
            assert http.put("/admin/tenants/acme/device", json={"device": "1"}).status_code == 200
            shown = http.get("/admin/partitions").json()["partitions"]
        assert (shown["acme"]["device"], shown["acme"]["granules"]) == ("1", [2, 3])
        until(lambda: site.fence().get("granules") == [2])
        until(lambda: not waited(site, server, "globex"))  # It is on another device now.
        assert waited(site, server, "initech")
