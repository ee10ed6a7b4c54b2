"""Two devices of one host: each has its own process and tenants, and a tenant moves to the other one while it is served."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .devices_server import GRANULES
from .fixtures import server_with
from .harness import cores
from .processes import Load, Running, configure, running, running_devices, tenant
from .wire import FOREVER, SMALL, Connection, answered, as_before, client, infer, lane, posted, spin, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two devices of cores need two cores")

PLACES = {"acme": ("0", 1), "globex": ("1", 2)}
PROCESSES = {"0": "dev 0", "1": "dev 1"}
LIMIT = 2.0
"""Seconds: more than an answer takes on a busy machine, and less than a device process takes to be replaced."""


def devices() -> str:
    first, second = cores()[:2]
    return "".join(f'[devices.{name}]\nbackend = "cpu"\ncores = "{core}"\n' for name, core in (("0", first), ("1", second)))


TENANTS = tenant("acme", "identity", "spin", "rows", device="0") + tenant("globex", "identity", device="1", granules=2)


started = server_with(devices() + TENANTS, running_devices, max_pause='"1s"')


@pytest.fixture
def server(started: Running) -> Iterator[Running]:
    """As it was started."""
    yield started
    with client(started, "acme") as http:
        until(lambda: answered(http) == 200)
        for name, (to, count) in PLACES.items():
            there = http.get("/admin/partitions").json()["partitions"][name]
            if there["device"] != to:
                assert move(http, name, to).status_code == 200
            assert http.put("/admin/partitions", json={name: count}).status_code == 200
        assert http.post("/v2/repository/models/rows/load").status_code == 200


class Timed(Load):
    """Also knows how long its slowest answer took, in seconds."""

    def __init__(self, server: Running, tenant: str) -> None:
        super().__init__(server, tenant)
        self.slowest = 0.0
        self._began = time.monotonic()
        self._http.event_hooks = {"request": [self._on_request], "response": [self._on_response]}

    def _on_request(self, _: httpx.Request) -> None:
        self._began = time.monotonic()

    def _on_response(self, _: httpx.Response) -> None:
        self.slowest = max(self.slowest, time.monotonic() - self._began)


def move(http: httpx.Client, tenant: str, to: str, **fields: Any) -> httpx.Response:
    return http.put(f"/admin/tenants/{tenant}/device", json={"device": to, **fields})


def test_the_admin_api_has_both_devices(server: Running, acme: httpx.Client) -> None:
    found = acme.get("/admin/device").json()
    assert list(found) == ["devices"], "there is not one device that the other fields could be of"
    shown = [(each["name"], each["tenants"], each["state"], len(each["granules"])) for each in found["devices"]]
    assert shown == [("0", ["acme"], "serving", GRANULES), ("1", ["globex"], "serving", GRANULES)]
    probed = acme.post("/admin/partitions/probe").json()
    assert probed["overlaps"] == [], "granules of different devices have the same numbers"
    assert {name: (each["device"], each["located"]) for name, each in probed["partitions"].items()} == {
        "acme": ("0", [0]),
        "globex": ("1", [0, 1]),
    }
    assert [(each["name"], each["free"]) for each in probed["devices"]] == [("0", 3), ("1", 2)]
    metrics = acme.get("/metrics").text
    assert 'greenlane_device_info{device="1",kind="cpu"} 1.0' in metrics
    assert 'greenlane_device_granules{device="0"} 4.0' in metrics
    assert 'greenlane_tenant_device{device="1",tenant="globex"} 1.0' in metrics


def test_the_end_of_one_device_process_is_not_noticed_by_tenants_of_the_other(server: Running, acme: httpx.Client) -> None:
    other = server.pid(PROCESSES["1"])
    away = []
    with Load(server, "acme") as load, Timed(server, "globex") as quiet:
        for _ in range(2):
            killed = time.monotonic()
            server.kill(PROCESSES["0"])
            until(lambda: infer(acme, "identity", SMALL).status_code == 503)
            assert acme.get("/admin/device").json()["devices"][1]["state"] == "serving"
            assert acme.get("/v2/health/ready", headers={"X-Tenant": "globex"}).status_code == 200
            quiet.more()
            until(lambda: infer(acme, "identity", SMALL).status_code == 200)
            away.append(time.monotonic() - killed)
            load.more()
    assert quiet.wrong == []
    assert quiet.slowest < min(away), "it did not wait for a device process to be replaced"
    assert all(isinstance(each, tuple) and each[0] == 503 for each in load.wrong), load.wrong[:3]
    assert any("the process of device 0 has ended" in str(each) for each in load.wrong)
    assert server.pid(PROCESSES["1"]) == other


def test_tenants_of_both_devices_are_repartitioned_together_or_not_at_all(server: Running, acme: httpx.Client) -> None:
    with Load(server, "acme") as one, Load(server, "globex") as two:
        for counts in ({"acme": 3, "globex": 1}, {"acme": 1}, {"globex": 4}):
            assert acme.put("/admin/partitions", json=counts).json()["moved"] == sorted(counts)
            one.more()
            two.more()
        before = acme.get("/admin/partitions").json()
        refused = acme.put("/admin/partitions", json={"acme": 2, "globex": 5})
        assert (refused.status_code, refused.json()["error"].split(":")[0]) == (
            409,
            "globex 5 granules, but the device has 4",
        )
        assert acme.get("/admin/partitions").json() == before
    assert (one.wrong, two.wrong) == ([], [])


def test_no_tenant_is_repartitioned_if_an_inference_of_one_device_does_not_end(server: Running, acme: httpx.Client) -> None:
    before = acme.get("/admin/partitions").json()
    with spinning(server), Load(server, "globex") as load:
        until(lambda: lane(acme)["in_flight"] == 1)
        refused = acme.put("/admin/partitions", json={"acme": 2, "globex": 1})
        assert (refused.status_code, refused.json()["error"].split(":")[0]) == (409, "tenant acme")
        assert acme.get("/admin/partitions").json() == before
        load.more()
    assert load.wrong == []
    until(lambda: infer(acme, "identity", SMALL).status_code == 200)
    assert acme.put("/admin/partitions", json={"acme": 2, "globex": 1}).status_code == 200


def test_a_tenant_moves_to_another_device_and_back_under_load(server: Running, acme: httpx.Client) -> None:
    pid = server.pid("acme")
    with (
        Load(server, "acme") as one,
        Load(server, "acme") as two,
        Timed(server, "globex") as quiet,
    ):
        for to, granules in (("1", 2), ("0", 1), ("1", 1)):
            moved = move(acme, "acme", to, granules=granules)
            assert moved.status_code == 200, moved.text
            there = moved.json()["partitions"]["acme"]
            assert (there["size"], there["device"]) == (granules, to)
            for load in (one, two, quiet):
                load.more()
    assert (one.wrong, two.wrong, quiet.wrong) == ([], [], [])
    assert quiet.slowest < LIMIT
    assert server.pid("acme") == pid, "connections stay"
    shown = {each["name"]: each["tenants"] for each in acme.get("/admin/device").json()["devices"]}
    assert shown == {"0": [], "1": ["globex", "acme"]}
    assert acme.post("/admin/partitions/probe").json()["overlaps"] == []


def test_a_tenant_that_has_moved_is_served_again_by_replaced_processes(server: Running, acme: httpx.Client) -> None:
    assert acme.post("/v2/repository/models/rows/unload").status_code == 200
    assert move(acme, "acme", "1").status_code == 200
    with Timed(server, "acme") as load:
        server.kill(PROCESSES["0"])  # Where it was: nothing of it is there any more.
        until(lambda: acme.get("/admin/device").json()["devices"][0]["state"] == "serving")
        load.more()
    assert load.wrong == []
    server.kill(PROCESSES["1"])
    until(lambda: as_before(acme))
    assert infer(acme, "rows", SMALL).status_code == 503, "it is still unloaded"
    assert acme.post("/v2/repository/models/rows/load").status_code == 200
    assert acme.get("/admin/partitions").json()["partitions"]["acme"]["device"] == "1"
    server.kill("acme")
    with client(server, "acme") as http:
        until(lambda: answered(http) == 200)
    assert move(acme, "acme", "0").status_code == 200
    with client(server, "acme") as http:
        assert infer(http, "identity", SMALL).status_code == 200


def test_a_tenant_takes_along_the_list_of_models_that_a_reload_gave_it(standard: Path, tmp_path: Path) -> None:
    path = configure(tmp_path / "greenlane.toml", standard, devices() + TENANTS)
    with running_devices(path) as server, client(server, "acme") as http, Load(server, "acme") as load:
        path.write_text(path.read_text().replace('["identity", "spin", "rows"]', '["identity", "half"]'))
        assert http.post("/admin/reload").status_code == 200
        assert move(http, "acme", "1").status_code == 200
        assert ready(http) == {"half", "identity"}
        load.more()
        assert load.wrong == []
        server.kill(PROCESSES["1"])
        until(lambda: as_before(http))
        assert ready(http) == {"half", "identity"}
        assert move(http, "acme", "0").status_code == 200
        assert ready(http) == {"half", "identity"}


def ready(http: httpx.Client) -> set[str]:
    return {each["name"] for each in http.post("/v2/repository/index", json={"ready": True}).json()}


@pytest.mark.parametrize(
    ("tenant", "body", "status", "text"),
    [
        ("globex", {"device": "0", "granules": 4}, 409, "acme 1 + globex 4 = 5 granules, but the device has 4: 1 too many"),
        ("globex", {"device": "2"}, 400, 'device: "2" is not a device; expected "0" or "1"'),
        ("globex", {"device": ["0", "1"]}, 400, 'is no text; expected "0" or "1"'),
        ("globex", {"device": "1", "granules": 1}, 400, "tenant globex is on device 1 already; PUT /admin/partitions"),
        ("globex", {"device": "0", "cores": 1}, 400, "cores: unknown; expected 'device', and perhaps 'granules'"),
        ("initech", {"device": "0"}, 404, "initech: there is no such tenant; there are acme, globex"),
    ],
)
def test_a_move_that_is_refused_changes_nothing(
    server: Running, tenant: str, body: dict[str, Any], status: int, text: str
) -> None:
    with client(server) as http:
        before = http.get("/admin/partitions").json()
        answer = http.put(f"/admin/tenants/{tenant}/device", json=body)
        assert answer.status_code == status
        assert text in answer.json()["error"]
        assert http.get("/admin/partitions").json() == before


def test_an_inference_that_does_not_end_keeps_its_tenant_where_it_is(server: Running, acme: httpx.Client) -> None:
    with spinning(server):
        until(lambda: lane(acme)["in_flight"] == 1)
        refused = move(acme, "acme", "1")
        assert refused.status_code == 409, refused.text
        assert "tenant acme: an inference has been running for 1 s" in refused.json()["error"]
        shown = {each["name"]: each["free"] for each in acme.get("/admin/partitions").json()["devices"]}
        assert shown == {"0": 3, "1": 2}
    until(lambda: infer(acme, "identity", SMALL).status_code == 200)
    assert move(acme, "acme", "1").status_code == 200, "what was prepared there is gone"


@contextmanager
def spinning(server: Running) -> Iterator[None]:
    """An inference of acme that ends only when its client disconnects, at the end of the block."""
    with Connection(server) as connection:
        connection.send(posted("spin", spin(FOREVER), "X-Tenant: acme"))
        yield


def test_tenants_of_two_devices_of_cores_run_on_their_devices_cores(standard: Path, tmp_path: Path) -> None:
    tenants = TENANTS.replace("granules = 2", "granules = 1")
    with (
        running(configure(tmp_path / "greenlane.toml", standard, devices() + tenants)) as server,
        client(server, "acme") as http,
        Load(server, "globex") as load,
    ):
        probed = http.post("/admin/partitions/probe").json()
        located = {name: (each["device"], each["located"]) for name, each in probed["partitions"].items()}
        assert located == {"acme": ("0", [cores()[0]]), "globex": ("1", [cores()[1]])}
        assert infer(http, "identity", SMALL).status_code == 200
        refused = move(http, "acme", "1")
        assert refused.status_code == 400
        assert "set tenants.acme.device and restart the server" in refused.json()["error"]
        load.more()
        assert load.wrong == []


def test_a_tenant_that_came_by_a_reload_moves_to_another_device_as_it_is_configured_now(standard: Path, tmp_path: Path) -> None:
    path = tmp_path / "greenlane.toml"

    def reload(*late: str) -> None:
        configure(path, standard, "".join((devices(), TENANTS, *late)))
        with client(server) as http:
            assert (answer := http.post("/admin/reload")).status_code == 200, answer.text

    configure(path, standard, devices() + TENANTS)
    with running_devices(path) as server, client(server, "late") as http:
        reload(tenant("late", "half", device="0"))
        assert move(http, "late", "1").status_code == 200
        assert ready(http) == {"half"}
        reload()
        reload(tenant("late", "identity", device="0"))
        assert move(http, "late", "1").status_code == 200
        assert ready(http) == {"identity"}
        assert answered(http) == 200
