"""Tenants that come and go while others are served, without a failed request of theirs: all of a reload, or nothing."""

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from greenlane.load.server_process import free_port
from server.tenants.auth import digest

from . import repository
from .fixtures import Site
from .harness import cores
from .processes import Load, Running, configure, running, running_apart, running_devices, tenant
from .wire import SMALL, Connection, client, infer, lane, post, posted, spin, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

FORMS: dict[str, tuple[Any, str, str]] = {
    "processes": (running, "", ""),
    "device process": (running_devices, '[device]\nbackend = "cpu"\ncores = "0-1"\n', "http_processes = 2"),
    "device process each": (
        running_apart,
        '[device]\nbackend = "cpu"\ncores = "0-1"\nmps = "on"\n',
        'http_processes = 2\ndevice_memory = "1GiB"',
    ),
}
KEY = "acme-key"


class Changing(Site):
    """A server of globex."""

    def write(
        self,
        *,
        acme: bool = False,
        models: Sequence[str] = ("identity", "spin"),
        granules: int = 1,
        limit: str = "",
        more: str = "",
    ) -> Path:
        """Write the file, with acme or without it; `granules` and `limit` are globex's, `models` and `more` acme's."""
        tables = [tenant("globex", "identity", granules=granules), limit]
        if acme:
            tables += [tenant("acme", *models, keys_sha256=[digest(KEY)]), self.own, more]
        path = super().write(*tables, drain_timeout='"60s"')
        path.write_text(path.read_text().replace("[models]\n", "[models]\npython = true\n"))
        return path

    def of_acme(self) -> httpx.Response:
        """The answer to acme with its key. With the key alone it would be globex's while that is the only tenant, as it has
        no keys.
        """
        return self.ask(KEY, tenant="acme")

    def answered(self) -> int:
        """Its status; 0 for a connection that is lost."""
        return self.status(KEY, tenant="acme")

    def partitions(self) -> set[str]:
        """The tenants that have one."""
        with client(self.server) as http:
            return set(http.get("/admin/partitions").json()["partitions"])

    def metrics(self) -> set[str]:
        """The names of the metrics of acme, without those of the account, which stay."""
        with client(self.server) as http:
            lines = http.get("/metrics").text.splitlines()
        return {line.partition("{")[0] for line in lines if 'tenant="acme"' in line and "_unit_seconds" not in line}


@pytest.fixture(scope="module", params=FORMS)
def started(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Changing]:
    start, device, own = FORMS[request.param]
    root = tmp_path_factory.mktemp("tenants")
    repository.write(root / "models", "identity", repository.IDENTITY)
    repository.write(root / "models", "spin", repository.SPIN)
    (root / "models" / "broken" / "1").mkdir(parents=True)
    (root / "models" / "broken" / "1" / "model.onnx").write_bytes(b"not a model")
    site = Changing(root, root / "models", device)
    site.own = own
    with start(site.write()) as server:
        site.server = server
        yield site


@pytest.fixture
def site(started: Changing) -> Iterator[Changing]:
    """As it was started."""
    yield started
    started.write()
    assert started.reload().status_code == 200


def memory(server: Running) -> int:
    """How many pieces of tenants' shared memory the supervisor and the device processes have."""
    count = 0
    for pid in (server.popen.pid, *server.devices()):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                count += "memfd:greenlane tensors" in os.readlink(f"/proc/{pid}/fd/{descriptor}")
    return count


def test_a_tenant_comes_is_used_and_goes_and_its_neighbour_does_not_notice(site: Changing) -> None:
    site.write()
    before = site.of_acme().text
    assert site.answered() == 401
    before_it = memory(site.server)
    with Load(site.server, "globex") as load:
        for _ in range(2):  # The second time it has the name of one that has gone.
            site.write(acme=True)
            answer = site.reload()
            assert answer.status_code == 200, answer.text
            assert answer.json()["changed"] == [
                {"key": "server.default_tenant", "old": '"globex"', "new": "(not set)"},  # It was the only tenant.
                {"key": "tenants.acme", "old": "(not set)", "new": "a table"},
            ]
            assert {site.answered() for _ in range(5)} == {200}
            assert site.partitions() == {"acme", "globex"}
            with Load(site.server, Authorization=f"Bearer {KEY}") as own:
                own.more()
            assert own.wrong == []
            assert site.server.pids("acme")
            site.write()
            assert site.reload().status_code == 200
            assert site.of_acme().text == before
            assert site.partitions() == {"globex"}
            assert not site.server.pids("acme")
            assert site.metrics() <= {"greenlane_works_total"}
            load.more()
    assert load.wrong == []
    assert memory(site.server) <= before_it


