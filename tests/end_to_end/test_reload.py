"""The configuration read again while it is served, in each form: keys, limits, and all of it or nothing."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.tenants.auth import digest

from . import repository
from .fixtures import Site
from .harness import cores
from .processes import Load, running, running_device, running_plain, tenant
from .wire import SMALL, Connection, client, posted, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

FORMS: dict[str, tuple[Any, str]] = {
    "uvicorn": (running_plain, ""),
    "processes": (running, ""),
    "device process": (running_device, "http_processes = 2"),
}
OLD, NEW, LAST = "old-key", "new-key", "last-key"
MODELS = ("identity", "other", "third")


class Reloaded(Site):
    def write(
        self,
        *keys: str,
        more: str = "",
        globex: str = "",
        models: Sequence[str] = ("identity",),
        options: str = "",
        **server: str,
    ) -> Path:
        """Write the file; `more` and `globex` are keys of the tenants, `models` those that acme may call, and `options` tables
        of models.
        """
        acme = tenant("acme", *models, keys_sha256=[digest(key) for key in keys])
        return super().write(options, tenant("globex", "identity"), globex, acme, more, **server)

    def most(self) -> int:
        """acme's largest batch of `identity`."""
        with client(self.server, Authorization=f"Bearer {OLD}") as http:
            return http.get("/v2/models/identity/config").json()["max_batch_size"]

    def statuses(self) -> list[int]:
        """What acme's requests for each model of the repository are answered."""
        return [self.status(OLD, model) for model in MODELS]


@pytest.fixture(scope="module", params=FORMS)
def started(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Reloaded]:
    start, always = FORMS[request.param]
    root = tmp_path_factory.mktemp("reload")
    for name in MODELS:
        repository.write(root / "models", name, repository.IDENTITY)
    site = Reloaded(root, root / "models", always)
    with start(site.write(OLD)) as server:
        site.server = server
        until(lambda: site.status(OLD) == 200)
        yield site


@pytest.fixture
def site(started: Reloaded) -> Iterator[Reloaded]:
    """As it was started."""
    yield started
    started.write(OLD)
    os.kill(started.server.popen.pid, signal.SIGHUP)
    until(lambda: [started.status(key) for key in (OLD, NEW, LAST)] == [200, 401, 401])


def changed(answer: httpx.Response) -> dict[str, tuple[str, str]]:
    assert answer.status_code == 200, answer.text
    return {each["key"]: (each["old"], each["new"]) for each in answer.json()["changed"]}


def test_keys_are_rotated_without_a_failed_request(site: Reloaded) -> None:
    """Both are valid, then only the new one: also on connections that were open before and repeat the same head."""
    ask = posted("identity", SMALL, f"Authorization: Bearer {OLD}")
    with Connection(site.server) as connection, Load(site.server, "globex") as load:
        connection.send(ask)
        assert connection.answer().status == 200
        assert (site.status(OLD), site.status(NEW)) == (200, 401)
        site.write(OLD, NEW)
        old, both = f"{digest(OLD)[:8]}...", f"{digest(OLD)[:8]}..., {digest(NEW)[:8]}..."
        assert changed(site.reload()) == {"tenants.acme.keys_sha256": (old, both)}
        for _ in range(5):  # Of several processes each is asked.
            assert (site.status(OLD), site.status(NEW)) == (200, 200)
        connection.send(ask)
        assert connection.answer().status == 200
        site.write(NEW)
        assert list(changed(site.reload())) == ["tenants.acme.keys_sha256"]
        for _ in range(5):
            assert (site.status(OLD), site.status(NEW)) == (401, 200)
        connection.send(ask)
        assert connection.answer().status == 401
        load.more()
    assert load.wrong == []


def test_limits_change_and_go(site: Reloaded) -> None:
    site.write(OLD, more="requests_per_second = 1\nburst_requests = 2")
    assert changed(site.reload()) == {
        "tenants.acme.requests_per_second": ("(not set)", "1"),
        "tenants.acme.burst_requests": ("(not set)", "2"),
    }
    assert 429 in [site.status(OLD) for _ in range(8)]
    site.write(OLD)
    assert site.reload().status_code == 200
    assert [site.status(OLD) for _ in range(8)] == [200] * 8


def test_a_fence_comes_and_goes_and_says_where_it_holds_nothing(site: Reloaded) -> None:
    """As on cores, which have no PCIe."""

    def notes() -> list[str]:
        with client(site.server) as http:
            return list((http.get("/admin/partitions").json()["partitions"]["acme"].get("fence") or {}).get("notes", []))

    with Load(site.server, Authorization=f"Bearer {OLD}") as load:
        site.write(OLD, more="pcie = 0.4")
        assert changed(site.reload()) == {"tenants.acme.pcie": ("(not set)", "0.4")}
        until(lambda: notes() == ["its pcie holds nothing back: only a GPU's is held, and it has cores"])
        load.more()
        site.write(OLD)
        assert changed(site.reload()) == {"tenants.acme.pcie": ("0.4", "(not set)")}
        until(lambda: notes() == [])
        load.more()
    assert load.wrong == []


def test_a_limit_that_uvicorn_ignores_is_a_warning_when_it_comes_by_a_reload(tmp_path: Path) -> None:
    repository.write(tmp_path / "models", "identity", repository.IDENTITY)
    site = Reloaded(tmp_path, tmp_path / "models")
    with running_plain(site.write(OLD)) as site.server:
        site.write(OLD, more="max_connections = 3")
        assert set(changed(site.reload())) == {"tenants.acme.max_connections"}
        site.server.wait_for_log("tenants.acme.max_connections: connections belong to no tenant in one process")


