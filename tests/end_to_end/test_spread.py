"""A tenant on two devices of one host, each in a process of its own: one queue, and each run goes to the freer device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .harness import cores
from .processes import Load, Running, configure, running_devices, tenant
from .test_several_devices import Timed, devices, move, spinning
from .wire import SMALL, answered, client, infer, lane, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two devices of cores need two cores")

TENANTS = tenant("acme", "identity", "spin", "rows", device=["0", "1"], http_processes=2)
TENANTS += tenant("globex", "identity", device="1", granules=2)


@pytest.fixture(scope="module")
def file(standard: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread") / "greenlane.toml"
    return configure(path, standard, devices() + TENANTS, max_pause='"1s"')


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Running]:
    """One for all: each test leaves both devices serving."""
    with running_devices(file) as server:
        yield server


def works(http: httpx.Client) -> dict[str, int]:
    """The works of acme so far, by device."""
    found = http.get("/admin/usage").json()["tenants"]
    return {each["device"]: sum(model["works"] for model in each["models"]) for each in found if each["tenant"] == "acme"}


def test_both_devices_serve_it(server: Running, acme: httpx.Client) -> None:
    before = works(acme)
    for _ in range(10):
        assert infer(acme, "identity", SMALL).status_code == 200
    after = works(acme)
    assert {name: after[name] - before[name] for name in after} == {"0": 5, "1": 5}, "of devices with as many, each in turn"


def test_the_admin_api_shows_its_share_of_each(server: Running, acme: httpx.Client) -> None:
    probed = acme.post("/admin/partitions/probe").json()
    found = probed["partitions"]["acme"]
    assert (found["device"], found["size"]) == ("0", 1)
    assert [(each["device"], each["size"], len(each["located"])) for each in found["devices"]] == [("0", 1, 1), ("1", 1, 1)]
    assert probed["overlaps"] == []
    assert [(each["name"], each["free"]) for each in probed["devices"]] == [("0", 3), ("1", 1)]
    assert [each["tenants"] for each in acme.get("/admin/device").json()["devices"]] == [["acme"], ["acme", "globex"]]
    metrics = acme.get("/metrics").text
    for name in ("0", "1"):
        assert f'greenlane_tenant_device{{device="{name}",tenant="acme"}} 1.0' in metrics
    for each in acme.get("/admin/usage").json()["devices"]:
        assert each["granted"] + each["free"] == pytest.approx(each["total"])
    refused = move(acme, "acme", "1")
    assert (refused.status_code, refused.json()["error"].split(":")[:2]) == (400, ["tenant acme", " on devices 0 and 1"])


def test_its_share_of_both_changes_under_load(server: Running, acme: httpx.Client) -> None:
    with Load(server, "acme") as one, Load(server, "acme") as two:
        for count in (2, 1):
            moved = acme.put("/admin/partitions", json={"acme": count}).json()
            assert moved["moved"] == ["acme"]
            assert [len(each["granules"]) for each in moved["partitions"]["acme"]["devices"]] == [count, count]
            one.more()
            two.more()
    refused = acme.put("/admin/partitions", json={"acme": 3})
    assert (refused.status_code, refused.json()["error"].split(":")[0]) == (
        409,
        "acme 3 + globex 2 = 5 granules, but the device has 4",
    )
    assert (one.wrong, two.wrong) == ([], [])


@pytest.mark.parametrize("device", ["0", "1"])
def test_a_device_that_ends_is_noticed_by_what_runs_there_only(server: Running, acme: httpx.Client, device: str) -> None:
    with Load(server, "acme") as one, Load(server, "acme") as two:
        server.kill(f"dev {device}")
        assert acme.get("/v2/health/ready").status_code == 200
        assert acme.get("/v2/models/identity/ready").status_code == 200, "the other device serves it"
        one.more()
        two.more()
        until(lambda: state(acme, device) == "serving")
        before = works(acme)[device]
        until(lambda: works(acme)[device] > before)
    assert all(isinstance(each, tuple) and each[0] == 503 for each in (*one.wrong, *two.wrong))
    assert len(one.wrong) <= 1, "the one request that ran there"
    assert len(two.wrong) <= 1


def test_without_any_device_requests_are_503_until_one_is_back(server: Running, acme: httpx.Client) -> None:
    for name in ("0", "1"):
        server.kill(f"dev {name}")
    until(lambda: infer(acme, "identity", SMALL).status_code == 503)
    while (ready := acme.get("/v2/models/identity/ready").status_code) == 503:
        pass
    assert (ready, infer(acme, "identity", SMALL).status_code) == (200, 200), "it is ready once one of them serves it"
    until(lambda: both_serve(acme))
    before = works(acme)
    for _ in range(4):
        assert infer(acme, "identity", SMALL).status_code == 200
    assert {name: count - before[name] for name, count in works(acme).items()} == {"0": 2, "1": 2}


def test_an_inference_that_does_not_end_holds_up_one_device(server: Running, acme: httpx.Client) -> None:
    with spinning(server), Timed(server, "acme") as load:
        until(lambda: lane(acme)["in_flight"] >= 1)
        load.more()
    assert load.wrong == []
    until(lambda: lane(acme)["in_flight"] == 0)  # It was cancelled where it ran.


def test_its_http_process_is_replaced(server: Running, acme: httpx.Client) -> None:
    server.kill("acme")
    with client(server, "acme") as http:
        until(lambda: answered(http) == 200)
        before = works(http)
        for _ in range(4):
            assert infer(http, "identity", SMALL).status_code == 200
        assert {name: count - before[name] for name, count in works(http).items()} == {"0": 2, "1": 2}


def test_its_models_are_loaded_and_unloaded_on_both_under_load(server: Running, acme: httpx.Client) -> None:
    with Load(server, "acme") as load:
        for _ in range(3):
            assert acme.post("/v2/repository/models/identity/load").status_code == 200
            load.more()
    assert load.wrong == []
    assert acme.post("/v2/repository/models/identity/unload").status_code == 200
    assert infer(acme, "identity", SMALL).status_code == 503
    server.kill("dev 0")
    until(lambda: both_serve(acme))
    assert infer(acme, "identity", SMALL).status_code == 503, "still unloaded"
    assert acme.post("/v2/repository/models/identity/load").status_code == 200
    assert infer(acme, "identity", SMALL).status_code == 200


def test_a_reload_changes_its_models_on_both_and_in_what_replaces_them(server: Running, acme: httpx.Client, file: Path) -> None:
    """And a tenant that moves after that has its new list there too."""
    before, spread, single = file.read_text(), '["identity", "spin", "rows"]', '["identity"]'
    file.write_text(before.replace(spread, '["identity", "gone"]').replace(single, '["half"]'))
    refused = acme.post("/admin/reload")
    assert (refused.status_code, refused.json()["error"].splitlines()[1:]) == (
        409,
        [f"device {name}: tenants.acme.models: failed to load 'gone': not in the repository" for name in ("0", "1")],
    )
    assert models(acme) == {"identity", "rows", "spin"}
    file.write_text(before.replace(spread, '["identity", "half"]').replace(single, '["rows"]'))
    with Load(server, "acme") as load, client(server, "globex") as globex:
        assert acme.post("/admin/reload").status_code == 200
        load.more()
        assert (load.wrong, models(acme), models(globex)) == ([], {"half", "identity"}, {"rows"})
        for to in ("0", "1"):
            assert move(acme, "globex", to).status_code == 200
            assert models(globex) == {"rows"}
    server.kill("dev 0")
    until(lambda: both_serve(acme))
    server.kill("dev 1")
    until(lambda: both_serve(acme))
    assert models(acme) == {"half", "identity"}
    file.write_text(before)
    assert acme.post("/admin/reload").status_code == 200
    assert models(acme) == {"identity", "rows", "spin"}


def models(http: httpx.Client) -> set[str]:
    """Those that are ready."""
    return {each["name"] for each in http.post("/v2/repository/index", json={"ready": True}).json()}


def state(http: httpx.Client, device: str) -> Any:
    return next(each["state"] for each in http.get("/admin/device").json()["devices"] if each["name"] == device)


def both_serve(http: httpx.Client) -> bool:
    return [state(http, name) for name in ("0", "1")] == ["serving", "serving"]