def test_a_tenant_that_came_is_replaced_as_any_other(site: Changing) -> None:
    site.write(acme=True)
    assert site.reload().status_code == 200
    for name in ("acme", "dev 0", "dev acme", "(dispatcher)"):
        if site.server.pids(name):
            site.server.kill(name)
            until(lambda: site.answered() == 200)
    if "device_memory" in site.own:
        site.server.wait_for_log("a client that may have 0=3072M", 2)  # At first, and the one that replaced it.
    with client(site.server) as http:
        assert any("acme" in line for line in restarts(http))
        site.write()
        assert site.reload().status_code == 200
        assert not any("acme" in line for line in restarts(http)), "there is no such process any more"


def restarts(http: httpx.Client) -> list[str]:
    return [line for line in http.get("/metrics").text.splitlines() if line.startswith("greenlane_process_restarts_total{")]


def test_what_a_tenant_that_goes_has_accepted_is_answered(site: Changing) -> None:
    """And requests on its open connections are answered that its key is unknown."""
    site.write(acme=True)
    assert site.reload().status_code == 200
    with Connection(site.server) as connection, client(site.server) as http:
        ask = posted("identity", SMALL, f"Authorization: Bearer {KEY}")
        connection.send(ask)
        assert connection.answer().status == 200
        connection.send(posted("spin", spin(200_000), f"Authorization: Bearer {KEY}"))
        until(lambda: lane(http, "acme")["in_flight"] == 1)
        site.write()
        with ThreadPoolExecutor(1) as pool:
            reloaded = pool.submit(site.reload)
            until(lambda: site.answered() == 401)
            assert connection.answer().status == 200
            assert reloaded.result().status_code == 200


def test_a_reload_over_a_connection_of_the_tenant_that_goes_is_answered(site: Changing) -> None:
    site.write(acme=True)
    assert site.reload().status_code == 200
    with Connection(site.server) as connection:
        connection.send(posted("identity", SMALL, f"Authorization: Bearer {KEY}"))
        assert connection.answer().status == 200
        site.write()
        connection.send(post("/admin/reload"))
        assert connection.answer().status == 200
        connection.send(posted("identity", SMALL, f"Authorization: Bearer {KEY}", "X-Tenant: acme"))
        assert connection.answer().status == 401
    assert not site.server.pids("acme")


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"models": ["identity", "broken"]}, ["tenants.acme: failed to load 'broken': "]),
        ({"more": 'grpc_port = 1'}, ["tenants.acme: (not set) -> a table needs a restart, as it has a grpc_port"]),
        ({"granules": 9}, ["tenants.globex.granules 9 + tenants.acme.granules 1 = 10 ", ", but the device has "]),
    ],
)  # fmt: skip
def test_a_tenant_that_cannot_come_changes_nothing(site: Changing, change: dict[str, Any], reasons: list[str]) -> None:
    before_it, dispatcher = memory(site.server), site.server.pid("(dispatcher)")
    with Load(site.server, "globex") as load:
        site.write(acme=True, **{"limit": "requests_per_second = 1", **change})
        answer = site.reload()
        assert answer.status_code == 409, answer.text
        for reason in reasons:
            assert reason in answer.json()["error"], answer.text
        assert site.answered() == 401
        assert site.partitions() == {"globex"}
        load.more()
    assert load.wrong == [], "limits that are in the same file are not used either"
    assert not site.server.pids("acme")
    assert memory(site.server) <= before_it
    assert site.server.pids("(dispatcher)") == [dispatcher]


def test_a_tenant_that_comes_has_what_another_gives_up(site: Changing) -> None:
    site.write(granules=2)
    assert site.reload().status_code == 200
    with Load(site.server, "globex") as load:
        site.write(acme=True, granules=1)
        assert {each["key"] for each in site.reload().json()["changed"]} == {
            "server.default_tenant",
            "tenants.globex.granules",
            "tenants.acme",
        }
        assert site.answered() == 200
        load.more()
    assert load.wrong == []