def test_the_admin_key_and_web_pages_origins_change(site: Reloaded) -> None:
    site.write(OLD, admin_key_sha256=f'"{digest("admin")}"', cors_origins='["https://app.example"]')
    assert set(changed(site.reload())) == {"server.admin_key_sha256", "server.cors_origins"}
    assert site.reload().status_code == 401
    with client(site.server, Authorization="Bearer admin") as http:
        page = http.get("/v2", headers={"Authorization": f"Bearer {OLD}", "Origin": "https://app.example"})
        assert page.headers["access-control-allow-origin"] == "https://app.example"
        site.write(OLD)
        assert http.post("/admin/reload").status_code == 200


def test_what_needs_a_restart_refuses_all_of_it(site: Reloaded) -> None:
    site.write(NEW, more="queue = 7", max_body='"1MiB"')
    answer = site.reload()
    assert answer.status_code == 409
    assert answer.json()["error"].splitlines() == [
        "nothing has changed, as not all of it can while the server runs:",
        'server.max_body: "64MiB" -> "1MiB" needs a restart',
        "tenants.acme.queue: 64 -> 7 needs a restart",
    ]
    for line in answer.json()["error"].splitlines():
        site.server.wait_for_log(line)
    site.server.wait_for_log("WARNING greenlane.control: POST /admin/reload: nothing has changed, as not all of it can")
    assert (site.status(OLD), site.status(NEW)) == (200, 401)


def test_an_invalid_file_is_refused_with_every_problem(site: Reloaded) -> None:
    site.write(NEW, more='queue = "x"\nbanana = 1')
    answer = site.reload()
    assert answer.status_code == 409
    text = answer.json()["error"]
    assert "tenants.acme.queue: 'x' is not a whole number" in text
    assert "tenants.acme.banana: unknown key" in text
    site.path.write_text("not = [toml")
    assert "not TOML" in site.reload().json()["error"]
    assert (site.status(OLD), site.status(NEW)) == (200, 401)


def test_processes_that_are_replaced_have_the_new_configuration(site: Reloaded) -> None:
    site.write(LAST)
    assert site.reload().status_code == 200
    if site.server.pids("(dispatcher)"):
        site.server.kill("acme", "(dispatcher)")
    until(lambda: site.status(LAST) == 200)
    assert site.status(OLD) == 401


def test_models_come_and_go_and_no_other_request_fails(site: Reloaded) -> None:
    """Also in every process that is replaced after that."""
    with Load(site.server, "globex") as load, Load(site.server, Authorization=f"Bearer {OLD}") as own:
        site.write(OLD, models=["identity", "third"])
        assert changed(site.reload()) == {"tenants.acme.models": ('["identity"]', '["identity", "third"]')}
        assert site.statuses() == [200, 404, 200]
        site.write(OLD, models=["*"])
        assert list(changed(site.reload())) == ["tenants.acme.models"]
        assert site.statuses() == [200, 200, 200]
        load.more()
        own.more()
    assert (load.wrong, own.wrong) == ([], [])
    site.write(OLD, models=["other"])
    assert site.reload().status_code == 200
    assert site.statuses() == [404, 200, 404]
    with client(site.server, Authorization=f"Bearer {OLD}") as http:
        assert [each["name"] for each in http.post("/v2/repository/index").json()] == ["other"]
        assert http.post("/v2/repository/models/identity/load").status_code == 404
        assert http.post("/v2/repository/models/other/load").status_code == 200
    for name in ("dev 0", "acme"):
        if site.server.pids(name):
            site.server.kill(name)
            until(lambda: site.statuses() == [404, 200, 404])


def test_a_model_that_cannot_be_loaded_refuses_all_of_it(site: Reloaded) -> None:
    site.write(NEW, models=["other", "gone"], more="requests_per_second = 1")
    answer = site.reload()
    assert answer.status_code == 409
    assert answer.json()["error"].splitlines() == [
        "nothing has changed, as not every model that is added can be loaded:",
        "tenants.acme.models: failed to load 'gone': not in the repository",
    ]
    assert site.statuses() == [200, 404, 404]
    assert (site.status(OLD), site.status(NEW)) == (200, 401)


def test_options_of_models_change_and_no_request_fails(site: Reloaded) -> None:
    """All of them or none, and also in every process that is replaced after that."""
    with Load(site.server, "globex") as load, Load(site.server, Authorization=f"Bearer {OLD}") as own:
        site.write(OLD, options="[models.identity]\nmax_batch = 4\nprofile = 3")
        answer = site.reload()
        assert answer.status_code == 409
        assert "failed to load 'identity' with its new options: " in answer.json()["error"]
        assert "models.identity.profile" in answer.json()["error"]
        before = site.most()
        assert before == 0
        site.write(OLD, options="[models.identity]\nmax_batch = 4")
        assert changed(site.reload()) == {"models.identity.max_batch": ("(not set)", "4")}
        assert site.most() == 4
        load.more()
        own.more()
    assert (load.wrong, own.wrong) == ([], [])
    for name in ("dev 0", "acme"):
        if site.server.pids(name):
            site.server.kill(name)
            until(lambda: site.status(OLD) == 200)
            assert site.most() == 4
    site.write(OLD)
    assert site.reload().status_code == 200
    assert site.most() == before


def test_sighup_reloads(site: Reloaded) -> None:
    site.write(LAST)
    os.kill(site.server.popen.pid, signal.SIGHUP)
    until(lambda: site.status(LAST) == 200)
    until(lambda: site.status(OLD) == 401)
    site.write(NEW, more="queue = 7")
    os.kill(site.server.popen.pid, signal.SIGHUP)
    site.write(OLD)
    os.kill(site.server.popen.pid, signal.SIGHUP)
    until(lambda: site.status(OLD) == 200)
