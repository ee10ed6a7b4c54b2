"""Lending between tenants on cores, in both forms: processes that are killed, models that come and go, and what is shown."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .fixtures import server_with
from .harness import cores
from .processes import Load, Running, running, running_device, tenant
from .wire import FOREVER, Connection, answered, as_before, client, infer, lane, posted, spin, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

TENANTS = tenant("acme", "identity", "spin", burst=2) + tenant("globex", "identity", "spin", lend="1s")
TURNS = 20_000
"""Of a loop that does not run on the event loop."""


server = server_with(TENANTS, running, running_device)


@pytest.fixture
def acme(acme: httpx.Client) -> httpx.Client:
    until(lambda: wide(acme).get("granules") == [0, 1])
    return acme


def wide(http: httpx.Client) -> dict[str, Any]:
    """What is shown of acme's wide partition."""
    return http.get("/admin/partitions").json()["partitions"]["acme"].get("wide", {})


def launch(http: httpx.Client) -> None:
    """Have acme run inferences until one went wide."""
    before = wide(http)["launches"]

    def launched() -> bool:
        assert infer(http, "spin", spin(TURNS)).status_code == 200
        return bool(wide(http)["launches"] > before)

    until(launched)


def test_a_tenant_with_a_burst_borrows_from_one_that_lends(server: Running, acme: httpx.Client) -> None:
    assert wide(acme)["borrowed"] == [{"owner": "globex", "granules": [1]}]
    assert wide(acme)["problems"] == []
    launch(acme)
    metrics = acme.get("/metrics").text
    assert 'greenlane_lends{tenant="globex"} 1.0' in metrics
    assert 'greenlane_wide_launches_total{tenant="acme"} ' in metrics
    assert "wide" not in acme.get("/admin/partitions").json()["partitions"]["globex"]


def test_the_advice_says_what_a_borrower_and_its_lender_did(server: Running, acme: httpx.Client) -> None:
    def advised() -> bool:
        """Whether any inference ended in the measured second, which one of them may take on a busy machine."""
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(httpx.get, f"{acme.base_url}/admin/advice?seconds=1", timeout=30)
            while not asked.done():
                assert infer(acme, "spin", spin(TURNS)).status_code == 200
        tenants = asked.result().json()["tenants"]
        assert tenants["globex"]["lending"] == []
        return any("inferences ran on granules that globex lends" in said for said in tenants["acme"]["lending"])

    until(advised)


def test_killing_the_lenders_process_disturbs_no_borrower(server: Running, acme: httpx.Client) -> None:
    with Load(server, "acme") as load:
        os.kill(server.pid("globex"), signal.SIGKILL)
        with client(server, "globex") as globex:
            until(lambda: answered(globex) == 200)
        load.more()
    assert load.wrong == []
    assert wide(acme)["granules"] == [0, 1]


def test_a_lender_whose_process_was_killed_with_a_request_open_lends_again(server: Running, acme: httpx.Client) -> None:
    with Connection(server) as connection, client(server, "globex") as globex:
        connection.send(posted("spin", spin(FOREVER), "X-Tenant: globex"))
        until(lambda: lane(globex, "globex")["in_flight"] == 1)
        server.kill("globex")
    until(lambda: lane(acme, "globex")["age_seconds"] == lane(acme, "globex")["in_flight"] == 0)
    launch(acme)  # No request of globex has come since: that would count from nothing again.


def test_a_borrower_whose_process_was_killed_borrows_again(server: Running, acme: httpx.Client) -> None:
    """In one form its HTTP process, in the other that with its models, too."""
    with Load(server, "globex") as load:
        os.kill(server.pid("acme"), signal.SIGKILL)
        with client(server, "acme") as http:
            until(lambda: as_before(http))
            until(lambda: wide(http).get("granules") == [0, 1])
            load.more()
    assert load.wrong == []
    with client(server, "acme") as http:
        launch(http)


def test_models_that_are_loaded_again_are_served_on_both_partitions(server: Running, acme: httpx.Client) -> None:
    assert acme.post("/v2/repository/models/spin/unload").status_code == 200
    assert acme.post("/v2/repository/models/spin/load").status_code == 200
    assert wide(acme)["problems"] == []
    launch(acme)


def test_when_the_process_with_its_models_is_replaced_a_tenant_borrows_again(server: Running, acme: httpx.Client) -> None:
    has_device = any("greenlane dev" in one.name for one in server.family())
    os.kill(server.pid("dev 0" if has_device else "acme"), signal.SIGKILL)
    with client(server, "acme") as http:
        until(lambda: as_before(http))
        until(lambda: wide(http).get("granules") == [0, 1])
        launch(http)