@pytest.mark.parametrize("comes", [True, False])
def test_a_port_accepts_connections_only_once_its_tenant_has_come(site: Changing, tmp_path: Path, comes: bool) -> None:
    """While its process is there already: it runs the model's functions then."""
    port, fifo, go, folder = free_port(), tmp_path / "gate", tmp_path / "go", site.folder / "models" / "gated" / "1"
    os.mkfifo(fifo)
    repository.write(site.folder / "models", "gated", repository.IDENTITY)
    gate = f"import os\nif not os.path.exists({str(go)!r}):\n    open({str(fifo)!r}).read()\n    open({str(go)!r})\n"
    (folder / "model.py").write_text(f"{gate}def preprocess(inputs):\n    return inputs\n")
    site.write(acme=True, models=["gated"], more=f"port = {port}")
    try:
        with ThreadPoolExecutor(1) as pool:
            reloaded = pool.submit(site.reload)
            with fifo.open("w"):  # Returns once the process reads it, which goes on when it is closed.
                assert not _accepts(port)
                if comes:
                    go.touch()
            answer = reloaded.result()
        assert answer.status_code == (200 if comes else 409), answer.text
        assert _accepts(port) == comes
        if comes:
            with client(SimpleNamespace(port=port), Authorization=f"Bearer {KEY}") as own:
                assert infer(own, "gated", SMALL).status_code == 200
    finally:
        shutil.rmtree(folder.parent)


def test_a_reload_by_the_port_of_the_tenant_that_it_takes_away_is_answered(site: Changing) -> None:
    """And the connection reaches no other tenant, though its own is there no more."""
    port, key = free_port(), f"Authorization: Bearer {KEY}"
    site.write(acme=True, more=f"port = {port}")
    assert site.reload().status_code == 200
    with Connection(SimpleNamespace(port=port)) as connection:
        connection.send(posted("identity", SMALL, key))
        assert connection.answer().status == 200
        for removed in (False, True):
            site.write(acme=not removed, more=f"port = {port}")
            connection.send(post("/admin/reload"))
            answer = connection.answer()
            assert (answer.status, [each["key"] for each in answer.json["changed"]]) == (
                200,
                ["server.default_tenant", "tenants.acme"] if removed else [],
            )
            connection.send(posted("identity", SMALL, *([] if removed else [key])))
            assert connection.answer().status == (421 if removed else 200)


def test_administration_by_the_port_of_a_tenant_that_goes_is_answered(site: Changing) -> None:
    """What changes shares waits for the reload, which waits for the end of that tenant's process."""
    port, key, acme = free_port(), f"Authorization: Bearer {KEY}", {"Authorization": f"Bearer {KEY}", "X-Tenant": "acme"}
    site.write(acme=True, more=f"port = {port}")
    assert site.reload().status_code == 200
    with Connection(SimpleNamespace(port=port)) as own, Connection(site.server) as other, client(site.server) as http:
        own.send(posted("identity", SMALL, key))
        assert own.answer().status == 200
        other.send(posted("spin", spin(400_000), key))
        until(lambda: lane(http, "acme")["in_flight"] == 1)
        site.write()
        with ThreadPoolExecutor(1) as pool:
            reloaded = pool.submit(site.reload)
            until(lambda: http.get("/v2/models/identity", headers=acme).status_code == 401)  # No inference: it would wait.
            own.send(post("/admin/partitions", b'{"globex": 1}').replace(b"POST", b"PUT", 1))
            assert other.answer().status == 200
            assert reloaded.result().status_code == 200
        assert own.answer().status == 200


def _accepts(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=30):
        return True
    return False


def test_what_mps_auto_has_chosen_at_the_start_stays_when_a_second_tenant_comes(standard: Path, tmp_path: Path) -> None:
    device, path = '[device]\nbackend = "cpu"\ncores = "0-1"\nmps = "auto"\n', tmp_path / "c.toml"
    configure(path, standard, device + tenant("globex", "identity"))
    with running_apart(path) as server, client(server) as http:
        assert 'device 0: one device process for all tenants (mps = "auto"): it has fewer than two tenants' in "".join(
            server.log
        )
        configure(path, standard, device + tenant("globex", "identity") + tenant("acme", "identity"))
        assert http.post("/admin/reload").status_code == 200
        with client(server, "acme") as acme:
            assert infer(acme, "identity", SMALL).status_code == 200
        assert (len(server.pids("dev 0")), server.pids("dev acme")) == (1, [])
